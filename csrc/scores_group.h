// The score pass over keys by channel in integer products. A query is multiplied by the scales of a
// group of tokens, then rounded to integers: q . k = q . zero + step * (integers . codes). Codes
// are transposed first (turn_codes.h), so that products are sums of one token each. Integers are
// bytes, with a sum for each, if the machine sums those in 512 bits, else words. Compiled once for
// each instruction set that has such products, in that set's namespace.
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
#include "prefetch.h"
#include "turn_codes.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// Whether integers are words, one or two; else bytes, up to three.
inline constexpr bool kWordRows = !CARAMBA_FAST_BYTE_SUMS;
inline constexpr int kMostBytes = 3;
// The largest integer of so many bytes; three are limited by a float's mantissa.
inline constexpr float kIntegers[kMostBytes + 1] = {0, 127, 32600, 4.1e6f};

// The largest word: sums over a head have to fit into a dword, and rounding enlarges those of the
// second words by 0.2%. A byte of 4-bit codes counts up to 63 * 16 + 192 if its channels divide it
// unevenly (channel.h).
inline float most_word(int bits, std::int64_t width) {
  const float most = 2.14e9f / (bits == 4 ? 600 : 255) / static_cast<float>(width);
  return std::min(most, kIntegers[2]);
}

// The error, root mean square, that rounding a query may add to a score; as few bytes as possible
// are used. For 4-bit keys and 16-bit queries it is less than the rounding of a weight to fp16
// (2^-11), and a hundredth of the error of 4 bits; for 8-bit keys it is that of q8_0
// (scores_int8.h).
inline constexpr float kGroupScoreError = 8e-5f, kHalfScoreError = 3e-4f;
// The usual distance of codes from their middle, root mean square.
inline constexpr float kUsualCode4 = 4.5f, kUsualCode8 = 75;

inline constexpr int kFoldRows = 4;  // rows multiplied with a vector of codes in a register

// The largest step of integers at which fewer bytes suffice.
inline float step_allowed(int bits, std::int64_t width, Format query) {
  const float code = bits == 4 ? kUsualCode4 : kUsualCode8;
  const bool fine = query == Format::fp32 && bits == 8;
  const float error = fine ? kGroupScoreError : kHalfScoreError;
  return error / (code * std::sqrt(static_cast<float>(width) / 12));
}

// Query rows multiplied by the scales of a group: a score is base + step * sum.
struct alignas(16) FoldedRows {
  float base[kFoldRows], step[kFoldRows], inverse[kFoldRows];
  std::int32_t bytes[kFoldRows];  // or words, one or two; 0 if not representable
};

inline constexpr int kTurned = 32;  // tokens transposed at a time

// Scratch for one group of a head of `width` values.
struct GroupScratch {
  std::uint8_t* columns;  // transposed codes of kTurned tokens (turn_codes.h)
  float* folded;          // (kFoldRows, width)
  // Integers (kFoldRows, four values, byte of the integer, value): 16 bytes per four values, the
  // last four unused. Words are those of values 0 and 2, then of 1 and 3, followed by the words of
  // their remainders.
  std::int8_t* integers;
  // The low channels' bits of each byte of 4-bit codes, and the middle of each value's codes: 15
  // and 7.5 unless `divided`.
  std::uint8_t* masks;
  float* middles;
  bool divided;
  std::int64_t width;
  const char* next;  // prefetched during the products, for the next tile

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

  // Divides bytes as the scales of a group of `count` channels say.
  void divide(const std::uint16_t* scales, std::int64_t count) {
    divided = true;
    constexpr int kHalf = kPacked / 2;
    for (std::int64_t block = 0; block < count; block += kPacked)
      for (std::int64_t d = block; d < block + kHalf; d += kLanes) {
        const Ints mask = low_mask(scales + d);
        narrow(mask, masks + d - block / 2);
        store_as(converted(mask) * 0.5f, middles + d);
        store_as(converted(255 - mask) * (kHighUnit / 2), middles + d + kHalf);
      }
  }
};

// Whether all scales of a group are finite, and whether some are negative: then bytes are divided
// unevenly.
struct ScaleSigns {
  bool finite, negative;

