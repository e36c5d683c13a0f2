// The value pass over one quantized tile in products of bytes (int8_layout.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "int8_layout.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// Weights times scales of one row and group of blocks as bytes, four tokens a dword: vector v,
// lane, dword i hold the tokens of quad 4 v + i times the scales of the lane's block.
struct alignas(64) WeightGroup {
  std::uint8_t high[4][kUnit], low[4][kUnit];  // one byte is in `high`
  float scale[16];                             // what undoes the bytes, by lane
  // Of q4_0: what the codes' offset adds to the sums of low nibbles and of high ones, by lane.
  std::int32_t offset[2][16];
};

// Signs of the scales of a tile, in the same order. Codes are flipped where one is negative:
// s (u - 8) is |s| (u' - 7) then, of u' = 15 - u. Besides, bytes become signed: lo + 16 (hi - 8).
struct alignas(64) Flips {
  std::uint8_t flip[kMostGroups][4][kUnit];      // 0x80, 0x7f where negative
  std::uint8_t negative[kMostGroups][4][kUnit];  // 0, 1
};

// What a value's integer is divided by: levels of nf4 are integers up to kSixteenBits.
template <Format F>
inline constexpr float kValueDivisor = F == Format::nf4 ? kSixteenBits : 1;

// Signs of the scales into `flips`; the scales become magnitudes.
inline void take_signs(const HeadBytes& head, TileScales& scales, Flips& flips) {
  for (int g = 0; g < head.groups; ++g)
    for (int v = 0; v < 4; ++v) {
      __m512i part[4];
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < 4; ++i) {
        float* scale = scales.scale[g][4 * v + i];
        const __m512 whole = _mm512_load_ps(scale);
        part[i] = _mm512_castps_si512(whole);
        _mm512_store_ps(scale, _mm512_abs_ps(whole));
      }
      // Saturated to 0x7f and 0x80; zeros stay, their codes may be anything.
      const __m512i sign = _mm512_packs_epi16(_mm512_packs_epi32(part[0], part[1]),
                                              _mm512_packs_epi32(part[2], part[3]));
      const __m512i flip = _mm512_xor_si512(sign, _mm512_set1_epi8(-1));
      _mm512_store_si512(flips.flip[g][v], flip);
      _mm512_store_si512(flips.negative[g][v], _mm512_and_si512(flip, _mm512_set1_epi8(1)));
    }
}

// The largest entry of each lane, in all of its dwords.
inline __m512 largest_of_lane(__m512 v) {
  v = _mm512_max_ps(v, _mm512_permute_ps(v, 0xb1));
  return _mm512_max_ps(v, _mm512_permute_ps(v, 0x4e));
}
inline __m512i sum_of_lane(__m512i v) {
  v = _mm512_add_epi32(v, _mm512_shuffle_epi32(v, static_cast<_MM_PERM_ENUM>(0xb1)));
  return _mm512_add_epi32(v, _mm512_shuffle_epi32(v, static_cast<_MM_PERM_ENUM>(0x4e)));
}

