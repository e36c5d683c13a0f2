// The value pass over one quantized tile in products of bytes (values.h), if the machine sums four
// of them in a dword of 512 bits. A vector has 16 bytes of a block of four tokens, transposed so
// that a dword is one byte of each; the other factor is a dword of the four weights, times the
// scales of the block, in all lanes. Weights are 16-bit integers in two signed bytes, codes are
// unsigned; sums are in the order of the values. Included in isa_avx512_vnni.cpp alone, in that
// set's namespace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention_job.h"
#include "bytes.h"
#include "half.h"
#include "int8_layout.h"
#include "lane.h"
#include "numeric.h"
#include "prefetch.h"
#include "tile.h"
#include "visibility.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

inline constexpr float kMostWeight = 127 * 256;  // the most that rounds to two signed bytes
// The least that the largest integer of a block may be, lest weights lose too many bits.
inline constexpr int kFewestWeight = 2048;

// The order of scales and weights in vectors. A vector has four lanes for blocks and quads of
// tokens: four blocks of a quad, two of two quads, or one of four. More blocks form several groups.
struct WeightOrder {
  int blocks, lanes, groups;  // lanes: blocks of a vector

  explicit WeightOrder(int blocks)
      : blocks(blocks), lanes(blocks < 3 ? blocks : 4), groups((blocks + 3) / 4) {}
  int vectors() const { return 4 * lanes; }                      // per tile and group
  int step() const { return groups > 1 ? kMostBlocks : lanes; }  // of a token, padded
};

// Indexed by log2 of the step.
struct WeightPlaces {
  // Offsets of the weights of a quad and the group's first block (`WeightBytes`).
  std::int32_t weights[4][kQuads] = {};
  // Permutation of a vector of scales to the lanes of a group.
  alignas(64) std::uint16_t halves[4][kMostGroups][2 * kLanes] = {};

  constexpr WeightPlaces() {
    for (int i = 0; i < 4; ++i) {
      const int step = 1 << i, lanes = step > 4 ? 4 : step, quads = 4 / lanes;
      for (int quad = 0; quad < kQuads; ++quad) {
        const int vector = quad / quads, lane = quad % quads * lanes;
        weights[i][quad] = vector / 4 * kUnit + lane * kLaneBytes + vector % 4 * 4;
      }
      for (int g = 0; g < kMostGroups; ++g)
        for (int half = 0; half < 2 * kLanes; ++half) {
          const int lane = half % kLanes / 4, token = lane / lanes * 4 + half % 4;
          halves[i][g][half] = static_cast<std::uint16_t>(token * step + 4 * g + lane % lanes);
        }
    }
  }
  static constexpr int of(int step) { return step > 4 ? 3 : step / 2; }
};
inline constexpr WeightPlaces kWeightPlaces{};

// The weights of the tokens in vector i, by lane.
template <int LANES>
inline __m512 weights_at(const float* weights, int i) {
  if constexpr (LANES == 4) return _mm512_broadcast_f32x4(_mm_loadu_ps(weights + 4 * i));
  if constexpr (LANES == 1) return _mm512_loadu_ps(weights + 16 * i);
  const __m512 two = _mm512_castps256_ps512(_mm256_loadu_ps(weights + 8 * i));
  return _mm512_shuffle_f32x4(two, two, 0x50);
}

// The largest entry, or the sum, over all lanes of each block, in all of them.
template <int LANES>
inline __m512 largest_of_block(__m512 v) {
  v = _mm512_max_ps(v, _mm512_permute_ps(v, 0xb1));
  v = _mm512_max_ps(v, _mm512_permute_ps(v, 0x4e));
  if (LANES < 4) v = _mm512_max_ps(v, _mm512_shuffle_f32x4(v, v, 0x4e));
  return LANES > 1 ? v : _mm512_max_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1));
}
template <int LANES>
inline __m512i sum_of_block(__m512i v) {
  v = _mm512_add_epi32(v, _mm512_shuffle_epi32(v, _MM_PERM_CDAB));
  v = _mm512_add_epi32(v, _mm512_shuffle_epi32(v, _MM_PERM_BADC));
  if (LANES < 4) v = _mm512_add_epi32(v, _mm512_shuffle_i32x4(v, v, 0x4e));
  return LANES > 1 ? v : _mm512_add_epi32(v, _mm512_shuffle_i32x4(v, v, 0xb1));
}

