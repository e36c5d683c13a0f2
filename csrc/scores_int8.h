// The score pass over one quantized tile in products of bytes (int8_layout.h). A query has 16 bits
// where it meets 8-bit keys; what those leave of it is a third byte, added where leaving it out
// would show. Where it meets 4 bits it has 8 where that adds little to the scores, else 16
// (`EnoughBits`).
#pragma once

#include <algorithm>
#include <cstdint>

#include "query_int8.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// Kept in a register where several sums use it: compilers fold a plain load into each of them.
inline __m512i loaded(const std::int8_t* from) {
  __m512i v = _mm512_load_si512(from);
  asm("" : "+v"(v));
  return v;
}

// Four tokens of a unit as unsigned bytes, column by column; for nf4 high bytes, then low ones.
template <Format F>
struct KeyGroup {
  static constexpr int kVectors = KeyCodes<F>::kVectors, kBytes = F == Format::nf4 ? 2 : 1;
  __m512i bytes[kVectors * kBytes];

  inline __attribute__((always_inline)) void load(const char* codes, std::int64_t stride, int t,
                                                  int count, __mmask16 words) {
    __m512i rows[4], columns[4];
    load_rows(codes, stride, t, count, words, rows);
    columns_of(rows, columns);
    const __m512i nibble = _mm512_set1_epi8(15);
    CARAMBA_FAST_UNROLL
    for (int c = 0; c < 4; ++c) {
      if constexpr (F == Format::q8_0) {
        bytes[c] = _mm512_xor_si512(columns[c], _mm512_set1_epi8(-128));
      } else {
        bytes[2 * c] = _mm512_and_si512(columns[c], nibble);
        bytes[2 * c + 1] = _mm512_and_si512(_mm512_srli_epi16(columns[c], 4), nibble);
      }
    }
    if constexpr (F == Format::nf4) {
      const __m512i highs = table_of(kLevelBytes.key_high), lows = table_of(kLevelBytes.key_low);
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < 8; ++i) {
        bytes[8 + i] = _mm512_shuffle_epi8(lows, bytes[i]);
        bytes[i] = _mm512_shuffle_epi8(highs, bytes[i]);
      }
    }
  }
};

// The largest code, and the usual root mean square of codes.
template <Format F>
inline constexpr float kMostCode = F == Format::q8_0   ? 127.0f
                                   : F == Format::q4_0 ? 8.0f
                                                       : KeyCodes<F>::kDivisor;
template <Format F>
inline constexpr float kUsualCode = 0.575f * kMostCode<F>;
// What rounding a query may add to a score, root mean square: to 16 bits for q8_0, else to 8. Twice
// that is allowed by usual codes and the largest scales, which a few large tokens have, before the
// keys themselves are looked at.
template <Format F>
inline constexpr float kScoreError = F == Format::q8_0 ? 8e-5f : 7.5e-3f;
template <Format F>
inline constexpr float kUsualError = 2 * kScoreError<F>;

// Whether the fewer bits of a query are enough for a tile. That is decided for each query alone, so
// that a token's result does not depend on those beside it; never where a scale is not finite.
//
// Rounding a query to steps of s adds s^2 / 12 times the squared key to the mean square of a
// score's error. Two bounds of that: by the largest codes and the largest scales of the tile (those
// of every fourth token together); where that one is too large, but usual codes with the largest
// scales would do, by the squared keys of a few tokens.
template <Format F>
class EnoughBits {
 public:
  EnoughBits(const HeadBytes& head, const ScaleSteps& scales, const char* codes,
             std::int64_t stride, int count)
      : head_(head), scales_(scales), codes_(codes), stride_(stride), count_(count) {
    __m512i most = _mm512_setzero_si512();
    for (int i = 0; i < head.quads(); ++i)
      most = _mm512_max_epu16(most, _mm512_and_si512(scales.quad(i), _mm512_set1_epi16(0x7fff)));
    for (int u = 0; u < head.units; ++u) _mm512_store_ps(most_[u], by_lane(u, most));
  }