// Weights (one row, zeros behind the tile's tokens) times magnitudes of scales, in BYTES bytes.
template <Format F, int BYTES, int FOLD>
void pack_weights(const float* weights, const HeadBytes& head, const TileScales& scales,
                  const Flips& flips, WeightGroup* groups) {
  constexpr int kVectors = 4 / FOLD;
  constexpr float kRange = BYTES == 2 ? 65535 : 255;
  for (int g = 0; g < head.groups; ++g) {
    WeightGroup& group = groups[g];
    __m512 product[4 * kVectors];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < 4 * kVectors; ++i) {
      const __m512 weight =
          FOLD == 1
              ? _mm512_broadcast_f32x4(_mm_loadu_ps(weights + 4 * i))
              : _mm512_permutexvar_ps(_mm512_load_si512(head.weight_order),
                                      _mm512_castps256_ps512(_mm256_loadu_ps(weights + 8 * i)));
      product[i] = _mm512_mul_ps(weight, _mm512_load_ps(scales.scale[g][i]));
    }
    __m512 most[4];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < 4; ++i) {
      most[i] = product[i];
      CARAMBA_FAST_UNROLL
      for (int v = 1; v < kVectors; ++v) most[i] = _mm512_max_ps(most[i], product[4 * v + i]);
    }
    const __m512 largest = largest_of_lane(
        _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3])));
    const __mmask16 some = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(1e-30f), _CMP_GT_OQ);
    const __m512 inverse = _mm512_maskz_div_ps(some, _mm512_set1_ps(kRange), largest);
    _mm512_store_ps(group.scale,
                    _mm512_mul_ps(largest, _mm512_set1_ps(1 / kRange / kValueDivisor<F>)));
    // Of the offset: eights, and ones where scales are negative; of high bytes, and of low ones.
    __m512i eights[2], ones[2];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < 2; ++i) eights[i] = ones[i] = _mm512_setzero_si512();
    CARAMBA_FAST_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      __m512i code[4], bytes[2];
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < 4; ++i)
        code[i] = _mm512_cvtps_epi32(_mm512_mul_ps(product[4 * v + i], inverse));
      const __m512i a = _mm512_packus_epi32(code[0], code[1]);
      const __m512i b = _mm512_packus_epi32(code[2], code[3]);
      if constexpr (BYTES == 1) {
        bytes[0] = _mm512_packus_epi16(a, b);
      } else {
        const __m512i byte = _mm512_set1_epi16(255);
        bytes[0] = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
        bytes[1] = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
        _mm512_store_si512(group.low[v], bytes[1]);
      }
      _mm512_store_si512(group.high[v], bytes[0]);
      if constexpr (F == Format::q4_0) {
        const __m512i negative = _mm512_load_si512(flips.negative[g][v]);
        CARAMBA_FAST_UNROLL
        for (int i = 0; i < BYTES; ++i) {
          eights[i] = sum_of_products(eights[i], bytes[i], _mm512_set1_epi8(8));
          ones[i] = sum_of_products(ones[i], bytes[i], negative);
        }
      }
    }
    if constexpr (F == Format::q4_0) {
      __m512i eight = eights[0], one = ones[0];
      if constexpr (BYTES == 2) {
        eight = _mm512_add_epi32(_mm512_slli_epi32(eight, 8), eights[1]);
        one = _mm512_add_epi32(_mm512_slli_epi32(one, 8), ones[1]);
      }
      one = sum_of_lane(one);
      _mm512_store_si512(group.offset[0], _mm512_sub_epi32(sum_of_lane(eight), one));
      _mm512_store_si512(group.offset[1], _mm512_sub_epi32(_mm512_setzero_si512(), one));
    }
  }
}

// Half of the bytes of four tokens' unit, interleaved by token: vectors 2 HALF and 2 HALF + 1, of
// which each dword is one byte of the four.
template <int HALF>
inline void interleaved(const __m512i (&rows)[4], __m512i (&v)[2]) {
  const __m512i a =
      HALF ? _mm512_unpackhi_epi8(rows[0], rows[1]) : _mm512_unpacklo_epi8(rows[0], rows[1]);
  const __m512i b =
      HALF ? _mm512_unpackhi_epi8(rows[2], rows[3]) : _mm512_unpacklo_epi8(rows[2], rows[3]);
  v[0] = _mm512_unpacklo_epi16(a, b);
  v[1] = _mm512_unpackhi_epi16(a, b);
}

template <Format F>
inline constexpr int kHalfVectors = F == Format::q8_0 ? 2 : 4;  // of half a unit

// Half of a unit of four tokens: of q4_0 low nibbles, then whole bytes; of nf4 levels, high bytes
// and low ones.
template <Format F, int HALF>
struct ValueQuad {
  static constexpr int kVectors = kHalfVectors<F>;
  __m512i bytes[kVectors], lows[kVectors];

