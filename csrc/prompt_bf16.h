// The same passes for queries, keys and values in bf16: products of pairs of bf16, summed in fp32;
// weights are rounded to bf16, as in torch's attention. For processors with AVX512-BF16 beside
// VNNI, which is checked at run time. Included in isa_avx512_vnni.cpp alone, in that set's
// namespace.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention_job.h"
#include "lane.h"
#include "prefetch.h"
#include "prompt.h"
#include "rows.h"

// Adds these products to the file's target; such functions are never inlined.
#define CARAMBA_FAST_BF16                                                                          \
  __attribute__((noinline, target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2," \
                                  "fma,f16c")))

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

inline bool has_bf16_products() {
  static const bool has = __builtin_cpu_supports("avx512bf16") != 0;
  return has;
}

// Whether queries and keys are bf16 in the model's basis. The factor is applied to the sums, since
// it would not be exact in bf16.
inline bool takes_bf16(const AttentionJob& job, int stream) {
  const StoredStream& s = job.stored[stream];
  return job.prompt && job.queries[0].type == Format::bf16 && s.format == Format::bf16 &&
         !s.rotate && has_bf16_products();
}

// to[r][i] += factor times the sum over k of x[r][k] . y[k][i], all of them pairs; as
// `add_products`.
template <int ROWS, int PARTS>
CARAMBA_FAST_BF16 void add_pairs(const float* x, std::int64_t row, const float* y,
                                 std::int64_t step, std::int64_t part, std::int64_t count,
                                 float factor, float* to, std::int64_t to_row) {
  __m512 sum[ROWS][PARTS];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < PARTS; ++i) sum[r][i] = _mm512_setzero_ps();
  for (std::int64_t k = 0; k < count; ++k, ++x, y += step) {
    __m512i v[PARTS];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < PARTS; ++i) v[i] = _mm512_loadu_si512(y + i * part);
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      std::int32_t pair;
      std::memcpy(&pair, x + r * row, sizeof pair);
      const __m512i pairs = _mm512_set1_epi32(pair);
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < PARTS; ++i)
        sum[r][i] = _mm512_dpbf16_ps(sum[r][i], (__m512bh)pairs, (__m512bh)v[i]);
    }
  }
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < PARTS; ++i) {
    float* at = to + r * to_row + i * 16;
    _mm512_storeu_ps(at, _mm512_fmadd_ps(sum[r][i], _mm512_set1_ps(factor), _mm512_loadu_ps(at)));
  }
}

inline void add_all_pairs(const float* x, std::int64_t row, int rows, const float* y,
                          std::int64_t step, std::int64_t part, std::int64_t parts,
                          std::int64_t count, float factor, float* to, std::int64_t to_row) {
  for_each_block(rows, parts, [&](auto many, auto wide, int r, std::int64_t i) {
    add_pairs<decltype(many)::value, decltype(wide)::value>(x + r * row, row, y + i * part, step,
                                                            part, count, factor,
                                                            to + r * to_row + i * 16, to_row);
  });
}

// scores (rows, kScoreRow) += factor times q . k; `queries` and keys in bf16. A pair of a key is a
// dword, transposed like a float of fp32 keys.
inline void score_bf16_prompt(const float* queries, std::int64_t width, int rows, float factor,
                              const void* keys, std::int64_t stride, int count, float* turned,
                              float* scores) {
  const std::int64_t pairs = width / 2;
  turn_keys<Format::fp32>(keys, stride, count, pairs, turned);
  add_all_pairs(queries, pairs, rows, turned, kLanes, pairs * kLanes, (count + kLanes - 1) / kLanes,
                pairs, factor, scores, kScoreRow);
}

// Weights (rows, kScoreRow) as bf16, zeros from `count` on: (rows, kTile / 2) pairs.
CARAMBA_FAST_BF16 inline void round_weights(const float* weights, int rows, int count, float* to) {
  for (int r = 0; r < rows; ++r, weights += kScoreRow, to += kTile / 2)
    for (int t = 0; t < count; t += 16) {
      const __m256bh few = _mm512_cvtneps_pbh(_mm512_loadu_ps(weights + t));
      std::memcpy(to + t / 2, &few, sizeof few);
    }
}

// Values of two tokens as pairs: (pair of tokens, dim); zeros for those no query sees.
inline void pair_values(const void* values, std::int64_t stride, int count, std::uint64_t seen,
                        std::int64_t width, float* to) {
  for (int t = 0; t < count; t += 2, to += width) {
    const auto* a = token_at<std::uint16_t>(values, stride, t);
    const auto* b = token_at<std::uint16_t>(values, stride, t + 1 < count ? t + 1 : t);
    const Ints first = splat(seen >> t & 1 ? -1 : 0);
    const Ints second = splat(t + 1 < count && (seen >> (t + 1) & 1) ? -1 : 0);
    for (std::int64_t d = 0; d < width; d += kLanes)
      store_as((widen(a + d) & first) | ((widen(b + d) << 16) & second), to + d);
  }
}

// sums (rows, width) += weights times values in bf16; `pairs` and `rounded` are scratch for both.
inline void add_bf16_prompt(const float* weights, int rows, const void* values, std::int64_t stride,
                            int count, std::uint64_t seen, float* pairs, float* rounded,
                            float* sums, std::int64_t width) {
  pair_values(values, stride, count, seen, width, pairs);
  round_weights(weights, rows, count, rounded);
  add_all_pairs(rounded, kTile / 2, rows, pairs, width, kLanes, width / kLanes, (count + 1) / 2, 1,
                sums, width);
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