// The factor that makes the largest number kMostWeight; 0 for 0.
inline __m512 inverse_of(__m512 largest) {
  const __mmask16 some = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(1e-30f), _CMP_GT_OQ);
  return _mm512_maskz_div_ps(some, _mm512_set1_ps(kMostWeight), largest);
}

// The scales of a tile in that order, as fp32; zeros past the last token.
struct BlockScales {
  alignas(64) float scale[kMostGroups][kQuads][kLanes];
  // The divisors of divided scales, by block, in units of a weight.
  alignas(64) float unit[kMostGroups][kLanes];
  bool finite;

  // With `divide` the scales of a block are divided so that the largest becomes kMostWeight. Tokens
  // outside the mask `seen` count as zeros.
  void widen(const char* from, std::int64_t stride, const WeightOrder& order, int count,
             bool divide, std::uint64_t seen) {
    for (std::int64_t i = 0; i < stride * kTile; i += kLine)
      __builtin_prefetch(from + ahead_of(stride) + i, 0, 3);
    const int step = order.step();
    if (stride != 2 * step || order.blocks != step || seen != mask_of_first(count)) {
      std::memset(tokens_, 0, sizeof tokens_);
      for (int t = 0; t < count; ++t)
        if (seen >> t & 1)
          std::memcpy(tokens_ + t * step, from + t * stride,
                      2 * static_cast<std::size_t>(order.blocks));
      from = reinterpret_cast<const char*>(tokens_);
    }
    const auto& places = kWeightPlaces.halves[WeightPlaces::of(step)];
    const int halves = order.groups > 1 ? 32 : 16, there = count * step;  // of a vector, in all
    __m512i most = _mm512_setzero_si512();
    __m512 largest[kMostGroups];
    for (__m512& group : largest) group = _mm512_setzero_ps();
    for (int i = 0; i < order.vectors(); ++i) {
      const int left = std::clamp(there - halves * i, 0, halves);
      const auto mask = static_cast<__mmask32>((std::uint64_t{1} << left) - 1);
      const __m512i raw = _mm512_maskz_loadu_epi16(mask, from + 2 * halves * i);
      most = _mm512_max_epu16(most, _mm512_and_si512(raw, _mm512_set1_epi16(0x7fff)));
      CARAMBA_FAST_UNROLL
      for (int g = 0; g < kMostGroups; ++g) {
        if (g >= order.groups) break;
        const __m512i mine = _mm512_permutexvar_epi16(_mm512_load_si512(places[g]), raw);
        const __m512 wide = _mm512_cvtph_ps(_mm512_castsi512_si256(mine));
        largest[g] = _mm512_range_ps(largest[g], wide, 0x0b);  // the larger magnitude
        _mm512_store_ps(scale[g][i], wide);
      }
    }
    finite = _mm512_cmpgt_epu16_mask(most, _mm512_set1_epi16(0x7bff)) == 0;
    if (!divide) return;
    for (int g = 0; g < order.groups; ++g) {
      const __m512 all = order.lanes == 4   ? largest_of_block<4>(largest[g])
                         : order.lanes == 2 ? largest_of_block<2>(largest[g])
                                            : largest_of_block<1>(largest[g]);
      const __m512 inverse = inverse_of(all);
      _mm512_store_ps(unit[g], _mm512_mul_ps(all, _mm512_set1_ps(1 / kMostWeight)));
      for (int i = 0; i < order.vectors(); ++i)
        _mm512_store_ps(scale[g][i], _mm512_mul_ps(_mm512_load_ps(scale[g][i]), inverse));
    }
  }

 private:
  alignas(64) std::uint16_t tokens_[kTile * kMostBlocks];
};

// Weights of one row times the scales of a group of blocks, and their sums.
struct alignas(64) WeightBytes {
  std::int8_t high[kQuads / 4][kUnit], low[kQuads / 4][kUnit];
  float step[kLanes];  // of the integers, by lane
  std::int32_t high_sum[kLanes], low_sum[kLanes];
};

// The upper of two signed bytes.
inline __m512i upper_bytes(__m512i x) {
  return _mm512_srai_epi16(_mm512_add_epi16(x, _mm512_set1_epi16(128)), 8);
}
inline __m512i of_bytes(__m512i upper, __m512i lower) {
  return _mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower);
}

