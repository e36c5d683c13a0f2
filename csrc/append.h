// Writing new tokens: rotate, quantize, and store codes, scales, fp16 tail and fp16 sinks, one
// lane at a time. Compiled once per instruction set, in that set's namespace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>

#include "append_job.h"
#include "arena.h"
#include "channel.h"
#include "numeric.h"
#include "rows.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

inline void store_halves(const float* x, std::int64_t count, char* to) {
  write_row(Format::fp16, x, count, to, 0);
}

// Where a position of a row is stored: its row or page, and slot; false where there is no place.
inline bool find_place(const AppendJob& job, std::int64_t b, std::int64_t position,
                       std::int64_t& row, std::int64_t& slot) {
  row = b;
  slot = position;
  if (job.table == nullptr) return position >= 0 && position < job.slots;
  const std::int64_t page = position / job.slots;
  const bool kept = position >= 0 && page < job.pages_per_row;
  row = kept ? job.table[b * job.table_row + page] : -1;
  slot = position % job.slots;
  return row >= 0 && row < job.pages;
}

// Groups of tokens under way of one (row, lane) of a stream by channel: those of the first one that
// came before are in the tail, which is read before anything is written to it.
class OpenGroup {
 public:
  OpenGroup(const AppendStream& stream, std::int64_t b, std::int64_t lane, std::int64_t start,
            Arena& arena)
      : stream_(stream), values_(arena.take<float>(stream.stored.group * stream.stored.lane_dim)) {
    const StoredStream& s = stream.stored;
    for (std::int64_t t = start - start % s.group; t >= 0 && t < start; ++t) {
      const char* held = s.tail.at(b, lane, t % stream.ring);
      for (std::int64_t d = 0; d < s.lane_dim; d += kLanes)
        store_as(load_half(reinterpret_cast<const std::uint16_t*>(held) + d), row_of(t) + d);
    }
  }

  // Takes a token; encodes the group that it is the last of. `counted` is the first position that
  // counts for ranges.
  void take(const AppendJob& job, std::int64_t b, std::int64_t lane, std::int64_t position,
            std::int64_t counted, const float* x) {
    const StoredStream& s = stream_.stored;
    if (position < 0) return;
    float* to = row_of(position);
    for (std::int64_t d = 0; d < s.lane_dim; d += kLanes) {
      std::uint16_t halves[kLanes];
      store_half(load_as<Floats>(x + d), halves);
      store_as(load_half(halves), to + d);
    }
    std::int64_t row, slot;
    const std::int64_t first = position - s.group + 1;
    if ((position + 1) % s.group != 0 || !find_place(job, b, first, row, slot)) return;
    auto* scales = reinterpret_cast<std::uint16_t*>(s.scales.at(row, lane, slot / s.group));
    encode_group(values_, s, std::max<std::int64_t>(counted - first, 0),
                 s.codes.at(row, lane, slot), scales);
  }

 private:
  float* row_of(std::int64_t position) const {
    return values_ + position % stream_.stored.group * stream_.stored.lane_dim;
  }

  const AppendStream& stream_;
  float* values_;
};

// Tokens [begin, end) of one (row, lane) of one stream; by channel all tokens.
inline void append_tokens(const AppendJob& job, const AppendStream& stream, std::int64_t b,
                          std::int64_t lane, std::int64_t begin, std::int64_t end) {
  Arena& arena = thread_arena();
  const StoredStream& s = stream.stored;
  arena.reset();
  float* x = arena.take<float>(s.lane_dim + 64);
  const std::int64_t start = job.start[b], pad = job.leftpad == nullptr ? 0 : job.leftpad[b];
  const std::int64_t count = job.query_lens == nullptr ? job.tokens : job.query_lens[b];
  const bool by_channel = is_by_channel(s.format);
  // What was held before is read only where one of these tokens is the last of its group.
  const bool ends = by_channel && start % s.group + count >= s.group;
  OpenGroup* open = ends ? new (arena.take<OpenGroup>(1)) OpenGroup(stream, b, lane, start, arena)
                         : nullptr;
  for (std::int64_t i = begin; i < std::min(end, count); ++i) {
    const std::int64_t position = start + i, t = position - pad;
    std::fill(x, x + s.lane_dim, 0.0f);
    for (std::int64_t h = 0; h < job.heads_per_lane; ++h) {
      const std::int64_t head = lane * job.heads_per_lane + h;
      if (head >= job.heads) break;
      read_row(stream.given, b, head, i, s.dim, x + h * s.dim);
      if (s.rotate) hadamard(x + h * s.dim, s.dim);
    }
    std::int64_t row, slot;
    if (by_channel) {
      if (open != nullptr)
        open->take(job, b, lane, position, pad + stream.sink_len, x);
    } else if (find_place(job, b, position, row, slot)) {
      char* codes = s.codes.at(row, lane, slot);
      if (stream.quantize != nullptr) {
        auto* scales = reinterpret_cast<std::uint16_t*>(s.scales.at(row, lane, slot));
        stream.quantize(x, codes, scales, s.lane_dim / s.block);
      } else {
        write_row(s.format, x, s.lane_dim, codes, 0);
      }
    }
    if (s.tail.data != nullptr && position >= 0 && i >= count - stream.ring)
      store_halves(x, s.lane_dim, s.tail.at(b, lane, position % stream.ring));
    if (s.sink.data != nullptr && t >= 0 && t < stream.sink_len)
      store_halves(x, s.lane_dim, s.sink.at(b, lane, t));
  }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
