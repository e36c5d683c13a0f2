// How the integer passes (scores_int8.h, values_int8.h) see a quantized tile: which bytes of a
// token hold which values, and the tile's scales. AVX-512 VNNI's vpdpbusd adds four products of u8
// * s8 to each dword; scales are applied after the sums.
//
// A token's bytes are taken in units of 64, a unit in four lanes of 16; a block's bytes never share
// a lane with another's. Scales and weights of values lie in groups of four blocks, a block in each
// lane; the blocks of a unit are all of one group. Included in isa_avx512_vnni.cpp alone, in that
// set's namespace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention_job.h"
#include "prefetch.h"
#include "vec.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

inline constexpr int kUnit = 64, kUnitLanes = 4, kLaneBytes = 16;
inline constexpr int kMostUnits = 4;   // 256 values of q8_0
inline constexpr int kMostBlocks = 8;  // 256 values in blocks of 32
inline constexpr int kMostGroups = kMostBlocks / kUnitLanes;
inline constexpr int kQuads = kTile / 4;                // tokens are taken by four
inline constexpr float kSixteenBits = 127 * 256 + 127;  // what two signed bytes hold

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
  int bits, block, token_blocks, fold, blocks, groups, units, nibbles;
  // The block that unit u's lane reads; lanes behind the last read the last.
  int block_of[kMostUnits][kUnitLanes];
  int group_of[kMostUnits];
  __mmask16 words[kMostUnits];  // dwords of each unit that exist
  // The value that lane's byte 4 * quarter + i holds in a nibble: value[u][quarter * nibbles +
  // nibble][lane * 4 + i]; -1 behind the last. It is also the order of the sums of a unit
  // (`value_half`).
  std::int16_t value[kMostUnits][8][kUnitLanes * 4];
  // From the scales of four tokens, token by token, to lane (block of the group; block of the unit)
  // by token.
  alignas(64) std::uint16_t scale_order[kMostGroups][32], unit_scale_order[kMostUnits][32];
  // From a group's lanes to those of a unit: whole lanes, and one dword of each four times.
  alignas(64) std::int32_t lanes[kMostUnits][16];
  alignas(64) std::int32_t spread[kMostUnits][4][16];
  // Of pairs of tokens: from the weights of eight tokens to those of four pairs, by lane.
  alignas(64) std::int32_t weight_order[16];

  HeadBytes(int bits, int block, int token_blocks, int fold)
      : bits(bits),
        block(block),
        token_blocks(token_blocks),
        fold(fold),
        blocks(token_blocks * fold) {
    const int per_block = block * bits / 8, bytes = blocks * per_block;
    nibbles = bits == 4 ? 2 : 1;
    units = (bytes + kUnit - 1) / kUnit;
    groups = (blocks + kUnitLanes - 1) / kUnitLanes;
    for (int u = 0; u < units; ++u) {
      const int left = std::min(bytes - u * kUnit, kUnit) / 4;
      words[u] = static_cast<__mmask16>((1u << left) - 1);
      for (int lane = 0; lane < kUnitLanes; ++lane)
        block_of[u][lane] = std::min((u * kUnit + lane * kLaneBytes) / per_block, blocks - 1);
      group_of[u] = block_of[u][0] / kUnitLanes;
      for (int vector = 0; vector < 4 * nibbles; ++vector)
        for (int i = 0; i < kUnitLanes * 4; ++i) {
          const int byte = u * kUnit + i / 4 * kLaneBytes + vector / nibbles * 4 + i % 4;
          const int inside = byte % per_block + vector % nibbles * (block / 2);
          value[u][vector][i] = static_cast<std::int16_t>(
              byte < bytes ? byte / per_block % token_blocks * block + inside : -1);
        }
      for (int i = 0; i < 16; ++i) {
        const int lane = block_of[u][i / 4] % kUnitLanes;
        lanes[u][i] = 4 * lane + i % 4;
        for (int g = 0; g < 4; ++g) spread[u][g][i] = 4 * lane + g;
      }
      for (int i = 0; i < 32; ++i)
        unit_scale_order[u][i] =
            static_cast<std::uint16_t>(i % 4 * blocks + block_of[u][i / 4 % kUnitLanes]);
    }
    for (int g = 0; g < groups; ++g)
      for (int i = 0; i < 32; ++i)
        scale_order[g][i] = static_cast<std::uint16_t>(
            i % 4 * blocks + std::min(kUnitLanes * g + i / 4 % kUnitLanes, blocks - 1));
    for (int i = 0; i < 16; ++i)
      weight_order[i] = i % 4 * fold + std::min(i / 4, blocks - 1) / token_blocks;
  }
  static bool fits(int bits, int block, int blocks) {
    return blocks <= kMostBlocks && blocks * block * bits / 8 <= kMostUnits * kUnit;
  }
  int sums() const { return units * kUnit * nibbles; }
  int quads() const { return kQuads / fold; }
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

