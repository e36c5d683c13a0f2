// The score pass over keys by channel in products of bytes. The scales of a group of tokens go into
// a query, and what comes of that becomes integers: q . k = q . zero + step * (integers . codes),
// one sum over the head for each byte of the integers. Codes are turned first (turn_codes.h), so
// that a product of bytes leaves one sum a token. Included in isa_avx512_vnni.cpp alone, in that
// set's namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "arena.h"
#include "attention_job.h"
#include "half.h"
#include "int8_layout.h"
#include "numeric.h"
#include "turn_codes.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

inline constexpr int kMostBytes = 3;  // of an integer
// How large integers of so many bytes get; the most is what the mantissa of a float holds.
inline constexpr float kIntegers[kMostBytes + 1] = {0, 127, 32600, 4.1e6f};

// What rounding a query to integers may add to a score, root mean square: bytes are left out where
// that is enough. With queries of 16 bits it is less than fp16 rounds a weight by (2^-11), and a
// hundredth of what 4 bits of the keys have cost. Codes are taken to be as large as they usually
// are.
inline constexpr float kGroupScoreError = 3e-6f, kHalfScoreError = 3e-4f;
inline constexpr float kUsualCode4 = 9, kUsualCode8 = 150;

inline constexpr int kFoldRows = 4;  // rows that meet a vector of codes while it is in a register

// The largest step of integers that is allowed where fewer bytes are taken.
inline float step_allowed(int bits, std::int64_t width, Format query) {
  const float code = bits == 4 ? kUsualCode4 : kUsualCode8;
  const float error = query == Format::fp32 ? kGroupScoreError : kHalfScoreError;
  return error / (code * std::sqrt(static_cast<float>(width) / 12));
}

// Query rows folded with the scales of a group: a score is base + step * sum.
struct alignas(16) FoldedRows {
  float base[kFoldRows], step[kFoldRows], inverse[kFoldRows];
  std::int32_t bytes[kFoldRows];  // 0 where integers do not serve
};

inline constexpr int kTurned = 32;  // tokens that are turned at a time

// Memory for one group of a head of `width` values.
struct GroupScratch {
  // Codes by (16 tokens, four values, token, value).
  std::uint8_t* columns;
  std::uint8_t* masks;  // of each byte of 4-bit codes, see `store_column`
  float* folded;        // (kFoldRows, width)
  // Integers (kFoldRows, four values, byte of the integer, value): 16 bytes for four values, of
  // which the last four are not used.
  std::int8_t* integers;

  GroupScratch(std::int64_t width, Arena& arena)
      : columns(arena.take<std::uint8_t>(kTurned * width)),
        masks(arena.take<std::uint8_t>(width / 2)),
        folded(arena.take<float>(kFoldRows * width)),
        integers(arena.take<std::int8_t>(kFoldRows * width * 4)) {}
};

// Whether all scales of a group are finite, and whether one is negative, so that bytes are divided.
struct ScaleSigns {
  bool finite, negative;

  ScaleSigns(const std::uint16_t* halves, std::int64_t count) {
    const __m512i exponent = _mm512_set1_epi16(0x7c00);
    __mmask32 endless = 0, below = 0;
    for (std::int64_t d = 0; d < count; d += 32) {
      const __m512i bits = _mm512_loadu_si512(halves + d);
      endless |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(bits, exponent), exponent);
      below |= _mm512_movepi16_mask(bits);
    }
    finite = endless == 0;
    negative = below != 0;
  }
};

template <bool SUM>
inline __m512 pair(__m512 a, __m512 b) {
  return SUM ? _mm512_add_ps(a, b) : _mm512_max_ps(a, b);
}

