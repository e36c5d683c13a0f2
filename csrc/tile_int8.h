// The score pass and the value pass over one quantized tile in integer products of bytes (AVX-512
// VNNI's vpdpbusd: 16 sums of four u8 * s8). Queries become 16-bit integers, weights of values
// 8-bit (4-bit formats) or 16-bit (q8_0) ones, cut into bytes; scales are applied after the sums.
//
// A token's bytes are taken in units of 64, a unit in four lanes of 16; a block's bytes never share
// a lane with another's. Included in isa_avx512_vnni.cpp alone, in that set's namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "attention.h"
#include "numeric.h"
#include "tile_float.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

inline constexpr int kUnit = 64, kUnitLanes = 4, kLaneBytes = 16;
inline constexpr int kMostUnits = 4;                   // 256 values of q8_0
inline constexpr int kMostBlocks = 8;                  // 256 values in blocks of 32
inline constexpr float kQueryRange = 127 * 256 + 127;  // in two signed bytes

// What is stored of one head: its blocks, as bytes of a token. Worked out once for each layout
// (`head_bytes`).
struct HeadBytes {
  int bits, block, blocks, units, nibbles, lanes_per_block;
  // The block that unit u's lane reads; lanes behind the last read the last.
  int block_of[kMostUnits][kUnitLanes];
  __mmask16 words[kMostUnits];  // dwords of each unit that exist
  // The value that lane's byte 4 * quarter + i holds in a nibble: value[u][quarter * nibbles +
  // nibble][lane * 4 + i]; -1 behind the last. It is also the order of the sums of a unit
  // (`ValueHalf`).
  std::int16_t value[kMostUnits][8][kUnitLanes * 4];
  std::uint16_t scale_order[32];  // 32 scales, token by token, to block by block

  HeadBytes(int bits, int block, int blocks) : bits(bits), block(block), blocks(blocks) {
    const int per_block = block * bits / 8, bytes = blocks * per_block;
    nibbles = bits == 4 ? 2 : 1;
    lanes_per_block = per_block / kLaneBytes;
    units = (bytes + kUnit - 1) / kUnit;
    for (int u = 0; u < units; ++u) {
      const int left = std::min(bytes - u * kUnit, kUnit) / 4;
      words[u] = static_cast<__mmask16>((1u << left) - 1);
      for (int lane = 0; lane < kUnitLanes; ++lane)
        block_of[u][lane] = std::min((u * kUnit + lane * kLaneBytes) / per_block, blocks - 1);
      for (int vector = 0; vector < 4 * nibbles; ++vector)
        for (int i = 0; i < kUnitLanes * 4; ++i) {
          const int byte = u * kUnit + i / 4 * kLaneBytes + vector / nibbles * 4 + i % 4;
          const int inside = byte % per_block + vector % nibbles * (block / 2);
          value[u][vector][i] =
              static_cast<std::int16_t>(byte < bytes ? byte / per_block * block + inside : -1);
        }
    }
    const int tokens = 32 / blocks;
    for (int i = 0; i < 32; ++i)
      scale_order[i] = static_cast<std::uint16_t>(i % tokens * blocks + i / tokens);
  }
  static bool fits(int bits, int block, int blocks) {
    return blocks <= kMostBlocks && blocks * block * bits / 8 <= kMostUnits * kUnit;
  }
  int sums() const { return units * kUnit * nibbles; }
};

inline const HeadBytes* head_bytes(int bits, int block, int blocks) {
  thread_local std::vector<std::unique_ptr<HeadBytes>> known;
  for (const auto& head : known)
    if (head->bits == bits && head->block == block && head->blocks == blocks) return head.get();
  known.push_back(std::make_unique<HeadBytes>(bits, block, blocks));
  return known.back().get();
}

// Scales of a tile by block, as fp32: scale[block][token]; zeros from `count` on.
struct TileScales {
  alignas(64) float scale[kMostBlocks][kTile];
  bool odd;  // some are not finite, or negative where the integer passes need magnitudes

