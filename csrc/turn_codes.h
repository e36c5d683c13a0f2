// Codes by channel, turned for products of bytes (scores_group.h): a vector has four values of 16
// tokens, and vectors follow the order of the values. Included in isa_avx512_vnni.cpp alone, in
// that set's namespace.
#pragma once

#include <cstdint>

#include "int8_layout.h"
#include "vec.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// 16 tokens; behind the last the last stands in.
struct Tokens {
  const char* from[16];

  Tokens(const char* codes, std::int64_t stride, int count) {
    CARAMBA_FAST_UNROLL
    for (int t = 0; t < 16; ++t) {
      from[t] = codes;
      if (t + 1 < count) codes += stride;
    }
  }

  const char* at(int t, int byte) const {
    __builtin_prefetch(from[t] + byte + kAhead, 0, 2);
    return from[t] + byte;
  }
  __m512i whole(int t, int byte) const { return _mm512_loadu_si512(at(t, byte)); }
  // Half a vector, or a quarter, of tokens so many apart.
  __m512i halves(int t, int step, int byte) const {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at(t, byte)));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at(t + step, byte)));
    return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
  }
  __m512i quarters(int t, int step, int byte) const {
    __m128i part[4];
    for (int i = 0; i < 4; ++i)
      part[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at(t + i * step, byte)));
    const __m256i a = _mm256_set_m128i(part[1], part[0]), b = _mm256_set_m128i(part[3], part[2]);
    return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
  }
};

// How codes lie in bytes: one in each, two of 4 bits, or two that divide its bits.
enum class Packing { kBytes, kNibbles, kDivided };

// A dword of 16 tokens, the one at DWORD of its vectors, as codes of four values each. Where bytes
// are divided `masks` has the low channel's bits of each; those of the high one stay in place.
template <Packing P, int DWORD>
inline void store_column(__m512i v, const std::uint8_t* masks, std::uint8_t* columns) {
  if constexpr (P == Packing::kBytes) {
    _mm512_store_si512(columns + 64 * DWORD, v);
  } else {  // 16 bytes have the low codes of 16 values, then the high ones of 16 more
    std::uint8_t* to = columns + 64 * (DWORD / 4 * 8 + DWORD % 4);
    const __m512i mask = P == Packing::kDivided
                             ? _mm512_set1_epi32(load_as<std::int32_t>(masks + 4 * DWORD))
                             : _mm512_set1_epi8(15);
    const __m512i low = _mm512_and_si512(v, mask);
    const __m512i high = P == Packing::kDivided ? _mm512_xor_si512(v, low)
                                                : _mm512_and_si512(_mm512_srli_epi16(v, 4), mask);
    _mm512_store_si512(to, low);
    _mm512_store_si512(to + 4 * 64, high);
  }
}

// Four parts of 16 tokens each, of the columns C of lanes that hold four dwords each.
template <Packing P, int C>
inline void store_columns(const __m512i (&part)[4][4], const std::uint8_t* masks,
                          std::uint8_t* columns) {
  const __m512i a = _mm512_shuffle_i32x4(part[0][C], part[1][C], 0x88);  // lanes 0, 2
  const __m512i b = _mm512_shuffle_i32x4(part[2][C], part[3][C], 0x88);
  const __m512i e = _mm512_shuffle_i32x4(part[0][C], part[1][C], 0xdd);  // lanes 1, 3
  const __m512i f = _mm512_shuffle_i32x4(part[2][C], part[3][C], 0xdd);
  store_column<P, C>(_mm512_shuffle_i32x4(a, b, 0x88), masks, columns);
  store_column<P, 4 + C>(_mm512_shuffle_i32x4(e, f, 0x88), masks, columns);
  store_column<P, 8 + C>(_mm512_shuffle_i32x4(a, b, 0xdd), masks, columns);
  store_column<P, 12 + C>(_mm512_shuffle_i32x4(e, f, 0xdd), masks, columns);
}

// The same of two parts, of which each vector has two tokens.
template <Packing P, int C>
inline void store_columns(const __m512i (&part)[2][4], const std::uint8_t* masks,
                          std::uint8_t* columns) {
  store_column<P, C>(_mm512_shuffle_i32x4(part[0][C], part[1][C], 0x88), masks, columns);
  store_column<P, 4 + C>(_mm512_shuffle_i32x4(part[0][C], part[1][C], 0xdd), masks, columns);
}

// And of one, of which each vector has four.
template <Packing P, int C>
inline void store_columns(const __m512i (&part)[1][4], const std::uint8_t* masks,
                          std::uint8_t* columns) {
  store_column<P, C>(part[0][C], masks, columns);
}

template <Packing P, int PARTS>
inline void store_parts(const __m512i (&part)[PARTS][4], const std::uint8_t* masks,
                        std::uint8_t* columns) {
  store_columns<P, 0>(part, masks, columns);
  store_columns<P, 1>(part, masks, columns);
  store_columns<P, 2>(part, masks, columns);
  store_columns<P, 3>(part, masks, columns);
}

// The bytes of 16 tokens from one on: 64, 32 or 16 of each.
template <Packing P, int PARTS>
inline void turn_part(const Tokens& tokens, int byte, const std::uint8_t* masks,
                      std::uint8_t* columns) {
  __m512i part[PARTS][4];
  CARAMBA_FAST_UNROLL
  for (int q = 0; q < PARTS; ++q) {
    __m512i rows[4];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < 4; ++i)
      rows[i] = PARTS == 4   ? tokens.whole(4 * q + i, byte)
                : PARTS == 2 ? tokens.halves(8 * q + i, 4, byte)
                             : tokens.quarters(i, 4, byte);
    columns_of(rows, part[q]);
  }
  store_parts<P>(part, masks + byte, columns + byte * (P == Packing::kBytes ? 16 : 32));
}

// `bytes` of 16 tokens, a multiple of 16.
template <Packing P>
void turn_codes(const Tokens& tokens, int bytes, const std::uint8_t* masks, std::uint8_t* columns) {
  int byte = 0;
  for (; byte + 64 <= bytes; byte += 64) turn_part<P, 4>(tokens, byte, masks, columns);
  if (byte + 32 <= bytes) {
    turn_part<P, 2>(tokens, byte, masks, columns);
    byte += 32;
  }
  if (byte < bytes) turn_part<P, 1>(tokens, byte, masks, columns);
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
