// The score pass over one tile in fp32, for keys of any element type. Quantized keys are decoded
// first (tile.h), if there are no integer products or the tile has values these cannot represent.
// Compiled once per instruction set, in that set's namespace.
#pragma once

#include <cstdint>

#include "attention_job.h"
#include "half.h"
#include "numeric.h"
#include "prefetch.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// scores[r][t] += q[r] . k[t] for ROWS rows; q rows are `width` apart, keys `stride` bytes.
template <Format T, int ROWS>
void score_rows(const float* q, std::int64_t width, const void* keys, std::int64_t stride,
                int count, float* scores) {
  constexpr int kTokens = kScoreSums / ROWS > 0 ? kScoreSums / ROWS : 1;
  for (int t = 0; t < count; t += kTokens) {
    const typename Values<T>::Storage* key[kTokens];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < kTokens; ++i)  // the last token is repeated past the end
      key[i] =
          token_at<typename Values<T>::Storage>(keys, stride, t + i < count ? t + i : count - 1);
    for (int i = 0; i < kTokens; ++i)
      prefetch(key[i], width * static_cast<std::int64_t>(sizeof *key[i]), stride);
    Floats sums[kScoreSums] = {};
    for (std::int64_t d = 0; d < width; d += kLanes) {
      Floats k[kTokens];
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < kTokens; ++i) k[i] = Values<T>::load(key[i] + d);
      CARAMBA_FAST_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        const Floats query = load_as<Floats>(q + r * width + d);
        CARAMBA_FAST_UNROLL
        for (int i = 0; i < kTokens; ++i)
          sums[r * kTokens + i] = fused(query, k[i], sums[r * kTokens + i]);
      }
    }
    float found[kScoreSums];
    store_sums(sums, found);
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
    for (int i = 0; i < kTokens; ++i) scores[r * kScoreRow + t + i] += found[r * kTokens + i];
  }
}

// The same for any number of rows.
template <Format T>
void score_tile(const float* q, std::int64_t width, int rows, const void* keys, std::int64_t stride,
                int count, float* scores) {
  int r = 0;
  for (; r + 4 <= rows; r += 4)
    score_rows<T, 4>(q + r * width, width, keys, stride, count, scores + r * kScoreRow);
  if (r + 2 <= rows) {
    score_rows<T, 2>(q + r * width, width, keys, stride, count, scores + r * kScoreRow);
    r += 2;
  }
  if (r < rows) score_rows<T, 1>(q + r * width, width, keys, stride, count, scores + r * kScoreRow);
}

using ScoreTile = void (*)(const float* q, std::int64_t width, int rows, const void* keys,
                           std::int64_t stride, int count, float* scores);

// By element type.
inline constexpr ScoreTile kScoreTiles[kValueTypes] = {
    score_tile<Format::fp32>, score_tile<Format::fp16>, score_tile<Format::bf16>};

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