// Of four vectors the sums, or the largest entries.
template <bool SUM>
inline __m128 reduced(const __m512 (&v)[4]) {
  const __m512 a = pair<SUM>(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const __m512 b = pair<SUM>(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  const __m512 lanes = pair<SUM>(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  const __m512 half = pair<SUM>(lanes, _mm512_shuffle_f32x4(lanes, lanes, 0x4e));
  return _mm512_castps512_ps128(pair<SUM>(half, _mm512_shuffle_f32x4(half, half, 0xb1)));
}

// How many bytes each row takes, and its step, by the largest magnitude of its products. That
// depends on the query and the group alone, so that a token's result does not depend on those
// beside it.
inline void choose_integers(__m128 base, __m128 largest, float allowed, FoldedRows& rows) {
  __m128i bytes = _mm_set1_epi32(1);
  __m128 range = _mm_set1_ps(kIntegers[1]);
  CARAMBA_FAST_UNROLL
  for (int i = 1; i < kMostBytes; ++i) {
    const __m128 enough = _mm_set1_ps(allowed * kIntegers[i]);
    const __mmask8 more = _mm_cmp_ps_mask(largest, enough, _CMP_NLE_UQ);
    bytes = _mm_mask_mov_epi32(bytes, more, _mm_set1_epi32(i + 1));
    range = _mm_mask_mov_ps(range, more, _mm_set1_ps(kIntegers[i + 1]));
  }
  const __m128 infinity = _mm_set1_ps(std::numeric_limits<float>::infinity());
  const __mmask8 usable =
      _mm_cmp_ps_mask(largest, infinity, _CMP_LT_OQ) &
      _mm_cmp_ps_mask(_mm_andnot_ps(_mm_set1_ps(-0.0f), base), infinity, _CMP_LT_OQ);
  const __mmask8 some = _mm_cmp_ps_mask(largest, _mm_set1_ps(1e-30f), _CMP_GT_OQ);
  _mm_store_ps(rows.base, base);
  _mm_store_ps(rows.step, _mm_div_ps(largest, range));
  _mm_store_ps(rows.inverse, _mm_maskz_div_ps(some, range, largest));
  store_as(_mm_maskz_mov_epi32(usable, bytes), rows.bytes);
}

// ROWS queries times scales, into `folded`, and what makes them integers. In a divided byte the
// high code stays above the low one's bits, where it counts 16 times as much: `score_columns` takes
// that back. `masks`: those of the codes are made too.
template <Packing P, int ROWS>
void fold_queries(const float* q, const std::uint16_t* scales, const std::uint16_t* zeros,
                  std::int64_t width, float allowed, bool masks, const GroupScratch& scratch,
                  FoldedRows& rows) {
  __m512 sum[kFoldRows], most[kFoldRows];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < kFoldRows; ++r) sum[r] = most[r] = _mm512_setzero_ps();
  const auto fold = [&](std::int64_t d, __m512 scale) {
    const __m512 zero = load_half(zeros + d);
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const __m512 query = _mm512_loadu_ps(q + r * width + d);
      const __m512 product = _mm512_mul_ps(query, scale);
      sum[r] = _mm512_fmadd_ps(query, zero, sum[r]);
      most[r] = _mm512_range_ps(most[r], product, 0x0b);  // the larger magnitude
      _mm512_storeu_ps(scratch.folded + r * width + d, product);
    }
  };
  if constexpr (P != Packing::kDivided) {
    for (std::int64_t d = 0; d < width; d += 16) fold(d, load_half(scales + d));
  } else {
    for (std::int64_t d = 0; d < width; d += kPacked) {
      if (masks) narrow(low_mask(scales + d), scratch.masks + d / 2);
      fold(d, load_scale(scales + d));
      fold(d + kPacked / 2, load_scale(scales + d + kPacked / 2));
    }
  }
  choose_integers(reduced<true>(sum), reduced<false>(most), allowed, rows);
}

// One row as integers. Adding 1.5 * 2^23 leaves an integer in the mantissa's low bits; with 0x8080
// more the two lower bytes are 128 above signed ones. The third is 64 above.
inline void quantize_folded(const float* folded, std::int64_t width, float inverse,
                            std::int8_t* to) {
  const __m512 magic = _mm512_set1_ps(12582912.0f + 32896.0f);
  const __m512i above = _mm512_set1_epi32(0x00408080);
  const __m512i order =
      _mm512_broadcast_i32x4(_mm_set_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400));
  for (std::int64_t d = 0; d < width; d += 16) {
    const __m512 x = _mm512_fmadd_ps(_mm512_loadu_ps(folded + d), _mm512_set1_ps(inverse), magic);
    const __m512i bytes = _mm512_sub_epi8(_mm512_castps_si512(x), above);
    _mm512_store_si512(to + 4 * d, _mm512_shuffle_epi8(bytes, order));
  }
}

