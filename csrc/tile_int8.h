// The score pass and the value pass over one quantized tile in integer products of bytes (AVX-512
// VNNI's vpdpbusd: 16 sums of four u8 * s8). Queries and weights of values become 16-bit
// integers, cut into bytes; scales are applied after the sums. Weights of 8 bits would be a sixth
// faster for 4-bit formats, and lose the many small ones beside a large one: a KL of 4e-4 to 1e-3
// on the demo models, against 1e-6.
//
// A token's bytes are taken in units of 64, a unit in four lanes of 16; a block's bytes never share
// a lane with another's. Included in isa_avx512_vnni.cpp alone, in that set's namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
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

// sum + the products of four unsigned bytes of u with four signed ones of s, in each dword.
// Assembly because gcc 12 copies the sum of the intrinsic in front of each use.
inline __m512i sum_of_products(__m512i sum, __m512i u, __m512i s) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "vm"(s));
  return sum;
}

// What is stored of one head: its blocks, as bytes of a token. Worked out once for each layout
// (`head_bytes`).
//
// Where a token has only 32 bytes, and tokens lie end to end, two of them are taken as one of twice
// the blocks: `fold` is 2 then, and `blocks`, strides and counts below are of such pairs.
struct HeadBytes {
  int bits, block, token_blocks, fold, blocks, units, nibbles;
  // The block that unit u's lane reads; lanes behind the last read the last.
  int block_of[kMostUnits][kUnitLanes];
  __mmask16 words[kMostUnits];  // dwords of each unit that exist
  // The value that lane's byte 4 * quarter + i holds in a nibble: value[u][quarter * nibbles +
  // nibble][lane * 4 + i]; -1 behind the last. It is also the order of the sums of a unit
  // (`value_half`).
  std::int16_t value[kMostUnits][8][kUnitLanes * 4];
  std::uint16_t scale_order[32];  // 32 scales, token by token, to block by block