  void load(const char* from, std::int64_t stride, const HeadBytes& head, int count,
            bool may_be_negative) {
    const int blocks = head.blocks;
    std::uint32_t found = 0;
    const bool packed = stride == 2 * blocks && (blocks & (blocks - 1)) == 0;
    if (packed) {
      const int tokens = 32 / blocks;
      alignas(64) std::uint16_t halves[32];
      const __m512i order = _mm512_loadu_si512(head.scale_order);
      const __m512i infinity = _mm512_set1_epi16(0x7c00);
      for (int t = 0; t < kTile; t += tokens) {
        const int there = std::clamp((count - t) * blocks, 0, 32);
        const auto mask = static_cast<__mmask32>(there == 32 ? ~0u : (1u << there) - 1);
        const __m512i raw =
            _mm512_maskz_loadu_epi16(mask, from + static_cast<std::int64_t>(t) * stride);
        found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(raw, infinity), infinity);
        if (!may_be_negative) found |= _mm512_movepi16_mask(raw);
        _mm512_store_si512(halves, _mm512_permutexvar_epi16(order, raw));
        for (int b = 0; b < blocks; ++b) {
          const std::uint16_t* mine = halves + b * tokens;
          float* to = scale[b] + t;
          if (tokens >= 16)
            for (int i = 0; i < tokens; i += 16) _mm512_store_ps(to + i, load_half(mine + i));
          else if (tokens == 8)
            _mm256_store_ps(to, _mm256_cvtph_ps(load_as<__m128i>(mine)));
          else
            _mm_store_ps(to, _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(mine))));
        }
      }
    } else {
      for (int t = 0; t < kTile; ++t)
        for (int b = 0; b < blocks; ++b) {
          const std::uint16_t half = t < count ? token_at<std::uint16_t>(from, stride, t)[b] : 0;
          found |= (half & 0x7c00) == 0x7c00 || (!may_be_negative && half >> 15);
          scale[b][t] = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
        }
    }
    odd = found != 0;
  }
};

// -- keys ---------------------------------------------------------------------------------------

// One unit of one query row: bytes by column of dwords and nibble, each dword four times, for the
// four tokens that meet it; what undoes the 16 bits, and what the codes' offset takes away.
struct alignas(64) QueryUnit {
  std::int8_t high[8][kUnit], low[8][kUnit];
  float scale[16], shift[16];
};

template <Format F>
struct KeyCodes;

// codes are unsigned; value = (u - kOffset) / kDivisor
template <>
struct KeyCodes<Format::q8_0> {
  static constexpr int kVectors = 4;
  static constexpr float kOffset = 128, kDivisor = 1;
};
template <>
struct KeyCodes<Format::q4_0> {
  static constexpr int kVectors = 8;
  static constexpr float kOffset = 8, kDivisor = 1;
};
template <>
struct KeyCodes<Format::nf4> {
  static constexpr int kVectors = 8;
  static constexpr float kOffset = 32768, kDivisor = 32767;
};

template <Format F>
void prepare_query(const float* q, const HeadBytes& head, QueryUnit* units) {
  alignas(64) std::int16_t whole[kMostBlocks * 128 + 1];
  whole[kMostBlocks * 128] = 0;
  float scale[kMostBlocks];
  for (int b = 0; b < head.blocks; ++b) {
    const float* x = q + b * head.block;
    __m512 most = _mm512_setzero_ps();
    for (int i = 0; i < head.block; i += 16)
      most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(x + i)));
    const float largest = _mm512_reduce_max_ps(most);
    scale[b] = largest / kQueryRange;
    const __m512 inverse = _mm512_set1_ps(largest > 0 ? kQueryRange / largest : 0);
    for (int i = 0; i < head.block; i += 16) {
      const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), inverse));
      store_as(_mm512_cvtepi32_epi16(code), whole + b * head.block + i);
    }
  }
  for (int u = 0; u < head.units; ++u) {
    QueryUnit& unit = units[u];
    std::int32_t sums[kUnitLanes] = {};
    for (int vector = 0; vector < 4 * head.nibbles; ++vector)
      for (int lane = 0; lane < kUnitLanes; ++lane) {
        std::uint32_t high = 0, low = 0;
        for (int i = 0; i < 4; ++i) {
          const int value = head.value[u][vector][lane * 4 + i];
          const int code = value < 0 ? 0 : whole[value], upper = (code + 128) >> 8;
          sums[lane] += code;
          high |= static_cast<std::uint32_t>(upper & 255) << (8 * i);
          low |= static_cast<std::uint32_t>((code - 256 * upper) & 255) << (8 * i);
        }
        store_as(_mm_set1_epi32(static_cast<int>(high)), unit.high[vector] + lane * kLaneBytes);
        store_as(_mm_set1_epi32(static_cast<int>(low)), unit.low[vector] + lane * kLaneBytes);
      }
    for (int lane = 0; lane < kUnitLanes; ++lane) {
      const float undo = scale[head.block_of[u][lane]] / KeyCodes<F>::kDivisor;
      _mm_store_ps(unit.scale + 4 * lane, _mm_set1_ps(undo));
      _mm_store_ps(unit.shift + 4 * lane,
                   _mm_set1_ps(-KeyCodes<F>::kOffset * static_cast<float>(sums[lane]) * undo));
    }
  }
}