// Weights of a row times scales as integers, relative to the largest product for 8-bit values,
// which need all 16 bits, else to `peak`, the largest weight, times the largest scale
// (`BlockScales::unit`). If those two are of different tokens, such as a sink with values near 0,
// integers may get small; then relative to the largest product too.
template <int LANES, bool EXACT>
void pack_weights(const float* weights, float peak, const BlockScales& scales, int group,
                  WeightBytes& to) {
  __m512i codes[4 * LANES];
  // `unit` is the divisor of the scales.
  const auto of_products = [&](__m512 unit) {
    __m512 product[4 * LANES], most[4];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < 4 * LANES; ++i)
      product[i] =
          _mm512_mul_ps(weights_at<LANES>(weights, i), _mm512_load_ps(scales.scale[group][i]));
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < 4; ++i) {
      most[i] = _mm512_setzero_ps();
      CARAMBA_FAST_UNROLL
      for (int v = 0; v < LANES; ++v)
        most[i] = _mm512_range_ps(most[i], product[4 * v + i], 0x0b);  // the larger magnitude
    }
    const __m512 largest = largest_of_block<LANES>(
        _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3])));
    const __m512 inverse = inverse_of(largest);
    _mm512_store_ps(to.step,
                    _mm512_mul_ps(_mm512_mul_ps(largest, _mm512_set1_ps(1 / kMostWeight)), unit));
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < 4 * LANES; ++i)
      codes[i] = _mm512_cvtps_epi32(_mm512_mul_ps(product[i], inverse));
  };
  // Splits codes into bytes and sums them; returns the largest upper bytes.
  const auto pack = [&] {
    const __m512i ones = _mm512_set1_epi8(1), byte = _mm512_set1_epi16(255);
    __m512i high_sum = _mm512_setzero_si512(), low_sum = _mm512_setzero_si512();
    __m512i most = _mm512_setzero_si512();
    CARAMBA_FAST_UNROLL
    for (int v = 0; v < LANES; ++v) {
      const __m512i a = _mm512_packs_epi32(codes[4 * v], codes[4 * v + 1]);
      const __m512i b = _mm512_packs_epi32(codes[4 * v + 2], codes[4 * v + 3]);
      const __m512i high = _mm512_packs_epi16(upper_bytes(a), upper_bytes(b));
      const __m512i low = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
      _mm512_store_si512(to.high[v], high);
      _mm512_store_si512(to.low[v], low);
      high_sum = sum_of_products(high_sum, ones, high);
      low_sum = sum_of_products(low_sum, ones, low);
      if constexpr (!EXACT) most = _mm512_max_epi8(most, _mm512_abs_epi8(high));
    }
    store_as(sum_of_block<LANES>(high_sum), to.high_sum);
    store_as(sum_of_block<LANES>(low_sum), to.low_sum);
    return most;
  };
  if constexpr (EXACT) {
    of_products(_mm512_set1_ps(1));
    pack();
  } else {
    alignas(64) float shares[kTile];
    const __m512 inverse = _mm512_set1_ps(peak > 1e-30f ? 1 / peak : 0);
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < kTile; i += kLanes)
      _mm512_store_ps(shares + i, _mm512_mul_ps(_mm512_loadu_ps(weights + i), inverse));
    const __m512 unit = _mm512_load_ps(scales.unit[group]);
    _mm512_store_ps(to.step, _mm512_mul_ps(unit, _mm512_set1_ps(peak)));
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < 4 * LANES; ++i)
      codes[i] = _mm512_cvtps_epi32(
          _mm512_mul_ps(weights_at<LANES>(shares, i), _mm512_load_ps(scales.scale[group][i])));
    // Blocks with a large enough integer, as masks of lanes, and empty ones or ones with scales 0.
    const unsigned empty = _mm512_cmp_ps_mask(unit, _mm512_setzero_ps(), _CMP_EQ_OQ);
    std::uint64_t filled =
        _mm512_cmpge_epi8_mask(pack(), _mm512_set1_epi8(static_cast<char>(kFewestWeight >> 8)));
    if (LANES < 4) filled |= filled >> 32;
    if (LANES < 2) filled |= filled >> 16;
    bool all = true;
    CARAMBA_FAST_UNROLL
    for (int lane = 0; lane < LANES; ++lane)
      all = all && ((filled >> 16 * lane & 0xffff) != 0 || (empty >> 4 * lane & 0xf) != 0);
    if (!all && peak > 1e-30f) {
      of_products(unit);
      pack();
    }
  }
}