  HeadBytes(int bits, int block, int token_blocks, int fold)
      : bits(bits),
        block(block),
        token_blocks(token_blocks),
        fold(fold),
        blocks(token_blocks * fold) {
    const int per_block = block * bits / 8, bytes = blocks * per_block;
    nibbles = bits == 4 ? 2 : 1;
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
          value[u][vector][i] = static_cast<std::int16_t>(
              byte < bytes ? byte / per_block % token_blocks * block + inside : -1);
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

inline const HeadBytes* head_bytes(int bits, int block, int token_blocks, int fold) {
  thread_local std::vector<std::unique_ptr<HeadBytes>> known;
  for (const auto& head : known)
    if (head->bits == bits && head->block == block && head->token_blocks == token_blocks &&
        head->fold == fold)
      return head.get();
  known.push_back(std::make_unique<HeadBytes>(bits, block, token_blocks, fold));
  return known.back().get();
}

// Scales of a tile by block, as fp32: scale[block][token]; zeros from `count` on.
struct TileScales {
  alignas(64) float scale[kMostBlocks][kTile];
  bool odd;  // some are not finite, or negative where the integer passes need magnitudes

  void load(const char* from, std::int64_t stride, const HeadBytes& head, int count,
            bool may_be_negative) {
    const int blocks = head.blocks, valid = count * head.token_blocks;
    stride *= head.fold;
    std::uint32_t found = 0;
    for (std::int64_t i = 0; i < stride * kTile / head.fold; i += kLine)
      __builtin_prefetch(from + kAhead / 4 + i);
    const bool packed = stride == 2 * blocks && (blocks & (blocks - 1)) == 0;
    if (packed) {
      const int tokens = 32 / blocks;
      alignas(64) std::uint16_t halves[32];
      const __m512i order = _mm512_loadu_si512(head.scale_order);
      const __m512i infinity = _mm512_set1_epi16(0x7c00);
      for (int t = 0; t < kTile; t += tokens) {
        const int there = std::clamp(valid - t * blocks, 0, 32);
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
  for (int b = 0; b < head.token_blocks; ++b) {
    const float* x = q + b * head.block;
    __m512 most = _mm512_setzero_ps();
    bool odd = false;  // a NaN, which neither the maximum nor an integer would show
    for (int i = 0; i < head.block; i += 16) {
      const __m512 value = _mm512_loadu_ps(x + i);
      most = _mm512_max_ps(most, _mm512_abs_ps(value));
      odd |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q) != 0;
    }
    const float largest = _mm512_reduce_max_ps(most);
    scale[b] = odd ? std::numeric_limits<float>::quiet_NaN() : largest / kQueryRange;
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
      const float undo = scale[head.block_of[u][lane] % head.token_blocks] / KeyCodes<F>::kDivisor;
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
template <bool PREFETCH = true>
inline void load_rows(const char* codes, std::int64_t stride, int t, int count, __mmask16 words,
                      __m512i (&rows)[4]) {
  CARAMBA_FAST_UNROLL
  for (int i = 0; i < 4; ++i) {
    const char* from = codes + std::min(t + i, count - 1) * stride;
    if (PREFETCH) __builtin_prefetch(from + kAhead, 0, 2);
    rows[i] = _mm512_maskz_loadu_epi32(words, from);
  }
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

// Four tokens of a unit as unsigned bytes, column by column; for nf4 high bytes, then low ones.
template <Format F>
struct KeyGroup {
  static constexpr int kVectors = KeyCodes<F>::kVectors, kBytes = F == Format::nf4 ? 2 : 1;
  __m512i bytes[kVectors * kBytes];

  inline __attribute__((always_inline)) void load(const char* codes, std::int64_t stride, int t,
                                                  int count, __mmask16 words) {
    __m512i rows[4], columns[4];
    load_rows(codes, stride, t, count, words, rows);
    columns_of(rows, columns);
    const __m512i nibble = _mm512_set1_epi8(15);
    CARAMBA_FAST_UNROLL
    for (int c = 0; c < 4; ++c) {
      if constexpr (F == Format::q8_0) {
        bytes[c] = _mm512_xor_si512(columns[c], _mm512_set1_epi8(-128));
      } else {
        bytes[2 * c] = _mm512_and_si512(columns[c], nibble);
        bytes[2 * c + 1] = _mm512_and_si512(_mm512_srli_epi16(columns[c], 4), nibble);
      }
    }
    if constexpr (F == Format::nf4) {
      const __m512i highs = table_of(kLevelBytes.key_high), lows = table_of(kLevelBytes.key_low);
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < 8; ++i) {
        bytes[8 + i] = _mm512_shuffle_epi8(lows, bytes[i]);
        bytes[i] = _mm512_shuffle_epi8(highs, bytes[i]);
      }
    }
  }
};

// What UNITS units of four tokens each, GROUPS times, contribute to the scores of one row: by lane
// and token, scales of the keys included. Chains of sums are interleaved, for each sum waits for
// the one before it.
template <Format F, int UNITS, int GROUPS>
inline __attribute__((always_inline)) void row_sums(const KeyGroup<F> (&keys)[UNITS][GROUPS],
                                                    const __m512 (&by_lane)[UNITS][GROUPS],
                                                    const QueryUnit* q, __m512 (&found)[GROUPS]) {
  constexpr int kVectors = KeyCodes<F>::kVectors;
  __m512i high[UNITS][GROUPS], low[UNITS][GROUPS];
  CARAMBA_FAST_UNROLL
  for (int u = 0; u < UNITS; ++u) {
    CARAMBA_FAST_UNROLL
    for (int g = 0; g < GROUPS; ++g) high[u][g] = low[u][g] = _mm512_setzero_si512();
  }
  CARAMBA_FAST_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    CARAMBA_FAST_UNROLL
    for (int u = 0; u < UNITS; ++u) {
      const __m512i above = _mm512_load_si512(q[u].high[i]), below = _mm512_load_si512(q[u].low[i]);
      CARAMBA_FAST_UNROLL
      for (int g = 0; g < GROUPS; ++g) {
        high[u][g] = sum_of_products(high[u][g], keys[u][g].bytes[i], above);
        low[u][g] = sum_of_products(low[u][g], keys[u][g].bytes[i], below);
        if constexpr (F == Format::nf4)
          low[u][g] = sum_of_products(low[u][g], keys[u][g].bytes[8 + i], above);
      }
    }
  }
  CARAMBA_FAST_UNROLL
  for (int u = 0; u < UNITS; ++u) {
    const __m512 scale = _mm512_load_ps(q[u].scale), shift = _mm512_load_ps(q[u].shift);
    CARAMBA_FAST_UNROLL
    for (int g = 0; g < GROUPS; ++g) {
      __m512 sum;
      if constexpr (F == Format::nf4) {
        // 16 bits on both sides; the product of the two low bytes is left out (below 2^-16 of the
        // sum).
        sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[u][g]), _mm512_set1_ps(256),
                              _mm512_cvtepi32_ps(low[u][g]));
        sum = _mm512_fmadd_ps(_mm512_mul_ps(sum, scale), _mm512_set1_ps(256), shift);
      } else {
        const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high[u][g], 8), low[u][g]);
        sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), scale, shift);
      }
      found[g] = u == 0 ? _mm512_mul_ps(sum, by_lane[u][g])
                        : _mm512_fmadd_ps(sum, by_lane[u][g], found[g]);
    }
  }
}

