// Softmax weights as integers, for products with quantized values (values_int8.h): times the scales
// of the values, in one byte or two. Compiled once for each instruction set that has such products,
// in that set's namespace.
#pragma once

#include <cstdint>
#include <type_traits>

#include "half.h"
#include "int8_layout.h"
#include "numeric.h"
#include "query_int8.h"
#include "tile_scales.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// Weights times scales of one row and group of blocks as bytes, four tokens a dword: vector v,
// lane, dword i hold the tokens of quad 4 v + i times the scales of the lane's block.
struct alignas(64) WeightGroup {
  // One byte is in `high`. Where words meet (`kWords`), these are the even ones of four and the odd
  // ones.
  std::uint8_t high[4][kUnit], low[4][kUnit];
  float scale[kLanes];  // what undoes the bytes, by lane
  // Of q4_0: what the codes' offset adds to the sums of low nibbles and of high ones, by lane.
  std::int32_t offset[2][kLanes];
};

// Signs of the scales of a tile, in the same order. Codes are flipped where one is negative:
// s (u - 8) is |s| (u' - 7) then, of u' = 15 - u. Besides, with VNNI bytes become signed:
// lo + 16 (hi - 8).
struct alignas(64) Flips {
  std::uint8_t flip[kMostGroups][4][kUnit];      // 0x80 (0), inverted where negative
  std::uint8_t negative[kMostGroups][4][kUnit];  // 0, 1
};

// What a value's integer is divided by: levels of nf4 are integers up to kSixteenBits.
template <Format F>
inline constexpr float kValueDivisor = F == Format::nf4 ? kSixteenBits : 1;

// Signs of the scales into `flips`; the scales become magnitudes.
inline void take_signs(const HeadBytes& head, TileScales& scales, Flips& flips) {
  for (int g = 0; g < head.groups; ++g)
    for (int v = 0; v < 4; ++v) {
      Raw part[4];
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < 4; ++i) {
        float* scale = scales.scale[g][4 * v + i];
        const Ints whole = load_as<Ints>(scale);
        part[i] = reinterpret_cast<Raw>(whole);
        store_as(whole & kMagnitude, scale);
      }
      // Saturated to 0x7f and 0x80; zeros stay, their codes may be anything.
      const Raw sign = CARAMBA_FAST_MM(packs_epi16)(CARAMBA_FAST_MM(packs_epi32)(part[0], part[1]),
                                                    CARAMBA_FAST_MM(packs_epi32)(part[2], part[3]));
      const Raw flip = sign ^ CARAMBA_FAST_MM(set1_epi8)(kVnni ? -1 : 0x7f);
      store_as(flip, flips.flip[g][v]);
      store_as(flip & CARAMBA_FAST_MM(set1_epi8)(1), flips.negative[g][v]);
    }
}

// The largest entry of each lane, in all of its dwords.
inline Floats largest_of_lane(Floats v) {
  v = greater(v, CARAMBA_FAST_MM(permute_ps)(v, 0xb1));
  return greater(v, CARAMBA_FAST_MM(permute_ps)(v, 0x4e));
}
inline Raw sum_of_lane(Raw v) {
  const auto turned = [](Raw x, auto order) {
    return reinterpret_cast<Raw>(
        CARAMBA_FAST_MM(permute_ps)(reinterpret_cast<Floats>(x), decltype(order)::value));
  };
  v = CARAMBA_FAST_MM(add_epi32)(v, turned(v, std::integral_constant<int, 0xb1>{}));
  return CARAMBA_FAST_MM(add_epi32)(v, turned(v, std::integral_constant<int, 0x4e>{}));
}

// Codes of weights of four quads, by dword, as the even words of each four and the odd ones.
inline void words_of(Raw a, Raw b, Raw (&words)[2]) {
  const Raw order = in_all_lanes(_mm_set_epi32(0x0f0e0b0a, 0x0d0c0908, 0x07060302, 0x05040100));
  const auto x = reinterpret_cast<Floats>(CARAMBA_FAST_MM(shuffle_epi8)(a, order));
  const auto y = reinterpret_cast<Floats>(CARAMBA_FAST_MM(shuffle_epi8)(b, order));
  words[0] = reinterpret_cast<Raw>(CARAMBA_FAST_MM(shuffle_ps)(x, y, 0x88));
  words[1] = reinterpret_cast<Raw>(CARAMBA_FAST_MM(shuffle_ps)(x, y, 0xdd));
}

