// The value pass over one quantized tile in products of words (values.h): a dword has the codes of
// two tokens, another their weights times the scales of a block; sums are in the order of the
// values. Codes are converted to words once for several rows. Compiled for each instruction set
// that has integer products but no sums of four bytes in 512 bits (values_bytes.h), in that set's
// namespace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attention_job.h"
#include "bytes.h"
#include "int8_layout.h"
#include "numeric.h"
#include "prefetch.h"
#include "tile.h"
#include "tile_scales.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

inline constexpr int kMostWeight = 32764;
// Levels of nf4 are integers, too. For sums of a tile's products to fit into a dword, weights whose
// sum exceeds this are halved, and once more if it is more than twice that: the limit without
// rounding.
inline constexpr int kMostLevel = 4095, kMostWeights = 524000;
static_assert((kTile * kMostWeight / 4 + kTile) * kMostLevel < 0x7fffffff &&
              (kMostWeights + kTile) * kMostLevel < 0x7fffffff);
inline constexpr int kWeightRows = 8;  // query rows whose weights are packed together

inline constexpr int kRun = 8;  // tokens whose words fill a lane

// Weights of one row times the scales of a group of blocks, one block per lane.
struct alignas(64) WeightWords {
  std::int16_t weight[kTile / kRun][kUnitLanes][kRun];
  float step[kLanes];           // of the integers, by lane
  std::int32_t offset[kLanes];  // excess of a sum, by lane
};

// The largest entry of each lane, in all of its dwords.
inline Floats largest_of_lane(Floats v) {
  v = greater(v, CARAMBA_FAST_MM(permute_ps)(v, 0xb1));
  return greater(v, CARAMBA_FAST_MM(permute_ps)(v, 0x4e));
}

// The sum of each lane, in all of its dwords. NaN becomes the least integer, so sums may wrap; such
// a row shows in the softmax' total.
inline Raw sum_of_lane(Raw v) {
  const auto turned = [](Raw x, auto order) {
    return reinterpret_cast<Raw>(
        CARAMBA_FAST_MM(permute_ps)(reinterpret_cast<Floats>(x), decltype(order)::value));
  };
  v = CARAMBA_FAST_MM(add_epi32)(v, turned(v, std::integral_constant<int, 0xb1>{}));
  return CARAMBA_FAST_MM(add_epi32)(v, turned(v, std::integral_constant<int, 0x4e>{}));
}

// `weights` are zeros past the tile's tokens.
template <Format F>
void pack_weights(const float* weights, const TileScales& scales, int group, WeightWords& to) {
  const auto product = [&](int quad) {
    return in_all_lanes(_mm_loadu_ps(weights + 4 * quad)) *
           load_as<Floats>(scales.scale[group][quad]);
  };
  Floats products[kQuads], most[2] = {};
  CARAMBA_FAST_UNROLL
  for (int quad = 0; quad < kQuads; ++quad) {
    products[quad] = product(quad);
    most[quad % 2] = greater(floats(bits(products[quad]) & kMagnitude), most[quad % 2]);
  }
  const Floats largest = largest_of_lane(greater(most[0], most[1]));
  const Floats range = splat(static_cast<float>(kMostWeight));
  Floats inverse = largest > splat(1e-30f) ? range / largest : Floats{}, share = splat(1.0f);
  if constexpr (F == Format::nf4) {
    Raw size{};  // an integer sum, which does not depend on the order
    CARAMBA_FAST_UNROLL
    for (const Floats& product : products)
      size = CARAMBA_FAST_MM(add_epi32)(
          size, CARAMBA_FAST_MM(abs_epi32)(CARAMBA_FAST_MM(cvtps_epi32)(product * inverse)));
    const Ints whole = reinterpret_cast<Ints>(sum_of_lane(size));
    share = whole > splat(kMostWeights) ? splat(0.5f) : share;
    share = whole > splat(2 * kMostWeights) ? splat(0.25f) : share;
    inverse *= share;
  }
  Raw sum[2] = {};
  CARAMBA_FAST_UNROLL
  for (int quad = 0; quad < kQuads; quad += 2) {
    Raw code[2];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < 2; ++i) {
      code[i] = CARAMBA_FAST_MM(cvtps_epi32)(products[quad + i] * inverse);
      sum[i] = CARAMBA_FAST_MM(add_epi32)(sum[i], code[i]);
    }
    store_as(CARAMBA_FAST_MM(packs_epi32)(code[0], code[1]), to.weight[quad / 2]);
  }
  // Codes of q4_0 are the values plus 8.
  const Raw all = sum_of_lane(CARAMBA_FAST_MM(add_epi32)(sum[0], sum[1]));
  store_as(F == Format::q4_0 ? CARAMBA_FAST_MM(slli_epi32)(all, 3) : Raw{}, to.offset);
  constexpr float kUnit = F == Format::nf4 ? 1.0f / kMostLevel : 1.0f;
  store_as(largest * (kUnit / kMostWeight) / share, to.step);
}