// The sum over lanes of two vectors of four tokens.
inline __m256 sums_of_lanes(__m512 a, __m512 b) {
  const __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(b), _mm512_extractf32x8_ps(b, 1));
  return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}

// The sum over the first two lanes, and over the last two, of four pairs of tokens: eight tokens.
inline __m256 sums_of_pairs(__m512 v) {
  const __m512 sums = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1));
  const __m128 first = _mm512_castps512_ps128(sums), second = _mm512_extractf32x4_ps(sums, 2);
  return _mm256_set_m128(_mm_unpackhi_ps(first, second), _mm_unpacklo_ps(first, second));
}

// Eight tokens from t on, UNITS units from the first: keys stay in registers while all rows meet
// them.
template <Format F, int UNITS, int GROUPS, int FOLD>
inline void score_eight(const QueryUnit* q, const HeadBytes& head, int first, int rows,
                        const char* codes, std::int64_t stride, const TileScales& scales, int t,
                        int count, float* scores) {
  for (int part = 0; part < 2; part += GROUPS) {
    KeyGroup<F> keys[UNITS][GROUPS];
    __m512 by_lane[UNITS][GROUPS];
    CARAMBA_FAST_UNROLL
    for (int u = 0; u < UNITS; ++u) CARAMBA_FAST_UNROLL
    for (int g = 0; g < GROUPS; ++g) {
      const int at = t + 4 * (part + g);
      keys[u][g].load(codes + (first + u) * kUnit, stride, std::min(at, count - 1), count,
                      head.words[first + u]);
      by_lane[u][g] = lane_scales(scales, head.block_of[first + u], at);
    }
    for (int r = 0; r < rows; ++r) {
      const QueryUnit* query = q + r * head.units + first;
      float* to = scores + r * kScoreRow + FOLD * (t + 4 * part);
      __m512 found[GROUPS];
      row_sums(keys, by_lane, query, found);
      if constexpr (FOLD == 2) {
        CARAMBA_FAST_UNROLL
        for (int g = 0; g < GROUPS; ++g) {
          const __m256 pairs = sums_of_pairs(found[g]);
          _mm256_storeu_ps(to + 8 * g, _mm256_add_ps(_mm256_loadu_ps(to + 8 * g), pairs));
        }
      } else if constexpr (GROUPS == 2) {
        _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), sums_of_lanes(found[0], found[1])));
      } else {
        const __m256 sum = sums_of_lanes(found[0], found[0]);
        _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), _mm256_castps256_ps128(sum)));
      }
    }
  }
}