  ScaleSigns(const std::uint16_t* halves, std::int64_t count) {
    Raw most{}, any{};
    for (std::int64_t d = 0; d < count; d += 2 * kLanes) {
      const Raw raw = load_as<Raw>(halves + d);
      most = CARAMBA_FAST_MM(max_epu16)(most, raw & CARAMBA_FAST_MM(set1_epi16)(0x7fff));
      any |= raw;
    }
    finite = !any_greater(most, CARAMBA_FAST_MM(set1_epi16)(0x7bff));
    negative = any_greater(Raw{}, any);
  }
};

inline constexpr float kEndless = std::numeric_limits<float>::infinity();

// Bytes or words of each row, and its step, by the largest magnitude of its products. They depend
// on the query and the group alone, so that a token's result does not depend on other tokens.
inline void choose_integers(__m128 base, __m128 largest, float allowed, float most,
                            FoldedRows& rows) {
#if CARAMBA_FAST_BYTE_SUMS
  static_cast<void>(most);
  __m128i bytes = _mm_set1_epi32(1);
  __m128 range = _mm_set1_ps(kIntegers[1]);
  CARAMBA_FAST_UNROLL
  for (int i = 1; i < kMostBytes; ++i) {
    const __m128 enough = _mm_set1_ps(allowed * kIntegers[i]);
    const __mmask8 more = _mm_cmp_ps_mask(largest, enough, _CMP_NLE_UQ);
    bytes = _mm_mask_mov_epi32(bytes, more, _mm_set1_epi32(i + 1));
    range = _mm_mask_mov_ps(range, more, _mm_set1_ps(kIntegers[i + 1]));
  }
  const __m128 infinity = _mm_set1_ps(kEndless);
  const __mmask8 usable =
      _mm_cmp_ps_mask(largest, infinity, _CMP_LT_OQ) &
      _mm_cmp_ps_mask(_mm_andnot_ps(_mm_set1_ps(-0.0f), base), infinity, _CMP_LT_OQ);
  const __mmask8 some = _mm_cmp_ps_mask(largest, _mm_set1_ps(1e-30f), _CMP_GT_OQ);
  _mm_store_ps(rows.base, base);
  _mm_store_ps(rows.step, _mm_div_ps(largest, range));
  _mm_store_ps(rows.inverse, _mm_maskz_div_ps(some, range, largest));
  store_as(_mm_maskz_mov_epi32(usable, bytes), rows.bytes);
#else
  const __m128 range = _mm_set1_ps(most), infinity = _mm_set1_ps(kEndless);
  const __m128 size = _mm_andnot_ps(_mm_set1_ps(-0.0f), base);
  const __m128 usable = _mm_and_ps(_mm_cmplt_ps(largest, infinity), _mm_cmplt_ps(size, infinity));
  const __m128 much = _mm_cmpgt_ps(largest, _mm_set1_ps(allowed * most));
  const __m128i words = _mm_sub_epi32(_mm_set1_epi32(1), _mm_castps_si128(much));
  const __m128 some = _mm_cmpgt_ps(largest, _mm_set1_ps(1e-30f));
  _mm_store_ps(rows.base, base);
  _mm_store_ps(rows.step, _mm_div_ps(largest, range));
  _mm_store_ps(rows.inverse, _mm_and_ps(some, _mm_div_ps(range, largest)));
  store_as(_mm_and_si128(_mm_castps_si128(usable), words), rows.bytes);
#endif
}

// The one of larger magnitude, or that magnitude.
inline Floats larger_size(Floats size, Floats x) {
#if CARAMBA_FAST_VECTOR_BITS == 512
  return _mm512_range_ps(size, x, 0x0b);
#else
  return greater(floats(bits(x) & kMagnitude), size);
#endif
}

// ROWS queries times scales, into `folded`, and their steps and numbers of bytes.
template <int ROWS>
void fold_queries(const float* q, const std::uint16_t* scales, const std::uint16_t* zeros,
                  std::int64_t width, float allowed, float most, float* folded, FoldedRows& rows) {
  Floats sum[kFoldRows] = {}, largest[kFoldRows] = {};
  for (std::int64_t d = 0; d < width; d += kLanes) {
    const Floats scale = load_scale(scales + d), zero = load_half(zeros + d);
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const Floats query = load_as<Floats>(q + r * width + d);
      const Floats product = query * scale;
      sum[r] = fused(query, zero, sum[r]);
      largest[r] = larger_size(largest[r], product);
      store_as(product, folded + r * width + d);
    }
  }
  choose_integers(reduced<true>(sum), reduced<false>(largest), allowed, most, rows);
}

