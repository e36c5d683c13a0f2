// The score pass over keys by channel in products of bytes. The scales of a group of tokens go into
// a query, and what comes of that becomes integers: q . k = q . zero + step * (integers . codes),
// one sum over the head for each byte of the integers. Codes are turned first (turn_codes.h), so
// that a product of bytes leaves one sum a token. Included in isa_avx512_vnni.cpp alone, in that
// set's namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "arena.h"
#include "attention_job.h"
#include "channel.h"
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
// that is enough. Of 4-bit keys, and of queries of 16 bits, it is less than fp16 rounds a weight by
// (2^-11) and a hundredth of what 4 bits have cost; of 8-bit keys what q8_0 allows (scores_int8.h).
inline constexpr float kGroupScoreError = 8e-5f, kHalfScoreError = 3e-4f;
// How far codes usually are from the middle of theirs, root mean square.
inline constexpr float kUsualCode4 = 4.5f, kUsualCode8 = 75;

inline constexpr int kFoldRows = 4;  // rows that meet a vector of codes while it is in a register

// The largest step of integers that is allowed where fewer bytes are taken.
inline float step_allowed(int bits, std::int64_t width, Format query) {
  const float code = bits == 4 ? kUsualCode4 : kUsualCode8;
  const bool fine = query == Format::fp32 && bits == 8;
  const float error = fine ? kGroupScoreError : kHalfScoreError;
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
  std::uint8_t* columns;  // turned codes of kTurned tokens (turn_codes.h)
  float* folded;          // (kFoldRows, width)
  // Integers (kFoldRows, four values, byte of the integer, value): 16 bytes for four values, of
  // which the last four are not used.
  std::int8_t* integers;
  // The bits of each byte of 4-bit codes that the low channel has, and the middle of each value's
  // codes: 15 and 7.5 unless `divided`.
  std::uint8_t* masks;
  float* middles;
  bool divided;
  std::int64_t width;
  const char* next;  // what is asked for while codes meet queries, in time for the next tile

  GroupScratch(std::int64_t width, Arena& arena)
      : columns(arena.take<std::uint8_t>(kTurned * width)),
        folded(arena.take<float>(kFoldRows * width)),
        integers(arena.take<std::int8_t>(kFoldRows * width * 4)),
        masks(arena.take<std::uint8_t>(width / 2)),
        middles(arena.take<float>(width)),
        divided(true),
        width(width),
        next(nullptr) {
    divide_evenly();
  }

  void divide_evenly() {
    if (!divided) return;
    divided = false;
    std::memset(masks, 15, static_cast<std::size_t>(width) / 2);
    std::fill(middles, middles + width, 7.5f);
  }

  // As the scales of a group of `count` channels have it.
  void divide(const std::uint16_t* scales, std::int64_t count) {
    divided = true;
    for (std::int64_t d = 0; d < count; d += kPacked) {
      const Ints mask = low_mask(scales + d);
      narrow(mask, masks + d / 2);
      store_as(converted(mask) * 0.5f, middles + d);
      store_as(converted(255 - mask) * (kHighUnit / 2), middles + d + kPacked / 2);
    }
  }
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

// ROWS queries times scales, into `folded`, and what makes them integers.
template <int ROWS>
void fold_queries(const float* q, const std::uint16_t* scales, const std::uint16_t* zeros,
                  std::int64_t width, float allowed, float* folded, FoldedRows& rows) {
  __m512 sum[kFoldRows], most[kFoldRows];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < kFoldRows; ++r) sum[r] = most[r] = _mm512_setzero_ps();
  for (std::int64_t d = 0; d < width; d += 16) {
    const __m512 scale = load_scale(scales + d), zero = load_half(zeros + d);
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const __m512 query = _mm512_loadu_ps(q + r * width + d);
      const __m512 product = _mm512_mul_ps(query, scale);
      sum[r] = _mm512_fmadd_ps(query, zero, sum[r]);
      most[r] = _mm512_range_ps(most[r], product, 0x0b);  // the larger magnitude
      _mm512_storeu_ps(folded + r * width + d, product);
    }
  }
  choose_integers(reduced<true>(sum), reduced<false>(most), allowed, rows);
}