// Four tokens' dwords: columns[c] holds, in each lane, dword c of the four.
inline void columns_of(const __m512i (&rows)[4], __m512i (&columns)[4]) {
  const __m512i a = _mm512_unpacklo_epi32(rows[0], rows[1]);
  const __m512i b = _mm512_unpacklo_epi32(rows[2], rows[3]);
  const __m512i c = _mm512_unpackhi_epi32(rows[0], rows[1]);
  const __m512i d = _mm512_unpackhi_epi32(rows[2], rows[3]);
  columns[0] = _mm512_unpacklo_epi64(a, b);
  columns[1] = _mm512_unpackhi_epi64(a, b);
  columns[2] = _mm512_unpacklo_epi64(c, d);
  columns[3] = _mm512_unpackhi_epi64(c, d);
}

// Tokens t to t + 3 of a unit; behind the last the last stands in.
inline void load_rows(const char* codes, std::int64_t stride, int t, int count, __mmask16 words,
                      __m512i (&rows)[4]) {
  for (int i = 0; i < 4; ++i)
    rows[i] = _mm512_maskz_loadu_epi32(words, codes + std::min(t + i, count - 1) * stride);
}

// Lane sums of four vectors of four tokens each: 16 tokens.
inline __m512 lane_sums(const __m512 (&v)[4]) {
  const __m512 a =
      _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x44), _mm512_shuffle_f32x4(v[0], v[1], 0xee));
  const __m512 b =
      _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x44), _mm512_shuffle_f32x4(v[2], v[3], 0xee));
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

inline __m512 lane_scales(const TileScales& scales, const int (&block_of)[kUnitLanes], int t) {
  __m512 v = _mm512_castps128_ps512(_mm_load_ps(scales.scale[block_of[0]] + t));
  v = _mm512_insertf32x4(v, _mm_load_ps(scales.scale[block_of[1]] + t), 1);
  v = _mm512_insertf32x4(v, _mm_load_ps(scales.scale[block_of[2]] + t), 2);
  return _mm512_insertf32x4(v, _mm_load_ps(scales.scale[block_of[3]] + t), 3);
}

inline __m512i table_of(const std::uint8_t (&bytes)[16]) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}

// The levels of nf4 as 16-bit integers in two bytes: unsigned around 32768 for keys, signed for
// values.
struct LevelBytes {
  std::uint8_t key_high[16] = {}, key_low[16] = {}, value_high[16] = {}, value_low[16] = {};
  constexpr LevelBytes() {
    for (int i = 0; i < 16; ++i) {
      const float level = kNf4.levels[i];
      const int key = static_cast<int>(level * 32767.0f + 32768.5f);
      key_high[i] = static_cast<std::uint8_t>(key >> 8);
      key_low[i] = static_cast<std::uint8_t>(key & 255);
      const int value = static_cast<int>(level * kQueryRange + (level < 0 ? -0.5f : 0.5f));
      const int high = (value + 128 + 65536) / 256 - 256;
      value_high[i] = static_cast<std::uint8_t>(high & 255);
      value_low[i] = static_cast<std::uint8_t>((value - 256 * high) & 255);
    }
  }
};
inline constexpr LevelBytes kLevelBytes{};