// The values in 16 bytes of 4-bit codes, and in 32 of 8-bit ones.
inline constexpr int kPieceValues = 32, kPieceVectors = kPieceValues / kLanes;
inline constexpr int kMostPieces = 2 * kMostUnits * kUnit / kPieceValues;  // of 4-bit codes

// Interleaves 16 bytes of each of two tokens as words, by byte and token: vectors of kLanes bytes.
template <bool SIGNED>
inline void words_of(const char* a, const char* b, Raw* words) {
  const auto x = load_as<__m128i>(a), y = load_as<__m128i>(b);
  const __m128i low = _mm_unpacklo_epi8(x, y), high = _mm_unpackhi_epi8(x, y);
#if CARAMBA_FAST_VECTOR_BITS == 512
  const __m256i both = _mm256_set_m128i(high, low);
  words[0] = SIGNED ? _mm512_cvtepi8_epi16(both) : _mm512_cvtepu8_epi16(both);
#else
  words[0] = SIGNED ? _mm256_cvtepi8_epi16(low) : _mm256_cvtepu8_epi16(low);
  words[1] = SIGNED ? _mm256_cvtepi8_epi16(high) : _mm256_cvtepu8_epi16(high);
#endif
}

// The levels of nf4 as words, and their two bytes.
struct LevelWords {
  alignas(64) std::int16_t word[2 * kLanes] = {};
  std::uint8_t high[16] = {}, low[16] = {};
  constexpr LevelWords() {
    for (int i = 0; i < 2 * kLanes; ++i) {
      const float level = kNf4.levels[i % 16] * kMostLevel;
      word[i] = static_cast<std::int16_t>(level + (level < 0 ? -0.5f : 0.5f));
      high[i % 16] = static_cast<std::uint8_t>(word[i] >> 8 & 255);
      low[i % 16] = static_cast<std::uint8_t>(word[i] & 255);
    }
  }
};
inline constexpr LevelWords kLevelWords{};

// The words of 4-bit codes' levels, low codes first.
inline void level_words_of(const char* a, const char* b, Raw (&words)[kPieceVectors]) {
#if CARAMBA_FAST_VECTOR_BITS == 512
  words_of<false>(a, b, words);
  const Raw levels = load_as<Raw>(kLevelWords.word);  // repeated: higher index bits are ignored
  words[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words[0], 4), levels);
  words[0] = _mm512_permutexvar_epi16(words[0], levels);
#else
  const auto x = load_as<__m128i>(a), y = load_as<__m128i>(b);
  const Raw both = _mm256_set_m128i(_mm_unpackhi_epi8(x, y), _mm_unpacklo_epi8(x, y));
  // So that both halves of a vector below have contiguous values.
  const Raw codes = _mm256_permute4x64_epi64(both, 0xd8), nibble = _mm256_set1_epi8(15);
  CARAMBA_FAST_UNROLL
  for (int i = 0; i < 2; ++i) {
    const Raw index = (i == 0 ? codes : _mm256_srli_epi16(codes, 4)) & nibble;
    const Raw low = _mm256_shuffle_epi8(table_of(kLevelWords.low), index);
    const Raw high = _mm256_shuffle_epi8(table_of(kLevelWords.high), index);
    words[2 * i] = _mm256_unpacklo_epi8(low, high);
    words[2 * i + 1] = _mm256_unpackhi_epi8(low, high);
  }
#endif
}

// The codes of `kPieceValues` values of a tile's tokens as words, two tokens per dword.
struct PieceWords {
  Raw words[kTile / 2][kPieceVectors];

  // With PREFETCH, prefetches the lines of the next tile.
  template <Format F, bool PREFETCH>
  void load(const char* codes, std::int64_t stride, int count) {
    Raw(*to)[kPieceVectors] = words;
    const char* last = codes + (count - 1) * stride;
    const std::int64_t ahead = ahead_of(stride);
    for (; codes < last; codes += 2 * stride) {
      if constexpr (PREFETCH) __builtin_prefetch(codes + ahead, 0, 3);
      if constexpr (PREFETCH) __builtin_prefetch(codes + stride + ahead, 0, 3);
      load_two<F>(codes, codes + stride, *to++);
    }
    // An odd last token is paired with itself, with weight 0.
    if (codes == last) load_two<F>(codes, codes, *to);
  }

 private:
  template <Format F>
  static void load_two(const char* a, const char* b, Raw (&to)[kPieceVectors]) {
    constexpr int kHalf = kPieceVectors / 2;
    if constexpr (F == Format::nf4) return level_words_of(a, b, to);
    words_of<F == Format::q8_0>(a, b, to);
    if constexpr (F == Format::q8_0) {
      words_of<true>(a + kLaneBytes, b + kLaneBytes, to + kHalf);
    } else {
      CARAMBA_FAST_UNROLL
      for (int i = 0; i < kHalf; ++i) {
        to[kHalf + i] = CARAMBA_FAST_MM(srli_epi16)(to[i], 4);
        to[i] &= CARAMBA_FAST_MM(set1_epi16)(15);
      }
    }
  }
};