// scores += base + step * sum of ROWS rows and TURNS times 16 tokens, of which `there` exist.
template <bool DIVIDED, int BYTES, int ROWS, int TURNS>
void score_columns(const std::uint8_t* columns, const std::int8_t* integers, std::int64_t width,
                   const FoldedRows& rows, int first, int there, float* scores) {
  __m512i sums[BYTES][ROWS][TURNS];
  CARAMBA_FAST_UNROLL
  for (int b = 0; b < BYTES; ++b) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < TURNS; ++i) sums[b][r][i] = _mm512_setzero_si512();
  const auto add = [&](std::int64_t d) {
    __m512i codes[TURNS];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < TURNS; ++i) codes[i] = _mm512_load_si512(columns + 16 * (i * width + d));
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
    for (int b = 0; b < BYTES; ++b) {
      const auto* from = integers + 4 * (r * width + d + b);
      __m512i query = _mm512_set1_epi32(load_as<std::int32_t>(from));
      asm("" : "+v"(query));  // in a register, for several sums use it
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < TURNS; ++i)
        sums[b][r][i] = sum_of_products(sums[b][r][i], codes[i], query);
    }
  };
  if constexpr (!DIVIDED) {
    for (std::int64_t d = 0; d < width; d += 4) add(d);
  } else {  // low codes, times 16, and high ones
    for (std::int64_t d = 0; d < width; d += kPacked) CARAMBA_FAST_UNROLL
    for (int j = 0; j < kPacked / 2; j += 4) add(d + j);
    CARAMBA_FAST_UNROLL
    for (int b = 0; b < BYTES; ++b) CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
    for (int i = 0; i < TURNS; ++i) sums[b][r][i] = _mm512_slli_epi32(sums[b][r][i], 4);
    for (std::int64_t d = kPacked / 2; d < width; d += kPacked) CARAMBA_FAST_UNROLL
    for (int j = 0; j < kPacked / 2; j += 4) add(d + j);
  }
  constexpr float kUnit = DIVIDED ? kHighUnit : 1.0f;
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < TURNS; ++i) {
    __m512 sum = _mm512_cvtepi32_ps(sums[0][r][i]);
    float unit = 256;
    CARAMBA_FAST_UNROLL
    for (int b = 1; b < BYTES; ++b, unit *= 256)
      sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[b][r][i]), _mm512_set1_ps(unit), sum);
    sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(kUnit * rows.step[first + r]),
                          _mm512_set1_ps(rows.base[first + r]));
    float* to = scores + r * kScoreRow + 16 * i;
    const auto mask = static_cast<__mmask16>((1u << std::min(there - 16 * i, 16)) - 1);
    _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, to)));
  }
}

using ScoreColumns = void (*)(const std::uint8_t* columns, const std::int8_t* integers,
                              std::int64_t width, const FoldedRows& rows, int first, int there,
                              float* scores);

// By bytes of an integer, rows and turns, each from one on.
template <bool DIVIDED, int BYTES, int ROWS>
inline constexpr ScoreColumns kScoreTurns[2] = {score_columns<DIVIDED, BYTES, ROWS, 1>,
                                                score_columns<DIVIDED, BYTES, ROWS, 2>};
template <bool DIVIDED, int BYTES>
inline constexpr const ScoreColumns* kScoreRows[kFoldRows] = {
    kScoreTurns<DIVIDED, BYTES, 1>, kScoreTurns<DIVIDED, BYTES, 2>, kScoreTurns<DIVIDED, BYTES, 3>,
    kScoreTurns<DIVIDED, BYTES, 4>};
