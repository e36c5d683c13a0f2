// Prompts: the passes over one tile for the many query rows of a long call, in fp32. Keys are
// transposed (turn_keys.h), values become fp32. Both pay off only with many rows, and last bits
// differ from those among few queries (scores_float.h), so callers ask for them:
// `AttentionJob::prompt`.
// Compiled once per instruction set, in that set's namespace.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_job.h"
#include "half.h"
#include "numeric.h"
#include "prefetch.h"
#include "turn_keys.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// Sums that fit into registers, beside a vector of each part and one of a row.
inline constexpr int kPromptRows = 6, kPromptParts = kManyRegisters ? 4 : 2;

// Values of a tile in fp32, contiguous.
template <Format T>
CARAMBA_FAST_NOINLINE void widen_values(const void* values, std::int64_t stride, int count,
                                        std::int64_t width, float* to) {
  for (int t = 0; t < count; ++t, to += width) {
    const auto* from = token_at<typename Values<T>::Storage>(values, stride, t);
    for (std::int64_t d = 0; d < width; d += kLanes) store_as(Values<T>::load(from + d), to + d);
  }
}

// By element type.
inline constexpr MovedTile kWidenValues[kValueTypes] = {
    widen_values<Format::fp32>, widen_values<Format::fp16>, widen_values<Format::bf16>};

// to[r][i] += the sum over k of x[r][k] y[k][i], for ROWS rows and PARTS vectors. Strides: `row`
// between rows of x, `step` between k and `part` between vectors of y.
template <int ROWS, int PARTS>
CARAMBA_FAST_NOINLINE void add_products(const float* x, std::int64_t row, const float* y,
                                        std::int64_t step, std::int64_t part, std::int64_t count,
                                        float* to, std::int64_t to_row) {
  Floats sum[ROWS][PARTS];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < PARTS; ++i) sum[r][i] = load_as<Floats>(to + r * to_row + i * kLanes);
  for (std::int64_t k = 0; k < count; ++k, ++x, y += step) {
    Floats v[PARTS];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < PARTS; ++i) v[i] = load_as<Floats>(y + i * part);
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const Floats factor = floats(splat(load_as<std::int32_t>(x + r * row)));
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < PARTS; ++i) sum[r][i] = fused(factor, v[i], sum[r][i]);
    }
  }
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < PARTS; ++i) store_as(sum[r][i], to + r * to_row + i * kLanes);
}

// Calls run(rows, vectors, first row, first vector) with constants for the first two, for all rows
// and all vectors.
template <class Run>
void for_each_block(int rows, std::int64_t parts, const Run& run) {
  const auto all_rows = [&](auto wide, std::int64_t i) {
    int r = 0;
    for (; r + kPromptRows <= rows; r += kPromptRows)
      run(std::integral_constant<int, kPromptRows>{}, wide, r, i);
    for (; r + 2 <= rows; r += 2) run(std::integral_constant<int, 2>{}, wide, r, i);
    if (r < rows) run(std::integral_constant<int, 1>{}, wide, r, i);
  };
  std::int64_t i = 0;
  for (; i + kPromptParts <= parts; i += kPromptParts)
    all_rows(std::integral_constant<int, kPromptParts>{}, i);
  for (; i < parts; ++i) all_rows(std::integral_constant<int, 1>{}, i);
}

// `add_products` for any number of rows and of vectors.
inline void add_all_products(const float* x, std::int64_t row, int rows, const float* y,
                             std::int64_t step, std::int64_t part, std::int64_t parts,
                             std::int64_t count, float* to, std::int64_t to_row) {
  for_each_block(rows, parts, [&](auto many, auto wide, int r, std::int64_t i) {
    add_products<decltype(many)::value, decltype(wide)::value>(
        x + r * row, row, y + i * part, step, part, count, to + r * to_row + i * kLanes, to_row);
  });
}

// scores (rows, kScoreRow) += q . k of transposed keys.
inline void score_prompt(const float* q, std::int64_t width, int rows, const float* turned,
                         int count, float* scores) {
  add_all_products(q, width, rows, turned, kLanes, width * kLanes, (count + kLanes - 1) / kLanes,
                   width, scores, kScoreRow);
}

// As `value_tile` (values_float.h), for values in fp32.
inline void add_prompt_values(const float* weights, int rows, const void* values,
                              std::int64_t stride, int count, float* sums, std::int64_t width) {
  add_all_products(weights, kScoreRow, rows, static_cast<const float*>(values),
                   stride / static_cast<std::int64_t>(sizeof(float)), kLanes, width / kLanes, count,
                   sums, width);
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