  inline __attribute__((always_inline)) void load(const __m512i (&rows)[4], __m512i flip) {
    __m512i v[2];
    interleaved<HALF>(rows, v);
    const __m512i nibble = _mm512_set1_epi8(15);
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < 2; ++i) {
      if constexpr (F == Format::q8_0) {
        bytes[i] = v[i];
      } else if constexpr (F == Format::q4_0) {
        bytes[2 * i + 1] = _mm512_xor_si512(v[i], flip);
        bytes[2 * i] = _mm512_and_si512(bytes[2 * i + 1], nibble);
      } else {
        bytes[2 * i] = _mm512_and_si512(v[i], nibble);
        bytes[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(v[i], 4), nibble);
      }
    }
    if constexpr (F == Format::nf4) {
      const __m512i highs = table_of(kLevelBytes.value_high),
                    below = table_of(kLevelBytes.value_low);
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        lows[i] = _mm512_shuffle_epi8(below, bytes[i]);
        bytes[i] = _mm512_shuffle_epi8(highs, bytes[i]);
      }
    }
  }
};

// One half of unit u, ROWS rows: integer sums over the tile, then added to to[r][...] in the order
// (vector, lane, dword). One plain loop over arrays of registers: compilers keep those in
// registers, and no others.
template <Format F, int BYTES, int ROWS, int HALF>
void value_half(const char* codes, std::int64_t stride, int count, const HeadBytes& head, int u,
                const WeightGroup* const (&weights)[ROWS], const Flips& flips,
                float* const (&to)[ROWS]) {
  constexpr int kVectors = kHalfVectors<F>;
  // Of high bytes, and of low ones: of the weights, or of nf4's levels.
  constexpr int kSums = BYTES == 2 || F == Format::nf4 ? 2 : 1;
  __m512i sums[ROWS][kVectors][kSums];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < kVectors; ++i) CARAMBA_FAST_UNROLL
  for (int s = 0; s < kSums; ++s) sums[r][i][s] = _mm512_setzero_si512();
  const std::uint8_t (&flip)[4][kUnit] = flips.flip[head.group_of[u]];
  for (int t = 0; t < count; t += 4) {
    const int quarter = t / 16;
    const __m512i spread = _mm512_load_si512(head.spread[u][t / 4 % 4]);
    __m512i rows[4];
    load_rows<HALF == 0>(codes, stride, t, count, head.words[u], rows);
    ValueQuad<F, HALF> quad;
    quad.load(rows, F == Format::q4_0
                        ? _mm512_permutexvar_epi32(spread, _mm512_load_si512(flip[quarter]))
                        : _mm512_setzero_si512());
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const __m512i high =
          _mm512_permutexvar_epi32(spread, _mm512_load_si512(weights[r]->high[quarter]));
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < kVectors; ++i)
        sums[r][i][0] = sum_of_products(sums[r][i][0], high, quad.bytes[i]);
      if constexpr (BYTES == 2) {
        const __m512i low =
            _mm512_permutexvar_epi32(spread, _mm512_load_si512(weights[r]->low[quarter]));
        CARAMBA_FAST_UNROLL
        for (int i = 0; i < kVectors; ++i)
          sums[r][i][1] = sum_of_products(sums[r][i][1], low, quad.bytes[i]);
      }
      // Where both sides have 16 bits the product of the two low bytes is left out: it shows where
      // weights are small beside the tile's largest, 1e-3 of their part at most.
      if constexpr (F == Format::nf4) CARAMBA_FAST_UNROLL
      for (int i = 0; i < kVectors; ++i)
        sums[r][i][1] = sum_of_products(sums[r][i][1], high, quad.lows[i]);
    }
  }
  const __m512i lanes = _mm512_load_si512(head.lanes[u]);
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const __m512 scale = _mm512_permutexvar_ps(lanes, _mm512_load_ps(weights[r]->scale));
    __m512i whole[kVectors];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      whole[i] = sums[r][i][0];
      if constexpr (kSums == 2 && !(F == Format::nf4 && BYTES == 2))
        whole[i] = _mm512_add_epi32(_mm512_slli_epi32(whole[i], 8), sums[r][i][1]);
    }
    if constexpr (F == Format::q4_0) CARAMBA_FAST_UNROLL
    for (int i = 0; i < kVectors; i += 2) {
      // Of bytes the low nibbles' sum is taken away; what is left is a multiple of 16.
      whole[i + 1] = _mm512_srai_epi32(_mm512_sub_epi32(whole[i + 1], whole[i]), 4);
      CARAMBA_FAST_UNROLL
      for (int k = 0; k < 2; ++k)
        whole[i + k] = _mm512_sub_epi32(
            whole[i + k],
            _mm512_permutexvar_epi32(lanes, _mm512_load_si512(weights[r]->offset[k])));
    }
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      __m512 sum = _mm512_cvtepi32_ps(whole[i]);
      if constexpr (F == Format::nf4 && BYTES == 2) {
        const __m512 unit = _mm512_set1_ps(256);
        sum = _mm512_fmadd_ps(sum, unit, _mm512_cvtepi32_ps(sums[r][i][kSums - 1]));
        sum = _mm512_mul_ps(sum, unit);
      }
      float* at = to[r] + (HALF * kVectors + i) * 16;
      _mm512_storeu_ps(at, _mm512_fmadd_ps(sum, scale, _mm512_loadu_ps(at)));
    }
  }
}