// What four tokens of a unit contribute to the scores of one row, by lane and token.
template <Format F>
struct KeyGroup {
  __m512i bytes[KeyCodes<F>::kVectors];

  void load(const char* codes, std::int64_t stride, int t, int count, __mmask16 words) {
    __m512i rows[4], columns[4];
    load_rows(codes, stride, t, count, words, rows);
    columns_of(rows, columns);
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int c = 0; c < 4; ++c) {
      if constexpr (F == Format::q8_0) {
        bytes[c] = _mm512_xor_si512(columns[c], _mm512_set1_epi8(-128));
      } else {
        bytes[2 * c] = _mm512_and_si512(columns[c], nibble);
        bytes[2 * c + 1] = _mm512_and_si512(_mm512_srli_epi16(columns[c], 4), nibble);
      }
    }
  }
};

template <Format F, int GROUPS>
inline void row_sums(const KeyGroup<F> (&keys)[GROUPS], const QueryUnit& q,
                     __m512 (&found)[GROUPS]) {
  constexpr int kVectors = KeyCodes<F>::kVectors;
  __m512i sums[GROUPS], lows[GROUPS];  // chains of their own: a sum waits for the one before it
  for (int g = 0; g < GROUPS; ++g) sums[g] = lows[g] = _mm512_setzero_si512();
  for (int i = 0; i < kVectors; ++i) {
    const __m512i high = _mm512_load_si512(q.high[i]), low = _mm512_load_si512(q.low[i]);
    for (int g = 0; g < GROUPS; ++g) {
      sums[g] = _mm512_dpbusd_epi32(sums[g], keys[g].bytes[i], high);
      lows[g] = _mm512_dpbusd_epi32(lows[g], keys[g].bytes[i], low);
    }
  }
  for (int g = 0; g < GROUPS; ++g)
    sums[g] = _mm512_add_epi32(_mm512_slli_epi32(sums[g], 8), lows[g]);
  const __m512 scale = _mm512_load_ps(q.scale), shift = _mm512_load_ps(q.shift);
  for (int g = 0; g < GROUPS; ++g)
    found[g] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[g]), scale, shift);
}

// nf4 has 16 bits on both sides; the product of the two low bytes is left out (below 2^-16 of the
// sum).
template <int GROUPS>
inline void row_sums(const KeyGroup<Format::nf4> (&keys)[GROUPS], const QueryUnit& q,
                     __m512 (&found)[GROUPS]) {
  const __m512i highs = table_of(kLevelBytes.key_high), lows = table_of(kLevelBytes.key_low);
  const __m512 scale = _mm512_load_ps(q.scale), shift = _mm512_load_ps(q.shift);
  for (int g = 0; g < GROUPS; ++g) {
    __m512i most = _mm512_setzero_si512(), rest = _mm512_setzero_si512();
    for (int i = 0; i < 8; ++i) {
      const __m512i high = _mm512_shuffle_epi8(highs, keys[g].bytes[i]);
      const __m512i low = _mm512_shuffle_epi8(lows, keys[g].bytes[i]);
      const __m512i query = _mm512_load_si512(q.high[i]);
      most = _mm512_dpbusd_epi32(most, high, query);
      rest = _mm512_dpbusd_epi32(rest, low, query);
      rest = _mm512_dpbusd_epi32(rest, high, _mm512_load_si512(q.low[i]));
    }
    const __m512 sum =
        _mm512_fmadd_ps(_mm512_cvtepi32_ps(most), _mm512_set1_ps(256), _mm512_cvtepi32_ps(rest));
    found[g] = _mm512_fmadd_ps(_mm512_mul_ps(sum, scale), _mm512_set1_ps(256), shift);
  }
}

