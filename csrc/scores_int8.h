// The score pass over one quantized tile in integer products (int8_layout.h). For 8-bit keys a
// query has 16 bits, and a third byte for the remainder if leaving it out would show. For 4-bit
// keys it has 8 bits if that adds little error to the scores, else 16 (`EnoughBits`).
#pragma once

#include <algorithm>
#include <cstdint>

#include "query_int8.h"
#include "tile_scales.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// Kept in a register for several sums: compilers fold a plain load into each of them.
inline Raw loaded(const std::int8_t* from) {
  Raw v = load_as<Raw>(from);
#if CARAMBA_FAST_VECTOR_BITS == 512
  asm("" : "+v"(v));
#endif
  return v;
}

// Four tokens of a unit as unsigned bytes, column by column; for nf4 high bytes, then low ones. As
// words (`kWords`) the even ones of four, then the odd ones; levels of nf4 are signed.
template <Format F>
struct KeyGroup {
  static constexpr int kVectors = KeyCodes<F>::kVectors;
  static constexpr int kBytes = F == Format::nf4 || kWords<F> ? 2 : 1;
  Raw bytes[kVectors * kBytes];

  inline __attribute__((always_inline)) void load(const char* codes, std::int64_t stride, int t,
                                                  int count, Words words) {
    Raw rows[4], columns[4];
    load_rows(codes, stride, t, count, words, rows);
    columns_of(rows, columns);
    const Raw nibble = CARAMBA_FAST_MM(set1_epi8)(15);
    CARAMBA_FAST_UNROLL
    for (int c = 0; c < 4; ++c) {
      if constexpr (F == Format::q8_0) {
        bytes[c] = columns[c] ^ CARAMBA_FAST_MM(set1_epi8)(-128);
        if constexpr (kWords<F>) {
          bytes[4 + c] = CARAMBA_FAST_MM(srli_epi16)(bytes[c], 8);
          bytes[c] &= CARAMBA_FAST_MM(set1_epi16)(255);
        }
      } else {
        bytes[2 * c] = columns[c] & nibble;
        bytes[2 * c + 1] = CARAMBA_FAST_MM(srli_epi16)(columns[c], 4) & nibble;
      }
    }
    if constexpr (F == Format::nf4) {
      const Raw highs = table_of(kLevelBytes.high), lows = table_of(kLevelBytes.low);
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < 8; ++i) {
        const Raw low = CARAMBA_FAST_MM(shuffle_epi8)(lows, bytes[i]);
        const Raw high = CARAMBA_FAST_MM(shuffle_epi8)(highs, bytes[i]);
        bytes[i] = kWords<F> ? even_words(low, high) : high;
        bytes[8 + i] = kWords<F> ? odd_words(low, high) : low;
      }
    }
  }

  // Approximate squares of values, by lane and token, in units of `kSquareUnit`.
  Raw squares() const {
    Raw sum{};
    CARAMBA_FAST_UNROLL
    for (int v = 0; v < kVectors * (kWords<F> ? 2 : 1); ++v) {
      if constexpr (kWords<F>) {
        const Raw code = F == Format::nf4 ? CARAMBA_FAST_MM(srai_epi16)(bytes[v], 8)
                                          : CARAMBA_FAST_MM(sub_epi16)(
                                                bytes[v], CARAMBA_FAST_MM(set1_epi16)(128));
        sum = sum_of_words<false>(sum, code, code);
      } else {
        const Raw middle = CARAMBA_FAST_MM(set1_epi8)(F == Format::q4_0 ? 8 : -128);
        const Raw code = CARAMBA_FAST_MM(sub_epi8)(bytes[v], middle);
        const Raw size = CARAMBA_FAST_MM(min_epu8)(CARAMBA_FAST_MM(abs_epi8)(code),
                                                   CARAMBA_FAST_MM(set1_epi8)(127));
        sum = sum_of_products(sum, size, size);
      }
    }
    return sum;
  }
  static constexpr float kSquareUnit = F == Format::nf4 ? 256.0f * 256.0f : 1.0f;
};