// 16 bytes of each of four tokens; dword i has byte i of the four.
inline __m512i turned_bytes(const char* a, const char* b, const char* c, const char* d) {
  const auto load = [](const char* at) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  };
  __m512i v = _mm512_castsi128_si512(load(a));
  v = _mm512_inserti32x4(v, load(b), 1);
  v = _mm512_inserti32x4(v, load(c), 2);
  v = _mm512_inserti32x4(v, load(d), 3);
  const __m512i dwords = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  const __m512i bytes =
      _mm512_broadcast_i32x4(_mm_set_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400));
  return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(dwords, v), bytes);
}

// 16 bytes of 4-bit codes, or 32 of 8-bit ones, of four tokens, transposed.
template <Format F>
inline void turn_quad(const char* a, const char* b, const char* c, const char* d,
                      __m512i (&codes)[2]) {
  codes[0] = turned_bytes(a, b, c, d);
  if constexpr (F == Format::q8_0) {
    codes[1] = turned_bytes(a + kLaneBytes, b + kLaneBytes, c + kLaneBytes, d + kLaneBytes);
    for (__m512i& code : codes) code = _mm512_xor_si512(code, _mm512_set1_epi8(-128));
  }
}

// The lines that 16 bytes of 4-bit codes, or 32 of 8-bit ones, of four tokens are.
template <Format F>
inline constexpr int kQuadLines = F == Format::q8_0 ? 2 : 1;

// Calls add(quad, codes) for the quads of a tile's tokens; past the end the last token is repeated,
// with weight 0.
template <Format F, class Add>
inline void for_each_quad(const char* codes, std::int64_t stride, int count, const Add& add) {
  const auto visit = [&](int quad, const char* a, const char* b, const char* c, const char* d) {
    __m512i turned[2];
    turn_quad<F>(a, b, c, d, turned);
    add(quad, turned);
  };
  int t = 0;
  for (; t + 4 <= count; t += 4, codes += 4 * stride)
    visit(t / 4, codes, codes + stride, codes + 2 * stride, codes + 3 * stride);
  if (t == count) return;
  const char* last = codes + (count - 1 - t) * stride;
  visit(t / 4, codes, std::min(codes + stride, last), std::min(codes + 2 * stride, last), last);
}

// Stores the transposed codes of a tile's tokens.
template <Format F>
CARAMBA_FAST_NOINLINE void turn_values(const char* codes, std::int64_t stride, int count,
                                       char* to) {
  for_each_quad<F>(codes, stride, count, [&to](int, const __m512i(&turned)[2]) {
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < kQuadLines<F>; ++i, to += kLine) _mm512_store_si512(to, turned[i]);
  });
}

// The codes of `block` values of a tile's tokens, and their weights.
struct ValueBlock {
  const char* codes;           // of the first token, or of all tokens transposed
  std::int64_t stride, width;  // of codes in bytes, of sums
  int count;
  const WeightOrder& order;
  const WeightBytes* weights;  // of the first row, `groups` apart
  int lane;                    // of the block
  const char* next;            // prefetched, a line per step
};

