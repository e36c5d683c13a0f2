// Vectors of kLanes floats or ints, as wide as in the instruction set. Arithmetic, comparisons
// (true is -1) and selection (mask ? a : b) are the compilers' vector extensions; operations they
// lack, or compile badly, are here. Compiled once per instruction set, in that set's namespace.
#pragma once

#include <cstdint>
#include <cstring>

// Before a loop over an array of vectors: unrolled early enough for compilers to keep the array in
// registers. Without it gcc 12 writes every element to the stack in every step.
#if defined(__clang__)
#define CARAMBA_FAST_UNROLL _Pragma("unroll")
#else
#define CARAMBA_FAST_UNROLL _Pragma("GCC unroll 16")
#endif

// Before a function with loops that is called from one place: compilers would inline it, and all
// loops of the caller would then share the registers.
#define CARAMBA_FAST_NOINLINE __attribute__((noinline))
// Before a function that has to be inlined for its arrays of vectors to be in registers.
#define CARAMBA_FAST_INLINE inline __attribute__((always_inline))

// Whether the instruction set sums four products of bytes in a dword, in 512 bits.
#define CARAMBA_FAST_BYTE_SUMS (CARAMBA_FAST_VNNI && CARAMBA_FAST_VECTOR_BITS == 512)

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

inline constexpr int kLanes = CARAMBA_FAST_VECTOR_BITS ? CARAMBA_FAST_VECTOR_BITS / 32 : 4;
// Whether there are 32 vector registers, not 16.
inline constexpr bool kManyRegisters = CARAMBA_FAST_VECTOR_BITS == 512 || CARAMBA_FAST_NEON;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kLanes)));

template <class V, class T>
inline V load_as(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V, class T>
inline void store_as(V v, T* to) {
  std::memcpy(to, &v, sizeof v);
}

inline Floats splat(float x) {
  return x - Floats{};
}  // adding 0.0 would change -0.0, hence cost an instruction
inline Ints splat(std::int32_t x) { return Ints{} + x; }
inline Ints bits(Floats x) { return reinterpret_cast<Ints>(x); }
inline Floats floats(Ints x) { return reinterpret_cast<Floats>(x); }
inline Floats converted(Ints x) { return __builtin_convertvector(x, Floats); }
inline Ints truncated(Floats x) { return __builtin_convertvector(x, Ints); }
inline Ints larger(Ints a, Ints b) { return a > b ? a : b; }
inline Ints smaller(Ints a, Ints b) { return a < b ? a : b; }

#if CARAMBA_FAST_VECTOR_BITS == 512

inline Ints widen(const std::uint8_t* from) {
  return reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(load_as<__m128i>(from)));
}
inline Ints widen(const std::int8_t* from) {
  return reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(load_as<__m128i>(from)));
}
inline Ints widen(const std::uint16_t* from) {
  return reinterpret_cast<Ints>(_mm512_cvtepu16_epi32(load_as<__m256i>(from)));
}
// The low bits of each lane.
inline void narrow(Ints v, std::uint8_t* to) {
  store_as(_mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(v)), to);
}
inline void narrow(Ints v, std::uint16_t* to) {
  store_as(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(v)), to);
}
inline std::int32_t largest_of(Ints v) {
  return _mm512_reduce_max_epi32(reinterpret_cast<__m512i>(v));
}
// The sign bits, lane 0 lowest.
inline std::uint32_t signs_of(Ints v) { return _mm512_movepi32_mask(reinterpret_cast<__m512i>(v)); }
// Lane i: the sum of v[i], adding upper halves to lower ones until one value is left.
inline Floats sums_of(const Floats (&v)[kLanes]) {
  __m512 sum[4];
  for (int i = 0; i < 4; ++i) {  // quarter k of sum[i] has the rest of v[i + 4 k]
    const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 4], 0x44),
                                     _mm512_shuffle_f32x4(v[i], v[i + 4], 0xee));
    const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0x44),
                                      _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0xee));
    sum[i] =
        _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  }
  const __m512 low = _mm512_add_ps(_mm512_shuffle_ps(sum[0], sum[1], 0x44),
                                   _mm512_shuffle_ps(sum[0], sum[1], 0xee));
  const __m512 high = _mm512_add_ps(_mm512_shuffle_ps(sum[2], sum[3], 0x44),
                                    _mm512_shuffle_ps(sum[2], sum[3], 0xee));
  return _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xdd));
}
// table[index]; indices are 0..15.
inline Floats lookup(const float (&table)[16], Ints index) {
  return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(index), _mm512_loadu_ps(table));
}

#elif CARAMBA_FAST_VECTOR_BITS == 256

