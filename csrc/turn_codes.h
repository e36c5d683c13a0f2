// Codes by channel, transposed for integer products (scores_group.h): a vector has four bytes of
// each of kLanes tokens, and vectors follow the order of the bytes. Compiled once for each
// instruction set that has such products, in that set's namespace.
#pragma once

#include <cstdint>

#include "int8_layout.h"
#include "vec.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// kLanes tokens; the last is repeated past the end.
struct Tokens {
  const char* from[kLanes];

  Tokens(const char* codes, std::int64_t stride, int count) {
    CARAMBA_FAST_UNROLL
    for (int t = 0; t < kLanes; ++t) {
      from[t] = codes;
      if (t + 1 < count) codes += stride;
    }
  }

  const char* at(int t, int byte) const { return from[t] + byte; }
#if CARAMBA_FAST_VECTOR_BITS == 512
  __m512i whole(int t, int byte) const { return _mm512_loadu_si512(at(t, byte)); }
  // Halves, or quarters, of vectors of tokens `step` apart.
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
#endif
};

#if CARAMBA_FAST_VECTOR_BITS == 512

// Stores dword DWORD of 16 tokens.
template <int DWORD>
inline void store_column(__m512i v, std::uint8_t* columns) {
  _mm512_store_si512(columns + 64 * DWORD, v);
}

// From four parts of 16 tokens: the columns C of their four lanes, with four tokens each.
template <int C>
inline void store_columns(const __m512i (&part)[4][4], std::uint8_t* columns) {
  const __m512i a = _mm512_shuffle_i32x4(part[0][C], part[1][C], 0x88);  // lanes 0, 2
  const __m512i b = _mm512_shuffle_i32x4(part[2][C], part[3][C], 0x88);
  const __m512i e = _mm512_shuffle_i32x4(part[0][C], part[1][C], 0xdd);  // lanes 1, 3
  const __m512i f = _mm512_shuffle_i32x4(part[2][C], part[3][C], 0xdd);
  store_column<C>(_mm512_shuffle_i32x4(a, b, 0x88), columns);
  store_column<4 + C>(_mm512_shuffle_i32x4(e, f, 0x88), columns);
  store_column<8 + C>(_mm512_shuffle_i32x4(a, b, 0xdd), columns);
  store_column<12 + C>(_mm512_shuffle_i32x4(e, f, 0xdd), columns);
}

// The same of two parts, with two tokens in each vector.
template <int C>
inline void store_columns(const __m512i (&part)[2][4], std::uint8_t* columns) {
  store_column<C>(_mm512_shuffle_i32x4(part[0][C], part[1][C], 0x88), columns);
  store_column<4 + C>(_mm512_shuffle_i32x4(part[0][C], part[1][C], 0xdd), columns);
}

// And of one part, with four tokens in each vector.
template <int C>
inline void store_columns(const __m512i (&part)[1][4], std::uint8_t* columns) {
  store_column<C>(part[0][C], columns);
}

// 64, 32 or 16 bytes of each of 16 tokens, by PARTS.
template <int PARTS>
inline void turn_part(const Tokens& tokens, int byte, std::uint8_t* columns) {
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
  store_columns<0>(part, columns);
  store_columns<1>(part, columns);
  store_columns<2>(part, columns);
  store_columns<3>(part, columns);
}

// `bytes` of kLanes tokens, a multiple of 16: (four bytes, token, byte).
inline void turn_codes(const Tokens& tokens, int bytes, std::uint8_t* columns) {
  int byte = 0;
  for (; byte + 64 <= bytes; byte += 64) turn_part<4>(tokens, byte, columns + 16 * byte);
  if (byte + 32 <= bytes) {
    turn_part<2>(tokens, byte, columns + 16 * byte);
    byte += 32;
  }
  if (byte < bytes) turn_part<1>(tokens, byte, columns + 16 * byte);
}

#else

inline void turn_codes(const Tokens& tokens, int bytes, std::uint8_t* columns) {
  for (int byte = 0; byte < bytes; byte += kLaneBytes) {
    Raw rows[4], part[4];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < 4; ++i)
      rows[i] = _mm256_set_m128i(load_as<__m128i>(tokens.at(i + 4, byte)),
                                 load_as<__m128i>(tokens.at(i, byte)));
    columns_of(rows, part);
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < 4; ++i) store_as(part[i], columns + kLanes * (byte + 4 * i));
  }
}

#endif

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