// Rounds kLanes products times `inverse` to integers; `rest` are the remainders.
template <bool SECOND>
inline Raw integers_of(Floats folded, Floats inverse, float most, Floats& rest) {
#if CARAMBA_FAST_BYTE_SUMS
  static_cast<void>(most);
  // Adding 1.5 * 2^23 leaves an integer in the mantissa's low bits; with 0x8080 more the two lower
  // bytes are 128 above signed ones. The third is 64 above.
  const Floats magic = splat(12582912.0f + 32896.0f);
  const Floats x = fused(folded, inverse, magic);
  rest = _mm512_fmsub_ps(folded, inverse, x - magic);
  const Raw bytes = _mm512_sub_epi8(reinterpret_cast<Raw>(x), _mm512_set1_epi32(0x00408080));
  return _mm512_shuffle_epi8(
      bytes, in_all_lanes(_mm_set_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400)));
#else
  const Raw whole = CARAMBA_FAST_MM(cvtps_epi32)(folded * inverse);
  rest = CARAMBA_FAST_MM(fmsub_ps)(folded, inverse, converted(reinterpret_cast<Ints>(whole)));
  const Raw second = SECOND ? CARAMBA_FAST_MM(cvtps_epi32)(rest * splat(2 * most)) : whole;
  // In each lane the first words, then the second ones.
  const Raw words = CARAMBA_FAST_MM(packs_epi32)(whole, second);
  return CARAMBA_FAST_MM(shuffle_epi8)(
      words, in_all_lanes(_mm_set_epi32(0x0f0e0b0a, 0x0d0c0908, 0x07060302, 0x05040100)));
#endif
}

// Rounds ROWS rows to integers. The remainders times the middle of the codes are added to `base`,
// so that only the remainders times the codes' distance from it are lost.
template <int BITS, int ROWS, bool SECOND>
void quantize_folded(const GroupScratch& scratch, std::int64_t width, float most,
                     FoldedRows& rows) {
  Floats left[kFoldRows] = {};
  for (std::int64_t d = 0; d < width; d += kLanes) {
    const Floats middle = BITS == 8 ? splat(127.5f) : load_as<Floats>(scratch.middles + d);
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      Floats rest;
      const Floats folded = load_as<Floats>(scratch.folded + r * width + d);
      const Raw integers = integers_of<SECOND>(folded, splat(rows.inverse[r]), most, rest);
      left[r] = fused(rest, middle, left[r]);
      store_as(integers, scratch.integers + 4 * (r * width + d));
    }
  }
  __m128 lost = _mm_mul_ps(reduced<true>(left), _mm_load_ps(rows.step));
  if constexpr (SECOND)  // unless a second word has the remainders
    lost = _mm_and_ps(
        lost, _mm_castsi128_ps(_mm_cmpeq_epi32(load_as<__m128i>(rows.bytes), _mm_set1_epi32(1))));
  _mm_store_ps(rows.base, _mm_add_ps(_mm_load_ps(rows.base), lost));
}

// to += sums of the first `there` tokens; partial stores only there, since they are slow to reload.
inline void add_first(Floats sums, int there, float* to) {
  if (there >= kLanes) return store_as(sums + load_as<Floats>(to), to);
#if CARAMBA_FAST_VECTOR_BITS == 512
  const Words mask = first_words(there);
  _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(sums, _mm512_maskz_loadu_ps(mask, to)));
#else
  const Raw mask = reinterpret_cast<Raw>(first_words(there));
  _mm256_maskstore_ps(to, mask, _mm256_add_ps(sums, _mm256_maskload_ps(to, mask)));
#endif
}

