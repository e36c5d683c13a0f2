// The score pass over one tile of keys by channel. Queries are multiplied by the scales once per
// group, q . k = q . zero + (q scale) . code, so that a token is a product with small integers: in
// integer products if the machine has those of many values (scores_group.h), else in fp32. Compiled
// once per instruction set, in that set's namespace.
#pragma once

#include <algorithm>
#include <cstdint>

#include "channel.h"
#include "numeric.h"
#include "prefetch.h"
#include "query.h"
#include "tile.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// scores[r][t] += base[r] + q[r] . code[t] for ROWS rows; q rows are `width` apart. `masks` are the
// low channels' bits of each byte of 4-bit codes; high codes are not shifted down.
template <int BITS, int ROWS>
void score_codes(const float* q, const float* base, const std::int32_t* masks, std::int64_t width,
                 const char* codes, std::int64_t stride, int count, float* scores) {
  constexpr int kTokens = kScoreSums / ROWS > 0 ? kScoreSums / ROWS : 1;
  constexpr int kRun = BITS == 8 ? kPacked : kPacked / 2;  // contiguous values
  for (int t = 0; t < count; t += kTokens) {
    const std::uint8_t* key[kTokens];
    CARAMBA_FAST_UNROLL
    for (int i = 0; i < kTokens; ++i)  // the last token is repeated past the end
      key[i] = token_at<std::uint8_t>(codes, stride, t + i < count ? t + i : count - 1);
    for (int i = 0; i < kTokens; ++i) prefetch(key[i], width * BITS / 8, stride);
    Floats sums[kScoreSums] = {};
    const auto add = [&](std::int64_t d, const Floats(&values)[kTokens]) {
      CARAMBA_FAST_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        const Floats query = load_as<Floats>(q + r * width + d);
        CARAMBA_FAST_UNROLL
        for (int i = 0; i < kTokens; ++i)
          sums[r * kTokens + i] = fused(query, values[i], sums[r * kTokens + i]);
      }
    };
    for (std::int64_t d = 0; d < width; d += kPacked)
      for (int j = 0; j < kRun; j += kLanes) {
        Floats values[kTokens];
        if constexpr (BITS == 8) {
          CARAMBA_FAST_UNROLL
          for (int i = 0; i < kTokens; ++i) values[i] = converted(widen(key[i] + d + j));
          add(d + j, values);
        } else {
          const Ints mask = load_as<Ints>(masks + d / 2 + j);
          Ints pairs[kTokens];
          CARAMBA_FAST_UNROLL
          for (int i = 0; i < kTokens; ++i) {
            pairs[i] = widen(key[i] + d / 2 + j);
            values[i] = converted(pairs[i] & mask);
          }
          add(d + j, values);
          CARAMBA_FAST_UNROLL
          for (int i = 0; i < kTokens; ++i) values[i] = converted(pairs[i] & ~mask);
          add(d + j + kRun, values);
        }
      }
    float found[kScoreSums];
    store_sums(sums, found);
    const int there = std::min(kTokens, count - t);  // the rest belongs to the next group
    for (int r = 0; r < ROWS; ++r)
      for (int i = 0; i < there; ++i)
        scores[r * kScoreRow + t + i] += base[r] + found[r * kTokens + i];
  }
}

// The same for any number of rows.
template <int BITS>
void score_code_rows(const float* q, const float* base, const std::int32_t* masks,
                     std::int64_t width, int rows, const char* codes, std::int64_t stride,
                     int count, float* scores) {
  int r = 0;
  const auto run = [&](auto score, int step) {
    score(q + r * width, base + r, masks, width, codes, stride, count, scores + r * kScoreRow);
    r += step;
  };
  while (r + 4 <= rows) run(score_codes<BITS, 4>, 4);
  if (r + 2 <= rows) run(score_codes<BITS, 2>, 2);
  if (r < rows) run(score_codes<BITS, 1>, 1);
}

