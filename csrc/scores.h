// The scores of a tile: q . k of all query rows of one kv head, for one key stream of any format.
// In integer products (scores_int8.h) if the machine has them and the tile allows it, else in fp32
// (scores_float.h) with quantized keys decoded first. Compiled once per instruction set, in that
// set's namespace.
#pragma once

#include <cstdint>
#include <type_traits>

#include "lane.h"
#include "prompt.h"
#include "query.h"
#include "scores_channel.h"
#include "scores_float.h"
#include "tile.h"
#include "turn_keys.h"
#include "visibility.h"
#if CARAMBA_FAST_VECTOR_BITS
#include "scores_int8.h"
#include "scores_many.h"
#endif

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

#if CARAMBA_FAST_VECTOR_BITS
// q8_0 keys are multiplied by two or three bytes of a query, 4-bit keys by one or two. Each query
// decides for itself, and takes the most bytes for a tile that it sees only in part, since the
// tokens that only others see must not change its result.
template <Format F>
CARAMBA_FAST_NOINLINE void add_scores_int8(const Lane& lane, const HeadQuery& query,
                                           const TileData& data, const ScaleSteps& scales,
                                           const Tile& tile, const Visibility& visibility,
                                           float* scores) {
  constexpr bool kThird = F == Format::q8_0;
  using OneByte = std::integral_constant<int, 1>;
  using TwoBytes = std::integral_constant<int, 2>;
  const HeadBytes& head = *query.key.bytes;
  const auto add = [&](auto bytes, const QueryUnit* units, int first, int rows) {
    score_int8<F, decltype(bytes)::value>(units + first * head.units, head, rows, data.values,
                                          data.stride, scales, tile.count,
                                          scores + first * kScoreRow);
  };
  EnoughBits<F> enough(head, scales, data.values, data.stride, tile.count);
  const QueryUnit* judged = kThird ? query.two_bytes : query.one_byte;
  const auto needs_few = [&](int r) {
    return visibility.full(tile, lane.query_token(r), lane.job.tile) &&
           enough(judged + r * head.units);
  };
  if (kThird) add(TwoBytes{}, query.two_bytes, 0, lane.query_rows);
  int first = 0;  // of a run of queries with the same number of bytes
  bool few = needs_few(0);
  for (int r = 1; r <= lane.query_rows; ++r) {
    const bool next = r < lane.query_rows && needs_few(r);
    if (r < lane.query_rows && next == few) continue;
    if (kThird != few)
      add(OneByte{}, query.one_byte, first, r - first);
    else if (!kThird)
      add(TwoBytes{}, query.two_bytes, first, r - first);
    first = r;
    few = next;
  }
}
#endif

// scores (query rows, kScoreRow) += q . k for the tokens of a tile.
CARAMBA_FAST_NOINLINE inline void add_scores(const Lane& lane, const HeadQuery& query,
                                             const Tile& tile, const Visibility& visibility,
                                             const TileScratch& scratch, float* scores) {
  TileData data = data_of(lane, query.key, tile, scratch);
#if CARAMBA_FAST_VECTOR_BITS
  if (takes_bytes(query.key, tile)) {
    complete_pairs(lane, query.key, tile, scratch, data);
    const ScaleSteps scales =
        scratch.scales->steps(data.scales, data.scales_stride, *query.key.bytes, tile.count);
    if (data.format == Format::q8_0)
      add_scores_int8<Format::q8_0>(lane, query, data, scales, tile, visibility, scores);
    else if (data.format == Format::q4_0)
      add_scores_int8<Format::q4_0>(lane, query, data, scales, tile, visibility, scores);
    else
      add_scores_int8<Format::nf4>(lane, query, data, scales, tile, visibility, scores);
    return;
  }
#else
  static_cast<void>(visibility);
#endif
  if (is_by_channel(data.format))
    return score_groups(query, data, lane.query_rows, tile.count, scratch, scores);
#if CARAMBA_FAST_BYTE_SUMS
  if (query.halves != nullptr && data.format == Format::bf16)
    return score_bf16_prompt(query.halves, query.key.width, lane.query_rows, query.factor,
                             data.values, data.stride, tile.count, scratch.turned, scores);
#endif
  const TileData keys = decoded(data, query.key, tile.count, scratch.decoded);
  const std::int64_t width = query.key.width;
  if (lane.job.prompt) {
    kTurnKeys[static_cast<int>(keys.format)](keys.values, keys.stride, tile.count, width,
                                             scratch.turned);
    return score_prompt(query.values, width, lane.query_rows, scratch.turned, tile.count, scores);
  }
#if CARAMBA_FAST_VECTOR_BITS
  if (has_many_rows(lane.query_rows, width))
    return score_many(query.values, width, lane.query_rows, keys.format, keys.values, keys.stride,
                      tile.count, scratch.turned, scores);
#endif
  kScoreTiles[static_cast<int>(keys.format)](query.values, width, lane.query_rows, keys.values,
                                             keys.stride, tile.count, scores);
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
