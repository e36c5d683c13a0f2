// The score pass over one tile in fp32 for many query rows, as those of a few tokens of grouped
// queries are: keys are transposed (turn_keys.h), and sums of a dim's products added in the order
// of `score_tile` (scores_float.h), so that a query's bits do not depend on how many there are.
// Compiled once for each instruction set that has turn_codes.h, in that set's namespace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attention_job.h"
#include "numeric.h"
#include "prefetch.h"
#include "turn_keys.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// Whether transposing costs less than the sums across vectors that it saves: these are as many for
// any head.
inline bool has_many_rows(int rows, std::int64_t width) { return 8 * rows >= width; }

// Sums of products of ROWS queries and PARTS vectors of transposed keys, `part` apart, over the
// dims d with d % N == lane. Dims kLanes apart are added up first, then halves, as `sums_of` does.
template <int N, int ROWS, int PARTS>
CARAMBA_FAST_INLINE void sum_dims(const float* q, std::int64_t width, const float* turned,
                                  std::int64_t part, int lane, Floats (&sum)[ROWS][PARTS]) {
  if constexpr (N < kLanes) {
    Floats other[ROWS][PARTS];
    sum_dims<2 * N>(q, width, turned, part, lane, sum);
    sum_dims<2 * N>(q, width, turned, part, lane + N, other);
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
    for (int i = 0; i < PARTS; ++i) sum[r][i] += other[r][i];
  } else {
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
    for (int i = 0; i < PARTS; ++i) sum[r][i] = Floats{};
    for (std::int64_t d = lane; d < width; d += kLanes) {
      Floats k[PARTS];
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < PARTS; ++i) k[i] = load_as<Floats>(turned + d * kLanes + i * part);
      CARAMBA_FAST_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        const Floats query = splat(q[r * width + d]);
        CARAMBA_FAST_UNROLL
        for (int i = 0; i < PARTS; ++i) sum[r][i] = fused(query, k[i], sum[r][i]);
      }
    }
  }
}

template <int ROWS, int PARTS>
CARAMBA_FAST_NOINLINE void score_turned(const float* q, std::int64_t width, const float* turned,
                                        float* scores) {
  Floats sum[ROWS][PARTS];
  sum_dims<1>(q, width, turned, width * kLanes, 0, sum);
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < PARTS; ++i) {
    float* to = scores + r * kScoreRow + i * kLanes;
    store_as(load_as<Floats>(to) + sum[r][i], to);
  }
}

// scores (rows, kScoreRow) += q . k for many rows, to the bits of `score_tile` (scores_float.h).
// Keys are transposed into `turned`, a few vectors of tokens at a time.
inline void score_many(const float* q, std::int64_t width, int rows, Format type, const char* keys,
                       std::int64_t stride, int count, float* turned, float* scores) {
  constexpr int kRows = 4, kParts = 2, kStep = kParts * kLanes;
  const MovedTile turn = kTurnKeys[static_cast<int>(type)];
  const std::int64_t size = width * (type == Format::fp32 ? 4 : 2);
  const auto score_all = [&](auto parts) {
    int next = 0;  // token to prefetch
    const auto run = [&](auto many, int r) {
      for (const int stop = kStep * (r + decltype(many)::value) / rows; next < stop; ++next)
        prefetch(keys + next * stride, size, stride);
      score_turned<decltype(many)::value, decltype(parts)::value>(q + r * width, width, turned,
                                                                  scores + r * kScoreRow);
    };
    int r = 0;
    for (; r + kRows <= rows; r += kRows) run(std::integral_constant<int, kRows>{}, r);
    if (r + 2 <= rows) {
      run(std::integral_constant<int, 2>{}, r);
      r += 2;
    }
    if (r < rows) run(std::integral_constant<int, 1>{}, r);
  };
  for (; count > 0; count -= kStep, keys += kStep * stride, scores += kStep) {
    turn(keys, stride, std::min(count, kStep), width, turned);
    if (count > kLanes)
      score_all(std::integral_constant<int, kParts>{});
    else
      score_all(std::integral_constant<int, 1>{});
  }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