// sums[r] += weights times 32 values of each token, for ROWS rows: 16 bytes of 4-bit codes, with
// low codes to `sums` and high ones `apart` later, or 32 bytes of 8-bit codes. TURNED: by
// `turn_values`.
template <Format F, int ROWS, bool TURNED>
CARAMBA_FAST_NOINLINE void add_block(const ValueBlock& block, float* sums, int apart) {
  // Sums of both bytes of the weights; for nf4 of high bytes, and of mixed ones.
  __m512i high[ROWS][2], low[ROWS][2];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < 2; ++i) high[r][i] = low[r][i] = _mm512_setzero_si512();
  const std::int64_t row = static_cast<std::int64_t>(sizeof(WeightBytes)) * block.order.groups;
  const char* next = block.next;
  const char* weights =
      reinterpret_cast<const char*>(block.weights->high[0]) + block.lane * kLaneBytes;
  const std::int32_t* places = kWeightPlaces.weights[WeightPlaces::of(block.order.step())];
  // Levels of nf4 as unsigned 16-bit integers around 32768, in two bytes.
  [[maybe_unused]] const __m512i level_high = table_of(kLevelBytes.high);
  [[maybe_unused]] const __m512i level_low = table_of(kLevelBytes.low);
  const auto add = [&](int quad, const __m512i(&turned)[2]) {
    const char* at = weights + places[quad];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < kQuadLines<F>; ++i, next += kLine) __builtin_prefetch(next, 0, 3);
    __m512i codes[2] = {turned[0], turned[1]}, lows[2];
    if constexpr (F != Format::q8_0) {  // q4_0: high codes as whole bytes, 16 times them plus the
                                        // low ones
      const __m512i nibble = _mm512_set1_epi8(15);
      codes[1] =
          F == Format::nf4 ? _mm512_and_si512(_mm512_srli_epi16(codes[0], 4), nibble) : codes[0];
      codes[0] = _mm512_and_si512(codes[0], nibble);
      if constexpr (F == Format::nf4) CARAMBA_FAST_UNROLL
      for (int i = 0; i < 2; ++i) {
        lows[i] = _mm512_shuffle_epi8(level_low, codes[i]);
        codes[i] = _mm512_shuffle_epi8(level_high, codes[i]);
      }
    }
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const char* from = at + r * row;
      __m512i upper = _mm512_set1_epi32(load_as<std::int32_t>(from));
      asm("" : "+v"(upper));
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < 2; ++i) {
        high[r][i] = sum_of_products(high[r][i], codes[i], upper);
        // For nf4 products of two low bytes are left out, except the middle of the levels' bytes.
        if constexpr (F == Format::nf4) low[r][i] = sum_of_products(low[r][i], lows[i], upper);
      }
      __m512i lower = _mm512_set1_epi32(load_as<std::int32_t>(from + sizeof block.weights->high));
      asm("" : "+v"(lower));
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < 2; ++i) low[r][i] = sum_of_products(low[r][i], codes[i], lower);
    }
  };
  if constexpr (TURNED) {
    const char* turned = block.codes;
    for (int quad = 0; 4 * quad < block.count; ++quad, turned += kQuadLines<F> * kLine)
      add(quad,
          {_mm512_load_si512(turned), _mm512_load_si512(turned + (kQuadLines<F> - 1) * kLine)});
  } else {
    for_each_quad<F>(block.codes, block.stride, block.count, add);
  }
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const WeightBytes& mine = block.weights[r * block.order.groups];
    const int lane = 4 * block.lane;
    const __m512i high_sum = _mm512_set1_epi32(mine.high_sum[lane]);
    const __m512i low_sum = _mm512_set1_epi32(mine.low_sum[lane]);
    const __m512 step = _mm512_set1_ps(mine.step[lane]);
    float* to = sums + r * block.width;
    __m512 found[2];
    if constexpr (F == Format::nf4) {
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < 2; ++i) {
        const __m512i a = _mm512_sub_epi32(high[r][i], _mm512_slli_epi32(high_sum, 7));
        const __m512i b = _mm512_sub_epi32(low[r][i], _mm512_slli_epi32(low_sum, 7));
        const __m512 middle = _mm512_mul_ps(_mm512_cvtepi32_ps(low_sum), _mm512_set1_ps(128));
        const __m512 lower = _mm512_fmadd_ps(_mm512_cvtepi32_ps(b), _mm512_set1_ps(256), middle);
        found[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(a), _mm512_set1_ps(65536), lower);
      }
    } else {
      __m512i sum[2] = {of_bytes(high[r][0], low[r][0]), of_bytes(high[r][1], low[r][1])};
      if constexpr (F == Format::q4_0)
        sum[1] = _mm512_srai_epi32(_mm512_sub_epi32(sum[1], sum[0]), 4);
      const __m512i offset =
          _mm512_slli_epi32(of_bytes(high_sum, low_sum), F == Format::q8_0 ? 7 : 3);
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < 2; ++i) found[i] = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum[i], offset));
    }
    const __m512 unit = F == Format::nf4 ? _mm512_mul_ps(step, _mm512_set1_ps(1 / 32767.0f)) : step;
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < 2; ++i) {
      float* at = to + i * apart;
      _mm512_storeu_ps(at, _mm512_fmadd_ps(found[i], unit, _mm512_loadu_ps(at)));
    }
  }
}