// scores[r][t] += q[r] . k[t]; units of a row lie behind each other.
template <Format F>
void score_int8(const QueryUnit* q, const HeadBytes& head, int rows, const char* codes,
                std::int64_t stride, const TileScales& scales, int count, float* scores) {
  constexpr int kGroups = 2;
  for (int t = 0; t < count; t += 16) {
    for (int pair = 0; pair < 4; pair += kGroups) {
      const int at = t + 4 * pair;
      for (int u = 0; u < head.units; ++u) {
        KeyGroup<F> keys[kGroups];
        __m512 by_lane[kGroups];
        for (int g = 0; g < kGroups; ++g) {
          keys[g].load(codes + u * kUnit, stride, std::min(at + 4 * g, count - 1), count,
                       head.words[u]);
          by_lane[g] = lane_scales(scales, head.block_of[u], at + 4 * g);
        }
        for (int r = 0; r < rows; ++r) {
          __m512 found[kGroups];
          row_sums(keys, q[r * head.units + u], found);
          for (int g = 0; g < kGroups; ++g) {
            const __m512 product = _mm512_mul_ps(found[g], by_lane[g]);
            // The sum over lanes of four tokens.
            const __m256 half =
                _mm256_add_ps(_mm512_castps512_ps256(product), _mm512_extractf32x8_ps(product, 1));
            const __m128 sum =
                _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
            float* to = scores + r * kScoreRow + at + 4 * g;
            _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), sum));
          }
        }
      }
    }
  }
}

// -- values -------------------------------------------------------------------------------------

// Weights times scales of one row and unit as bytes: [lane][16 tokens] for each 16 tokens; `low` is
// used by q8_0 alone, `flip` (0xff where a scale is negative) by q4_0 alone.
struct alignas(64) WeightUnit {
  std::uint8_t high[4][kUnit], low[4][kUnit];
  float scale[16];  // what undoes the bytes, by lane
};

template <Format F>
struct ValueCodes;
template <>
struct ValueCodes<Format::q8_0> {
  static constexpr float kRange = 65535, kDivisor = 1;
};
template <>
struct ValueCodes<Format::q4_0> {
  static constexpr float kRange = 255, kDivisor = 1;
};
template <>
struct ValueCodes<Format::nf4> {
  static constexpr float kRange = 255, kDivisor = kQueryRange;
};

// Weights (one row, zeros from `count` on) times scales. constants[block][16]: what all values of a
// block get besides, summed over its 16 entries.
template <Format F>
void weigh(const float* weights, const HeadBytes& head, const TileScales& scales, WeightUnit* units,
           float* constants) {
  __m512 p[4];
  for (int g = 0; g < 4; ++g) p[g] = _mm512_loadu_ps(weights + 16 * g);
  for (int b = 0; b < head.blocks; ++b) {
    __m512 product[4], most = _mm512_setzero_ps(), sum = _mm512_setzero_ps();
    for (int g = 0; g < 4; ++g) {
      product[g] = _mm512_mul_ps(p[g], _mm512_load_ps(scales.scale[b] + 16 * g));
      if constexpr (F == Format::q4_0) {
        sum = _mm512_add_ps(sum, product[g]);
        product[g] = _mm512_abs_ps(product[g]);
      }
      most = _mm512_max_ps(most, product[g]);
    }
    const float largest = _mm512_reduce_max_ps(most);
    const float unit = largest / ValueCodes<F>::kRange;
    const __m512 inverse =
        _mm512_set1_ps(largest > 1e-30f ? ValueCodes<F>::kRange / largest : 0.0f);
    __m512i total = _mm512_setzero_si512();
    __m128i high[4], low[4];
    for (int g = 0; g < 4; ++g) {
      const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(product[g], inverse));
      if constexpr (F == Format::q8_0) {
        high[g] = _mm512_cvtepi32_epi8(_mm512_srli_epi32(code, 8));
        low[g] = _mm512_cvtepi32_epi8(code);
      } else {
        high[g] = _mm512_cvtepi32_epi8(code);
        if constexpr (F == Format::q4_0) total = _mm512_add_epi32(total, code);
      }
    }
    if constexpr (F == Format::q4_0) {
      // |s| (u' - 7.5) - s / 2 is s (u - 8), u' being u or, where s is negative, 15 - u.
      __m512 constant = _mm512_loadu_ps(constants + 16 * b);
      constant = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_set1_ps(-7.5f * unit), constant);
      constant = _mm512_fmadd_ps(sum, _mm512_set1_ps(-0.5f), constant);
      _mm512_storeu_ps(constants + 16 * b, constant);
    }
    for (int i = b * head.lanes_per_block; i < (b + 1) * head.lanes_per_block; ++i) {
      WeightUnit& to = units[i / kUnitLanes];
      const int lane = i % kUnitLanes;
      for (int g = 0; g < 4; ++g) {
        store_as(high[g], to.high[g] + lane * kLaneBytes);
        if constexpr (F == Format::q8_0) store_as(low[g], to.low[g] + lane * kLaneBytes);
      }
      _mm_store_ps(to.scale + 4 * lane, _mm_set1_ps(unit / ValueCodes<F>::kDivisor));
    }
  }
}

