// The score pass and the value pass over one tile in fp32, for any element type. Quantized tiles
// come here decoded, where there are no integer products or where a tile holds what they cannot
// take. Compiled once per instruction set, in that set's namespace.
#pragma once

#include <cstdint>

#include "attention_job.h"
#include "dequantize.h"
#include "half.h"
#include "numeric.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

template <class T>
inline const T* token_at(const void* data, std::int64_t stride, std::int64_t token) {
  return reinterpret_cast<const T*>(static_cast<const char*>(data) + token * stride);
}

// How far ahead of what is read the next bytes of a stream are asked for. Hardware follows a stream
// to the end of its page; a lane changes streams with every tile.
inline constexpr std::int64_t kAhead = 4096;
inline constexpr std::int64_t kLine = 64;

inline void prefetch(const void* at, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += kLine)
    __builtin_prefetch(static_cast<const char*>(at) + kAhead + i, 0, 2);
}

// scores[r][t] += q[r] . k[t] for ROWS rows; q rows are `width` apart, keys `stride` bytes.
template <Format T, int ROWS>
void score_rows(const float* q, std::int64_t width, const void* keys, std::int64_t stride,
                int count, float* scores) {
  constexpr int kTokens = kLanes / ROWS > 0 ? kLanes / ROWS : 1;
  for (int t = 0; t < count; t += kTokens) {
    const typename Values<T>::Storage* key[kTokens];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < kTokens; ++i)  // past the end the last token stands in
      key[i] =
          token_at<typename Values<T>::Storage>(keys, stride, t + i < count ? t + i : count - 1);
    for (int i = 0; i < kTokens; ++i)
      prefetch(key[i], width * static_cast<std::int64_t>(sizeof *key[i]));
    Floats sums[kLanes] = {};
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
    float found[kLanes];
    store_as(sums_of(sums), found);
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
    for (int i = 0; i < kTokens; ++i) scores[r * kScoreRow + t + i] += found[r * kTokens + i];
  }
}

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

// sums[r][d] += sum over t of weights[r][t] v[t][d], for ROWS rows and PARTS vectors of dims.
template <Format T, int ROWS, int PARTS>
void value_part(const float* weights, const void* values, std::int64_t stride, int count,
                float* sums, std::int64_t width, std::int64_t d) {
  Floats sum[ROWS][PARTS];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < PARTS; ++i) sum[r][i] = load_as<Floats>(sums + r * width + d + i * kLanes);
  for (int t = 0; t < count; ++t) {
    const auto* value = token_at<typename Values<T>::Storage>(values, stride, t) + d;
    prefetch(value, PARTS * kLanes * static_cast<std::int64_t>(sizeof *value));
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
  constexpr int kParts = kLanes == 16 ? 4 : 2;
  std::int64_t d = 0;
  for (; d + kParts * kLanes <= width; d += kParts * kLanes)
    value_part<T, ROWS, kParts>(weights, values, stride, count, sums, width, d);
  for (; d < width; d += 2 * kLanes)
    value_part<T, ROWS, 2>(weights, values, stride, count, sums, width, d);
}

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

// Decodes blocks [0, blocks) of each token: values[t * blocks * N ...].
template <Format F, int N>
void decode_blocks(const char* codes, std::int64_t codes_stride, const char* scales,
                   std::int64_t scales_stride, int blocks, int count, float* values) {
  for (int t = 0; t < count; ++t) {
    const auto* block = token_at<CodeBlock<F, N>>(codes, codes_stride, t);
    const auto* scale = token_at<std::uint16_t>(scales, scales_stride, t);
    for (int i = 0; i < blocks; ++i) {
      std::uint16_t padded[kLanes] = {scale[i]};
      decode<F, Format::fp32, N>(block[i], load_half(padded)[0], values + (t * blocks + i) * N);
    }
  }
}

using DecodeTile = void (*)(const char*, std::int64_t, const char*, std::int64_t, int, int, float*);
using ScoreTile = void (*)(const float*, std::int64_t, int, const void*, std::int64_t, int, float*);
using ValueTile = void (*)(const float*, int, const void*, std::int64_t, int, float*, std::int64_t);

inline constexpr ScoreTile kScoreTiles[kValueTypes] = {
    score_tile<Format::fp32>, score_tile<Format::fp16>, score_tile<Format::bf16>};
inline constexpr ValueTile kValueTiles[kValueTypes] = {
    value_tile<Format::fp32>, value_tile<Format::fp16>, value_tile<Format::bf16>};
template <Format F>
inline constexpr DecodeTile kDecodeTiles[kBlockCount] = {decode_blocks<F, 32>, decode_blocks<F, 64>,
                                                         decode_blocks<F, 128>};

inline DecodeTile decoder_of(Format format, int block) {
  const int size = block_index(block);
  if (format == Format::q8_0) return kDecodeTiles<Format::q8_0>[size];
  if (format == Format::q4_0) return kDecodeTiles<Format::q4_0>[size];
  return kDecodeTiles<Format::nf4>[size];
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
