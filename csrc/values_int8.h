// The value pass over one quantized tile in products of integers (int8_layout.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "int8_layout.h"
#include "query_int8.h"
#include "weights_int8.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// Half of the bytes of four tokens' unit, interleaved by token: vectors 2 HALF and 2 HALF + 1, of
// which each dword is one byte of the four.
template <int HALF>
inline void interleaved(const Raw (&rows)[4], Raw (&v)[2]) {
  const Raw a = HALF ? CARAMBA_FAST_MM(unpackhi_epi8)(rows[0], rows[1])
                     : CARAMBA_FAST_MM(unpacklo_epi8)(rows[0], rows[1]);
  const Raw b = HALF ? CARAMBA_FAST_MM(unpackhi_epi8)(rows[2], rows[3])
                     : CARAMBA_FAST_MM(unpacklo_epi8)(rows[2], rows[3]);
  v[0] = CARAMBA_FAST_MM(unpacklo_epi16)(a, b);
  v[1] = CARAMBA_FAST_MM(unpackhi_epi16)(a, b);
}

template <Format F>
inline constexpr int kHalfVectors = F == Format::q8_0 ? 2 : 4;  // of half a unit
// Of high bytes, and of low ones: of the weights, or of nf4's levels.
template <Format F, int BYTES>
inline constexpr int kValueSums = !kWords<F> && (BYTES == 2 || F == Format::nf4) ? 2 : 1;

// Half of a unit of four tokens: of q4_0 low nibbles, then whole bytes (without VNNI high nibbles);
// of nf4 levels, high bytes and low ones. As words the even tokens' are in `bytes`, the odd ones'
// in `lows`.
template <Format F, int HALF>
struct ValueQuad {
  static constexpr int kVectors = kHalfVectors<F>;
  Raw bytes[kVectors], lows[kVectors];

  inline __attribute__((always_inline)) void load(const Raw (&rows)[4], Raw flip) {
    Raw v[2];
    interleaved<HALF>(rows, v);
    const Raw nibble = CARAMBA_FAST_MM(set1_epi8)(15);
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < 2; ++i) {
      if constexpr (F == Format::q8_0) {
        bytes[i] = v[i];
        if constexpr (kWords<F>) {
          bytes[i] = CARAMBA_FAST_MM(srai_epi16)(CARAMBA_FAST_MM(slli_epi16)(v[i], 8), 8);
          lows[i] = CARAMBA_FAST_MM(srai_epi16)(v[i], 8);
        }
      } else if constexpr (F == Format::q4_0) {
        const Raw whole = v[i] ^ flip;
        bytes[2 * i] = whole & nibble;
        bytes[2 * i + 1] = kVnni ? whole : CARAMBA_FAST_MM(srli_epi16)(whole, 4) & nibble;
      } else {
        bytes[2 * i] = v[i] & nibble;
        bytes[2 * i + 1] = CARAMBA_FAST_MM(srli_epi16)(v[i], 4) & nibble;
      }
    }
    if constexpr (F == Format::nf4) {
      const Raw highs = table_of(kLevelBytes.value_high), below = table_of(kLevelBytes.value_low);
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        const Raw low = CARAMBA_FAST_MM(shuffle_epi8)(below, bytes[i]);
        const Raw high = CARAMBA_FAST_MM(shuffle_epi8)(highs, bytes[i]);
        bytes[i] = kWords<F> ? even_words(low, high) : high;
        lows[i] = kWords<F> ? odd_words(low, high) : low;
      }
    }
  }
};

// A unit of a tile.
struct ValueUnit {
  const char* codes;
  std::int64_t stride;
  int count;
  const HeadBytes& head;
  int u;
  const Flips& flips;
};

// Half of it, by the first token of a quad.
template <Format F, int HALF>
class ReadQuads {
 public:
  explicit ReadQuads(const ValueUnit& unit)
      : codes_(unit.codes),
        stride_(unit.stride),
        count_(unit.count),
        words_(unit.head.words[unit.u]),
        spread_(unit.head.spread[unit.u]),
        flip_(unit.flips.flip[unit.head.group_of[unit.u]]) {}