// 0xff where the scale of a lane's block and token is negative, as `WeightUnit::high` has weights.
struct alignas(64) Flips {
  std::uint8_t bytes[kMostUnits][4][kUnit];

  void load(const HeadBytes& head, const TileScales& scales) {
    for (int b = 0; b < head.blocks; ++b) {
      __m128i flip[4];
      for (int g = 0; g < 4; ++g) {
        const __m512 scale = _mm512_load_ps(scales.scale[b] + 16 * g);
        flip[g] = _mm_movm_epi8(_mm512_movepi32_mask(_mm512_castps_si512(scale)));
      }
      for (int i = b * head.lanes_per_block; i < (b + 1) * head.lanes_per_block; ++i)
        for (int g = 0; g < 4; ++g)
          store_as(flip[g], bytes[i / kUnitLanes][g] + i % kUnitLanes * kLaneBytes);
    }
  }
};

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

// One half of a unit, ROWS rows: integer sums over the tile, then added to sums[r * width ...] in
// the order (vector, lane, dword).
template <Format F, int ROWS, int HALF>
struct ValueHalf {
  static constexpr bool kTwo = F != Format::q4_0;  // two sums: high and low bytes
  static constexpr int kVectors = F == Format::q8_0 ? 2 : 4;
  __m512i sums[ROWS][kVectors][kTwo ? 2 : 1];

  template <int QUARTER>
  inline void step(const __m512i (&rows)[4], const WeightUnit* const (&weights)[ROWS],
                   const std::uint8_t* flips, int group) {
    constexpr auto kSpread = static_cast<_MM_PERM_ENUM>(QUARTER * 0x55);
    __m512i v[2], bytes[kVectors][kTwo && F == Format::nf4 ? 2 : 1];
    interleaved<HALF>(rows, v);
    if constexpr (F == Format::q8_0) {
      bytes[0][0] = v[0];
      bytes[1][0] = v[1];
    } else {
      if constexpr (F == Format::q4_0) {
        const __m512i flip =
            _mm512_shuffle_epi32(_mm512_load_si512(flips + group * kUnit), kSpread);
        v[0] = _mm512_xor_si512(v[0], flip);
        v[1] = _mm512_xor_si512(v[1], flip);
      }
      const __m512i nibble = _mm512_set1_epi8(15);
      for (int i = 0; i < 2; ++i) {
        bytes[2 * i][0] = _mm512_and_si512(v[i], nibble);
        bytes[2 * i + 1][0] = _mm512_and_si512(_mm512_srli_epi16(v[i], 4), nibble);
      }
      if constexpr (F == Format::nf4) {
        const __m512i highs = table_of(kLevelBytes.value_high),
                      lows = table_of(kLevelBytes.value_low);
        for (int i = 0; i < 4; ++i) {
          bytes[i][1] = _mm512_shuffle_epi8(lows, bytes[i][0]);
          bytes[i][0] = _mm512_shuffle_epi8(highs, bytes[i][0]);
        }
      }
    }
    for (int r = 0; r < ROWS; ++r) {
      const __m512i high =
          _mm512_shuffle_epi32(_mm512_load_si512(weights[r]->high[group]), kSpread);
      for (int i = 0; i < kVectors; ++i)
        sums[r][i][0] = _mm512_dpbusd_epi32(sums[r][i][0], high, bytes[i][0]);
      if constexpr (F == Format::q8_0) {
        const __m512i low =
            _mm512_shuffle_epi32(_mm512_load_si512(weights[r]->low[group]), kSpread);
        for (int i = 0; i < kVectors; ++i)
          sums[r][i][1] = _mm512_dpbusd_epi32(sums[r][i][1], low, bytes[i][0]);
      }
      if constexpr (F == Format::nf4)
        for (int i = 0; i < kVectors; ++i)
          sums[r][i][1] = _mm512_dpbusd_epi32(sums[r][i][1], high, bytes[i][1]);
    }
  }