// scores += base + step * sum for ROWS rows and TURNS times kLanes tokens, of which `there` exist;
// `second` is for the words of remainders. High codes of a byte are not shifted down and so count
// 16 times as much.
template <int BITS, int BYTES, int ROWS, int TURNS>
void score_columns(const GroupScratch& scratch, std::int64_t width, const FoldedRows& rows,
                   int first, int turn, int there, bool second, float* scores) {
  Raw sums[BYTES][ROWS][TURNS];
  CARAMBA_FAST_UNROLL
  for (int b = 0; b < BYTES; ++b) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < TURNS; ++i) sums[b][r][i] = Raw{};
  const std::int8_t* integers = scratch.integers + 4 * first * width + (second ? 8 : 0);
  const std::int64_t bytes = width * BITS / 8;
  const std::uint8_t* columns = scratch.columns + kLanes * turn * bytes;
  const char* next = scratch.next;
  // sums[b] += codes of the tokens times one dword of integers of each row.
  const auto meet = [&](int b, const Raw(&codes)[TURNS], const std::int8_t* from) {
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      Raw query = CARAMBA_FAST_MM(set1_epi32)(load_as<std::int32_t>(from + 4 * r * width));
      in_register(query);  // used by several sums
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < TURNS; ++i) {
        Raw& sum = sums[b][r][i];
        sum = kWordRows ? sum_of_words<false>(sum, codes[i], query)
                        : sum_of_products(sum, codes[i], query);
      }
    }
  };
  // Multiplies `byte` of the tokens with value d; half 0 are low codes, 1 high ones.
  const auto add = [&](auto half, std::int64_t byte, std::int64_t d) {
    if constexpr (!kWordRows)
      for (int line = 0; line < BITS / 4; ++line, next += kLine) __builtin_prefetch(next, 0, 3);
    Raw mask = CARAMBA_FAST_MM(set1_epi8)(-1), codes[TURNS];
    if constexpr (BITS == 4) {
      mask = CARAMBA_FAST_MM(set1_epi32)(load_as<std::int32_t>(scratch.masks + byte));
      if constexpr (decltype(half)::value) mask = ~mask;
    }
    const auto* column = columns + kLanes * byte;
    const auto* from = integers + 4 * d;
    if constexpr (kWordRows) {  // the even bytes, then the odd ones
      const Raw low = CARAMBA_FAST_MM(set1_epi16)(255);
      const Raw even = mask & low, odd = CARAMBA_FAST_MM(srli_epi16)(mask, 8);
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < TURNS; ++i) codes[i] = load_as<Raw>(column + kLanes * i * bytes) & even;
      meet(0, codes, from);
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < TURNS; ++i)
        codes[i] = CARAMBA_FAST_MM(srli_epi16)(load_as<Raw>(column + kLanes * i * bytes), 8) & odd;
      meet(0, codes, from + 4);
    } else {
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < TURNS; ++i) {
        codes[i] = load_as<Raw>(column + kLanes * i * bytes);
        if constexpr (BITS == 4) codes[i] &= mask;
      }
      CARAMBA_FAST_UNROLL
      for (int b = 0; b < BYTES; ++b) meet(b, codes, from + 4 * b);
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
    for (int i = 0; i < TURNS; ++i) sums[b][r][i] = CARAMBA_FAST_MM(slli_epi32)(sums[b][r][i], 4);
    for (std::int64_t byte = 0; byte < bytes; byte += kHalf) CARAMBA_FAST_UNROLL
    for (int j = 0; j < kHalf; j += 4) add(std::true_type{}, byte + j, 2 * byte + kHalf + j);
  }
  const float share = (BITS == 4 ? kHighUnit : 1.0f) / (second ? 2 * most_word(BITS, width) : 1);
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < TURNS; ++i) {
    const auto whole = [&](int b) { return converted(reinterpret_cast<Ints>(sums[b][r][i])); };
    Floats sum = whole(0);
    float unit = 256;
    CARAMBA_FAST_UNROLL
    for (int b = 1; b < BYTES; ++b, unit *= 256) sum = fused(whole(b), splat(unit), sum);
    sum = fused(sum, splat(share * rows.step[first + r]), splat(second ? 0 : rows.base[first + r]));
    add_first(sum, there - kLanes * i, scores + r * kScoreRow + kLanes * i);
  }
}

using ScoreColumns = void (*)(const GroupScratch& scratch, std::int64_t width,
                              const FoldedRows& rows, int first, int turn, int there, bool second,
                              float* scores);

// By bytes of an integer, rows and turns, each from one on.
inline constexpr int kMostTurns = 2;
template <int BITS, int BYTES, int ROWS>
inline constexpr ScoreColumns kScoreTurns[kMostTurns] = {score_columns<BITS, BYTES, ROWS, 1>,
                                                         score_columns<BITS, BYTES, ROWS, 2>};
