// Vectors of bytes and words, for the integer passes (int8_layout.h): what two widths call alike is
// CARAMBA_FAST_MM(name), the rest is here, with the products of integers that each instruction set
// has. Compiled once per instruction set, in that set's namespace.
#pragma once

#include <cstdint>
#include <cstring>

#include "vec.h"

#if CARAMBA_FAST_VECTOR_BITS == 512
#define CARAMBA_FAST_MM(name) _mm512_##name
#else
#define CARAMBA_FAST_MM(name) _mm256_##name
#endif

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// Whether there are sums of four products of bytes.
inline constexpr bool kVnni = CARAMBA_FAST_VNNI;
// Whether codes meet integers as words, but for those of 4 bits; see below.
inline constexpr bool kWordCodes = !kVnni || CARAMBA_FAST_VECTOR_BITS < 512;

#if CARAMBA_FAST_VECTOR_BITS == 512

using Raw = __m512i;
inline constexpr int kRegisters = 32;

// The first `count` dwords of a vector, or less.
using Words = __mmask16;
inline Words first_words(int count) { return static_cast<Words>((1u << count) - 1); }
inline Raw load_words(Words words, const char* from) {
  return _mm512_maskz_loadu_epi32(words, from);
}
inline Floats wide(__m256 low) { return _mm512_castps256_ps512(low); }  // any upper half
inline Floats in_all_lanes(__m128 lane) { return _mm512_broadcast_f32x4(lane); }
inline Raw in_all_lanes(__m128i lane) { return _mm512_broadcast_i32x4(lane); }
// Whether a word of a is greater than that of b, signed.
inline bool any_greater(Raw a, Raw b) { return _mm512_cmpgt_epi16_mask(a, b) != 0; }

// The sum over lanes of two vectors of four tokens.
inline __m256 sums_of_lanes(Floats a, Floats b) {
  const __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(b), _mm512_extractf32x8_ps(b, 1));
  return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}

// The sum over the first half of the lanes, and over the second, of four pairs of tokens: eight
// tokens.
inline __m256 sums_of_pairs(Floats v) {
  const __m512 sums = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1));
  const __m128 first = _mm512_castps512_ps128(sums), second = _mm512_extractf32x4_ps(sums, 2);
  return _mm256_set_m128(_mm_unpackhi_ps(first, second), _mm_unpacklo_ps(first, second));
}

#else

using Raw = __m256i;
inline constexpr int kRegisters = 16;

using Words = Ints;
inline Words first_words(int count) {
  return Ints{0, 1, 2, 3, 4, 5, 6, 7} < splat(static_cast<std::int32_t>(count));
}
inline Raw load_words(Words words, const char* from) {
  return _mm256_maskload_epi32(reinterpret_cast<const int*>(from), reinterpret_cast<Raw>(words));
}
inline Floats wide(__m256 low) { return low; }
inline Floats in_all_lanes(__m128 lane) { return _mm256_set_m128(lane, lane); }
inline Raw in_all_lanes(__m128i lane) { return _mm256_broadcastsi128_si256(lane); }
inline bool any_greater(Raw a, Raw b) {
  return _mm256_movemask_epi8(_mm256_cmpgt_epi16(a, b)) != 0;
}

inline __m256 sums_of_lanes(Floats a, Floats b) {
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
inline __m256 sums_of_pairs(Floats v) {
  const __m128 first = _mm256_castps256_ps128(v), second = _mm256_extractf128_ps(v, 1);
  return _mm256_set_m128(_mm_unpackhi_ps(first, second), _mm_unpacklo_ps(first, second));
}

#endif

// Keeps what several sums use in a register, where compilers would read it for each.
inline void in_register(Raw& v) {
#if CARAMBA_FAST_VECTOR_BITS == 512
  asm("" : "+v"(v));
#else
  asm("" : "+x"(v));
#endif
}

// Products of integers, added to sums of dwords. A dword has four values: with AVX-512 VNNI four
// unsigned bytes meet four signed ones, without it
//
//   4-bit keys by token   bytes. Where there are no sums of four products (AVX-VNNI has them), they
//                         are summed in words first. A word gets two products of each of the eight
//                         columns of a unit, which it holds: 8 * 2 * 15 * 128 < 2^15.
//   all else              words, two at a time. Sums of two products of bytes would not fit a word:
//                         2 * 255 * 127 > 2^15. Those of words fit a dword unless all four are
//                         -2^15, which codes and levels never are. With AVX-VNNI, too: 16 registers
//                         are few for two sums of bytes.

// sum + products of unsigned bytes u with signed ones s, in each dword; without VNNI two of them
// have to fit a word.
inline Raw sum_of_products(Raw sum, Raw u, Raw s) {
#if CARAMBA_FAST_VNNI
  // Assembly because gcc 12 copies the sum of the intrinsic in front of each use.
#if CARAMBA_FAST_VECTOR_BITS == 512
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "vm"(s));
#else
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(u), "xm"(s));
#endif
  return sum;
#else
  const Raw words = CARAMBA_FAST_MM(maddubs_epi16)(u, s);
  const Raw ones = CARAMBA_FAST_MM(set1_epi16)(1);
  return CARAMBA_FAST_MM(add_epi32)(sum, CARAMBA_FAST_MM(madd_epi16)(words, ones));
#endif
}

// The same of codes of 4 bits, whose sums become dwords by `whole_sums`.
inline Raw narrow_products(Raw sum, Raw u, Raw s) {
  if constexpr (kVnni) return sum_of_products(sum, u, s);
  return CARAMBA_FAST_MM(add_epi16)(sum, CARAMBA_FAST_MM(maddubs_epi16)(u, s));
}
inline Raw whole_sums(Raw sums) {
  if constexpr (kVnni) return sums;
  return CARAMBA_FAST_MM(madd_epi16)(sums, CARAMBA_FAST_MM(set1_epi16)(1));
}

// sum + products of words, two in each dword, or 2^-8 of them, rounded down: where both sides have
// 16 bits the sum would not fit.
template <bool LARGE>
inline Raw sum_of_words(Raw sum, Raw a, Raw b) {
#if CARAMBA_FAST_VNNI && CARAMBA_FAST_VECTOR_BITS == 256
  if constexpr (!LARGE) {
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "xm"(b));
    return sum;
  }
#endif
  Raw products = CARAMBA_FAST_MM(madd_epi16)(a, b);
  if constexpr (LARGE) products = CARAMBA_FAST_MM(srai_epi32)(products, 8);
#if CARAMBA_FAST_VECTOR_BITS == 512
  asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(products));
#else
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
#endif
  return sum;
}

// The even bytes of words that are `low` and `high` bytes apart, and the odd ones, as words.
inline Raw even_words(Raw low, Raw high) {
  const Raw byte = CARAMBA_FAST_MM(set1_epi16)(255);
  return (low & byte) | CARAMBA_FAST_MM(slli_epi16)(high, 8);
}
inline Raw odd_words(Raw low, Raw high) {
  return CARAMBA_FAST_MM(srli_epi16)(low, 8) | (high & CARAMBA_FAST_MM(set1_epi16)(-256));
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