// sums[r] += weights times a piece for ROWS rows, with weights `groups` and sums `width` apart; the
// second half of the values is `apart` after the first.
template <Format F, int ROWS>
CARAMBA_FAST_NOINLINE void add_piece(const PieceWords& piece, int count, const WeightWords* weights,
                                     int groups, int lane, float* sums, std::int64_t width,
                                     std::int64_t apart) {
  Raw found[ROWS][kPieceVectors];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) CARAMBA_FAST_UNROLL
  for (int i = 0; i < kPieceVectors; ++i) found[r][i] = Raw{};
  const std::int16_t* weight[ROWS];
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) weight[r] = weights[r * groups].weight[0][lane];
  const Raw(*words)[kPieceVectors] = piece.words;
  // Whole runs: past the last token weights are 0.
  for (std::int64_t at = 0; at < count * kUnitLanes; at += kRun * kUnitLanes, words += kRun / 2)
    CARAMBA_FAST_UNROLL
  for (int t = 0; t < kRun; t += 2) CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const Raw two = CARAMBA_FAST_MM(set1_epi32)(load_as<std::int32_t>(weight[r] + at + t));
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < kPieceVectors; ++i)
      found[r][i] = sum_of_words<false>(found[r][i], two, words[t / 2][i]);
  }
  CARAMBA_FAST_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const WeightWords& mine = weights[r * groups];
    const Floats step = splat(mine.step[4 * lane]);
    const Raw offset = CARAMBA_FAST_MM(set1_epi32)(mine.offset[4 * lane]);
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < kPieceVectors; ++i) {
      constexpr int kHalf = kPieceVectors / 2;
      float* at = sums + r * width + i / kHalf * apart + i % kHalf * kLanes;
      const Floats sum =
          CARAMBA_FAST_MM(cvtepi32_ps)(CARAMBA_FAST_MM(sub_epi32)(found[r][i], offset));
      store_as(fused(sum, step, load_as<Floats>(at)), at);
    }
  }
}

// The same for any number of rows.
template <Format F>
void add_piece_rows(const PieceWords& piece, int count, const WeightWords* weights, int groups,
                    int lane, int rows, float* sums, std::int64_t width, std::int64_t apart) {
  int r = 0;
  const auto run = [&](auto add, int step) {
    add(piece, count, weights + r * groups, groups, lane, sums + r * width, width, apart);
    r += step;
  };
  // As many rows as leave registers for the codes; two and two rather than three and one.
  constexpr int kMost = kRegisters == 32 ? 4 : 3;
  while (rows - r >= kMost && rows - r != kMost + 1) run(add_piece<F, kMost>, kMost);
  while (rows - r >= 2) run(add_piece<F, 2>, 2);
  if (r < rows) run(add_piece<F, 1>, 1);
}

// Scratch for one tile of values and some rows.
struct ValueScratch {
  PieceWords pieces[kMostPieces];  // few rows use the first alone
  WeightWords weights[kWeightRows * kMostGroups];
};

// sums (rows, head.width) += weights (rows, kScoreRow) times the values of a tile. Returns false,
// adding nothing, if some scale is not finite.
template <Format F>
bool add_values_words(const HeadStream& head, const TileData& data, int count, int rows,
                      const float* weights, TileScales& scales, ValueScratch& scratch,
                      float* sums) {
  constexpr int kBits = F == Format::q8_0 ? 8 : 4;
  const HeadBytes& bytes = *head.bytes;
  scales.widen(scales.steps(data.scales, data.scales_stride, bytes, count), bytes);
  if (!scales.finite) return false;
  const int block = head.stored->block, groups = bytes.groups;
  const bool many = rows > kWeightRows;
  for (int first = 0; first < rows; first += kWeightRows) {
    const int some = std::min(rows - first, kWeightRows);
    for (int r = 0; r < some; ++r)
      for (int g = 0; g < groups; ++g)
        pack_weights<F>(weights + (first + r) * kScoreRow, scales, g,
                        scratch.weights[r * groups + g]);
    for (std::int64_t at = 0; at < head.width; at += kPieceValues) {
      const std::int64_t b = at / block, inside = at % block, byte = at * kBits / 8;
      PieceWords& piece = scratch.pieces[many ? at / kPieceValues : 0];
      if (first == 0 && byte % kLine == 0)
        piece.template load<F, true>(data.values + byte, data.stride, count);
      else if (first == 0)
        piece.template load<F, false>(data.values + byte, data.stride, count);
      add_piece_rows<F>(piece, count, scratch.weights + b / kUnitLanes, groups,
                        static_cast<int>(b % kUnitLanes), some,
                        sums + first * head.width + (kBits == 8 ? at : b * block + inside / 2),
                        head.width, kBits == 8 ? kPieceValues / 2 : block / 2);
    }
  }
  return true;
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
