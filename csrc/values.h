// Weights times values of a tile, summed for all query rows of one kv head, whatever values are
// stored in. In integer products (values_int8.h) where the machine has them and the tile allows
// it, else in fp32 (values_float.h), quantized values being decoded first. Compiled once per
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
#if CARAMBA_FAST_TURNS_CODES
#include "prompt_bf16.h"
#include "values_bytes.h"
#elif CARAMBA_FAST_VECTOR_BITS
#include "values_int8.h"
#endif

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// Weighted values so far.
struct ValueSums {
  HeadStream value;
  int query_rows;
  float* sums;  // (query rows, value.width)
  // (query rows, unit_width) of tiles that were taken in integer products, in the order of
  // `value_half`; null where there are none.
  float* unit_sums = nullptr;
  std::int64_t unit_width = 0;

  ValueSums(const Lane& lane, int h, Arena& arena)
      : value(lane.job.value(), h),
        query_rows(lane.query_rows),
        sums(arena.zeros(query_rows * value.width)) {
#if CARAMBA_FAST_VECTOR_BITS && !CARAMBA_FAST_TURNS_CODES
    if (value.bytes == nullptr) return;
    unit_width = value.bytes->sums();
    unit_sums = arena.zeros(query_rows * unit_width);
#endif
  }

  // Of one query row.
  void rescale(int r, float factor) {
    scale_by(sums + r * value.width, value.width, factor);
    if (unit_sums != nullptr) scale_by(unit_sums + r * unit_width, unit_width, factor);
  }

  // Brings everything into `sums`, when all tiles are done.
  void settle() {
#if CARAMBA_FAST_VECTOR_BITS && !CARAMBA_FAST_TURNS_CODES
    if (unit_sums == nullptr) return;
    for (int r = 0; r < query_rows; ++r)
      settle_unit_sums(*value.bytes, unit_sums + r * unit_width, sums + r * value.width);
#endif
  }

  // The head's own sums of one query row, (dim).
  const float* of_head(int r) const { return sums + r * value.width + value.inner; }

 private:
  static void scale_by(float* x, std::int64_t count, float factor) {
    for (std::int64_t i = 0; i < count; i += kLanes)
      store_as(load_as<Floats>(x + i) * factor, x + i);
  }
};

// In fp32. Values nobody sees may be anything: runs of those somebody sees are added.
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

#if CARAMBA_FAST_VECTOR_BITS && !CARAMBA_FAST_TURNS_CODES
inline constexpr int kWeightRows = 16;  // query rows whose weights are packed at a time
// A weight's share of the total so far that 8 bits of it, and of what is smaller in its tile, are
// enough for where values have 4 bits.
inline constexpr float kFaintShare = 1.0f / 64;
// Of 8 bits little is left of weights so much smaller than the tile's largest; so much of the
// tile's sum they may be.
inline constexpr float kLostWeight = 1.0f / 256, kLostShare = 1.0f / 128;

// Whether 8 bits are enough for a row's weights: what they lose is next to nothing.
inline bool takes_few_bytes(const Softmax& softmax, int r, const float* weights) {
  const float peak = softmax.peak[r], sum = softmax.sum[r];
  if (!(peak <= kFaintShare * softmax.total[r])) return false;
  if (kTile * kLostWeight * peak <= kLostShare * sum) return true;
  Floats lost{};
  for (int i = 0; i < kTile; i += kLanes) {
    const Floats weight = load_as<Floats>(weights + i);
    lost += weight < splat(kLostWeight * peak) ? weight : Floats{};
  }
  float parts[kLanes], all = 0;
  store_as(lost, parts);
  for (const float part : parts) all += part;
  return all <= kLostShare * sum;
}

// Some query rows, with weights of BYTES bytes.
template <Format F, int BYTES>
void add_values_int8(const ValueSums& state, const TileData& data, int count, const int* row,
                     int rows, const float* weights, const TileScratch& scratch) {
  const HeadBytes& head = *state.value.bytes;
  for (int r = 0; r < rows; ++r) {
    const float* from = weights + row[r] * kScoreRow;
    WeightGroup* to = scratch.weights + r * head.groups;
    if (head.fold == 2)
      pack_weights<F, BYTES, 2>(from, head, *scratch.scales, *scratch.flips, to);
    else
      pack_weights<F, BYTES, 1>(from, head, *scratch.scales, *scratch.flips, to);
  }
  const WeightRows all = {scratch.weights, rows, row, state.unit_sums, state.unit_width};
  value_int8<F, BYTES>(all, head, data.values, data.stride, *scratch.flips, count);
}

// All query rows; the number of bytes is each row's own matter.
template <Format F>
void add_values_int8(const ValueSums& state, const TileData& data, int count, const float* weights,
                     const Softmax& softmax, const TileScratch& scratch) {
  constexpr int kFewBytes = F == Format::q8_0 ? 2 : 1;
  if (F == Format::q4_0) take_signs(*state.value.bytes, *scratch.scales, *scratch.flips);
  int row[2][kWeightRows], rows[2] = {};  // of those with two bytes, and with few
  const auto add = [&](bool few) {
    if (few)
      add_values_int8<F, kFewBytes>(state, data, count, row[1], rows[1], weights, scratch);
    else
      add_values_int8<F, 2>(state, data, count, row[0], rows[0], weights, scratch);
    rows[few] = 0;
  };
  for (int r = 0; r < state.query_rows; ++r) {
    const bool few = kFewBytes < 2 && takes_few_bytes(softmax, r, weights + r * kScoreRow);
    row[few][rows[few]++] = r;
    if (rows[few] == kWeightRows) add(few);
  }
  for (const bool few : {false, true})
    if (rows[few] > 0) add(few);
}
#endif

// state += weights (query rows, kScoreRow) times the values of a tile.
CARAMBA_FAST_NOINLINE inline void add_values(const Lane& lane, const Tile& tile,
                                             const Visibility& visibility, const float* weights,
                                             const Softmax& softmax, const TileScratch& scratch,
                                             const ValueSums& state) {
  const TileData data = data_of(lane, state.value, tile, scratch);
#if CARAMBA_FAST_TURNS_CODES
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
  if (takes_bytes(lane, state.value, tile)) {
    const HeadBytes& head = *state.value.bytes;
    TileScales& scales = *scratch.scales;
    scales.widen(scales.steps(data.scales, data.scales_stride, head, tile.count), head,
                 data.format == Format::q4_0);
    if (!scales.unusable) {
      if (data.format == Format::q8_0)
        add_values_int8<Format::q8_0>(state, data, tile.count, weights, softmax, scratch);
      if (data.format == Format::q4_0)
        add_values_int8<Format::q4_0>(state, data, tile.count, weights, softmax, scratch);
      if (data.format == Format::nf4)
        add_values_int8<Format::nf4>(state, data, tile.count, weights, softmax, scratch);
      return;
    }
  }
#else
  static_cast<void>(softmax);
#endif
  TileData values = decoded(data, state.value, tile.count, scratch.decoded);
  const bool prompt = scratch.turned != nullptr;
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
