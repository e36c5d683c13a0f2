// fp16 and bf16 <-> fp32, and vectors read from and written to values of any element type.
// Narrowing rounds to nearest even; subnormals, infinities and NaN are kept (a NaN stays a NaN).
// Compiled once per instruction set, in that set's namespace.
#pragma once

#include <cstdint>

#include "formats.h"
#include "vec.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

inline constexpr std::int32_t kMagnitude = 0x7fffffff;
inline constexpr std::int32_t kInfinity = 255 << 23;
inline constexpr std::int32_t kNaN = 0x7fc00000;
inline constexpr std::int32_t kHalfNaN = 0x7e00;

#if CARAMBA_FAST_VECTOR_BITS == 512

inline Floats load_half(const std::uint16_t* from) {
  return _mm512_cvtph_ps(load_as<__m256i>(from));
}
inline void store_half(Floats v, std::uint16_t* to) {
  store_as(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT), to);
}

#elif CARAMBA_FAST_VECTOR_BITS == 256

inline Floats load_half(const std::uint16_t* from) {
  return _mm256_cvtph_ps(load_as<__m128i>(from));
}
inline void store_half(Floats v, std::uint16_t* to) {
  store_as(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT), to);
}

#elif CARAMBA_FAST_NEON

inline Floats load_half(const std::uint16_t* from) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}
inline void store_half(Floats v, std::uint16_t* to) {
  vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(v)));
}

#else

inline constexpr std::int32_t kRebias = (127 - 15) << 23;    // fp16's exponent bias to fp32's
inline constexpr std::int32_t kLeast = kRebias + (1 << 23);  // 2^-14, the least normal fp16

inline Floats load_half(const std::uint16_t* from) {
  const Ints half = widen(from);
  const Ints magnitude = (half & 0x7fff) << 13;
  // A subnormal gets the exponent of 2^-14 and with it an implicit one, which is then subtracted:
  // exact, and normalizing.
  const Ints subnormal = bits(floats(magnitude + kLeast) - floats(splat(kLeast)));
  const Ints normal = magnitude + kRebias;
  Ints v = magnitude < splat(1 << 23) ? subnormal : normal;
  v = magnitude >= splat(31 << 23) ? normal + kRebias : v;  // infinity and NaN
  return floats(v | ((half & 0x8000) << 16));
}

inline void store_half(Floats v, std::uint16_t* to) {
  const Ints magnitude = bits(v) & kMagnitude;
  // Near 0.5 floats are 2^-24 apart, as fp16 subnormals are: the addition rounds.
  const Ints subnormal = bits(floats(magnitude) + 0.5f) - bits(splat(0.5f));
  const Ints normal = (magnitude - kRebias + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  Ints half = magnitude < splat(kLeast) ? subnormal : normal;  // normal may carry into infinity
  half = magnitude >= splat((127 + 16) << 23) ? splat(0x7c00) : half;
  half = magnitude > splat(kInfinity) ? splat(kHalfNaN) : half;
  narrow(half | ((bits(v) >> 16) & 0x8000), to);
}

#endif

inline Floats load_bfloat(const std::uint16_t* from) { return floats(widen(from) << 16); }

inline void store_bfloat(Floats v, std::uint16_t* to) {
  const Ints number = (bits(v) & kMagnitude) > splat(kInfinity) ? splat(kNaN) : bits(v);
  narrow((number + 0x7fff + ((number >> 16) & 1)) >> 16, to);
}

// Reads and writes kLanes values of an element type.
template <Format T>
struct Values;

template <>
struct Values<Format::fp32> {
  using Storage = float;
  static Floats load(const Storage* from) { return load_as<Floats>(from); }
  static void store(Floats v, Storage* to) { store_as(v, to); }
};

template <>
struct Values<Format::fp16> {
  using Storage = std::uint16_t;
  static Floats load(const Storage* from) { return load_half(from); }
  static void store(Floats v, Storage* to) { store_half(v, to); }
};

template <>
struct Values<Format::bf16> {
  using Storage = std::uint16_t;
  static Floats load(const Storage* from) { return load_bfloat(from); }
  static void store(Floats v, Storage* to) { store_bfloat(v, to); }
};

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