  void run(const char* codes, std::int64_t stride, int count, __mmask16 words,
           const WeightUnit* const (&weights)[ROWS], const std::uint8_t* flips,
           float* const (&to)[ROWS]) {
    for (auto& row : sums)
      for (auto& vector : row)
        for (auto& sum : vector) sum = _mm512_setzero_si512();
    for (int group = 0; 16 * group < count; ++group) {
      __m512i rows[4];
      load_rows(codes, stride, std::min(16 * group, count - 1), count, words, rows);
      step<0>(rows, weights, flips, group);
      load_rows(codes, stride, std::min(16 * group + 4, count - 1), count, words, rows);
      step<1>(rows, weights, flips, group);
      load_rows(codes, stride, std::min(16 * group + 8, count - 1), count, words, rows);
      step<2>(rows, weights, flips, group);
      load_rows(codes, stride, std::min(16 * group + 12, count - 1), count, words, rows);
      step<3>(rows, weights, flips, group);
    }
    for (int r = 0; r < ROWS; ++r) {
      const __m512 scale = _mm512_load_ps(weights[r]->scale);
      for (int i = 0; i < kVectors; ++i) {
        __m512i sum = sums[r][i][0];
        if constexpr (kTwo) sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), sums[r][i][1]);
        float* at = to[r] + (HALF * kVectors + i) * 16;
        _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, _mm512_loadu_ps(at)));
      }
    }
  }
};

template <Format F, int ROWS>
void value_rows_int8(const WeightUnit* weights, const HeadBytes& head, const char* codes,
                     std::int64_t stride, const Flips& flips, int count, float* sums,
                     std::int64_t width) {
  constexpr int kUnitSums = 16 * 2 * ValueHalf<F, ROWS, 0>::kVectors;
  for (int u = 0; u < head.units; ++u) {
    const WeightUnit* mine[ROWS];
    float* to[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      mine[r] = weights + r * head.units + u;
      to[r] = sums + r * width + u * kUnitSums;
    }
    ValueHalf<F, ROWS, 0>().run(codes + u * kUnit, stride, count, head.words[u], mine,
                                flips.bytes[u][0], to);
    ValueHalf<F, ROWS, 1>().run(codes + u * kUnit, stride, count, head.words[u], mine,
                                flips.bytes[u][0], to);
  }
}

// Sums in the order of `ValueHalf` for `rows` rows, `width` apart.
template <Format F>
void value_int8(const WeightUnit* weights, const HeadBytes& head, int rows, const char* codes,
                std::int64_t stride, const Flips& flips, int count, float* sums,
                std::int64_t width) {
  constexpr int kMost = F == Format::nf4 ? 2 : 4;
  int r = 0;
  for (; r + kMost <= rows; r += kMost)
    value_rows_int8<F, kMost>(weights + r * head.units, head, codes, stride, flips, count,
                              sums + r * width, width);
  if (kMost > 2 && r + 2 <= rows) {
    value_rows_int8<F, 2>(weights + r * head.units, head, codes, stride, flips, count,
                          sums + r * width, width);
    r += 2;
  }
  if (r < rows)
    value_rows_int8<F, 1>(weights + r * head.units, head, codes, stride, flips, count,
                          sums + r * width, width);
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
