// One head's part of a stream and of its tiles: the head's bytes of a token, and the beginning of a
// tile. Compiled once per instruction set, in that set's namespace.
#pragma once

#include <cstdint>
#include <cstring>

#include "channel.h"
#include "dequantize.h"
#include "lane.h"
#if CARAMBA_FAST_VECTOR_BITS
#include "int8_layout.h"
#endif

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

struct HeadBytes;     // int8_layout.h
struct TileScales;    // tile_scales.h
struct GroupScratch;  // scores_group.h
struct ValueScratch;  // values_bytes.h, values_words.h

// Scratch for one tile at a time.
struct TileScratch {
  float* decoded;  // kTile tokens of one head in fp32
  float* turned;   // as many, transposed (turn_keys.h), or values of a prompt
  float* rounded;  // weights in bf16 (prompt_bf16.h); null where there are none
  // For integer products; null if there are none.
  TileScales* scales;
  GroupScratch* group;
  ValueScratch* values;
};

// One head's part of a lane's token: whole blocks (of 32 values if unquantized), so it may begin
// before the head and end after it.
struct HeadStream {
  const StoredStream* stored;
  std::int64_t first, width;  // values of the lane's token before the part, values in the part
  std::int64_t inner;         // values of the part before the head
  int blocks;
  const HeadBytes* bytes;  // null without integer products, or if they do not fit

  // `pairs`: whether two tokens may be processed as one.
  HeadStream(const StoredStream& s, int head_in_lane, bool pairs) : stored(&s) {
    const std::int64_t unit = is_quantized(s.format) ? s.block : 32;
    const std::int64_t begin = head_in_lane * s.dim, end = begin + s.dim;
    first = begin / unit * unit;
    width = (end + unit - 1) / unit * unit - first;
    inner = begin - first;
    blocks = static_cast<int>(width / unit);
    bytes = nullptr;
#if CARAMBA_FAST_VECTOR_BITS
    const int bits = bits_of(s.format);
    if (!is_quantized(s.format) || is_by_channel(s.format)) return;
    if (!HeadBytes::fits(bits, s.block, blocks)) return;
    pairs = pairs && s.codes.token == kUnit / 2 && width * bits == 8 * s.codes.token &&
            s.scales.token == 2 * blocks;
    bytes = head_bytes(bits, s.block, blocks, pairs ? 2 : 1);
#else
    static_cast<void>(pairs);
#endif
  }
};

// One head's part of the tokens of a tile; strides between tokens in bytes.
struct TileData {
  Format format;
  const char* values;  // or codes
  std::int64_t stride;
  const char* scales;  // of quantized formats; by channel those of the first token's group
  std::int64_t scales_stride;
  std::int64_t phase = 0;  // by channel: tokens of that group before the first
};

// The data of a tile. If a tile of the tail wraps around the ring, it is copied to `scratch`.
inline TileData data_of(const Lane& lane, const HeadStream& head, const Tile& tile,
                        const TileScratch& scratch) {
  const StoredStream& s = *head.stored;
  if (tile.source != Source::codes) {
    const Buffer& buffer = tile.source == Source::tail ? s.tail : s.sink;
    const auto token = [&](int i) {
      return lane.side_at(buffer, tile.source, tile.start + i) + 2 * head.first;
    };
    if (tile.source == Source::sinks || tile.start % lane.job.ring + tile.count <= lane.job.ring)
      return {Format::fp16, token(0), buffer.token, nullptr, 0};
    char* to = reinterpret_cast<char*>(scratch.decoded);
    for (int i = 0; i < tile.count; ++i)
      std::memcpy(to + 2 * i * head.width, token(i), 2 * static_cast<std::size_t>(head.width));
    return {Format::fp16, to, 2 * head.width, nullptr, 0};
  }
  const char* values = lane.stored_at(s.codes, tile.start) + head.first * bits_of(s.format) / 8;
  if (!is_quantized(s.format)) return {s.format, values, s.codes.token, nullptr, 0};
  if (is_by_channel(s.format)) {
    const char* groups = lane.group_at(s, tile.start) + 2 * head.first;
    return {s.format, values, s.codes.token, groups, s.scales.token, tile.start % s.group};
  }
  const char* scales = lane.stored_at(s.scales, tile.start) + head.first / s.block * 2;
  return {s.format, values, s.codes.token, scales, s.scales.token};
}

// Quantized tokens as fp32 in `to`, for `count * head.width` values; others unchanged.
inline TileData decoded(const TileData& data, const HeadStream& head, int count, float* to) {
  if (!is_quantized(data.format)) return data;
  if (is_by_channel(data.format)) {
    const StoredStream& s = *head.stored;
    const GroupRows rows{data.scales, 2 * s.lane_dim, data.scales_stride, s.group, data.phase};
    const auto decode = data.format == Format::q8_channel ? decode_tokens<8> : decode_tokens<4>;
    decode(data.values, data.stride, rows, head.width, count, to);
    return {Format::fp32, reinterpret_cast<const char*>(to), head.width * 4, nullptr, 0};
  }
  dequantizer(data.format, head.stored->block)(data.values, data.stride, data.scales,
                                               data.scales_stride, head.blocks, count, to);
  return {Format::fp32, reinterpret_cast<const char*>(to), head.width * 4, nullptr, 0};
}

#if CARAMBA_FAST_VECTOR_BITS
// Whether a tile's keys allow integer products.
inline bool takes_bytes(const HeadStream& head, const Tile& tile) {
  return tile.source == Source::codes && head.bytes != nullptr;
}

// Tokens processed in pairs need a token after an odd number of them: a tile that ends with the
// last slot is copied to `scratch` with a zero token appended.
inline void complete_pairs(const Lane& lane, const HeadStream& head, const Tile& tile,
                           const TileScratch& scratch, TileData& data) {
  const std::int64_t slots = lane.job.slots;
  if (head.bytes->fold == 1 || tile.count % 2 == 0) return;
  if (tile.start % slots + tile.count < slots) return;
  char* to = reinterpret_cast<char*>(scratch.decoded);
  const auto token = static_cast<std::size_t>(data.stride);
  std::memcpy(to, data.values, static_cast<std::size_t>(tile.count) * token);
  std::memset(to + static_cast<std::size_t>(tile.count) * token, 0, token);
  data.values = to;
}
#endif

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