// The largest code, and the usual root mean square of codes.
template <Format F>
inline constexpr float kMostCode = F == Format::q8_0   ? 127.0f
                                   : F == Format::q4_0 ? 8.0f
                                                       : KeyCodes<F>::kDivisor;
template <Format F>
inline constexpr float kUsualCode = 0.575f * kMostCode<F>;
// The error, root mean square, that rounding a query may add to a score: to 16 bits for q8_0, else
// to 8. With usual codes and the largest scales, which a few large tokens have, twice that is
// allowed before the keys themselves are examined.
template <Format F>
inline constexpr float kScoreError = F == Format::q8_0 ? 8e-5f : 7.5e-3f;
template <Format F>
inline constexpr float kUsualError = 2 * kScoreError<F>;

// Whether the fewer bits of a query suffice for a tile. Each query decides for itself, so that its
// results do not depend on others; never if a scale is not finite.
//
// Rounding a query to steps of s adds s^2 / 12 times the squared key to the mean square of a
// score's error. There are two bounds: by the largest codes and the largest scales of the tile
// (those of every fourth token together); and if that is exceeded, but not with usual codes, by the
// squared keys of a few tokens.
template <Format F>
class EnoughBits {
 public:
  EnoughBits(const HeadBytes& head, const ScaleSteps& scales, const char* codes,
             std::int64_t stride, int count)
      : head_(head), scales_(scales), codes_(codes), stride_(stride), count_(count) {
    Halves most{};
    for (int i = 0; i < head.quads(); ++i) {
      const Halves raw = scales.quad(i);
      for (int part = 0; part < Halves::kParts; ++part)
        most.part[part] = CARAMBA_FAST_MM(max_epu16)(
            most.part[part], raw.part[part] & CARAMBA_FAST_MM(set1_epi16)(0x7fff));
    }
    for (int u = 0; u < head.units; ++u) store_as(head.unit_scale_order[u](most), most_[u]);
  }

  // `units` are those of one query, with the fewer bits.
  bool operator()(const QueryUnit* units) {
    constexpr float kValues = 4 * KeyCodes<F>::kVectors;  // of a lane
    Floats squares{};
    for (int u = 0; u < head_.units; ++u) {
      const Floats error = load_as<Floats>(most_[u]) * load_as<Floats>(units[u].scale);
      squares = fused(error, error, squares);
    }
    const float bound = sum_of(squares) / 4 * kValues / 12;  // times squared codes
    if (bound * kMostCode<F> * kMostCode<F> <= kScoreError<F> * kScoreError<F>) return true;
    // Also for NaN.
    if (!(bound * kUsualCode<F> * kUsualCode<F> <= kUsualError<F> * kUsualError<F>)) return false;
    if (!sampled_) sample();
    squares = Floats{};
    for (int u = 0; u < head_.units; ++u) {
      const Floats step = load_as<Floats>(units[u].scale);
      squares = fused(step * step, load_as<Floats>(squares_[u]), squares);
    }
    return sum_of(squares) / (4 * kSamples) / 12 <= kScoreError<F> * kScoreError<F>;
  }

 private:
  static constexpr int kSamples = 2;  // of four tokens

  // The squares of some tokens' keys, by lane and token.
  void sample() {
    sampled_ = true;
    const int tokens = count_ / head_.fold, quads = tokens / 4;
    for (int u = 0; u < head_.units; ++u) {
      Floats sum{};
      for (int i = 0; i < kSamples; ++i) {
        const int quad = quads * (2 * i + 1) / (2 * kSamples);
        KeyGroup<F> keys;
        keys.load(codes_ + u * kUnit, stride_ * head_.fold, 4 * quad, tokens, head_.words[u]);
        const Floats scale = head_.unit_scale_order[u](scales_.quad(quad));
        const Floats codes = CARAMBA_FAST_MM(cvtepi32_ps)(keys.squares());
        sum = fused(scale * scale * KeyGroup<F>::kSquareUnit, codes, sum);
      }
      store_as(sum, squares_[u]);
    }
  }