  // `units` are those of one query, in as many bits.
  bool operator()(const QueryUnit* units) {
    constexpr float kValues = 4 * KeyCodes<F>::kVectors;  // of a lane
    __m512 squares = _mm512_setzero_ps();
    for (int u = 0; u < head_.units; ++u) {
      const __m512 error = _mm512_mul_ps(_mm512_load_ps(most_[u]), _mm512_loadu_ps(units[u].scale));
      squares = _mm512_fmadd_ps(error, error, squares);
    }
    const float bound = _mm512_reduce_add_ps(squares) / 4 * kValues / 12;  // times codes' squares
    if (bound * kMostCode<F> * kMostCode<F> <= kScoreError<F> * kScoreError<F>) return true;
    // Also where it is NaN.
    if (!(bound * kUsualCode<F> * kUsualCode<F> <= kUsualError<F> * kUsualError<F>)) return false;
    if (!sampled_) sample();
    squares = _mm512_setzero_ps();
    for (int u = 0; u < head_.units; ++u) {
      const __m512 step = _mm512_loadu_ps(units[u].scale);
      squares = _mm512_fmadd_ps(_mm512_mul_ps(step, step), _mm512_load_ps(squares_[u]), squares);
    }
    return _mm512_reduce_add_ps(squares) / (4 * kSamples) / 12 <= kScoreError<F> * kScoreError<F>;
  }

 private:
  static constexpr int kSamples = 2;  // of four tokens

  __m512 by_lane(int u, __m512i scales) const {
    const __m512i order = _mm512_load_si512(head_.unit_scale_order[u]);
    return _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi16(order, scales)));
  }

  // The squares of the keys of some tokens, by lane and token.
  void sample() {
    sampled_ = true;
    const int tokens = count_ / head_.fold, quads = tokens / 4;
    for (int u = 0; u < head_.units; ++u) {
      __m512 sum = _mm512_setzero_ps();
      for (int i = 0; i < kSamples; ++i) {
        const int quad = quads * (2 * i + 1) / (2 * kSamples);
        KeyGroup<F> keys;
        keys.load(codes_ + u * kUnit, stride_ * head_.fold, 4 * quad, tokens, head_.words[u]);
        __m512i codes = _mm512_setzero_si512();
        constexpr int kMiddle = F == Format::q4_0 ? 8 : 128;
        for (int v = 0; v < KeyCodes<F>::kVectors; ++v) {
          const __m512i code =
              _mm512_sub_epi8(keys.bytes[v], _mm512_set1_epi8(static_cast<char>(kMiddle)));
          const __m512i size = _mm512_min_epu8(_mm512_abs_epi8(code), _mm512_set1_epi8(127));
          codes = sum_of_products(codes, size, size);
        }
        constexpr float kUnitOfCode = F == Format::nf4 ? 256.0f : 1.0f;
        const __m512 scale =
            _mm512_mul_ps(by_lane(u, scales_.quad(quad)), _mm512_set1_ps(kUnitOfCode));
        sum = _mm512_fmadd_ps(_mm512_mul_ps(scale, scale), _mm512_cvtepi32_ps(codes), sum);
      }
      _mm512_store_ps(squares_[u], sum);
    }
  }

  alignas(64) float most_[kMostUnits][16], squares_[kMostUnits][16];
  const HeadBytes& head_;
  const ScaleSteps& scales_;
  const char* codes_;
  std::int64_t stride_;
  int count_;
  bool sampled_ = false;
};

