// The online softmax (arXiv:1805.02867) of the query rows of one kv head: scores of one tile after
// the other become weights relative to the largest score so far. Compiled once per instruction set,
// in that set's namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

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

// `count` tokens, and what fills up their last vector.
inline int whole_vectors(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

template <int... LANES>
inline Ints in_order(std::integer_sequence<int, LANES...>) {
  return Ints{LANES...};
}
// 0, 1, 2 and so on.
inline Ints first_lanes() { return in_order(std::make_integer_sequence<int, kLanes>{}); }

// softcap * tanh(score / softcap)
inline void cap_scores(float* scores, int count, float softcap) {
  for (int i = 0; i < count; i += kLanes) {
    const Floats capped = hyperbolic_tangent(load_as<Floats>(scores + i) / softcap);
    store_as(capped * softcap, scores + i);
  }
}

// The softcap, and -infinity for what a query does not see and behind the tile.
inline void mask_scores(const Lane& lane, const Tile& tile, const Visibility& visibility,
                        float* scores) {
  const int whole = whole_vectors(tile.count);
  if (lane.job.softcap <= 0 && visibility.whole && whole == tile.count) return;
  for (int r = 0; r < lane.query_rows; ++r) {
    float* row = scores + r * kScoreRow;
    if (lane.job.softcap > 0) cap_scores(row, tile.count, lane.job.softcap);
    if (!visibility.whole) visibility.hide(row, lane.query_token(r), tile.count);
    if (whole > tile.count) {  // a vector, for one that was written in parts is slow to read
      const int last = whole - kLanes;
      const Ints there = first_lanes() < splat(tile.count - last);
      store_as(there ? load_as<Floats>(row + last) : splat(kNegativeInfinity), row + last);
    }
  }
}

inline constexpr int kSoftmaxRows = 4;  // rows that are weighed at once: each waits for itself

// The largest score of each of ROWS rows, -infinity for what has none.
template <int ROWS>
void largest_scores(const float* scores, int whole, float (&largest)[kSoftmaxRows]) {
  Floats most[kSoftmaxRows];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < kSoftmaxRows; ++r) most[r] = splat(kNegativeInfinity);
  for (int i = 0; i < whole; i += kLanes) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r)
    most[r] = greater(load_as<Floats>(scores + r * kScoreRow + i), most[r]);
  reduce<false>(most, largest);
}

// Scores of ROWS rows become weights, zeros behind the tile; their sums, and the largest of each.
template <int ROWS>
void weigh_rows(float* scores, int whole, const float* max, float (&sums)[kSoftmaxRows],
                float (&peaks)[kSoftmaxRows]) {
  Floats total[kSoftmaxRows] = {}, most[kSoftmaxRows] = {};
  for (int i = 0; i < whole; i += kLanes) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    float* at = scores + r * kScoreRow + i;
    const Floats weight = weight_of(load_as<Floats>(at) - max[r]);
    total[r] += weight;
    most[r] = greater(weight, most[r]);
    store_as(weight, at);
  }
  for (int i = whole; i < kTile; i += kLanes) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) store_as(Floats{}, scores + r * kScoreRow + i);
  reduce<true>(total, sums);
  reduce<false>(most, peaks);
}

using LargestScores = void (*)(const float* scores, int whole, float (&largest)[kSoftmaxRows]);
using WeighRows = void (*)(float* scores, int whole, const float* max, float (&sums)[kSoftmaxRows],
                           float (&peaks)[kSoftmaxRows]);
inline constexpr LargestScores kLargestScores[kSoftmaxRows] = {
    largest_scores<1>, largest_scores<2>, largest_scores<3>, largest_scores<4>};
inline constexpr WeighRows kWeighRows[kSoftmaxRows] = {weigh_rows<1>, weigh_rows<2>, weigh_rows<3>,
                                                       weigh_rows<4>};

// Scores (query rows, kScoreRow) become weights exp(score - max), zeros where nothing is seen.
// Where a maximum rises, rescale(r, factor) is told by what all that is summed so far shrinks.
// False where no query has seen anything yet.
template <class Rescale>
bool weigh_scores(const Lane& lane, const Tile& tile, const Visibility& visibility,
                  const Softmax& softmax, float* scores, const Rescale& rescale) {
  mask_scores(lane, tile, visibility, scores);
  const int whole = whole_vectors(tile.count);
  bool any = false;
  for (int first = 0; first < lane.query_rows; first += kSoftmaxRows) {
    const int rows = std::min(lane.query_rows - first, kSoftmaxRows);
    float* block = scores + first * kScoreRow;
    float largest[kSoftmaxRows], against[kSoftmaxRows];
    float sums[kSoftmaxRows], peaks[kSoftmaxRows];
    kLargestScores[rows - 1](block, whole, largest);
    for (int r = 0; r < rows; ++r) {
      const float before = softmax.max[first + r], now = largest[r], max = std::max(before, now);
      any = any || max != kNegativeInfinity;
      against[r] = max == kNegativeInfinity ? 0 : max;  // without scores weights are 0 or NaN
      if (!(now > before)) continue;
      softmax.max[first + r] = now;
      if (before == kNegativeInfinity) continue;  // nothing is summed yet
      const float factor = std::exp(before - now);
      softmax.total[first + r] *= factor;
      rescale(first + r, factor);
    }
    kWeighRows[rows - 1](block, whole, against, sums, peaks);
    for (int r = 0; r < rows; ++r) {
      softmax.total[first + r] += sums[r];
      softmax.peak[first + r] = peaks[r];
      // Nothing is seen, or every score seen is NaN, which the total shows.
      if (softmax.max[first + r] == kNegativeInfinity)
        std::fill_n(block + r * kScoreRow, kTile, 0.0f);
    }
  }
  return any;
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