template <int BITS, int BYTES>
inline constexpr const ScoreColumns* kScoreRows[kFoldRows] = {
    kScoreTurns<BITS, BYTES, 1>, kScoreTurns<BITS, BYTES, 2>, kScoreTurns<BITS, BYTES, 3>,
    kScoreTurns<BITS, BYTES, 4>};
template <int BITS>
inline constexpr const ScoreColumns* const* kScoreBytes[] = {
    kScoreRows<BITS, 1>,
#if CARAMBA_FAST_BYTE_SUMS
    kScoreRows<BITS, 2>,
    kScoreRows<BITS, 3>,
#endif
};

using FoldQueries = void (*)(const float* q, const std::uint16_t* scales,
                             const std::uint16_t* zeros, std::int64_t width, float allowed,
                             float most, float* folded, FoldedRows& rows);
inline constexpr FoldQueries kFoldQueries[kFoldRows] = {fold_queries<1>, fold_queries<2>,
                                                        fold_queries<3>, fold_queries<4>};
using QuantizeFolded = void (*)(const GroupScratch& scratch, std::int64_t width, float most,
                                FoldedRows& rows);
template <int BITS, bool SECOND>
inline constexpr QuantizeFolded kQuantizeFolded[kFoldRows] = {
    quantize_folded<BITS, 1, SECOND>, quantize_folded<BITS, 2, SECOND>,
    quantize_folded<BITS, 3, SECOND>, quantize_folded<BITS, 4, SECOND>};

// Up to kTurned tokens of a group.
struct GroupTokens {
  const std::uint16_t *scales, *zeros;
  const char* codes;
  std::int64_t stride, width;
  std::int64_t before;  // bytes of the lane's token before the head's
  int count;
  float allowed;  // see `step_allowed`
};

// scores (rows, kScoreRow) += q . k for some tokens of a group. Rows that integers cannot
// represent, or all rows if a scale is not finite, are left to left(row, rows).
template <int BITS, class Left>
void score_group(const float* q, int rows, const GroupTokens& tokens, GroupScratch& scratch,
                 float* scores, const Left& left) {
  const ScaleSigns signs(tokens.scales, tokens.width);
  if (!signs.finite) return left(0, rows);
  if (BITS == 4 && signs.negative)
    scratch.divide(tokens.scales, tokens.width);
  else if (BITS == 4)
    scratch.divide_evenly();
  const std::int64_t width = tokens.width, bytes = width * BITS / 8;
  const float most = most_word(BITS, width);
  // Each head prefetches its share of the lane's next tokens.
  scratch.next = tokens.codes + ahead_of(tokens.stride) + (kTurned - 1) * tokens.before;
  for (int first = 0; first < rows; first += kFoldRows) {
    const int block = std::min(rows - first, kFoldRows);
    FoldedRows folded;
    kFoldQueries[block - 1](q + first * width, tokens.scales, tokens.zeros, width, tokens.allowed,
                            most, scratch.folded, folded);
    // In between, since the integers depend on the largest product.
    if (first == 0)
      for (int t = 0; t < tokens.count; t += kLanes) {
        const char* codes = tokens.codes + t * tokens.stride;
        if constexpr (kWordRows)
          for (int i = 0; i < kLanes; ++i)
            prefetch(codes + i * tokens.stride, bytes, tokens.stride);
        turn_codes(Tokens(codes, tokens.stride, tokens.count - t), static_cast<int>(bytes),
                   scratch.columns + t * bytes);
      }
    const bool second = kWordRows && std::count(folded.bytes, folded.bytes + block, 2) > 0;
    const auto* quantize = second ? kQuantizeFolded<BITS, kWordRows> : kQuantizeFolded<BITS, false>;
    quantize[block - 1](scratch, width, most, folded);
    for (int r = 0, run = 1; r < block; r += run) {
      run = 1;
      while (r + run < block && folded.bytes[r + run] == folded.bytes[r]) ++run;
      if (folded.bytes[r] == 0) {
        left(first + r, run);
        continue;
      }
      const int parts = kWordRows ? folded.bytes[r] : 1;
      const ScoreColumns* score = kScoreBytes<BITS>[folded.bytes[r] - parts][run - 1];
      for (int part = 0; part < parts; ++part)
        for (int t = 0, there; (there = tokens.count - t) > 0; t += kMostTurns * kLanes)
          score[there > kLanes](scratch, width, folded, r, t / kLanes, there, part > 0,
                                scores + (first + r) * kScoreRow + t);
    }
  }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