template <bool DIVIDED>
inline constexpr const ScoreColumns* const* kScoreBytes[kMostBytes] = {
    kScoreRows<DIVIDED, 1>, kScoreRows<DIVIDED, 2>, kScoreRows<DIVIDED, 3>};

using FoldQueries = void (*)(const float* q, const std::uint16_t* scales,
                             const std::uint16_t* zeros, std::int64_t width, float allowed,
                             bool masks, const GroupScratch& scratch, FoldedRows& rows);
template <Packing P>
inline constexpr FoldQueries kFoldQueries[kFoldRows] = {fold_queries<P, 1>, fold_queries<P, 2>,
                                                        fold_queries<P, 3>, fold_queries<P, 4>};

// Up to kTurned tokens of a group.
struct GroupTokens {
  const std::uint16_t *scales, *zeros;
  const char* codes;
  std::int64_t stride, width;
  int count;
  float allowed;  // see `step_allowed`
};

template <Packing P>
inline void turn_group(const GroupTokens& tokens, const GroupScratch& scratch) {
  const int bytes = static_cast<int>(P == Packing::kBytes ? tokens.width : tokens.width / 2);
  for (int t = 0; t < tokens.count; t += 16)
    turn_codes<P>(Tokens(tokens.codes + t * tokens.stride, tokens.stride, tokens.count - t), bytes,
                  scratch.masks, scratch.columns + t * tokens.width);
}

// Up to kFoldRows rows that are folded meet codes that are turned; those that integers do not serve
// are left to left(row).
template <bool DIVIDED, class Left>
inline void score_folded(const GroupTokens& tokens, const FoldedRows& folded, int rows,
                         const GroupScratch& scratch, float* scores, const Left& left) {
  const std::int64_t width = tokens.width;
  for (int r = 0; r < rows; ++r)
    quantize_folded(scratch.folded + r * width, width, folded.inverse[r],
                    scratch.integers + 4 * r * width);
  for (int r = 0, run = 1; r < rows; r += run) {
    run = 1;
    while (r + run < rows && folded.bytes[r + run] == folded.bytes[r]) ++run;
    if (folded.bytes[r] > 0)
      kScoreBytes<DIVIDED>[folded.bytes[r] - 1][run - 1][tokens.count > 16](
          scratch.columns, scratch.integers + 4 * r* width, width, folded, r, tokens.count,
          scores + r* kScoreRow);
    else
      for (int i = 0; i < run; ++i) left(r + i);
  }
}

// scores (rows, kScoreRow) += q . k for some tokens of a group with finite scales.
template <Packing P, class Left>
void score_packed(const float* q, int rows, const GroupTokens& tokens, const GroupScratch& scratch,
                  float* scores, const Left& left) {
  for (int first = 0; first < rows; first += kFoldRows) {
    const int block = std::min(rows - first, kFoldRows);
    FoldedRows folded;
    const FoldQueries fold = kFoldQueries<P>[block - 1];
    fold(q + first * tokens.width, tokens.scales, tokens.zeros, tokens.width, tokens.allowed,
         first == 0, scratch, folded);
    // Between the two, for the integers wait for the largest product; behind the masks.
    if (first == 0) turn_group<P>(tokens, scratch);
    score_folded<P == Packing::kDivided>(tokens, folded, block, scratch, scores + first * kScoreRow,
                                         [&](int r) { left(first + r); });
  }
}

// The same of any group. Rows that integers do not serve, or all where a scale is not finite, are
// left to left(row).
template <int BITS, class Left>
void score_group(const float* q, int rows, const GroupTokens& tokens, const GroupScratch& scratch,
                 float* scores, const Left& left) {
  const ScaleSigns signs(tokens.scales, tokens.width);
  if (!signs.finite)
    for (int r = 0; r < rows; ++r) left(r);
  else if (BITS == 8)
    score_packed<Packing::kBytes>(q, rows, tokens, scratch, scores, left);
  else if (signs.negative)
    score_packed<Packing::kDivided>(q, rows, tokens, scratch, scores, left);
  else
    score_packed<Packing::kNibbles>(q, rows, tokens, scratch, scores, left);
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