// The fp16 scales of a tile, end to end, in steps of four tokens.
struct ScaleSteps {
  const char* from;
  int step, valid;  // of halves

  // Those of a quad of tokens; zeros behind the last.
  __m512i quad(int i) const {
    const int there = valid - i * step;
    const char* at = from + 2 * i * step;
    if (there >= step) return _mm512_maskz_loadu_epi16(ones(step), at);
    return _mm512_maskz_loadu_epi16(there > 0 ? ones(there) : 0, at);
  }

 private:
  static __mmask32 ones(int count) { return static_cast<__mmask32>(~0u >> (32 - count)); }
};

struct TileScales {
  // scale[group][quad of tokens][lane * 4 + token] as fp32 (`widen`); zeros behind the last token.
  alignas(64) float scale[kMostGroups][kQuads][16];
  bool unusable;  // some are not finite, or negative where the integer passes need magnitudes

  ScaleSteps steps(const char* from, std::int64_t stride, const HeadBytes& head, int count) {
    for (std::int64_t i = 0; i < stride * kTile; i += kLine)
      __builtin_prefetch(from + kAhead / 4 + i);
    if (stride * head.fold == 2 * head.blocks)
      return {from, 4 * head.blocks, count * head.token_blocks};
    const auto mask = static_cast<__mmask8>((1u << head.blocks) - 1);
    for (int t = 0; t < count; ++t)
      store_as(_mm_maskz_loadu_epi16(mask, from + t * stride), tokens_ + t * head.blocks);
    return {reinterpret_cast<const char*>(tokens_), 4 * head.blocks, count * head.blocks};
  }

  void widen(const ScaleSteps& steps, const HeadBytes& head, bool may_be_negative) {
    __m512i most = _mm512_setzero_si512(), any = most;
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    for (int quad = 0; quad < head.quads(); ++quad) {
      const __m512i raw = steps.quad(quad);
      most = _mm512_max_epu16(most, _mm512_and_si512(raw, magnitude));
      any = _mm512_or_si512(any, raw);
      for (int g = 0; g < head.groups; ++g) {
        const __m512i order = _mm512_load_si512(head.scale_order[g]);
        const __m512i mine = _mm512_permutexvar_epi16(order, raw);
        _mm512_store_ps(scale[g][quad], _mm512_cvtph_ps(_mm512_castsi512_si256(mine)));
      }
    }
    unusable = _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(0x7c00)) != 0 ||
               (!may_be_negative && _mm512_movepi16_mask(any) != 0);
  }

 private:
  // With room for what a vector writes beyond the last token.
  alignas(64) std::uint16_t tokens_[kTile * kMostBlocks + kMostBlocks];
};

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
      const int value = static_cast<int>(level * kSixteenBits + (level < 0 ? -0.5f : 0.5f));
      const int high = (value + 128 + 65536) / 256 - 256;
      value_high[i] = static_cast<std::uint8_t>(high & 255);
      value_low[i] = static_cast<std::uint8_t>((value - 256 * high) & 255);
    }
  }
};
inline constexpr LevelBytes kLevelBytes{};

// Tokens t to t + 3 of a unit; behind the last the last stands in.
template <bool PREFETCH = true>
inline void load_rows(const char* codes, std::int64_t stride, int t, int count, __mmask16 words,
                      __m512i (&rows)[4]) {
  const char* from[4];
  const int last = count - 1;
  if (t + 3 <= last) {
    from[0] = codes + t * stride;
    from[1] = from[0] + stride;
    from[2] = from[0] + 2 * stride;
    from[3] = from[1] + 2 * stride;
  } else {
    for (int i = 0; i < 4; ++i) from[i] = codes + std::min(t + i, last) * stride;
  }
  CARAMBA_FAST_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (PREFETCH) __builtin_prefetch(from[i] + kAhead, 0, 2);
    rows[i] = _mm512_maskz_loadu_epi32(words, from[i]);
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

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