  alignas(64) float most_[kMostUnits][kLanes], squares_[kMostUnits][kLanes];
  const HeadBytes& head_;
  const ScaleSteps& scales_;
  const char* codes_;
  std::int64_t stride_;
  int count_;
  bool sampled_ = false;
};

// The products of UNITS units, GROUPS times four tokens each, with ROWS rows: by lane and token,
// scales of the keys included. Sums are interleaved, since each addition waits for the last one.
template <Format F, int BYTES, int ROWS, int UNITS, int GROUPS>
inline __attribute__((always_inline)) void row_sums(const KeyGroup<F> (&keys)[UNITS][GROUPS],
                                                    const Floats (&by_lane)[UNITS][GROUPS],
                                                    const QueryUnit* const (&q)[ROWS],
                                                    Floats (&found)[ROWS][GROUPS]) {
  constexpr int kVectors = KeyCodes<F>::kVectors;
  // The second sum is of the query's low bytes, or of those of nf4's levels.
  constexpr bool kTwoQueries = BYTES == 2, kTwoKeys = F == Format::nf4;
  // Sums of nf4 with 16 bits on both sides exceed 32 bits: products of two low bytes are left out
  // (below 2^-16 of the sum), and the rest is combined in fp32.
  constexpr bool kWide = kTwoQueries && kTwoKeys;
  Raw sums[ROWS][UNITS][GROUPS], low[ROWS][UNITS][GROUPS];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int u = 0; u < UNITS; ++u) CARAMBA_FAST_UNROLL
  for (int g = 0; g < GROUPS; ++g) sums[r][u][g] = low[r][u][g] = Raw{};
  CARAMBA_FAST_UNROLL
  for (int i = 0; i < kVectors; ++i) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int u = 0; u < UNITS; ++u) {
    const Raw query = loaded(q[r][u].high[i]);
    CARAMBA_FAST_UNROLL
    for (int g = 0; g < GROUPS; ++g) {
      const KeyGroup<F>& key = keys[u][g];
      Raw& sum = sums[r][u][g];
      if constexpr (kWords<F>)
        sum = sum_of_words<kWide>(sum, key.bytes[i], query);
      else
        sum = narrow_products(sum, key.bytes[i], query);
      if constexpr (kTwoKeys && !kWords<F>)
        low[r][u][g] = sum_of_products(low[r][u][g], key.bytes[8 + i], query);
    }
  }
  if constexpr (kVnni && !kWords<F> && (kTwoQueries || kTwoKeys) && !kWide) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int u = 0; u < UNITS; ++u) CARAMBA_FAST_UNROLL
  for (int g = 0; g < GROUPS; ++g) {
    sums[r][u][g] = CARAMBA_FAST_MM(slli_epi32)(sums[r][u][g], 8);
    if constexpr (kTwoKeys) sums[r][u][g] = CARAMBA_FAST_MM(add_epi32)(sums[r][u][g], low[r][u][g]);
  }
  if constexpr (kTwoQueries || kWords<F>) CARAMBA_FAST_UNROLL
  for (int i = 0; i < kVectors; ++i) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int u = 0; u < UNITS; ++u) {
    const Raw query = loaded(q[r][u].low[i]);
    CARAMBA_FAST_UNROLL
    for (int g = 0; g < GROUPS; ++g) {
      const KeyGroup<F>& key = keys[u][g];
      if constexpr (kWords<F>) {
        sums[r][u][g] = sum_of_words<kWide>(sums[r][u][g], key.bytes[kVectors + i], query);
      } else {
        Raw& sum = kWide || !kVnni ? low[r][u][g] : sums[r][u][g];
        sum = narrow_products(sum, key.bytes[i], query);
      }
    }
  }
  if constexpr (!kVnni && !kWords<F>) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int u = 0; u < UNITS; ++u) CARAMBA_FAST_UNROLL
  for (int g = 0; g < GROUPS; ++g) {
    Raw& sum = sums[r][u][g];
    sum = whole_sums(sum);
    if constexpr (kTwoQueries)
      sum =
          CARAMBA_FAST_MM(add_epi32)(CARAMBA_FAST_MM(slli_epi32)(sum, 8), whole_sums(low[r][u][g]));
  }
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int u = 0; u < UNITS; ++u) {
    const Floats scale = load_as<Floats>(q[r][u].scale), shift = load_as<Floats>(q[r][u].shift);
    CARAMBA_FAST_UNROLL
    for (int g = 0; g < GROUPS; ++g) {
      Floats sum = CARAMBA_FAST_MM(cvtepi32_ps)(sums[r][u][g]);
      if constexpr (kWide) {
        if constexpr (!kWords<F>)
          sum = fused(sum, splat(256.0f), CARAMBA_FAST_MM(cvtepi32_ps)(low[r][u][g]));
        sum = sum * 256.0f;
      }
      sum = fused(sum, scale, shift);
      found[r][g] = u == 0 ? sum * by_lane[u][g] : fused(sum, by_lane[u][g], found[r][g]);
    }
  }
}

