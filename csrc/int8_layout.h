// The layout of a quantized tile for the integer passes (scores_int8.h, values_words.h): which
// bytes of a token hold which values, and the tile's scales. Integer products (bytes.h) are summed
// in dwords, and the sums multiplied by scales.
//
// A token's bytes are processed in units of a vector, a unit in lanes of 16 bytes; a lane holds
// bytes of one block only. Scales of values are in groups of as many blocks as a vector has lanes.
// Compiled once for each instruction set that has such products, in that set's namespace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention_job.h"
#include "bytes.h"
#include "prefetch.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

inline constexpr int kUnit = 4 * kLanes, kUnitLanes = kLanes / 4, kLaneBytes = 16;
inline constexpr int kMostUnits = 256 / kUnit;  // of q8_0
inline constexpr int kMostBlocks = 8;           // 256 values in blocks of 32
inline constexpr int kMostGroups = kMostBlocks / kUnitLanes;
inline constexpr int kQuads = kTile / 4;  // groups of four tokens

// The fp16 scales of four tokens, token by token, of up to `kMostBlocks` blocks each.
struct Halves {
  static constexpr int kParts = 4 * kMostBlocks / (2 * kLanes);
  Raw part[kParts];
};

// Permutes them to lanes and tokens, as fp32.
class ScaleOrder {
 public:
  // Dword `to` of the result is half `from`.
  void place(int to, int from) {
#if CARAMBA_FAST_VECTOR_BITS == 512
    halves_[to] = static_cast<std::uint16_t>(from);
#else
    for (int i = 0; i < 2 * kUnit; ++i)
      if (i % kLaneBytes / 2 == to)
        bytes_[i] =
            static_cast<std::uint8_t>(i / kLaneBytes == from / 8 ? from % 8 * 2 + i % 2 : 128);
#endif
  }
  Floats operator()(const Halves& halves) const {
#if CARAMBA_FAST_VECTOR_BITS == 512
    const Raw mine = _mm512_permutexvar_epi16(_mm512_load_si512(halves_), halves.part[0]);
    return _mm512_cvtph_ps(_mm512_castsi512_si256(mine));
#else
    const Raw found = _mm256_shuffle_epi8(halves.part[0], load_as<Raw>(bytes_)) |
                      _mm256_shuffle_epi8(halves.part[1], load_as<Raw>(bytes_ + kUnit));
    return _mm256_cvtph_ps(
        _mm_or_si128(_mm256_castsi256_si128(found), _mm256_extracti128_si256(found, 1)));
#endif
  }

 private:
#if CARAMBA_FAST_VECTOR_BITS == 512
  alignas(64) std::uint16_t halves_[32] = {};
#else
  alignas(64) std::uint8_t bytes_[2 * kUnit];  // of each part, 16 in each lane
#endif
};

// The layout of one head: its blocks, as bytes of a token. Computed once per layout (`head_bytes`).
//
// If a contiguous token fills only half a unit, two tokens are processed as one with twice the
// blocks: then `fold` is 2, and `blocks`, strides and counts below are of such pairs.
struct HeadBytes {
  int bits, block, token_blocks, fold, blocks, groups, units, nibbles;
  // The block of each lane of unit u; lanes past the end repeat the last.
  int block_of[kMostUnits][kUnitLanes];
  Words words[kMostUnits];  // mask of existing dwords
  // The value in a nibble of byte 4 * quarter + i of a lane: value[u][quarter * nibbles +
  // nibble][lane * 4 + i]; -1 past the end.
  std::int16_t value[kMostUnits][8][kUnitLanes * 4];
  // From the scales of four tokens, token by token, to those of (lane, token), where a lane is a
  // block of the group, or of the unit.
  ScaleOrder scale_order[kMostGroups], unit_scale_order[kMostUnits];

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
      words[u] = first_words(left);
      for (int lane = 0; lane < kUnitLanes; ++lane)
        block_of[u][lane] = std::min((u * kUnit + lane * kLaneBytes) / per_block, blocks - 1);
      for (int vector = 0; vector < 4 * nibbles; ++vector)
        for (int i = 0; i < kUnitLanes * 4; ++i) {
          const int byte = u * kUnit + i / 4 * kLaneBytes + vector / nibbles * 4 + i % 4;
          const int inside = byte % per_block + vector % nibbles * (block / 2);
          value[u][vector][i] = static_cast<std::int16_t>(
              byte < bytes ? byte / per_block % token_blocks * block + inside : -1);
        }
      for (int i = 0; i < kLanes; ++i)
        unit_scale_order[u].place(i, i % 4 * blocks + block_of[u][i / 4]);
    }
    for (int g = 0; g < groups; ++g)
      for (int i = 0; i < kLanes; ++i)
        scale_order[g].place(i, i % 4 * blocks + std::min(kUnitLanes * g + i / 4, blocks - 1));
  }
  static bool fits(int bits, int block, int blocks) {
    return blocks <= kMostBlocks && blocks * block * bits / 8 <= kMostUnits * kUnit;
  }
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

inline Raw table_of(const std::uint8_t (&bytes)[16]) {
  return in_all_lanes(load_as<__m128i>(bytes));
}

// The levels of nf4 as 16-bit integers in two bytes: unsigned around 32768, or signed for products
// of words (`kWordCodes`).
struct LevelBytes {
  std::uint8_t high[16] = {}, low[16] = {};
  constexpr LevelBytes() {
    for (int i = 0; i < 16; ++i) {
      const int level = static_cast<int>(kNf4.levels[i] * 32767.0f + 32768.5f) - 32768;
      const int stored = (level + (kWordCodes ? 0 : 32768)) & 0xffff;
      high[i] = static_cast<std::uint8_t>(stored >> 8);
      low[i] = static_cast<std::uint8_t>(stored & 255);
    }
  }
};
inline constexpr LevelBytes kLevelBytes{};

// Tokens t to t + 3 of a unit; the last token is repeated past the end.
inline void load_rows(const char* codes, std::int64_t stride, int t, int count, Words words,
                      Raw (&rows)[4]) {
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
    __builtin_prefetch(from[i] + ahead_of(stride), 0, 3);
    rows[i] = load_words(words, from[i]);
  }
}

// Transposes four tokens: columns[c] has, in each lane, dword c of the four.
inline void columns_of(const Raw (&rows)[4], Raw (&columns)[4]) {
  const Raw a = CARAMBA_FAST_MM(unpacklo_epi32)(rows[0], rows[1]);
  const Raw b = CARAMBA_FAST_MM(unpacklo_epi32)(rows[2], rows[3]);
  const Raw c = CARAMBA_FAST_MM(unpackhi_epi32)(rows[0], rows[1]);
  const Raw d = CARAMBA_FAST_MM(unpackhi_epi32)(rows[2], rows[3]);
  columns[0] = CARAMBA_FAST_MM(unpacklo_epi64)(a, b);
  columns[1] = CARAMBA_FAST_MM(unpackhi_epi64)(a, b);
  columns[2] = CARAMBA_FAST_MM(unpacklo_epi64)(c, d);
  columns[3] = CARAMBA_FAST_MM(unpackhi_epi64)(c, d);
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
