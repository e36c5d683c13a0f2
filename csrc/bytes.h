// Vectors of bytes and words for the integer passes (int8_layout.h). Intrinsics with the same name
// for both widths are CARAMBA_FAST_MM(name); others, and the integer products of each instruction
// set, are defined here. Compiled once per instruction set, in that set's namespace.
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

// Whether the instruction set sums four products of bytes (VNNI).
inline constexpr bool kVnni = CARAMBA_FAST_VNNI;
// Whether codes are multiplied as words, except those of 4 bits; see below.
inline constexpr bool kWordCodes = !kVnni || CARAMBA_FAST_VECTOR_BITS < 512;

#if CARAMBA_FAST_VECTOR_BITS == 512

using Raw = __m512i;
inline constexpr int kRegisters = 32;

// A mask of the first `count` dwords, at most all.
using Words = __mmask16;
inline Words first_words(int count) { return static_cast<Words>((1u << count) - 1); }
inline Raw load_words(Words words, const char* from) {
  return _mm512_maskz_loadu_epi32(words, from);
}
inline Floats wide(__m256 low) { return _mm512_castps256_ps512(low); }  // upper half undefined
inline Floats in_all_lanes(__m128 lane) { return _mm512_broadcast_f32x4(lane); }
inline Raw in_all_lanes(__m128i lane) { return _mm512_broadcast_i32x4(lane); }
// Whether some word of a is greater than that of b, signed.
inline bool any_greater(Raw a, Raw b) { return _mm512_cmpgt_epi16_mask(a, b) != 0; }

// The sums over lanes of two vectors of four tokens.
inline __m256 sums_of_lanes(Floats a, Floats b) {
  const __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(b), _mm512_extractf32x8_ps(b, 1));
  return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}

// The sums over each half of the lanes of four pairs of tokens: eight tokens.
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

// Keeps a vector in a register for several sums; compilers would load it for each.
inline void in_register(Raw& v) {
#if CARAMBA_FAST_VECTOR_BITS == 512
  asm("" : "+v"(v));
#else
  asm("" : "+x"(v));
#endif
}

// Integer products, added to sums in dwords of four values. With AVX-512 VNNI these are four
// products of unsigned and signed bytes; without it
//
//   4-bit keys by token   bytes, without AVX-VNNI summed in words first. A word gets two products
//                         of each of the eight columns of a unit, which fit:
//                         8 * 2 * 15 * 128 < 2^15.
//   all else              words, two at a time. Two products of bytes would not fit into a word:
//                         2 * 255 * 127 > 2^15. Those of words fit into a dword unless all four are
//                         -2^15, which codes and levels never are. Also with AVX-VNNI: its 16
//                         registers are too few for two sums of bytes.

// sum + products of unsigned bytes u with signed ones s, in each dword; without VNNI two products
// have to fit into a word.
inline Raw sum_of_products(Raw sum, Raw u, Raw s) {
#if CARAMBA_FAST_VNNI
  // Assembly because gcc 12 copies the sum before each use of the intrinsic.
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

// The same for codes of 4 bits; `whole_sums` turns the sums into dwords.
inline Raw narrow_products(Raw sum, Raw u, Raw s) {
  if constexpr (kVnni) return sum_of_products(sum, u, s);
  return CARAMBA_FAST_MM(add_epi16)(sum, CARAMBA_FAST_MM(maddubs_epi16)(u, s));
}
inline Raw whole_sums(Raw sums) {
  if constexpr (kVnni) return sums;
  return CARAMBA_FAST_MM(madd_epi16)(sums, CARAMBA_FAST_MM(set1_epi16)(1));
}

// sum + products of words, two in each dword; if LARGE, 2^-8 of them, rounded down, since sums of
// 16-bit products on both sides would not fit.
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

// The even bytes of `low` and `high` combined to words, and the odd ones.
inline Raw even_words(Raw low, Raw high) {
  const Raw byte = CARAMBA_FAST_MM(set1_epi16)(255);
  return (low & byte) | CARAMBA_FAST_MM(slli_epi16)(high, 8);
}
inline Raw odd_words(Raw low, Raw high) {
  return CARAMBA_FAST_MM(srli_epi16)(low, 8) | (high & CARAMBA_FAST_MM(set1_epi16)(-256));
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