// scores += q . k for ROWS rows and UNITS units of GROUPS times four tokens.
template <Format F, int BYTES, int ROWS, int UNITS, int GROUPS, int FOLD>
inline __attribute__((always_inline)) void add_row_scores(const KeyGroup<F> (&keys)[UNITS][GROUPS],
                                                          const Floats (&by_lane)[UNITS][GROUPS],
                                                          const QueryUnit* q,
                                                          std::int64_t row_units, float* scores) {
  const QueryUnit* queries[ROWS];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) queries[r] = q + r * row_units;
  Floats found[ROWS][GROUPS];
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

// Groups of four tokens, and units, per step: keys take half of the registers, sums the others.
template <Format F>
inline constexpr int kKeyVectors = KeyGroup<F>::kVectors * KeyGroup<F>::kBytes;
template <Format F>
inline constexpr int kKeyGroups = 2 * kKeyVectors<F> <= kRegisters / 2 ? 2 : 1;
template <Format F>
inline constexpr int kKeyUnits = 2 * kKeyGroups<F> * kKeyVectors<F> <= kRegisters / 2 ? 2 : 1;

// All tokens of a tile, UNITS units from the first on: keys stay in registers for all rows, ROWS at
// a time.
template <Format F, int BYTES, int ROWS, int UNITS, int FOLD>
void score_units(const QueryUnit* q, const HeadBytes& head, int first, int rows, const char* codes,
                 std::int64_t stride, const ScaleSteps& scales, int count, float* scores) {
  constexpr int kGroups = kKeyGroups<F>;
  for (int t = 0; t < count; t += 4 * kGroups) {
    KeyGroup<F> keys[UNITS][kGroups];
    Floats by_lane[UNITS][kGroups];
    CARAMBA_FAST_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      const int at = t + 4 * g;
      const Halves raw = scales.quad(at / 4);
      CARAMBA_FAST_UNROLL
      for (int u = 0; u < UNITS; ++u) {
        keys[u][g].load(codes + (first + u) * kUnit, stride, std::min(at, count - 1), count,
                        head.words[first + u]);
        by_lane[u][g] = head.unit_scale_order[first + u](raw);
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
  constexpr int kUnits = kKeyUnits<F>;
  int u = 0;
  for (; u + kUnits <= head.units; u += kUnits)
    score_units<F, BYTES, ROWS, kUnits, 1>(q, head, u, rows, codes, stride, scales, count, scores);
  if (kUnits > 1 && u < head.units)
    score_units<F, BYTES, ROWS, 1, 1>(q, head, u, rows, codes, stride, scales, count, scores);
}

// scores[r][t] += q[r] . k[t]; units of a row are contiguous. Remaining rows have a loop of their
// own instead of a branch, around which compilers would spill the keys.
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