// What UNITS units of four tokens each, GROUPS times, contribute to the scores of ROWS rows: by
// lane and token, scales of the keys included. Chains of sums are interleaved, for each sum waits
// for the one before it.
template <Format F, int BYTES, int ROWS, int UNITS, int GROUPS>
inline __attribute__((always_inline)) void row_sums(const KeyGroup<F> (&keys)[UNITS][GROUPS],
                                                    const __m512 (&by_lane)[UNITS][GROUPS],
                                                    const QueryUnit* const (&q)[ROWS],
                                                    __m512 (&found)[ROWS][GROUPS]) {
  constexpr int kVectors = KeyCodes<F>::kVectors;
  // The second sum: of the query's low bytes, or of those of nf4's levels.
  constexpr bool kTwoQueries = BYTES == 2, kTwoKeys = F == Format::nf4;
  __m512i sums[ROWS][UNITS][GROUPS], low[ROWS][UNITS][GROUPS];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int u = 0; u < UNITS; ++u) CARAMBA_FAST_UNROLL
  for (int g = 0; g < GROUPS; ++g) sums[r][u][g] = low[r][u][g] = _mm512_setzero_si512();
  CARAMBA_FAST_UNROLL
  for (int i = 0; i < kVectors; ++i) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int u = 0; u < UNITS; ++u) {
    const __m512i query = loaded(q[r][u].high[i]);
    CARAMBA_FAST_UNROLL
    for (int g = 0; g < GROUPS; ++g) {
      const KeyGroup<F>& key = keys[u][g];
      sums[r][u][g] = sum_of_products(sums[r][u][g], key.bytes[i], query);
      if constexpr (kTwoKeys) low[r][u][g] = sum_of_products(low[r][u][g], key.bytes[8 + i], query);
    }
  }
  // Sums of nf4 with 16 bits on both sides take more than 32: of those the products of two low
  // bytes are left out (below 2^-16 of the sum), and the rest is put together in fp32.
  constexpr bool kWide = kTwoQueries && kTwoKeys;
  if constexpr ((kTwoQueries || kTwoKeys) && !kWide) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int u = 0; u < UNITS; ++u) CARAMBA_FAST_UNROLL
  for (int g = 0; g < GROUPS; ++g) {
    sums[r][u][g] = _mm512_slli_epi32(sums[r][u][g], 8);
    if constexpr (kTwoKeys) sums[r][u][g] = _mm512_add_epi32(sums[r][u][g], low[r][u][g]);
  }
  if constexpr (kTwoQueries) CARAMBA_FAST_UNROLL
  for (int i = 0; i < kVectors; ++i) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int u = 0; u < UNITS; ++u) {
    const __m512i query = loaded(q[r][u].low[i]);
    CARAMBA_FAST_UNROLL
    for (int g = 0; g < GROUPS; ++g) {
      __m512i& sum = kWide ? low[r][u][g] : sums[r][u][g];
      sum = sum_of_products(sum, keys[u][g].bytes[i], query);
    }
  }
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int u = 0; u < UNITS; ++u) {
    const __m512 scale = _mm512_load_ps(q[r][u].scale), shift = _mm512_load_ps(q[r][u].shift);
    CARAMBA_FAST_UNROLL
    for (int g = 0; g < GROUPS; ++g) {
      __m512 sum = _mm512_cvtepi32_ps(sums[r][u][g]);
      if constexpr (kWide) {
        const __m512 unit = _mm512_set1_ps(256);
        sum = _mm512_fmadd_ps(sum, unit, _mm512_cvtepi32_ps(low[r][u][g]));
        sum = _mm512_mul_ps(sum, unit);
      }
      sum = _mm512_fmadd_ps(sum, scale, shift);
      found[r][g] = u == 0 ? _mm512_mul_ps(sum, by_lane[u][g])
                           : _mm512_fmadd_ps(sum, by_lane[u][g], found[r][g]);
    }
  }
}

// The sum over lanes of two vectors of four tokens.
inline __m256 sums_of_lanes(__m512 a, __m512 b) {
  const __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(b), _mm512_extractf32x8_ps(b, 1));
  return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}

// The sum over the first two lanes, and over the last two, of four pairs of tokens: eight tokens.
inline __m256 sums_of_pairs(__m512 v) {
  const __m512 sums = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1));
  const __m128 first = _mm512_castps512_ps128(sums), second = _mm512_extractf32x4_ps(sums, 2);
  return _mm256_set_m128(_mm_unpackhi_ps(first, second), _mm_unpacklo_ps(first, second));
}