// scores[r][t] += q[r] . k[t]; units of a row lie behind each other.
template <Format F>
void score_int8(const QueryUnit* q, const HeadBytes& head, int rows, const char* codes,
                std::int64_t stride, const TileScales& scales, int count, float* scores) {
  // As many of the 32 registers as leave room for the sums: 16 for keys.
  constexpr int kGroups = F == Format::nf4 ? 1 : 2, kUnits = F == Format::q8_0 ? 2 : 1;
  if (head.fold == 2) {
    const int pairs = (count + 1) / 2;
    for (int t = 0; t < pairs; t += 8)
      score_eight<F, 1, kGroups, 2>(q, head, 0, rows, codes, 2 * stride, scales, t, pairs, scores);
    return;
  }
  for (int t = 0; t < count; t += 8) {
    int u = 0;
    for (; u + kUnits <= head.units; u += kUnits)
      score_eight<F, kUnits, kGroups, 1>(q, head, u, rows, codes, stride, scales, t, count, scores);
    for (; u < head.units; ++u)
      score_eight<F, 1, kGroups, 1>(q, head, u, rows, codes, stride, scales, t, count, scores);
  }
}

// -- values -------------------------------------------------------------------------------------

// Weights times scales of one row and unit as bytes, four tokens a dword: vector q, lane, dword g
// hold tokens 16 g + 4 q to 16 g + 4 q + 3 of the lane's block.
struct alignas(64) WeightUnit {
  std::uint8_t high[4][kUnit], low[4][kUnit];
  float scale[16];          // what undoes the bytes, by lane
  std::int32_t offset[16];  // of q4_0: what the codes' offset adds to each sum, by lane
};

// The same order for the scales of a tile: 0xff where one is negative. Negative scales make values
// |s| (u' - 7) of u' = 15 - u, others |s| (u - 8): `offset` is 8 or 7.
struct alignas(64) Flips {
  std::uint8_t flip[kMostUnits][4][kUnit], offset[kMostUnits][4][kUnit];
};

inline constexpr float kWeightRange = 65535;  // in two unsigned bytes
// What a value's integer is divided by: levels of nf4 are integers up to kQueryRange.
template <Format F>
inline constexpr float kValueDivisor = F == Format::nf4 ? kQueryRange : 1;

// Four vectors of 16 tokens as bytes: lane q, dword g hold tokens 16 g + 4 q on.
inline __m512i packed_signed(const __m512i (&v)[4]) {
  return _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
}

// Lane q of block b becomes lane b of vector q.
inline void by_quarter(const __m512i (&blocks)[4], __m512i (&quarters)[4]) {
  const __m512i a = _mm512_shuffle_i32x4(blocks[0], blocks[1], 0x44);
  const __m512i b = _mm512_shuffle_i32x4(blocks[2], blocks[3], 0x44);
  const __m512i c = _mm512_shuffle_i32x4(blocks[0], blocks[1], 0xee);
  const __m512i d = _mm512_shuffle_i32x4(blocks[2], blocks[3], 0xee);
  quarters[0] = _mm512_shuffle_i32x4(a, b, 0x88);
  quarters[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
  quarters[2] = _mm512_shuffle_i32x4(c, d, 0x88);
  quarters[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
}

// Signs of the scales into `flips`; the scales become magnitudes.
inline void take_signs(const HeadBytes& head, TileScales& scales, Flips& flips) {
  for (int u = 0; u < head.units; ++u) {
    __m512i blocks[4], quarters[4];
    for (int lane = 0; lane < kUnitLanes; ++lane) {
      const float* scale = scales.scale[head.block_of[u][lane]];
      __m512i sign[4];
      for (int g = 0; g < 4; ++g)
        sign[g] = _mm512_srai_epi32(_mm512_load_si512(scale + 16 * g), 31);
      blocks[lane] = packed_signed(sign);
    }
    by_quarter(blocks, quarters);
    for (int q = 0; q < 4; ++q) {
      _mm512_store_si512(flips.flip[u][q], quarters[q]);
      _mm512_store_si512(flips.offset[u][q], _mm512_add_epi8(quarters[q], _mm512_set1_epi8(8)));
    }
  }
  for (int b = 0; b < head.blocks; ++b)
    for (int t = 0; t < kTile; t += 16) {
      float* scale = scales.scale[b] + t;
      _mm512_store_ps(scale, _mm512_abs_ps(_mm512_load_ps(scale)));
    }
}

// The largest entry of each of four vectors, in all dwords of its lane.
inline __m512 largest_by_lane(const __m512 (&v)[4]) {
  const __m512 a =
      _mm512_max_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x44), _mm512_shuffle_f32x4(v[0], v[1], 0xee));
  const __m512 b =
      _mm512_max_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x44), _mm512_shuffle_f32x4(v[2], v[3], 0xee));
  __m512 most = _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  most = _mm512_max_ps(most, _mm512_permute_ps(most, 0xb1));
  return _mm512_max_ps(most, _mm512_permute_ps(most, 0x4e));
}