  inline __attribute__((always_inline)) ValueQuad<F, HALF> operator()(int t) const {
    Raw rows[4], flip{};
    load_rows<HALF == 0>(codes_, stride_, t, count_, words_, rows);
    if constexpr (F == Format::q4_0)
      flip = permuted(spread_[t / 4 % 4], load_as<Raw>(flip_[t / 16]));
    ValueQuad<F, HALF> quad;
    quad.load(rows, flip);
    return quad;
  }

 private:
  const char* codes_;
  const std::int64_t stride_;
  const int count_;
  const Words words_;
  const std::int32_t (*spread_)[kLanes];
  const std::uint8_t (*flip_)[kUnit];
};

// The same, unpacked before.
template <Format F, int HALF>
struct KeptQuads {
  ValueQuad<F, HALF> quads[kQuads];

  explicit KeptQuads(const ValueUnit& unit) {
    const ReadQuads<F, HALF> read(unit);
    for (int t = 0; t < unit.count; t += 4) quads[t / 4] = read(t);
  }
  const ValueQuad<F, HALF>& operator()(int t) const { return quads[t / 4]; }
};

// One half of unit u, ROWS rows: integer sums over the tile, then added to to[r][...] in the order
// (vector, lane, dword). One plain loop over arrays of registers: compilers keep those in
// registers, and no others.
template <Format F, int BYTES, int ROWS, int HALF, class Quads>
CARAMBA_FAST_NOINLINE void value_half(const Quads& quads, int count, const HeadBytes& head, int u,
                                      const WeightGroup* const (&weights)[ROWS],
                                      float* const (&to)[ROWS]) {
  constexpr int kVectors = kHalfVectors<F>, kSums = kValueSums<F, BYTES>;
  constexpr bool kWide = F == Format::nf4 && BYTES == 2;
  constexpr bool kNarrow = !kVnni && F == Format::q4_0;  // sums are of words at first
  Raw sums[ROWS][kVectors][kSums], whole_tile[kNarrow ? ROWS : 1][kVectors][kSums];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < kVectors; ++i) CARAMBA_FAST_UNROLL
  for (int s = 0; s < kSums; ++s) {
    sums[r][i][s] = Raw{};
    if constexpr (kNarrow) whole_tile[r][i][s] = Raw{};
  }
  for (int t = 0; t < count; t += 4) {
    const int quarter = t / 16;
    const std::int32_t* spread = head.spread[u][t / 4 % 4];
    const ValueQuad<F, HALF>& quad = quads(t);
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const Raw high = permuted(spread, load_as<Raw>(weights[r]->high[quarter]));
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        Raw& sum = sums[r][i][0];
        if constexpr (kWords<F>)
          sum = sum_of_words<kWide>(sum, high, quad.bytes[i]);
        else
          sum = narrow_products(sum, high, quad.bytes[i]);
      }
      if constexpr (BYTES == 2 || kWords<F>) {
        const Raw low = permuted(spread, load_as<Raw>(weights[r]->low[quarter]));
        CARAMBA_FAST_UNROLL
        for (int i = 0; i < kVectors; ++i) {
          Raw& sum = sums[r][i][kSums - 1];
          if constexpr (kWords<F>)
            sum = sum_of_words<kWide>(sum, low, quad.lows[i]);
          else
            sum = narrow_products(sum, low, quad.bytes[i]);
        }
      }
      // Where both sides have 16 bits the product of the two low bytes is left out: it shows where
      // weights are small beside the tile's largest, 1e-3 of their part at most.
      if constexpr (F == Format::nf4 && !kWords<F>) CARAMBA_FAST_UNROLL
      for (int i = 0; i < kVectors; ++i)
        sums[r][i][1] = sum_of_products(sums[r][i][1], high, quad.lows[i]);
    }
    if constexpr (kNarrow)
      if (t / 4 % kNarrowSums == kNarrowSums - 1 || t + 4 >= count) CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
    for (int i = 0; i < kVectors; ++i) CARAMBA_FAST_UNROLL
    for (int s = 0; s < kSums; ++s) {
      Raw& whole = whole_tile[r][i][s];
      whole = CARAMBA_FAST_MM(add_epi32)(whole, whole_sums(sums[r][i][s]));
      sums[r][i][s] = Raw{};
    }
  }
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const Floats scale = permuted(head.lanes[u], load_as<Floats>(weights[r]->scale));
    Raw whole[kVectors];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kNarrow) CARAMBA_FAST_UNROLL
      for (int s = 0; s < kSums; ++s) sums[r][i][s] = whole_tile[r][i][s];
      whole[i] = sums[r][i][0];
      if constexpr (kSums == 2 && !kWide)
        whole[i] =
            CARAMBA_FAST_MM(add_epi32)(CARAMBA_FAST_MM(slli_epi32)(whole[i], 8), sums[r][i][1]);
    }
    if constexpr (F == Format::q4_0) CARAMBA_FAST_UNROLL
    for (int i = 0; i < kVectors; i += 2) {
      // Of bytes the low nibbles' sum is taken away; what is left is a multiple of 16.
      if constexpr (kVnni)
        whole[i + 1] =
            CARAMBA_FAST_MM(srai_epi32)(CARAMBA_FAST_MM(sub_epi32)(whole[i + 1], whole[i]), 4);
      CARAMBA_FAST_UNROLL
      for (int k = 0; k < 2; ++k)
        whole[i + k] = CARAMBA_FAST_MM(sub_epi32)(
            whole[i + k], permuted(head.lanes[u], load_as<Raw>(weights[r]->offset[k])));
    }
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      Floats sum = CARAMBA_FAST_MM(cvtepi32_ps)(whole[i]);
      if constexpr (kWide && !kWords<F>)
        sum = fused(sum, splat(256.0f), CARAMBA_FAST_MM(cvtepi32_ps)(sums[r][i][kSums - 1]));
      if constexpr (kWide) sum = sum * 256.0f;
      float* at = to[r] + (HALF * kVectors + i) * kLanes;
      store_as(fused(sum, scale, load_as<Floats>(at)), at);
    }
  }
}

