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

  Softmax(int query_rows, Arena& arena)
      : max(arena.take<float>(query_rows)), total(arena.zeros(query_rows)) {
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

// The softcap, and -infinity for what a query does not see and behind the tile; `largest` (query
// rows) is the largest that is left.
inline void mask_scores(const Lane& lane, const Tile& tile, const Visibility& visibility,
                        float* scores, float* largest) {
  const int whole = whole_vectors(tile.count);
  for (int r = 0; r < lane.query_rows; ++r) {
    float* row = scores + r * kScoreRow;
    if (lane.job.softcap > 0) cap_scores(row, tile.count, lane.job.softcap);
    if (!visibility.whole) visibility.hide(row, lane.query_token(r), tile.count);
    if (whole > tile.count) {  // a vector, for one that was written in parts is slow to read
      const int last = whole - kLanes;
      const Ints there = first_lanes() < splat(tile.count - last);
      store_as(there ? load_as<Floats>(row + last) : splat(kNegativeInfinity), row + last);
    }
    Floats most = splat(kNegativeInfinity);
    for (int i = 0; i < whole; i += kLanes) most = greater(load_as<Floats>(row + i), most);
    largest[r] = greatest_of(most);
  }
}

// Scores (query rows, kScoreRow) become weights exp(score - max), zeros where nothing is seen.
// Where a maximum rises, rescale(r, factor) is told by what all that is summed so far shrinks.
// shares (query rows): log2 of at least the share that the tile's largest weight has of the total
// so far. False where no query has seen anything yet.
template <class Rescale>
bool weigh_scores(const Lane& lane, const Tile& tile, const Visibility& visibility,
                  const Softmax& softmax, float* scores, float* shares, const Rescale& rescale) {
  // All rows step by step, not row by row: each step waits for the one before.
  mask_scores(lane, tile, visibility, scores, shares);
  bool any = false;
  for (int r = 0; r < lane.query_rows; ++r) {
    const float before = softmax.max[r], now = shares[r];
    any = any || std::max(before, now) != kNegativeInfinity;
    if (!(now > before)) continue;
    softmax.max[r] = now;
    if (before == kNegativeInfinity) continue;  // nothing is summed yet
    const float factor = std::exp(before - now);
    softmax.total[r] *= factor;
    rescale(r, factor);
  }
  const int whole = whole_vectors(tile.count);
  for (int r = 0; r < lane.query_rows; ++r) {
    float* row = scores + r * kScoreRow;
    const float max = softmax.max[r];
    if (max == kNegativeInfinity) {  // also where every score seen is NaN: that must show
      bool damaged = false;
      for (int i = 0; i < tile.count; ++i) damaged = damaged || row[i] != row[i];
      if (damaged) softmax.total[r] = std::numeric_limits<float>::quiet_NaN();
      std::fill(row, row + kTile, 0.0f);
      continue;  // its share stays -infinity
    }
    Floats total{};
    for (int i = 0; i < whole; i += kLanes) {
      const Floats weight = exponential(load_as<Floats>(row + i) - max);
      total += weight;
      store_as(weight, row + i);
    }
    std::fill(row + whole, row + kTile, 0.0f);
    softmax.total[r] += sum_of(total);
    const float log2_of_largest = (shares[r] - max) * 1.44269504f;
    shares[r] = log2_of_largest - static_cast<float>(exponent_of(softmax.total[r]));
  }
  return any;
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