inline Ints widen(const std::uint8_t* from) {
  return reinterpret_cast<Ints>(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
inline Ints widen(const std::int8_t* from) {
  return reinterpret_cast<Ints>(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
inline Ints widen(const std::uint16_t* from) {
  return reinterpret_cast<Ints>(_mm256_cvtepu16_epi32(load_as<__m128i>(from)));
}
inline __m128i narrow_16(Ints v) {
  const __m256i wide = reinterpret_cast<__m256i>(v);
  return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}
inline void narrow(Ints v, std::uint8_t* to) {
  const __m128i half = narrow_16(v & 0xff);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(half, half));
}
inline void narrow(Ints v, std::uint16_t* to) { store_as(narrow_16(v & 0xffff), to); }
inline std::int32_t largest_of(Ints v) {
  const __m256i wide = reinterpret_cast<__m256i>(v);
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtsi128_si32(m);
}
inline std::uint32_t signs_of(Ints v) {
  return static_cast<std::uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(v)));
}
inline Floats sums_of(const Floats (&v)[kLanes]) {
  __m256 sum[4];
  for (int i = 0; i < 4; ++i)  // half k of sum[i] has the rest of v[i + 4 k]
    sum[i] = _mm256_add_ps(_mm256_permute2f128_ps(v[i], v[i + 4], 0x20),
                           _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));
  const __m256 low = _mm256_add_ps(_mm256_shuffle_ps(sum[0], sum[1], 0x44),
                                   _mm256_shuffle_ps(sum[0], sum[1], 0xee));
  const __m256 high = _mm256_add_ps(_mm256_shuffle_ps(sum[2], sum[3], 0x44),
                                    _mm256_shuffle_ps(sum[2], sum[3], 0xee));
  return _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xdd));
}
inline Floats lookup(const float (&table)[16], Ints index) {
  const __m256i i = reinterpret_cast<__m256i>(index);  // a permutation reads the low 3 bits
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), i);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), i);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
}

#elif CARAMBA_FAST_NEON

inline uint16x4_t widen_bytes(const std::uint8_t* from) {
  std::uint32_t bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes))));
}
inline Ints widen(const std::uint8_t* from) {
  return reinterpret_cast<Ints>(vmovl_u16(widen_bytes(from)));
}
inline Ints widen(const std::int8_t* from) {
  const Ints bytes = widen(reinterpret_cast<const std::uint8_t*>(from));
  return bytes << 24 >> 24;
}
inline Ints widen(const std::uint16_t* from) {
  return reinterpret_cast<Ints>(vmovl_u16(vld1_u16(from)));
}
inline void narrow(Ints v, std::uint8_t* to) {
  const uint16x4_t words = vmovn_u32(reinterpret_cast<uint32x4_t>(v));
  const uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
  const std::uint32_t four = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
  std::memcpy(to, &four, sizeof four);
}
inline void narrow(Ints v, std::uint16_t* to) {
  vst1_u16(to, vmovn_u32(reinterpret_cast<uint32x4_t>(v)));
}
inline std::int32_t largest_of(Ints v) { return vmaxvq_s32(reinterpret_cast<int32x4_t>(v)); }
inline std::uint32_t signs_of(Ints v) {
  return vaddvq_u32(reinterpret_cast<uint32x4_t>(v < 0) & uint32x4_t{1, 2, 4, 8});
}
// The lower halves of two vectors, and the upper ones.
inline Floats lower_halves(Floats a, Floats b) {
  return reinterpret_cast<Floats>(
      vtrn1q_f64(reinterpret_cast<float64x2_t>(a), reinterpret_cast<float64x2_t>(b)));
}
inline Floats upper_halves(Floats a, Floats b) {
  return reinterpret_cast<Floats>(
      vtrn2q_f64(reinterpret_cast<float64x2_t>(a), reinterpret_cast<float64x2_t>(b)));
}
inline Floats sums_of(const Floats (&v)[kLanes]) {
  return vpaddq_f32(lower_halves(v[0], v[1]) + upper_halves(v[0], v[1]),
                    lower_halves(v[2], v[3]) + upper_halves(v[2], v[3]));
}
inline Floats lookup(const float (&table)[16], Ints index) {
  const uint8x16x4_t bytes = vld1q_u8_x4(reinterpret_cast<const std::uint8_t*>(table));
  const Ints places = index * 0x04040404 + 0x03020100;  // of the four bytes of each entry
  return reinterpret_cast<Floats>(vqtbl4q_u8(bytes, reinterpret_cast<uint8x16_t>(places)));
}

#else

template <class T>
inline Ints widen(const T* from) {
  typedef T Few __attribute__((vector_size(kLanes * sizeof(T))));
  return __builtin_convertvector(load_as<Few>(from), Ints);
}
template <class T>
inline void narrow(Ints v, T* to) {
  typedef T Few __attribute__((vector_size(kLanes * sizeof(T))));
  store_as(__builtin_convertvector(v, Few), to);
}
inline std::int32_t largest_of(Ints v) {
  std::int32_t largest = v[0];
  for (int lane = 1; lane < kLanes; ++lane) largest = v[lane] > largest ? v[lane] : largest;
  return largest;
}
inline std::uint32_t signs_of(Ints v) {
  std::uint32_t signs = 0;
  for (int lane = 0; lane < kLanes; ++lane)
    signs |= (static_cast<std::uint32_t>(v[lane]) >> 31) << lane;
  return signs;
}
inline Floats sums_of(const Floats (&v)[kLanes]) {
  Floats lanes[kLanes];  // v transposed
  for (int lane = 0; lane < kLanes; ++lane)
    lanes[lane] = Floats{v[0][lane], v[1][lane], v[2][lane], v[3][lane]};
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}
inline Floats lookup(const float (&table)[16], Ints index) {
  std::int32_t i[kLanes];  // through memory: SSE2 is slow at extracting lanes
  store_as(index, i);
  return Floats{table[i[0]], table[i[1]], table[i[2]], table[i[3]]};
}

#endif

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
