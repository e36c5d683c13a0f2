// Weights times values of a tile, summed for all query rows of one kv head, for values of any
// format. In integer products (values_bytes.h, values_words.h) if the machine has them and the tile
// allows it, else in fp32 (values_float.h) with quantized values decoded first. Compiled once per
// instruction set, in that set's namespace.
#pragma once

#include <cstdint>

#include "arena.h"
#include "lane.h"
#include "prompt.h"
#include "softmax.h"
#include "tile.h"
#include "values_float.h"
#include "visibility.h"
#if CARAMBA_FAST_BYTE_SUMS
#include "prompt_bf16.h"
#include "values_bytes.h"
#elif CARAMBA_FAST_VECTOR_BITS
#include "values_words.h"
#endif

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// Weighted sums of values so far.
struct ValueSums {
  HeadStream value;
  int query_rows;
  float* sums;  // (query rows, value.width)

  ValueSums(const Lane& lane, int h, Arena& arena)
      : value(lane.job.value(), h, false),
        query_rows(lane.query_rows),
        sums(arena.zeros(query_rows * value.width)) {}

  // Of one query row.
  void rescale(int r, float factor) {
    float* row = sums + r * value.width;
    for (std::int64_t i = 0; i < value.width; i += kLanes)
      store_as(load_as<Floats>(row + i) * factor, row + i);
  }

  // The head's own sums of one query row, (dim).
  const float* of_head(int r) const { return sums + r * value.width + value.inner; }
};

// In fp32. Invisible values may be anything, so only runs of visible ones are added.
inline void add_values_float(const ValueSums& state, const TileData& values, int count,
                             std::uint64_t seen, const float* weights, bool prompt) {
  const ValueTile add = prompt ? add_prompt_values : kValueTiles[static_cast<int>(values.format)];
  for (int i = 0; i < count;) {
    if (!(seen >> i & 1)) {
      ++i;
      continue;
    }
    int stop = i + 1;
    while (stop < count && (seen >> stop & 1)) ++stop;
    add(weights + i, state.query_rows, values.values + i * values.stride, values.stride, stop - i,
        state.sums, state.value.width);
    i = stop;
  }
}

// state += weights (query rows, kScoreRow) times the values of a tile.
CARAMBA_FAST_NOINLINE inline void add_values(const Lane& lane, const Tile& tile,
                                             const Visibility& visibility, const float* weights,
                                             const Softmax& softmax, const TileScratch& scratch,
                                             const ValueSums& state) {
  const TileData data = data_of(lane, state.value, tile, scratch);
#if CARAMBA_FAST_BYTE_SUMS
  if (tile.source == Source::codes && state.value.bytes != nullptr) {
    const auto add = data.format == Format::q8_0   ? add_values_bytes<Format::q8_0>
                     : data.format == Format::q4_0 ? add_values_bytes<Format::q4_0>
                                                   : add_values_bytes<Format::nf4>;
    if (add(lane, state.value, data, tile.count, visibility, weights, softmax.peak, *scratch.values,
            state.sums))
      return;
  }
  if (scratch.rounded != nullptr && data.format == Format::bf16)
    return add_bf16_prompt(weights, state.query_rows, data.values, data.stride, tile.count,
                           visibility.any, scratch.turned, scratch.rounded, state.sums,
                           state.value.width);
#elif CARAMBA_FAST_VECTOR_BITS
  if (tile.source == Source::codes && state.value.bytes != nullptr) {
    const auto add = data.format == Format::q8_0   ? add_values_words<Format::q8_0>
                     : data.format == Format::q4_0 ? add_values_words<Format::q4_0>
                                                   : add_values_words<Format::nf4>;
    if (add(state.value, data, tile.count, state.query_rows, weights, *scratch.scales,
            *scratch.values, state.sums))
      return;
  }
  static_cast<void>(softmax);
#else
  static_cast<void>(softmax);
#endif
  TileData values = decoded(data, state.value, tile.count, scratch.decoded);
  const bool prompt = lane.job.prompt;
  if (prompt && values.format != Format::fp32) {
    kWidenValues[static_cast<int>(values.format)](values.values, values.stride, tile.count,
                                                  state.value.width, scratch.turned);
    values = {Format::fp32, reinterpret_cast<const char*>(scratch.turned), state.value.width * 4,
              nullptr, 0};
  }
  add_values_float(state, values, tile.count, visibility.any, weights, prompt);
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