inline constexpr int kValueRows = 4;  // rows multiplied with a vector of codes in a register

using AddBlock = void (*)(const ValueBlock& block, float* sums, int apart);
template <Format F, bool TURNED>
inline constexpr AddBlock kAddBlock[kValueRows] = {add_block<F, 1, TURNED>, add_block<F, 2, TURNED>,
                                                   add_block<F, 3, TURNED>,
                                                   add_block<F, 4, TURNED>};
using PackWeights = void (*)(const float* weights, float peak, const BlockScales& scales, int group,
                             WeightBytes& to);
template <bool EXACT>
inline constexpr PackWeights kPackWeights[3] = {pack_weights<1, EXACT>, pack_weights<2, EXACT>,
                                                pack_weights<4, EXACT>};

// Scratch for one tile of values and some rows.
struct ValueScratch {
  BlockScales scales;
  WeightBytes weights[kValueRows * kMostGroups];
  alignas(64) char codes[kTile * kMostUnits * kUnit];  // transposed
};

// sums (rows, head.width) += weights (rows, kScoreRow) times the values of a tile; `peaks` (rows)
// are the largest weights. Returns false, adding nothing, if some scale is not finite.
template <Format F>
bool add_values_bytes(const Lane& lane, const HeadStream& head, const TileData& data, int count,
                      const Visibility& visibility, const float* weights, const float* peaks,
                      ValueScratch& scratch, float* sums) {
  constexpr int kBits = F == Format::q8_0 ? 8 : 4;
  constexpr bool kDivides = F != Format::q8_0;
  const WeightOrder order(head.blocks);
  std::uint64_t seen = mask_of_first(count);
  const auto widen = [&] {
    scratch.scales.widen(data.scales, data.scales_stride, order, count, kDivides, seen);
  };
  widen();
  if (!scratch.scales.finite) return false;
  const int rows = lane.query_rows;
  const PackWeights pack = kPackWeights<F == Format::q8_0>[order.lanes / 2];
  const int block = head.stored->block, bytes = block * kBits / 8;
  constexpr int kStep = kBits == 8 ? 2 * kLaneBytes : kLaneBytes;
  // Each head prefetches its share of the lane's next tile.
  const char* next = data.values + ahead_of(data.stride) + (kTile - 1) * head.first * kBits / 8;
  const bool turned = rows > kValueRows;  // transposed once for all rows
  for (std::int64_t byte = 0; turned && byte < head.blocks * bytes; byte += kStep)
    turn_values<F>(data.values + byte, data.stride, count, scratch.codes + byte * kTile);
  const AddBlock* add = turned ? kAddBlock<F, true> : kAddBlock<F, false>;
  for (int first = 0; first < rows; first += kValueRows) {
    const int some = std::min(rows - first, kValueRows);
    for (int r = 0; r < some; ++r) {
      // Tokens that a query does not see must not change its bits, so they do not count for the
      // largest scale.
      const int token = lane.query_token(first + r);
      if (kDivides && !visibility.whole && visibility.seen[token] != seen) {
        seen = visibility.seen[token];
        widen();
      }
      for (int g = 0; g < order.groups; ++g)
        pack(weights + (first + r) * kScoreRow, peaks[first + r], scratch.scales, g,
             scratch.weights[r * order.groups + g]);
    }
    for (int b = 0; b < head.blocks; ++b) {
      ValueBlock mine = {(turned ? scratch.codes : data.values) + b * bytes * (turned ? kTile : 1),
                         data.stride,
                         head.width,
                         count,
                         order,
                         scratch.weights + b / 4,
                         b % 4,
                         (first == 0 ? next : scratch.codes) + b * bytes * kTile};
      float* to = sums + first * head.width + b * block;
      for (int byte = 0; byte < bytes; byte += kStep) {
        add[some - 1](mine, to + byte, kBits == 8 ? kLanes : block / 2);
        mine.codes += kStep * (turned ? kTile : 1);
        mine.next += kStep * kTile;
      }
    }
  }
  return true;
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