// Weights (one row, zeros behind the tile's tokens) times magnitudes of scales.
template <Format F>
void weigh(const float* weights, const HeadBytes& head, const TileScales& scales,
           const Flips& flips, WeightUnit* units) {
  __m512 p[2][4];  // of the first and of the last two lanes, which differ where tokens are taken in
                   // pairs
  CARAMBA_FAST_UNROLL
  for (int g = 0; g < 4; ++g) p[0][g] = p[1][g] = _mm512_loadu_ps(weights + 16 * g);
  if (head.fold == 2) {
    const __m512i even =
        _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i second = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512 all[4] = {p[0][0], p[0][1], p[0][2], p[0][3]};
    CARAMBA_FAST_UNROLL
    for (int g = 0; g < 2; ++g) {
      p[0][g] = _mm512_permutex2var_ps(all[2 * g], even, all[2 * g + 1]);
      p[1][g] = _mm512_permutex2var_ps(all[2 * g], second, all[2 * g + 1]);
      p[0][2 + g] = p[1][2 + g] = _mm512_setzero_ps();
    }
  }
  for (int u = 0; u < head.units; ++u) {
    __m512 product[kUnitLanes][4], most[kUnitLanes];
    const int (&block)[kUnitLanes] = head.block_of[u];
    const auto again = [&block](int lane) { return lane > 0 && block[lane] == block[lane - 1]; };
    CARAMBA_FAST_UNROLL
    for (int lane = 0; lane < kUnitLanes; ++lane) {
      if (again(lane)) {
        most[lane] = most[lane - 1];
        continue;
      }
      const float* scale = scales.scale[block[lane]];
      CARAMBA_FAST_UNROLL
      for (int g = 0; g < 4; ++g)
        product[lane][g] = _mm512_mul_ps(p[lane / 2][g], _mm512_load_ps(scale + 16 * g));
      most[lane] = _mm512_max_ps(_mm512_max_ps(product[lane][0], product[lane][1]),
                                 _mm512_max_ps(product[lane][2], product[lane][3]));
    }
    const __m512 largest = largest_by_lane(most), range = _mm512_set1_ps(kWeightRange);
    const __mmask16 some = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(1e-30f), _CMP_GT_OQ);
    const __m512 inverse = _mm512_maskz_div_ps(some, range, largest);
    const __m512 scale = _mm512_mul_ps(largest, _mm512_set1_ps(1 / kWeightRange));
    const __m512 by_lane[kUnitLanes] = {
        _mm512_shuffle_f32x4(inverse, inverse, 0x00), _mm512_shuffle_f32x4(inverse, inverse, 0x55),
        _mm512_shuffle_f32x4(inverse, inverse, 0xaa), _mm512_shuffle_f32x4(inverse, inverse, 0xff)};
    __m512i highs[kUnitLanes], lows[kUnitLanes], quarters[4];
    CARAMBA_FAST_UNROLL
    for (int lane = 0; lane < kUnitLanes; ++lane) {
      if (again(lane)) {
        highs[lane] = highs[lane - 1];
        lows[lane] = lows[lane - 1];
        continue;
      }
      __m512i code[4];
      CARAMBA_FAST_UNROLL
      for (int g = 0; g < 4; ++g)
        code[g] = _mm512_cvtps_epi32(_mm512_mul_ps(product[lane][g], by_lane[lane]));
      const __m512i a = _mm512_packus_epi32(code[0], code[1]);
      const __m512i b = _mm512_packus_epi32(code[2], code[3]);
      const __m512i byte = _mm512_set1_epi16(255);
      highs[lane] = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
      lows[lane] = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
    }
    __m512i total = _mm512_setzero_si512();
    by_quarter(highs, quarters);
    CARAMBA_FAST_UNROLL
    for (int q = 0; q < 4; ++q) {
      _mm512_store_si512(units[u].high[q], quarters[q]);
      if constexpr (F == Format::q4_0)
        total = sum_of_products(total, quarters[q], _mm512_load_si512(flips.offset[u][q]));
    }
    total = _mm512_slli_epi32(total, 8);
    by_quarter(lows, quarters);
    CARAMBA_FAST_UNROLL
    for (int q = 0; q < 4; ++q) {
      _mm512_store_si512(units[u].low[q], quarters[q]);
      if constexpr (F == Format::q4_0)
        total = sum_of_products(total, quarters[q], _mm512_load_si512(flips.offset[u][q]));
    }
    if constexpr (F == Format::q4_0) {
      total =
          _mm512_add_epi32(total, _mm512_shuffle_epi32(total, static_cast<_MM_PERM_ENUM>(0xb1)));
      total =
          _mm512_add_epi32(total, _mm512_shuffle_epi32(total, static_cast<_MM_PERM_ENUM>(0x4e)));
      _mm512_store_si512(units[u].offset, total);
    }
    _mm512_store_ps(units[u].scale, _mm512_mul_ps(scale, _mm512_set1_ps(1 / kValueDivisor<F>)));
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

// In each lane dword g four times: the bytes that meet four tokens' interleaved values.
struct alignas(64) Spread {
  std::uint8_t bytes[4][kUnit] = {};
  constexpr Spread() {
    for (int g = 0; g < 4; ++g)
      for (int i = 0; i < kUnit; ++i) bytes[g][i] = static_cast<std::uint8_t>(4 * g + i % 4);
  }
};
inline constexpr Spread kSpread{};

template <Format F>
inline constexpr int kHalfVectors = F == Format::q8_0 ? 2 : 4;  // of half a unit
// One half of a unit, ROWS rows: integer sums over the tile, then added to to[r][...] in the order
// (vector, lane, dword). One plain loop over arrays of registers: compilers keep those in
// registers, and no others.
template <Format F, int ROWS, int HALF>
void value_half(const char* codes, std::int64_t stride, int count, __mmask16 words,
                const WeightUnit* const (&weights)[ROWS], const std::uint8_t* flips,
                float* const (&to)[ROWS]) {
  constexpr int kVectors = kHalfVectors<F>;
  __m512i sums[ROWS][kVectors][2];  // of high bytes, and of low ones
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < kVectors; ++i) sums[r][i][0] = sums[r][i][1] = _mm512_setzero_si512();
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i level_highs = table_of(kLevelBytes.value_high),
                level_lows = table_of(kLevelBytes.value_low);
  for (int t = 0; t < count; t += 4) {
    const int quarter = t / 4 % 4;
    const __m512i spread = _mm512_load_si512(kSpread.bytes[t / 16]);
    __m512i rows[4], v[2], bytes[kVectors], lows[kVectors];
    load_rows<HALF == 0>(codes, stride, t, count, words, rows);
    interleaved<HALF>(rows, v);
    if constexpr (F == Format::q8_0) {
      bytes[0] = v[0];
      bytes[1] = v[1];
    } else {
      if constexpr (F == Format::q4_0) {
        const __m512i flip =
            _mm512_shuffle_epi8(_mm512_load_si512(flips + quarter * kUnit), spread);
        v[0] = _mm512_xor_si512(v[0], flip);
        v[1] = _mm512_xor_si512(v[1], flip);
      }
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < 2; ++i) {
        bytes[2 * i] = _mm512_and_si512(v[i], nibble);
        bytes[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(v[i], 4), nibble);
      }
      if constexpr (F == Format::nf4) CARAMBA_FAST_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        lows[i] = _mm512_shuffle_epi8(level_lows, bytes[i]);
        bytes[i] = _mm512_shuffle_epi8(level_highs, bytes[i]);
      }
    }
    CARAMBA_FAST_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const __m512i high =
          _mm512_shuffle_epi8(_mm512_load_si512(weights[r]->high[quarter]), spread);
      const __m512i low = _mm512_shuffle_epi8(_mm512_load_si512(weights[r]->low[quarter]), spread);
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        sums[r][i][0] = sum_of_products(sums[r][i][0], high, bytes[i]);
        sums[r][i][1] = sum_of_products(sums[r][i][1], low, bytes[i]);
        // nf4 has 16 bits on both sides; the product of the two low bytes is left out: it shows
        // where weights are small beside the tile's largest, 1e-3 of their part at most.
        if constexpr (F == Format::nf4)
          sums[r][i][1] = sum_of_products(sums[r][i][1], high, lows[i]);
      }
    }
  }
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const __m512 scale = _mm512_load_ps(weights[r]->scale);
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      __m512 sum;
      if constexpr (F == Format::nf4) {
        const __m512 unit = _mm512_set1_ps(256);
        sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][i][0]), unit,
                              _mm512_cvtepi32_ps(sums[r][i][1]));
        sum = _mm512_mul_ps(sum, unit);
      } else {
        __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(sums[r][i][0], 8), sums[r][i][1]);
        if constexpr (F == Format::q4_0)
          whole = _mm512_sub_epi32(whole, _mm512_load_si512(weights[r]->offset));
        sum = _mm512_cvtepi32_ps(whole);
      }
      float* at = to[r] + (HALF * kVectors + i) * 16;
      _mm512_storeu_ps(at, _mm512_fmadd_ps(sum, scale, _mm512_loadu_ps(at)));
    }
  }
}

