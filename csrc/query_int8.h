// Queries as integers, for products of bytes with quantized keys (scores_int8.h): 16 bits in two
// bytes or 8 in one, with a scale for each lane of a unit (int8_layout.h).
#pragma once

#include <cstdint>
#include <limits>

#include "int8_layout.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// One unit of one query row: bytes by column of dwords and nibble, each dword four times, for the
// four tokens that meet it; what undoes the integers, and what the codes' offset takes away.
struct alignas(64) QueryUnit {
  std::int8_t high[8][kUnit], low[8][kUnit];  // one byte is in `high`
  float scale[16], shift[16];
};

template <Format F>
struct KeyCodes;

// Codes are unsigned; value = (u - kOffset) / kDivisor.
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
  static constexpr float kOffset = 32768, kDivisor = 32767;
};

// One lane of a unit: its 4 values a vector become integers relative to the largest. What they
// leave of the values stays in `values`.
template <Format F, int BYTES>
void quantize_lane(float (&values)[32], int lane, QueryUnit& unit) {
  constexpr int kVectors = KeyCodes<F>::kVectors;
  constexpr float kRange = BYTES == 2 ? kSixteenBits : 127;
  __m512 most = _mm512_setzero_ps();
  bool damaged = false;  // a NaN, which neither the maximum nor an integer would show
  for (int v = 0; v < kVectors; v += 4) {
    const __m512 value = _mm512_loadu_ps(values + 4 * v);
    most = _mm512_max_ps(most, _mm512_abs_ps(value));
    damaged |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q) != 0;
  }
  const float largest = _mm512_reduce_max_ps(most);
  const __m512 inverse = _mm512_set1_ps(largest > 0 ? kRange / largest : 0);
  const __m512 step = _mm512_set1_ps(largest / kRange);
  int sum = 0;
  for (int v = 0; v < kVectors; v += 4) {
    const __m512 product = _mm512_mul_ps(_mm512_loadu_ps(values + 4 * v), inverse);
    // What is not a number counts as 0 here: the scale says so.
    const __mmask16 ordered = _mm512_cmp_ps_mask(product, product, _CMP_ORD_Q);
    const __m512i code = _mm512_maskz_cvtps_epi32(ordered, product);
    sum += _mm512_reduce_add_epi32(code);
    const __m512 left =
        _mm512_fnmadd_ps(_mm512_cvtepi32_ps(code), step, _mm512_loadu_ps(values + 4 * v));
    _mm512_storeu_ps(values + 4 * v, left);
    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(128)), 8);
    alignas(16) std::int32_t bytes[2][4];
    store_as(_mm512_cvtepi32_epi8(BYTES == 2 ? upper : code), bytes[0]);
    store_as(_mm512_cvtepi32_epi8(code), bytes[1]);
    for (int i = 0; i < 4; ++i) {
      store_as(_mm_set1_epi32(bytes[0][i]), unit.high[v + i] + lane * kLaneBytes);
      if (BYTES == 2) store_as(_mm_set1_epi32(bytes[1][i]), unit.low[v + i] + lane * kLaneBytes);
    }
  }
  const float scale = damaged ? std::numeric_limits<float>::quiet_NaN() : largest / kRange;
  const float undo = scale / KeyCodes<F>::kDivisor;
  const float shift = -KeyCodes<F>::kOffset * static_cast<float>(sum) * undo;
  store_as(_mm_set1_ps(undo), unit.scale + 4 * lane);
  store_as(_mm_set1_ps(shift), unit.shift + 4 * lane);
}

// Units of a query, and of what their two bytes leave of it unless `rest` is null.
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
