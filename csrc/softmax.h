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

struct Softmax {
  float* max;    // (query rows) the largest score so far
  float* total;  // (query rows) the sum of exp(score - max) so far
  float* peak;   // (query rows) the largest weight of the tile

  Softmax(int query_rows, Arena& arena)
      : max(arena.take<float>(query_rows)),
        total(arena.zeros(query_rows)),
        peak(arena.zeros(query_rows)) {
    std::fill(max, max + query_rows, kNegativeInfinity);
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

inline constexpr int kSoftmaxRows = 4;  // rows processed together, to hide latency

// The largest score of each of ROWS rows; -infinity if there is none.
template <int ROWS>
void largest_scores(const float* scores, int whole, float* largest) {
  Floats most[kSoftmaxRows];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < kSoftmaxRows; ++r) most[r] = splat(kNegativeInfinity);
  for (int i = 0; i < whole; i += kLanes) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r)
    most[r] = greater(load_as<Floats>(scores + r * kScoreRow + i), most[r]);
  reduce<false>(most, largest);
}

// Turns scores of ROWS rows into weights, zeros past the tile; their sums.
template <int ROWS>
void weigh_rows(float* scores, int whole, const float* max, float (&sums)[kSoftmaxRows]) {
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
  reduce<true>(total, sums);
}

using LargestScores = void (*)(const float* scores, int whole, float* largest);
using WeighRows = void (*)(float* scores, int whole, const float* max, float (&sums)[kSoftmaxRows]);
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
    float largest[kLanes] = {}, against[kLanes] = {}, peaks[kLanes], sums[kSoftmaxRows];
    kLargestScores[rows - 1](block, whole, largest);
    for (int r = 0; r < rows; ++r) {
      const float before = softmax.max[first + r], now = largest[r], max = std::max(before, now);
      any = any || max != kNegativeInfinity;
      against[r] = max == kNegativeInfinity ? 0 : max;  // without scores weights are 0 or NaN
      if (!(now > before)) continue;
      softmax.max[first + r] = now;
      if (before == kNegativeInfinity) continue;  // nothing to rescale
      const float factor = std::exp(before - now);
      softmax.total[first + r] *= factor;
      rescale(first + r, factor);
    }
    store_as(weight_of(load_as<Floats>(largest) - load_as<Floats>(against)), peaks);
    kWeighRows[rows - 1](block, whole, against, sums);
    for (int r = 0; r < rows; ++r) {
      softmax.total[first + r] += sums[r];
      softmax.peak[first + r] = peaks[r];
      // Nothing is visible, or every visible score is NaN, which shows in the total.
      if (softmax.max[first + r] == kNegativeInfinity)
        std::fill_n(block + r * kScoreRow, kTile, 0.0f);
    }
  }
  return any;
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