// ROWS rows as integers. Adding 1.5 * 2^23 leaves an integer in the mantissa's low bits; with
// 0x8080 more the two lower bytes are 128 above signed ones. The third is 64 above. What an integer
// leaves of its product meets the middle of the codes in `base`, so that only what codes are away
// from it is lost.
template <int BITS, int ROWS>
void quantize_folded(const GroupScratch& scratch, std::int64_t width, FoldedRows& rows) {
  constexpr float kMagic = 12582912.0f + 32896.0f;
  const __m512 magic = _mm512_set1_ps(kMagic);
  const __m512i above = _mm512_set1_epi32(0x00408080);
  const __m512i order =
      _mm512_broadcast_i32x4(_mm_set_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400));
  __m512 left[kFoldRows];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < kFoldRows; ++r) left[r] = _mm512_setzero_ps();
  for (std::int64_t d = 0; d < width; d += 16) {
    const __m512 middle = BITS == 8 ? _mm512_set1_ps(127.5f) : _mm512_load_ps(scratch.middles + d);
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const __m512 folded = _mm512_loadu_ps(scratch.folded + r * width + d);
      const __m512 inverse = _mm512_set1_ps(rows.inverse[r]);
      const __m512 x = _mm512_fmadd_ps(folded, inverse, magic);
      const __m512 rest = _mm512_fmsub_ps(folded, inverse, _mm512_sub_ps(x, magic));
      left[r] = _mm512_fmadd_ps(rest, middle, left[r]);
      const __m512i bytes = _mm512_sub_epi8(_mm512_castps_si512(x), above);
      _mm512_store_si512(scratch.integers + 4 * (r * width + d), _mm512_shuffle_epi8(bytes, order));
    }
  }
  _mm_store_ps(rows.base,
               _mm_fmadd_ps(reduced<true>(left), _mm_load_ps(rows.step), _mm_load_ps(rows.base)));
}

// scores += base + step * sum of ROWS rows and TURNS times 16 tokens, of which `there` exist. Of
// bytes with two codes the high ones stay in place: they count 16 times as much as the low ones.
template <int BITS, int BYTES, int ROWS, int TURNS>
void score_columns(const GroupScratch& scratch, std::int64_t width, const FoldedRows& rows,
                   int first, int there, float* scores) {
  __m512i sums[BYTES][ROWS][TURNS];
  CARAMBA_FAST_UNROLL
  for (int b = 0; b < BYTES; ++b) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < TURNS; ++i) sums[b][r][i] = _mm512_setzero_si512();
  const std::int8_t* integers = scratch.integers + 4 * first * width;
  const std::int64_t bytes = width * BITS / 8;
  // `byte` of the tokens meets value d; half 0 are low codes, 1 high ones.
  const char* next = scratch.next;
  const auto add = [&](auto half, std::int64_t byte, std::int64_t d) {
    for (int line = 0; line < BITS / 4; ++line, next += kLine) __builtin_prefetch(next, 0, 3);
    __m512i codes[TURNS];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < TURNS; ++i) {
      codes[i] = _mm512_load_si512(scratch.columns + 16 * (i * bytes + byte));
      if constexpr (BITS == 4) {
        const __m512i mask = _mm512_set1_epi32(load_as<std::int32_t>(scratch.masks + byte));
        codes[i] = decltype(half)::value ? _mm512_andnot_si512(mask, codes[i])
                                         : _mm512_and_si512(mask, codes[i]);
      }
    }
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
  if constexpr (BITS == 8) {
    for (std::int64_t d = 0; d < width; d += 4) add(std::false_type{}, d, d);
  } else {
    constexpr int kHalf = kPacked / 2;
    for (std::int64_t byte = 0; byte < bytes; byte += kHalf) CARAMBA_FAST_UNROLL
    for (int j = 0; j < kHalf; j += 4) add(std::false_type{}, byte + j, 2 * byte + j);
    CARAMBA_FAST_UNROLL
    for (int b = 0; b < BYTES; ++b) CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
    for (int i = 0; i < TURNS; ++i) sums[b][r][i] = _mm512_slli_epi32(sums[b][r][i], 4);
    for (std::int64_t byte = 0; byte < bytes; byte += kHalf) CARAMBA_FAST_UNROLL
    for (int j = 0; j < kHalf; j += 4) add(std::true_type{}, byte + j, 2 * byte + kHalf + j);
  }
  constexpr float kUnit = BITS == 4 ? kHighUnit : 1.0f;
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
    if (there >= 16 * (i + 1)) {  // a masked store is slow to read
      _mm512_storeu_ps(to, _mm512_add_ps(sum, _mm512_loadu_ps(to)));
      continue;
    }
    const auto mask = static_cast<__mmask16>((1u << (there - 16 * i)) - 1);
    _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, to)));
  }
}

