// Decode attention over some tiles of one (row, lane), and the merge of such splits. Keys and
// values are read once for all query heads that share them. The parts:
//
//   lane.h        the heads and tiles of a task, and where tokens are stored
//   visibility.h  which tokens of a tile each query sees
//   query.h       queries in the basis of the keys      query_int8.h   as integers
//   tile.h        one head's part of a tile             int8_layout.h  its bytes
//   scores.h      q . k                                 scores_float.h, scores_many.h
//                                                       scores_int8.h
//                                                       scores_channel.h, scores_group.h
//   prompt.h      q . k and weights times values in fp32 for many queries; prompt_bf16.h in bf16
//   softmax.h     scores to weights, online
//   values.h      weights times values                  values_float.h, values_bytes.h,
//                                                       values_words.h
//   merge.h       splits, one more key, two attentions
//   output.h      out and lse
//
// Compiled once per instruction set, in that set's namespace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>

#include "arena.h"
#include "lane.h"
#include "merge.h"
#include "output.h"
#include "query.h"
#include "scores.h"
#include "softmax.h"
#include "values.h"
#include "visibility.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// Scratch for `write_result` and for one query row.
inline float* take_row(const AttentionJob& job, Arena& arena) {
  std::int64_t widest = 0;
  for (int i = 0; i < job.streams; ++i) widest = std::max(widest, job.stored[i].dim);
  return arena.take<float>(2 * widest);
}

// The state of one kv head of a lane: its queries and sums.
struct HeadState {
  HeadQuery* queries;  // of each key stream
  Softmax softmax;
  ValueSums values;

  HeadState(const Lane& lane, int h, Arena& arena, float* row)
      : queries(arena.take<HeadQuery>(lane.job.streams - 1)),
        softmax(lane.query_rows, arena),
        values(lane, h, arena) {
    for (int i = 0; i + 1 < lane.job.streams; ++i)
      new (queries + i) HeadQuery(lane, i, h, arena, row);
  }
};

// A task in progress.
class LaneAttention {
 public:
  LaneAttention(const Lane& lane, Arena& arena) : lane_(lane) {
    arena.reset();
    row_ = take_row(lane.job, arena);
    scores_ = arena.take<float>(static_cast<std::int64_t>(lane.query_rows) * kScoreRow);
    states_ = arena.take<HeadState>(lane.heads);
    std::int64_t widest = 0;
    for (int h = 0; h < lane.heads; ++h) {
      const HeadState& state = *new (states_ + h) HeadState(lane, h, arena, row_);
      widest = std::max(widest, state.values.value.width);
      for (int i = 0; i + 1 < lane.job.streams; ++i)
        widest = std::max(widest, state.queries[i].key.width);
    }
    scratch_ = {};
    scratch_.decoded = arena.take<float>(kTile * widest + 16);
    scratch_.turned = arena.take<float>(kTile * widest);
#if CARAMBA_FAST_VECTOR_BITS
    scratch_.scales = arena.take<TileScales>(1);
    scratch_.values = arena.take<ValueScratch>(1);
    scratch_.group = new (arena.take<GroupScratch>(1)) GroupScratch(widest, arena);
#endif
#if CARAMBA_FAST_BYTE_SUMS
    if (takes_bf16(lane.job, lane.job.streams - 1))
      scratch_.rounded = arena.take<float>(static_cast<std::int64_t>(lane.query_rows) * kTile / 2);
#endif
  }

  void attend(const Tile& tile) {
    visibility_.find(lane_, tile);
    if (visibility_.any == 0) return;
    for (int h = 0; h < lane_.heads; ++h) {
      HeadState& state = states_[h];
      std::memset(scores_, 0,
                  static_cast<std::size_t>(lane_.query_rows) * kScoreRow * sizeof(float));
      for (int i = 0; i + 1 < lane_.job.streams; ++i)
        add_scores(lane_, state.queries[i], tile, visibility_, scratch_, scores_);
      const auto rescale = [&state](int r, float factor) { state.values.rescale(r, factor); };
      if (weigh_scores(lane_, tile, visibility_, state.softmax, scores_, rescale))
        add_values(lane_, tile, visibility_, scores_, state.softmax, scratch_, state.values);
    }
  }

  // Writes the results, or the partial ones for the merge if `partial` is not negative.
  void finish(std::int64_t partial) {
    for (int h = 0; h < lane_.heads; ++h) {
      HeadState& state = states_[h];
      if (partial >= 0) {
        keep_partial(lane_, partial, h, state.softmax, state.values);
        continue;
      }
      for (int r = 0; r < lane_.query_rows; ++r)
        write_result(lane_, h, r, state.softmax.max[r], state.softmax.total[r],
                     state.values.of_head(r), row_);
    }
  }

 private:
  const Lane lane_;
  Visibility visibility_;
  HeadState* states_;     // (kv heads of the lane)
  float *row_, *scores_;  // scores, then weights: (query rows, kScoreRow)
  TileScratch scratch_;
};

inline void attend_tasks(const AttentionJob& job, const Task* tasks, std::int64_t count) {
  Arena& arena = thread_arena();
  for (const Task* task = tasks; task < tasks + count; ++task) {
    const Lane lane(job, task->row, task->lane);
    LaneAttention attention(lane, arena);
    for_each_tile(job, lane.plan, task->first, task->last,
                  [&attention](const Tile& tile) { attention.attend(tile); });
    attention.finish(task->partial);
  }
}

// Merges the splits of one (row, lane) and writes the result.
inline void merge_partials(const AttentionJob& job, std::int64_t row, std::int64_t lane_index,
                           const std::int64_t* partials, int count) {
  const Lane lane(job, row, lane_index);
  Arena& arena = thread_arena();
  arena.reset();
  float* memory = take_row(job, arena);
  float* sums = arena.take<float>(job.value().dim);
  for (int h = 0; h < lane.heads; ++h)
    for (int r = 0; r < lane.query_rows; ++r) {
      const Merged all = merge_splits(job, partials, count, h, r, sums);
      write_result(lane, h, r, all.max, all.total, sums, memory);
    }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