// Multiplies `rows` queries by the scales of a group.
template <int BITS>
void fold_rows(const float* queries, const std::uint16_t* scales, std::int64_t width, int rows,
               float* folded) {
  for (std::int64_t at = 0; at < rows * width; at += width)
    for (std::int64_t d = 0; d < width; d += kLanes) {
      const bool high = BITS == 4 && d % kPacked >= kPacked / 2;
      const Floats unit = load_scale(scales + d) * (high ? kHighUnit : 1.0f);
      store_as(load_as<Floats>(queries + at + d) * unit, folded + at + d);
    }
}

// The low channels' bits of each byte of 4-bit codes.
inline void find_masks(const std::uint16_t* scales, std::int64_t width, std::int32_t* masks) {
  for (std::int64_t d = 0; d < width; d += kPacked)
    for (int j = 0; j < kPacked / 2; j += kLanes)
      store_as(low_mask(scales + d + j), masks + d / 2 + j);
}

// base (rows) = q . zero
inline void fold_zeros(const float* queries, const std::uint16_t* zeros, std::int64_t width,
                       int rows, float* base) {
  for (int r = 0; r < rows; ++r) {
    Floats sum = {};
    for (std::int64_t d = 0; d < width; d += kLanes)
      sum = fused(load_as<Floats>(queries + r * width + d), load_half(zeros + d), sum);
    base[r] = sum_of(sum);
  }
}

// scores (rows, kScoreRow) += q . k for the tokens of a tile in one group.
template <int BITS>
void score_group_tokens(const HeadQuery& query, int rows, const char* scales, std::int64_t zeros,
                        const char* codes, std::int64_t stride, int count,
                        const TileScratch& scratch, float* scores) {
  const std::int64_t width = query.key.width;
  const auto* scale = reinterpret_cast<const std::uint16_t*>(scales);
  const auto* zero = reinterpret_cast<const std::uint16_t*>(scales + zeros);
  float* base = query.folded + rows * width;
  std::int32_t* masks = query.masks;
#if CARAMBA_FAST_VECTOR_BITS
  for (std::int64_t i = 0; i < 2 * width; i += kLine) {  // prefetches the group after the next one
    __builtin_prefetch(scales + 4 * zeros + i, 0, 3);
    __builtin_prefetch(scales + 5 * zeros + i, 0, 3);
  }
  for (int t = 0; t < count; t += kTurned) {
    const GroupTokens tokens = {scale,
                                zero,
                                codes + t * stride,
                                stride,
                                width,
                                query.key.first * BITS / 8,
                                std::min(count - t, kTurned),
                                query.allowed_step};
    const auto left = [&](int r, int rows) {
      fold_zeros(query.values + r * width, zero, width, rows, base);
      fold_rows<BITS>(query.values + r * width, scale, width, rows, query.folded);
      if (BITS == 4) find_masks(scale, width, masks);
      score_code_rows<BITS>(query.folded, base, masks, width, rows, tokens.codes, stride,
                            tokens.count, scores + r * kScoreRow + t);
    };
    score_group<BITS>(query.values, rows, tokens, *scratch.group, scores + t, left);
  }
#else
  static_cast<void>(scratch);
  fold_zeros(query.values, zero, width, rows, base);
  fold_rows<BITS>(query.values, scale, width, rows, query.folded);
  if (BITS == 4) find_masks(scale, width, masks);
  score_code_rows<BITS>(query.folded, base, masks, width, rows, codes, stride, count, scores);
#endif
}

// scores (rows, kScoreRow) += q . k for the tokens of a tile.
inline void score_groups(const HeadQuery& query, const TileData& data, int rows, int count,
                         const TileScratch& scratch, float* scores) {
  const StoredStream& s = *query.key.stored;
  const auto score =
      data.format == Format::q8_channel ? score_group_tokens<8> : score_group_tokens<4>;
  for (int t = 0; t < count;) {
    const std::int64_t group = (data.phase + t) / s.group;
    const int stop =
        static_cast<int>(std::min<std::int64_t>(count, (group + 1) * s.group - data.phase));
    score(query, rows, data.scales + group * data.scales_stride, 2 * s.lane_dim,
          data.values + t * data.stride, data.stride, stop - t, scratch, scores + t);
    t = stop;
  }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