template <Format F, int BYTES, int ROWS>
void value_rows_int8(const WeightGroup* weights, const HeadBytes& head, const char* codes,
                     std::int64_t stride, const Flips& flips, int count, float* sums,
                     std::int64_t width) {
  constexpr int kUnitSums = 16 * 2 * kHalfVectors<F>;
  for (int u = 0; u < head.units; ++u) {
    const WeightGroup* mine[ROWS];
    float* to[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      mine[r] = weights + r * head.groups + head.group_of[u];
      to[r] = sums + r * width + u * kUnitSums;
    }
    const char* from = codes + u * kUnit;
    value_half<F, BYTES, ROWS, 0>(from, stride, count, head, u, mine, flips, to);
    value_half<F, BYTES, ROWS, 1>(from, stride, count, head, u, mine, flips, to);
  }
}

// Sums in the order of `value_half` for `rows` rows, `width` apart.
template <Format F, int BYTES>
void value_int8(const WeightGroup* weights, const HeadBytes& head, int rows, const char* codes,
                std::int64_t stride, const Flips& flips, int count, float* sums,
                std::int64_t width) {
  // 16 sums in registers
  constexpr int kMost = F == Format::q8_0 || (F == Format::q4_0 && BYTES == 1) ? 4 : 2;
  stride *= head.fold;
  count = (count + head.fold - 1) / head.fold;
  int r = 0;
  for (; r + kMost <= rows; r += kMost)
    value_rows_int8<F, BYTES, kMost>(weights + r * head.groups, head, codes, stride, flips, count,
                                     sums + r * width, width);
  if (kMost > 2 && r + 2 <= rows) {
    value_rows_int8<F, BYTES, 2>(weights + r * head.groups, head, codes, stride, flips, count,
                                 sums + r * width, width);
    r += 2;
  }
  if (r < rows)
    value_rows_int8<F, BYTES, 1>(weights + r * head.groups, head, codes, stride, flips, count,
                                 sums + r * width, width);
}

// Adds one row's sums in the order of `value_half` to those in the order of the values. The four
// dwords of a lane are four values beside each other.
inline void settle_unit_sums(const HeadBytes& head, const float* from, float* to) {
  for (int u = 0; u < head.units; ++u)
    for (int vector = 0; vector < 4 * head.nibbles; ++vector)
      for (int lane = 0; lane < kUnitLanes; ++lane, from += 4) {
        const int at = head.value[u][vector][4 * lane];
        if (at >= 0) _mm_storeu_ps(to + at, _mm_add_ps(_mm_loadu_ps(to + at), _mm_loadu_ps(from)));
      }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
