// The work of one attention task: a row of the batch and a lane of its kv heads. Its heads, the
// tiles of its tokens, and where those are stored: in rows or pages of the cache, in the tail, in
// the sinks.
// Compiled once per instruction set, in that set's namespace.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_job.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

struct Lane {
  const AttentionJob& job;
  std::int64_t row, lane;
  const RowPlan& plan;
  int heads;       // kv heads of the lane: the last lane may have fewer
  int query_rows;  // query heads of a kv head times query tokens

  Lane(const AttentionJob& job, std::int64_t row, std::int64_t lane)
      : job(job),
        row(row),
        lane(lane),
        plan(job.rows[row]),
        heads(static_cast<int>(
            std::min(job.heads_per_lane, job.kv_heads - lane * job.heads_per_lane))),
        query_rows(static_cast<int>(job.rows_per_head())) {}

  // The index of the lane's h-th kv head.
  std::int64_t kv_head(int h) const { return lane * job.heads_per_lane + h; }
  // The query head and the token of query row r of a kv head.
  std::int64_t query_head(int h, int r) const { return kv_head(h) * job.groups + r / job.tokens; }
  std::int64_t query_token(int r) const { return r % job.tokens; }

  // Codes or scales of a position; pages that do not exist are replaced by existing ones.
  const char* stored_at(const Buffer& buffer, std::int64_t position) const {
    if (job.table == nullptr) return buffer.at(row, lane, position);
    const std::int64_t page = job.table[row * job.table_row + position / job.slots];
    return buffer.at(std::clamp<std::int64_t>(page, 0, job.pages - 1), lane, position % job.slots);
  }

  // Scales and zeros of a position's group.
  const char* group_at(const StoredStream& s, std::int64_t position) const {
    if (job.table == nullptr) return s.scales.at(row, lane, position / s.group);
    const std::int64_t page = job.table[row * job.table_row + position / job.slots];
    return s.scales.at(std::clamp<std::int64_t>(page, 0, job.pages - 1), lane,
                       position % job.slots / s.group);
  }

  // A position in the tail, which is a ring, or in the sinks, which begin after the padding.
  const char* side_at(const Buffer& buffer, Source source, std::int64_t position) const {
    const bool tail = source == Source::tail;
    return buffer.at(row, lane, tail ? position % job.ring : position - plan.pad);
  }
};

// `count` tokens from position `start` on.
struct Tile {
  Source source;
  std::int64_t start;
  int count;
};

// Calls visit(tile) for the tiles [first, last) of a row.
template <class Visit>
void for_each_tile(const AttentionJob& job, const RowPlan& plan, std::int64_t first,
                   std::int64_t last, const Visit& visit) {
  std::int64_t index = 0;
  for (int i = 0; i < plan.segment_count; ++i) {
    const Segment& segment = plan.segments[i];
    for (std::int64_t at = job.first_tile(segment); at < segment.stop; at += job.tile, ++index) {
      if (index < first || index >= last) continue;
      const std::int64_t start = std::max(at, segment.start);
      const std::int64_t stop = std::min(at + job.tile, segment.stop);
      visit(Tile{segment.source, start, static_cast<int>(stop - start)});
    }
  }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
