// The value pass over one tile in fp32, for values of any element type. Quantized values are
// decoded first (tile.h), if there are no integer products or the tile has values these cannot
// represent. Compiled once per instruction set, in that set's namespace.
#pragma once

#include <cstdint>

#include "attention_job.h"
#include "half.h"
#include "numeric.h"
#include "prefetch.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// sums[r][d] += sum over t of weights[r][t] v[t][d], for ROWS rows and PARTS vectors of dims. Rows
// of weights are kScoreRow apart, those of sums `width`, values `stride` bytes.
template <Format T, int ROWS, int PARTS>
void value_part(const float* weights, const void* values, std::int64_t stride, int count,
                float* sums, std::int64_t width, std::int64_t d) {
  Floats sum[ROWS][PARTS];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < PARTS; ++i) sum[r][i] = load_as<Floats>(sums + r * width + d + i * kLanes);
  for (int t = 0; t < count; ++t) {
    const auto* value = token_at<typename Values<T>::Storage>(values, stride, t) + d;
    prefetch(value, PARTS * kLanes * static_cast<std::int64_t>(sizeof *value), stride);
    Floats v[PARTS];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < PARTS; ++i) v[i] = Values<T>::load(value + i * kLanes);
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const Floats weight = splat(weights[r * kScoreRow + t]);
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < PARTS; ++i) sum[r][i] = fused(weight, v[i], sum[r][i]);
    }
  }
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < PARTS; ++i) store_as(sum[r][i], sums + r * width + d + i * kLanes);
}

template <Format T, int ROWS>
void value_rows(const float* weights, const void* values, std::int64_t stride, int count,
                float* sums, std::int64_t width) {
  constexpr int kParts = kManyRegisters ? 4 : 2;
  std::int64_t d = 0;
  for (; d + kParts * kLanes <= width; d += kParts * kLanes)
    value_part<T, ROWS, kParts>(weights, values, stride, count, sums, width, d);
  for (; d < width; d += 2 * kLanes)
    value_part<T, ROWS, 2>(weights, values, stride, count, sums, width, d);
}

// The same for any number of rows and all dims.
template <Format T>
void value_tile(const float* weights, int rows, const void* values, std::int64_t stride, int count,
                float* sums, std::int64_t width) {
  int r = 0;
  for (; r + 4 <= rows; r += 4)
    value_rows<T, 4>(weights + r * kScoreRow, values, stride, count, sums + r * width, width);
  if (r + 2 <= rows) {
    value_rows<T, 2>(weights + r * kScoreRow, values, stride, count, sums + r * width, width);
    r += 2;
  }
  if (r < rows)
    value_rows<T, 1>(weights + r * kScoreRow, values, stride, count, sums + r * width, width);
}

using ValueTile = void (*)(const float* weights, int rows, const void* values, std::int64_t stride,
                           int count, float* sums, std::int64_t width);

// By element type.
inline constexpr ValueTile kValueTiles[kValueTypes] = {
    value_tile<Format::fp32>, value_tile<Format::fp16>, value_tile<Format::bf16>};

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
