// Vector arithmetic for attention: fused products, exponentials, sums, the Walsh-Hadamard
// transform. Compiled once per instruction set, in that set's namespace.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "half.h"
#include "vec.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

inline constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// a b + c. The build disables the compiler's own contraction, since codes must not depend on it.
#if CARAMBA_FAST_VECTOR_BITS == 512
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
#elif CARAMBA_FAST_VECTOR_BITS == 256
inline Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
#elif CARAMBA_FAST_NEON
inline Floats fused(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
#else
inline Floats fused(Floats a, Floats b, Floats c) { return a * b + c; }
#endif

template <int... LANES>
inline Ints in_order(std::integer_sequence<int, LANES...>) {
  return Ints{LANES...};
}
// 0, 1, 2 and so on.
inline Ints first_lanes() { return in_order(std::make_integer_sequence<int, kLanes>{}); }

inline Floats greater(Floats a, Floats b) { return a > b ? a : b; }

#if CARAMBA_FAST_VECTOR_BITS == 512
inline float sum_of(Floats v) { return _mm512_reduce_add_ps(v); }
inline float greatest_of(Floats v) { return _mm512_reduce_max_ps(v); }
#else
inline float sum_of(Floats v) {
  float lanes[kLanes];
  store_as(v, lanes);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}
inline float greatest_of(Floats v) {
  float lanes[kLanes];
  store_as(v, lanes);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i)
      lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}
#endif

// Number of vectors that sum up scores, limited by registers, but at least kLanes.
inline constexpr int kScoreSums = kManyRegisters ? 16 : kLanes;

inline void store_sums(const Floats (&sums)[kScoreSums], float* to) {
  CARAMBA_FAST_UNROLL
  for (int i = 0; i < kScoreSums; i += kLanes)
    store_as(sums_of(reinterpret_cast<const Floats(&)[kLanes]>(sums[i])), to + i);
}

template <bool SUM, class V>
inline V pair(V a, V b) {
  return SUM ? a + b : (a > b ? a : b);
}

typedef float Four __attribute__((vector_size(16)));

