// Queries as integers, for products with quantized keys (scores_int8.h): 16 bits in two bytes or 8
// in one, with a scale for each lane of a unit (int8_layout.h).
#pragma once

#include <cstdint>
#include <limits>

#include "half.h"
#include "int8_layout.h"
#include "numeric.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

inline constexpr float kSixteenBits = 127 * 256 + 127;  // the most that two signed bytes hold

// One unit of one query row: bytes by column of dwords and nibble, each dword repeated for four
// tokens; `scale` undoes the integers, `shift` subtracts the codes' offset.
struct alignas(64) QueryUnit {
  // A single byte is in `high`. For products of words (`kWords`), `high` has the even ones of four
  // and `low` the odd ones, whatever bits they have.
  std::int8_t high[8][kUnit], low[8][kUnit];
  float scale[kLanes], shift[kLanes];
};

// Whether a format's codes are multiplied as words (bytes.h).
template <Format F>
inline constexpr bool kWords = kWordCodes && F != Format::q4_0;

template <Format F>
struct KeyCodes;

// Codes are unsigned, except levels in words; value = (u - kOffset) / kDivisor.
template <>
struct KeyCodes<Format::q8_0> {
  static constexpr int kVectors = 4;
  static constexpr float kOffset = 128, kDivisor = 1;
};
template <>
struct KeyCodes<Format::q4_0> {
  static constexpr int kVectors = 8;
  static constexpr float kOffset = 8, kDivisor = 1;
};
template <>
struct KeyCodes<Format::nf4> {
  static constexpr int kVectors = 8;
  static constexpr float kOffset = kWordCodes ? 0 : 32768, kDivisor = 32767;
};

// Stores four integers of a lane, repeated for four tokens.
template <Format F, int BYTES>
inline void store_integers(__m128i code, int vector, int lane, QueryUnit& unit) {
  const auto store = [&](__m128i from, int bytes, std::int8_t (&to)[8][kUnit]) {
    const __m128i order = _mm_set1_epi32(bytes);
    store_as(_mm_shuffle_epi8(from, order), to[vector] + lane * kLaneBytes);
  };
  if constexpr (kWords<F>) {
    store(code, 0x09080100, unit.high);
    store(code, 0x0d0c0504, unit.low);
  } else {
    const __m128i upper = _mm_srai_epi32(_mm_add_epi32(code, _mm_set1_epi32(128)), 8);
    store(BYTES == 2 ? upper : code, 0x0c080400, unit.high);
    if (BYTES == 2) store(code, 0x0c080400, unit.low);
  }
}

// Quantizes one lane of a unit relative to its largest value, 4 values per vector. The remainders
// stay in `values`.
template <Format F, int BYTES>
void quantize_lane(float (&values)[32], int lane, QueryUnit& unit) {
  constexpr int kValues = 4 * KeyCodes<F>::kVectors;
  constexpr float kRange = BYTES == 2 ? kSixteenBits : 127;
  Floats most{};
  Ints damaged{};  // NaN, which shows neither in the maximum nor in an integer
  for (int i = 0; i < kValues; i += kLanes) {
    const Floats value = load_as<Floats>(values + i);
    most = greater(floats(bits(value) & kMagnitude), most);
    damaged |= value != value;
  }
  const float largest = greatest_of(most);
  // Tiny values count as 0: their inverse would not be finite.
  const Floats inverse = splat(largest > 1e-30f ? kRange / largest : 0);
  const Floats step = splat(largest / kRange);
  Ints sums{};
  alignas(64) std::int32_t codes[kValues];
  for (int i = 0; i < kValues; i += kLanes) {
    const Floats value = load_as<Floats>(values + i), product = value * inverse;
    // NaN counts as 0 here and shows in the scale.
    const Floats ordered = product == product ? product : Floats{};
    const Raw code = CARAMBA_FAST_MM(cvtps_epi32)(ordered);
    sums += reinterpret_cast<Ints>(code);
    store_as(code, codes + i);
    store_as(CARAMBA_FAST_MM(fnmadd_ps)(CARAMBA_FAST_MM(cvtepi32_ps)(code), step, value),
             values + i);
  }
  for (int i = 0; i < kValues; i += 4)
    store_integers<F, BYTES>(load_as<__m128i>(codes + i), i / 4, lane, unit);
  alignas(64) std::int32_t parts[kLanes];
  store_as(sums, parts);
  int sum = 0;
  for (const std::int32_t part : parts) sum += part;
  const bool nan = signs_of(damaged) != 0;
  const float scale = nan ? std::numeric_limits<float>::quiet_NaN() : largest / kRange;
  const float undo = scale / KeyCodes<F>::kDivisor;
  const float shift = -KeyCodes<F>::kOffset * static_cast<float>(sum) * undo;
  store_as(_mm_set1_ps(undo), unit.scale + 4 * lane);
  store_as(_mm_set1_ps(shift), unit.shift + 4 * lane);
}

// Quantizes a query and, unless `rest` is null, the remainder of its two bytes.
template <Format F, int BYTES>
void quantize_query(const float* q, const HeadBytes& head, QueryUnit* units, QueryUnit* rest) {
  for (int u = 0; u < head.units; ++u)
    for (int lane = 0; lane < kUnitLanes; ++lane) {
      float values[32];
      for (int v = 0; v < KeyCodes<F>::kVectors; ++v)
        for (int i = 0; i < 4; ++i) {
          const int value = head.value[u][v][lane * 4 + i];
          values[4 * v + i] = value < 0 ? 0.0f : q[value];
        }
      quantize_lane<F, BYTES>(values, lane, units[u]);
      if (rest != nullptr) quantize_lane<F, 1>(values, lane, rest[u]);
    }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