template <Format F, int ROWS>
void value_rows_int8(const WeightUnit* weights, const HeadBytes& head, const char* codes,
                     std::int64_t stride, const Flips& flips, int count, float* sums,
                     std::int64_t width) {
  constexpr int kUnitSums = 16 * 2 * kHalfVectors<F>;
  for (int u = 0; u < head.units; ++u) {
    const WeightUnit* mine[ROWS];
    float* to[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      mine[r] = weights + r * head.units + u;
      to[r] = sums + r * width + u * kUnitSums;
    }
    value_half<F, ROWS, 0>(codes + u * kUnit, stride, count, head.words[u], mine, flips.flip[u][0],
                           to);
    value_half<F, ROWS, 1>(codes + u * kUnit, stride, count, head.words[u], mine, flips.flip[u][0],
                           to);
  }
}

// Sums in the order of `value_half` for `rows` rows, `width` apart.
template <Format F>
void value_int8(const WeightUnit* weights, const HeadBytes& head, int rows, const char* codes,
                std::int64_t stride, const Flips& flips, int count, float* sums,
                std::int64_t width) {
  constexpr int kMost = F == Format::q8_0 ? 4 : 2;  // 16 sums in registers
  stride *= head.fold;
  count = (count + head.fold - 1) / head.fold;
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