// scores += q . k of ROWS rows and keys: UNITS units of four tokens each, GROUPS times.
template <Format F, int BYTES, int ROWS, int UNITS, int GROUPS, int FOLD>
inline __attribute__((always_inline)) void add_row_scores(const KeyGroup<F> (&keys)[UNITS][GROUPS],
                                                          const __m512 (&by_lane)[UNITS][GROUPS],
                                                          const QueryUnit* q,
                                                          std::int64_t row_units, float* scores) {
  const QueryUnit* queries[ROWS];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) queries[r] = q + r * row_units;
  __m512 found[ROWS][GROUPS];
  row_sums<F, BYTES>(keys, by_lane, queries, found);
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    float* to = scores + r * kScoreRow;
    if constexpr (FOLD == 2) {
      CARAMBA_FAST_UNROLL
      for (int g = 0; g < GROUPS; ++g) {
        const __m256 pairs = sums_of_pairs(found[r][g]);
        _mm256_storeu_ps(to + 8 * g, _mm256_add_ps(_mm256_loadu_ps(to + 8 * g), pairs));
      }
    } else if constexpr (GROUPS == 2) {
      const __m256 sums = sums_of_lanes(found[r][0], found[r][1]);
      _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), sums));
    } else {
      const __m256 sum = sums_of_lanes(found[r][0], found[r][0]);
      _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), _mm256_castps256_ps128(sum)));
    }
  }
}

// All tokens of a tile, UNITS units from the first on: keys stay in registers while all rows meet
// them, ROWS at a time.
template <Format F, int BYTES, int ROWS, int UNITS, int FOLD>
void score_units(const QueryUnit* q, const HeadBytes& head, int first, int rows, const char* codes,
                 std::int64_t stride, const ScaleSteps& scales, int count, float* scores) {
  // As many of the 32 registers as leave room for the sums: 16 for keys.
  constexpr int kGroups = F == Format::nf4 ? 1 : 2;
  for (int t = 0; t < count; t += 4 * kGroups) {
    KeyGroup<F> keys[UNITS][kGroups];
    __m512 by_lane[UNITS][kGroups];
    CARAMBA_FAST_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      const int at = t + 4 * g;
      const __m512i raw = scales.quad(at / 4);
      CARAMBA_FAST_UNROLL
      for (int u = 0; u < UNITS; ++u) {
        keys[u][g].load(codes + (first + u) * kUnit, stride, std::min(at, count - 1), count,
                        head.words[first + u]);
        const __m512i order = _mm512_load_si512(head.unit_scale_order[first + u]);
        by_lane[u][g] =
            _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi16(order, raw)));
      }
    }
    const QueryUnit* query = q + first;
    float* to = scores + FOLD * t;
    for (int r = 0; r < rows; r += ROWS) {
      add_row_scores<F, BYTES, ROWS, UNITS, kGroups, FOLD>(keys, by_lane, query, head.units, to);
      query += ROWS * head.units;
      to += ROWS * kScoreRow;
    }
  }
}

template <Format F, int BYTES, int ROWS>
void score_rows_int8(const QueryUnit* q, const HeadBytes& head, int rows, const char* codes,
                     std::int64_t stride, const ScaleSteps& scales, int count, float* scores) {
  if (head.fold == 2) {
    score_units<F, BYTES, ROWS, 1, 2>(q, head, 0, rows, codes, 2 * stride, scales, (count + 1) / 2,
                                      scores);
    return;
  }
  constexpr int kUnits = F == Format::q8_0 ? 2 : 1;
  int u = 0;
  for (; u + kUnits <= head.units; u += kUnits)
    score_units<F, BYTES, ROWS, kUnits, 1>(q, head, u, rows, codes, stride, scales, count, scores);
  if (kUnits > 1 && u < head.units)
    score_units<F, BYTES, ROWS, 1, 1>(q, head, u, rows, codes, stride, scales, count, scores);
}

// scores[r][t] += q[r] . k[t]; units of a row lie behind each other. Another loop for what is left
// of the rows, not a branch in one: compilers would spill the keys around it.
template <Format F, int BYTES>
void score_int8(const QueryUnit* q, const HeadBytes& head, int rows, const char* codes,
                std::int64_t stride, const ScaleSteps& scales, int count, float* scores) {
  constexpr int kRows = F == Format::q8_0 ? 1 : 2;
  const int most = rows / kRows * kRows;
  if (most > 0)
    score_rows_int8<F, BYTES, kRows>(q, head, most, codes, stride, scales, count, scores);
  if (kRows > 1 && most < rows)
    score_rows_int8<F, BYTES, 1>(q + most * head.units, head, rows - most, codes, stride, scales,
                                 count, scores + most * kScoreRow);
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