// The sums, or the largest entries, of four vectors. Adding halves first makes the bits independent
// of a rotation of the lanes, since a tile may begin with any token.
#if CARAMBA_FAST_VECTOR_BITS
template <bool SUM>
inline Four reduced(const Floats (&v)[4]) {
  __m128 lane[4];
  CARAMBA_FAST_UNROLL
  for (int i = 0; i < 4; ++i) {
#if CARAMBA_FAST_VECTOR_BITS == 512
    const __m256 half = pair<SUM>(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps(v[i], 1));
#else
    const __m256 half = v[i];
#endif
    lane[i] = pair<SUM>(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
  const __m128 a = pair<SUM>(_mm_unpacklo_ps(lane[0], lane[1]), _mm_unpackhi_ps(lane[0], lane[1]));
  const __m128 b = pair<SUM>(_mm_unpacklo_ps(lane[2], lane[3]), _mm_unpackhi_ps(lane[2], lane[3]));
  return pair<SUM>(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
}
#elif CARAMBA_FAST_NEON
template <bool SUM>
inline Four reduced(const Floats (&v)[4]) {
  const Floats a = pair<SUM>(lower_halves(v[0], v[1]), upper_halves(v[0], v[1]));
  const Floats b = pair<SUM>(lower_halves(v[2], v[3]), upper_halves(v[2], v[3]));
  return pair<SUM>(Floats(vuzp1q_f32(a, b)), Floats(vuzp2q_f32(a, b)));
}
#else
template <bool SUM>
inline Four reduced(const Floats (&v)[4]) {
  const auto one = [](Floats x) { return SUM ? sum_of(x) : greatest_of(x); };
  return Four{one(v[0]), one(v[1]), one(v[2]), one(v[3])};
}
#endif

// e^r for a remainder |r| <= log(2) / 2. The polynomial is Cephes' expf
// (https://www.netlib.org/cephes/), evaluated in pairs for shorter dependency chains.
inline Floats exponential_of_rest(Floats r) {
  const Floats square = r * r;
  const Floats low = fused(splat(1.6666665459e-1f), r, splat(5.0000001201e-1f));
  const Floats middle = fused(splat(8.3334519073e-3f), r, splat(4.1665795894e-2f));
  const Floats high = fused(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
  const Floats p = fused(fused(high, square, middle), square, low);
  return fused(p, square, r) + 1.0f;
}

// e^x to 2 ulp; 0 below -87 (also for -infinity), infinity above 88.7; NaN stays NaN.
inline Floats exponential(Floats x) {
  const Floats bounded = x > splat(88.8f) ? splat(88.8f) : x;
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = fused(bounded, splat(1.44269504f), magic);
  const Floats n = shifted - magic;
  Floats r = fused(n, splat(-0.693359375f), bounded);
  r = fused(n, splat(2.12194440e-4f), r);
  const Floats p = exponential_of_rest(r);
#if CARAMBA_FAST_VECTOR_BITS == 512
  const Floats value = _mm512_scalef_ps(p, n);
#else
  // 2^n as two factors, since n may be 128.
  const Ints whole = bits(shifted) - bits(magic);
  const Ints half = whole >> 1;
  const Floats two_to_half = floats((half + 127) << 23);
  const Floats two_to_rest = floats((whole - half + 127) << 23);
  const Floats value = p * two_to_half * two_to_rest;
#endif
  return x < splat(-87.3f) ? splat(0.0f) : value;
}

// The same for x <= 0: softmax weights. With 512 bits results may be subnormal, 0 below -104.
inline Floats weight_of(Floats x) {
  constexpr float kLeast = CARAMBA_FAST_VECTOR_BITS == 512 ? -200.0f : -87.0f;
#if CARAMBA_FAST_VECTOR_BITS == 512
  const Floats bounded = _mm512_max_ps(splat(kLeast), x);  // x where it is NaN
#else
  const Floats bounded = x < splat(kLeast) ? splat(kLeast) : x;
#endif
  const Floats magic = splat(12582912.0f);
  const Floats shifted = fused(bounded, splat(1.44269504f), magic);
  const Floats n = shifted - magic;
  // log(2) as one constant, which is as accurate in fp32 as two.
  const Floats p = exponential_of_rest(fused(n, splat(-0.693147182f), bounded));
#if CARAMBA_FAST_VECTOR_BITS == 512
  return _mm512_scalef_ps(p, n);
#else
  const Floats power = floats((bits(shifted) << 23) + (127 << 23));  // 2^n
  return x < splat(kLeast) ? Floats{} : p * power;
#endif
}

// The same for four numbers.
inline Four weights_of(Four x) {
#if CARAMBA_FAST_VECTOR_BITS == 512
  return _mm512_castps512_ps128(weight_of(_mm512_broadcast_f32x4(x)));
#elif CARAMBA_FAST_VECTOR_BITS == 256
  return _mm256_castps256_ps128(weight_of(_mm256_set_m128(x, x)));
#else
  return weight_of(x);
#endif
}

// The binary exponent of a positive number; 128 for infinity and NaN.
inline int exponent_of(float x) {
  std::int32_t whole;
  std::memcpy(&whole, &x, sizeof whole);
  return (whole >> 23 & 255) - 127;
}

inline Floats hyperbolic_tangent(Floats x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

// Replaces values HALF lanes apart by their sum and their difference.
template <int HALF, int... LANES>
inline Floats butterfly(Floats v, std::integer_sequence<int, LANES...>) {
  const Floats other = {v[LANES ^ HALF]...};  // one permutation
  const Floats sign = {(LANES & HALF) != 0 ? -1.0f : 1.0f ...};
  return fused(v, sign, other);  // exact but for the sum's rounding
}

// All butterflies within a vector.
inline Floats butterflies_within(Floats v) {
  using Lanes = std::make_integer_sequence<int, kLanes>;
  v = butterfly<2>(butterfly<1>(v, Lanes{}), Lanes{});
  if constexpr (kLanes > 4) v = butterfly<4>(v, Lanes{});
  if constexpr (kLanes > 8) v = butterfly<8>(v, Lanes{});
  return v;
}

// The transform of VECTORS vectors, in registers.
template <int VECTORS>
inline void hadamard_vectors(float* x, float factor) {
  Floats v[VECTORS];
  CARAMBA_FAST_UNROLL
  for (int i = 0; i < VECTORS; ++i) v[i] = butterflies_within(load_as<Floats>(x + i * kLanes));
  CARAMBA_FAST_UNROLL
  for (int half = 1; half < VECTORS; half *= 2) CARAMBA_FAST_UNROLL
  for (int i = 0; i < VECTORS; ++i) {
    if ((i & half) != 0) continue;
    const Floats a = v[i], b = v[i + half];
    v[i] = a + b;
    v[i + half] = a - b;
  }
  CARAMBA_FAST_UNROLL
  for (int i = 0; i < VECTORS; ++i) store_as(v[i] * factor, x + i * kLanes);
}

// The transform of any power of two.
inline void hadamard_power(float* x, std::int64_t size, float factor) {
  std::int64_t half = 1;
  if (size >= kLanes) {
    for (std::int64_t i = 0; i < size; i += kLanes)
      store_as(butterflies_within(load_as<Floats>(x + i)), x + i);
    half = kLanes;
  }
  for (; half < size; half *= 2)
    for (std::int64_t i = 0; i < size; i += 2 * half)
      for (std::int64_t j = i; j < i + half; ++j) {
        const float a = x[j], b = x[j + half];
        x[j] = a + b;
        x[j + half] = a - b;
      }
  for (std::int64_t i = 0; i < size; ++i) x[i] *= factor;
}

// The orthonormal Walsh-Hadamard transform of x[0, width), in place; another width is divided into
// powers of two, largest first. Equals the product with the matrix up to rounding.
CARAMBA_FAST_NOINLINE inline void hadamard(float* x, std::int64_t width) {
  while (width > 0) {
    std::int64_t size = 1;
    while (2 * size <= width) size *= 2;
    const float factor = 1.0f / std::sqrt(static_cast<float>(size));
    if (size == 8 * kLanes)
      hadamard_vectors<8>(x, factor);
    else if (size == 4 * kLanes)
      hadamard_vectors<4>(x, factor);
    else
      hadamard_power(x, size, factor);
    x += size;
    width -= size;
  }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