using ScoreColumns = void (*)(const GroupScratch& scratch, std::int64_t width,
                              const FoldedRows& rows, int first, int there, float* scores);

// By bytes of an integer, rows and turns, each from one on.
template <int BITS, int BYTES, int ROWS>
inline constexpr ScoreColumns kScoreTurns[2] = {score_columns<BITS, BYTES, ROWS, 1>,
                                                score_columns<BITS, BYTES, ROWS, 2>};
template <int BITS, int BYTES>
inline constexpr const ScoreColumns* kScoreRows[kFoldRows] = {
    kScoreTurns<BITS, BYTES, 1>, kScoreTurns<BITS, BYTES, 2>, kScoreTurns<BITS, BYTES, 3>,
    kScoreTurns<BITS, BYTES, 4>};
template <int BITS>
inline constexpr const ScoreColumns* const* kScoreBytes[kMostBytes] = {
    kScoreRows<BITS, 1>, kScoreRows<BITS, 2>, kScoreRows<BITS, 3>};

using FoldQueries = void (*)(const float* q, const std::uint16_t* scales,
                             const std::uint16_t* zeros, std::int64_t width, float allowed,
                             float* folded, FoldedRows& rows);
inline constexpr FoldQueries kFoldQueries[kFoldRows] = {fold_queries<1>, fold_queries<2>,
                                                        fold_queries<3>, fold_queries<4>};
using QuantizeFolded = void (*)(const GroupScratch& scratch, std::int64_t width, FoldedRows& rows);
template <int BITS>
inline constexpr QuantizeFolded kQuantizeFolded[kFoldRows] = {
    quantize_folded<BITS, 1>, quantize_folded<BITS, 2>, quantize_folded<BITS, 3>,
    quantize_folded<BITS, 4>};

// Up to kTurned tokens of a group.
struct GroupTokens {
  const std::uint16_t *scales, *zeros;
  const char* codes;
  std::int64_t stride, width;
  std::int64_t before;  // bytes of the lane's token before those of the head
  int count;
  float allowed;  // see `step_allowed`
};

// scores (rows, kScoreRow) += q . k for some tokens of a group. Rows that integers do not serve, or
// all where a scale is not finite, are left to left(row).
template <int BITS, class Left>
void score_group(const float* q, int rows, const GroupTokens& tokens, GroupScratch& scratch,
                 float* scores, const Left& left) {
  const ScaleSigns signs(tokens.scales, tokens.width);
  if (!signs.finite) {
    for (int r = 0; r < rows; ++r) left(r);
    return;
  }
  if (BITS == 4 && signs.negative)
    scratch.divide(tokens.scales, tokens.width);
  else if (BITS == 4)
    scratch.divide_evenly();
  const std::int64_t width = tokens.width, bytes = width * BITS / 8;
  // Of the lane's next tokens each head asks for its share.
  scratch.next = tokens.codes + ahead_of(tokens.stride) + (kTurned - 1) * tokens.before;
  for (int first = 0; first < rows; first += kFoldRows) {
    const int block = std::min(rows - first, kFoldRows);
    FoldedRows folded;
    kFoldQueries[block - 1](q + first * width, tokens.scales, tokens.zeros, width, tokens.allowed,
                            scratch.folded, folded);
    // Between the two, for the integers wait for the largest product.
    if (first == 0)
      for (int t = 0; t < tokens.count; t += 16)
        turn_codes(Tokens(tokens.codes + t * tokens.stride, tokens.stride, tokens.count - t),
                   static_cast<int>(bytes), scratch.columns + t * bytes);
    kQuantizeFolded<BITS>[block - 1](scratch, width, folded);
    for (int r = 0, run = 1; r < block; r += run) {
      run = 1;
      while (r + run < block && folded.bytes[r + run] == folded.bytes[r]) ++run;
      if (folded.bytes[r] > 0)
        kScoreBytes<BITS>[folded.bytes[r] - 1][run - 1][tokens.count > 16](
            scratch, width, folded, r, tokens.count, scores + (first + r)* kScoreRow);
      else
        for (int i = 0; i < run; ++i) left(first + r + i);
    }
  }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
