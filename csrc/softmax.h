// The online softmax (arXiv:1805.02867) of the query rows of one kv head: the scores of each tile
// become weights relative to the largest score so far. Compiled once per instruction set, in that
// set's namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "arena.h"
#include "lane.h"
#include "numeric.h"
#include "visibility.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

inline constexpr int kSoftmaxRows = 4;  // rows processed together, to hide latency

struct Softmax {
  // Of each query row, with room for whole groups of kSoftmaxRows.
  float* max;    // the largest score so far
  float* total;  // the sum of exp(score - max) so far
  float* peak;   // the largest weight of the tile

  Softmax(int query_rows, Arena& arena) {
    const int room = (query_rows + kSoftmaxRows - 1) / kSoftmaxRows * kSoftmaxRows;
    max = arena.take<float>(room);
    total = arena.zeros(room);
    peak = arena.zeros(room);
    std::fill(max, max + room, kNegativeInfinity);
  }
};

// `count` rounded up to whole vectors.
inline int whole_vectors(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

// softcap * tanh(score / softcap)
inline void cap_scores(float* scores, int count, float softcap) {
  for (int i = 0; i < count; i += kLanes) {
    const Floats capped = hyperbolic_tangent(load_as<Floats>(scores + i) / softcap);
    store_as(capped * softcap, scores + i);
  }
}

// Applies the softcap, and sets scores past the tile and of invisible tokens to -infinity.
inline void mask_scores(const Lane& lane, const Tile& tile, const Visibility& visibility,
                        float* scores) {
  const int whole = whole_vectors(tile.count);
  if (lane.job.softcap <= 0 && visibility.whole && whole == tile.count) return;
  for (int r = 0; r < lane.query_rows; ++r) {
    float* row = scores + r * kScoreRow;
    if (lane.job.softcap > 0) cap_scores(row, tile.count, lane.job.softcap);
    if (!visibility.whole) {
      visibility.hide(row, lane.query_token(r), whole);
    } else if (whole > tile.count) {  // as a whole vector: partial stores are slow to reload
      const int last = whole - kLanes;
      const Ints there = first_lanes() < splat(tile.count - last);
      store_as(there ? load_as<Floats>(row + last) : splat(kNegativeInfinity), row + last);
    }
  }
}

// The largest score of each of ROWS rows; -infinity if there is none.
template <int ROWS>
Four largest_scores(const float* scores, int whole) {
  Floats most[kSoftmaxRows];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < kSoftmaxRows; ++r) most[r] = splat(kNegativeInfinity);
  for (int i = 0; i < whole; i += kLanes) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r)
    most[r] = greater(load_as<Floats>(scores + r * kScoreRow + i), most[r]);
  return reduced<false>(most);
}

// Turns scores of ROWS rows into weights, zeros past the tile; their sums.
template <int ROWS>
Four weigh_rows(float* scores, int whole, const float* max) {
  Floats total[kSoftmaxRows] = {};
  for (int i = 0; i < whole; i += kLanes) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    float* at = scores + r * kScoreRow + i;
    const Floats weight = weight_of(load_as<Floats>(at) - max[r]);
    total[r] += weight;
    store_as(weight, at);
  }
  for (int i = whole; i < kTile; i += kLanes) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) store_as(Floats{}, scores + r * kScoreRow + i);
  return reduced<true>(total);
}

using LargestScores = Four (*)(const float* scores, int whole);
using WeighRows = Four (*)(float* scores, int whole, const float* max);
inline constexpr LargestScores kLargestScores[kSoftmaxRows] = {
    largest_scores<1>, largest_scores<2>, largest_scores<3>, largest_scores<4>};
inline constexpr WeighRows kWeighRows[kSoftmaxRows] = {weigh_rows<1>, weigh_rows<2>, weigh_rows<3>,
                                                       weigh_rows<4>};

// Turns scores (query rows, kScoreRow) into weights exp(score - max), zeros for invisible tokens.
// When a maximum rises, rescale(r, factor) gets the factor for all earlier sums. False if no query
// has seen anything yet.
template <class Rescale>
bool weigh_scores(const Lane& lane, const Tile& tile, const Visibility& visibility,
                  const Softmax& softmax, float* scores, const Rescale& rescale) {
  mask_scores(lane, tile, visibility, scores);
  const int whole = whole_vectors(tile.count);
  bool any = false;
  for (int first = 0; first < lane.query_rows; first += kSoftmaxRows) {
    const int rows = std::min(lane.query_rows - first, kSoftmaxRows);
    float* block = scores + first * kScoreRow;
    float *max = softmax.max + first, *total = softmax.total + first;
    const Four before = load_as<Four>(max), now = kLargestScores[rows - 1](block, whole);
    const Four most = now > before ? now : before;
    // Without scores weights are 0 or NaN.
    const Four against = most == kNegativeInfinity ? Four{} : most;
    const Four factor = weights_of(before - against);
    store_as(most, max);
    store_as(weights_of(now - against), softmax.peak + first);
    bool rises = false;
    for (int r = 0; r < rows; ++r) {
      rises = rises || now[r] > before[r];
      any = any || most[r] != kNegativeInfinity;
    }
    for (int r = 0; rises && r < rows; ++r)  // all: a branch for each costs more
      rescale(first + r, factor[r]);
    const Four sums = kWeighRows[rows - 1](block, whole, reinterpret_cast<const float*>(&against));
    store_as(load_as<Four>(total) * (rises ? factor : Four{} + 1) + sums, total);
    // Nothing is visible, or every visible score is NaN, which shows in the total.
    for (int r = 0; r < rows; ++r)
      if (most[r] == kNegativeInfinity) std::fill_n(block + r * kScoreRow, kTile, 0.0f);
  }
  return any;
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