// Query rows whose weights are packed: which they are, and where the sums of all rows begin.
struct WeightRows {
  const WeightGroup* weights;
  int rows;
  const int* row;
  float* sums;
  std::int64_t width;
};

// The same for any number of rows. But for AVX-512 VNNI a tile is unpacked once,
// for that takes longer.
template <Format F, int BYTES, int HALF>
void value_half_rows(const ValueUnit& unit, const WeightRows& all) {
  const std::conditional_t<kWordCodes, KeptQuads<F, HALF>, ReadQuads<F, HALF>> quads(unit);
  const auto run = [&](auto step, int first) {
    constexpr int kRows = decltype(step)::value;
    const WeightGroup* mine[kRows];
    float* to[kRows];
    for (int r = 0; r < kRows; ++r) {
      mine[r] = all.weights + (first + r) * unit.head.groups + unit.head.group_of[unit.u];
      to[r] = all.sums + all.row[first + r] * all.width + unit.u * 2 * kHalfVectors<F> * kLanes;
    }
    value_half<F, BYTES, kRows, HALF>(quads, unit.count, unit.head, unit.u, mine, to);
  };
  // Half of the registers have sums.
  constexpr int kMost = std::min(4, kRegisters / 2 / (kHalfVectors<F> * kValueSums<F, BYTES>));
  int r = 0;
  for (; r + kMost <= all.rows; r += kMost) run(std::integral_constant<int, kMost>{}, r);
  if (kMost > 2 && r + 2 <= all.rows) {
    run(std::integral_constant<int, 2>{}, r);
    r += 2;
  }
  if (r < all.rows) run(std::integral_constant<int, 1>{}, r);
}

// Sums in the order of `value_half`.
template <Format F, int BYTES>
void value_int8(const WeightRows& rows, const HeadBytes& head, const char* codes,
                std::int64_t stride, const Flips& flips, int count) {
  stride *= head.fold;
  count = (count + head.fold - 1) / head.fold;
  for (int u = 0; u < head.units; ++u) {
    const ValueUnit unit = {codes + u * kUnit, stride, count, head, u, flips};
    value_half_rows<F, BYTES, 0>(unit, rows);
    value_half_rows<F, BYTES, 1>(unit, rows);
  }
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