// Weights (one row, zeros behind the tile's tokens) times magnitudes of scales, in BYTES bytes; two
// bytes in words are signed.
template <Format F, int BYTES, int FOLD>
void pack_weights(const float* weights, const HeadBytes& head, const TileScales& scales,
                  const Flips& flips, WeightGroup* groups) {
  constexpr int kVectors = 4 / FOLD;
  constexpr float kRange = BYTES == 1 ? 255 : kWords<F> ? 32767 : 65535;
  for (int g = 0; g < head.groups; ++g) {
    WeightGroup& group = groups[g];
    Floats product[4 * kVectors];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < 4 * kVectors; ++i) {
      const Floats weight =
          FOLD == 1 ? in_all_lanes(_mm_loadu_ps(weights + 4 * i))
                    : permuted(head.weight_order, wide(_mm256_loadu_ps(weights + 8 * i)));
      product[i] = weight * load_as<Floats>(scales.scale[g][i]);
    }
    Floats most[4];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < 4; ++i) {
      most[i] = product[i];
      CARAMBA_FAST_UNROLL
      for (int v = 1; v < kVectors; ++v) most[i] = greater(most[i], product[4 * v + i]);
    }
    const Floats largest =
        largest_of_lane(greater(greater(most[0], most[1]), greater(most[2], most[3])));
    const Floats inverse = largest > splat(1e-30f) ? splat(kRange) / largest : Floats{};
    store_as(largest * (1 / kRange / kValueDivisor<F>), group.scale);
    // Of the offset: eights, and ones where scales are negative; of high bytes, and of low ones.
    Raw eights[2], ones[2];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < 2; ++i) eights[i] = ones[i] = Raw{};
    CARAMBA_FAST_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      Raw code[4], bytes[2];
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < 4; ++i)
        code[i] = CARAMBA_FAST_MM(cvtps_epi32)(product[4 * v + i] * inverse);
      const Raw a = CARAMBA_FAST_MM(packus_epi32)(code[0], code[1]);
      const Raw b = CARAMBA_FAST_MM(packus_epi32)(code[2], code[3]);
      if constexpr (kWords<F>) {
        words_of(a, b, bytes);
      } else if constexpr (BYTES == 1) {
        bytes[0] = CARAMBA_FAST_MM(packus_epi16)(a, b);
      } else {
        const Raw byte = CARAMBA_FAST_MM(set1_epi16)(255);
        bytes[0] = CARAMBA_FAST_MM(packus_epi16)(CARAMBA_FAST_MM(srli_epi16)(a, 8),
                                                 CARAMBA_FAST_MM(srli_epi16)(b, 8));
        bytes[1] = CARAMBA_FAST_MM(packus_epi16)(a & byte, b & byte);
      }
      store_as(bytes[0], group.high[v]);
      if constexpr (BYTES == 2 || kWords<F>) store_as(bytes[1], group.low[v]);
      if constexpr (F == Format::q4_0) {
        const Raw negative = load_as<Raw>(flips.negative[g][v]);
        CARAMBA_FAST_UNROLL
        for (int i = 0; i < BYTES; ++i) {
          eights[i] = sum_of_products(eights[i], bytes[i], CARAMBA_FAST_MM(set1_epi8)(8));
          ones[i] = sum_of_products(ones[i], bytes[i], negative);
        }
      }
    }
    if constexpr (F == Format::q4_0) {
      Raw eight = eights[0], one = ones[0];
      if constexpr (BYTES == 2) {
        eight = CARAMBA_FAST_MM(add_epi32)(CARAMBA_FAST_MM(slli_epi32)(eight, 8), eights[1]);
        one = CARAMBA_FAST_MM(add_epi32)(CARAMBA_FAST_MM(slli_epi32)(one, 8), ones[1]);
      }
      one = sum_of_lane(one);
      const Raw lower = CARAMBA_FAST_MM(sub_epi32)(sum_of_lane(eight), one);
      store_as(lower, group.offset[0]);
      store_as(kVnni ? CARAMBA_FAST_MM(sub_epi32)(Raw{}, one) : lower, group.offset[1]);
    }
  }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
