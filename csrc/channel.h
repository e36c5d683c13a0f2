// Kinds by channel: each channel of a group of tokens has its own scale and zero, value = zero +
// scale * code. Decodes tokens to fp32 and encodes groups, as the reference does
// (caramba_fast/ops/quantize.py, encode_groups). Compiled once per instruction set, in that set's
// namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "arena.h"
#include "half.h"
#include "numeric.h"
#include "rows.h"
#include "streams.h"
#include "vec.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

inline constexpr int kPacked = 32;  // values whose nibbles share 16 bytes
inline constexpr int kMostGroup = 128;

// The bits of a byte that belong to its low channel, for kLanes channels with scales from `scales`
// on; the high channels' are kPacked / 2 later (caramba_fast/ops/quantize.py, low_masks).
inline Ints low_mask(const std::uint16_t* scales) {
  const Ints low = widen(scales), high = widen(scales + kPacked / 2);
  const Ints given = -(low >> 15) & (8 | (low & 1) << 2);
  const Ints taken = -(high >> 15) & (16 | (high & 1) << 5);
  return 15 ^ given ^ taken;
}

inline constexpr float kHighUnit = 1.0f / 16;  // of a high code that is not shifted down

// The value of a code's unit: the scale without its sign, which marks bits lent.
inline Floats load_scale(const std::uint16_t* from) {
  return floats(bits(load_half(from)) & kMagnitude);
}

// Tokens [phase, phase + count) of consecutive groups to fp32, `width` values from `codes` on.
// `scales` are those of the first group, with their zeros `zeros` bytes and the next group
// `scales_stride` bytes later.
struct GroupRows {
  const char* scales;
  std::int64_t zeros, scales_stride, group, phase;
};

template <int BITS>
void decode_tokens(const char* codes, std::int64_t stride, const GroupRows& rows,
                   std::int64_t width, int count, float* to) {
  for (int t = 0; t < count;) {
    const std::int64_t index = rows.phase + t;
    const int stop = static_cast<int>(
        std::min<std::int64_t>(count, (index / rows.group + 1) * rows.group - rows.phase));
    const char* at = rows.scales + index / rows.group * rows.scales_stride;
    const auto* scales = reinterpret_cast<const std::uint16_t*>(at);
    const auto* zeros = reinterpret_cast<const std::uint16_t*>(at + rows.zeros);
    const auto* from = reinterpret_cast<const std::uint8_t*>(codes);
    for (std::int64_t d = 0; d < width; d += kPacked) {
      if constexpr (BITS == 8) {
        for (int j = 0; j < kPacked; j += kLanes) {
          const Floats scale = load_scale(scales + d + j), zero = load_half(zeros + d + j);
          for (int i = t; i < stop; ++i)
            store_as(fused(scale, converted(widen(from + i * stride + d + j)), zero),
                     to + i * width + d + j);
        }
      } else {
        for (int j = 0; j < kPacked / 2; j += kLanes) {
          const Ints mask = low_mask(scales + d + j);
          const Floats low_scale = load_scale(scales + d + j), low = load_half(zeros + d + j);
          const Floats high_scale = load_scale(scales + d + j + kPacked / 2) * kHighUnit;
          const Floats high = load_half(zeros + d + j + kPacked / 2);
          for (int i = t; i < stop; ++i) {
            const Ints pair = widen(from + i * stride + d / 2 + j);
            float* out = to + i * width + d + j;
            store_as(fused(low_scale, converted(pair & mask), low), out);
            store_as(fused(high_scale, converted(pair & ~mask), high), out + kPacked / 2);
          }
        }
      }
    }
    t = stop;
  }
}

inline Floats rounded_to_half(Floats x, std::uint16_t* halves) {
  store_half(x, halves);
  return load_half(halves);
}

// A channel that weighs (its range times its queries) this many times as much as its neighbour
// takes one bit, or two, of their byte; WIDER of caramba_fast/formats.py.
inline constexpr float kWider[2] = {2.1875f, 10.75f};

// The ranges of kLanes channels of a group, over tokens from `counted` on.
struct ChannelRange {
  Floats zero, extent, weight;
  Ints sound;  // whether scale and zero are finite

  // `query_rms` weighs errors by channel; null for equal weights.
  ChannelRange(const float* values, std::int64_t dim, std::int64_t counted, std::int64_t group,
               float most, std::uint16_t* zeros, const float* query_rms) {
    Floats low = splat(std::numeric_limits<float>::infinity()), high = -low;
    Ints largest = {};
    for (std::int64_t t = counted; t < group; ++t) {
      const Floats x = load_as<Floats>(values + t * dim);
      largest = larger(largest, bits(x) & kMagnitude);
      low = x < low ? x : low;
      high = x > high ? x : high;
    }
    if (counted >= group) low = high = splat(0.0f);
    zero = rounded_to_half(low, zeros) + 0.0f;  // the least may be -0.0 or 0.0
    extent = high - zero + 0.0f;
    weight = query_rms == nullptr ? extent : extent * load_as<Floats>(query_rms);
    std::uint16_t halves[kLanes];
    const Floats scale = rounded_to_half(extent / most, halves);
    largest = larger(larger(largest, bits(zero) & kMagnitude), bits(scale) & kMagnitude);
    sound = largest < splat(kInfinity);
    store_half(sound ? zero : floats(splat(kNaN)), zeros);
  }

  // Bits that these channels lend to those they share bytes with.
  Ints lent_to(const ChannelRange& other) const {
    const Ints more = other.weight > kWider[0] * weight, much = other.weight > kWider[1] * weight;
    return sound & other.sound & -(more + much);
  }
};

// Encodes kLanes channels, whose codes count `unit` scales each, and stores the scales.
struct ChannelCodes {
  Floats zero, inverse, most;

  ChannelCodes(const ChannelRange& range, Ints largest, Floats unit, Ints lent,
               std::uint16_t* scales)
      : zero(range.zero), most(converted(largest)) {
    std::uint16_t halves[kLanes];
    store_half(range.extent / (most * unit), halves);
    Ints half = widen(halves);
    half = lent > 0 ? (half & ~1) | (lent - 1) : half;
    narrow(half, halves);
    const Floats scale = load_half(halves);
    half |= lent > 0 ? splat(0x8000) : splat(0);
    narrow(range.sound ? half : splat(kHalfNaN), scales);
    const Ints counts = range.sound & (scale > splat(0.0f));
    inverse = counts ? 1.0f / (scale * unit) : splat(0.0f);
  }

  Ints of(const float* x) const {
    const Floats scaled = (load_as<Floats>(x) - zero) * inverse;
    const Floats below = scaled < most ? scaled : most;
    return truncated((scaled > splat(0.0f) ? below : splat(0.0f)) + 0.5f);  // NaN becomes 0
  }
};

// Encodes one group: `values` are (group, lane_dim) fp32, already rounded to fp16; tokens from
// `counted` on determine the range. Codes go to `codes`, token by token, scales and zeros to
// `scales`. With `divides` the two channels of a byte of 4-bit codes divide its bits, weighed by
// `query_rms` (lane_dim) if not null.
inline void encode_group(const float* values, const StoredStream& s, std::int64_t counted,
                         bool divides, const float* query_rms, char* codes, std::uint16_t* scales) {
  const std::int64_t dim = s.lane_dim, group = s.group;
  const int most = s.format == Format::q4_channel ? 15 : 255;
  const auto range = [&](std::int64_t d) {
    return ChannelRange(values + d, dim, std::min(counted, group), group, static_cast<float>(most),
                        scales + dim + d, query_rms == nullptr ? nullptr : query_rms + d);
  };
  auto* to = reinterpret_cast<std::uint8_t*>(codes);
  if (s.format == Format::q8_channel) {
    for (std::int64_t d = 0; d < dim; d += kLanes) {
      const ChannelCodes mine(range(d), splat(most), splat(1.0f), splat(0), scales + d);
      for (std::int64_t t = 0; t < group; ++t)
        narrow(mine.of(values + t * dim + d), to + t * s.codes.token + d);
    }
    return;
  }
  constexpr int kHalf = kPacked / 2;
  for (std::int64_t block = 0; block < dim; block += kPacked)
    for (std::int64_t d = block; d < block + kHalf; d += kLanes) {
      const ChannelRange first = range(d), second = range(d + kHalf);
      const Ints given = divides ? first.lent_to(second) : splat(0);
      const Ints taken = divides ? second.lent_to(first) : splat(0);
      const Ints share = 4 - given + taken;
      const Ints size = splat(1) << share;
      const ChannelCodes low(first, size - 1, splat(1.0f), given, scales + d);
      const ChannelCodes high(second, (splat(256) >> share) - 1, converted(size) * kHighUnit, taken,
                              scales + d + kHalf);
      std::uint8_t* pairs = to + block / 2 + d - block;
      for (std::int64_t t = 0; t < group; ++t)
        narrow(low.of(values + t * dim + d) | high.of(values + t * dim + d + kHalf) << share,
               pairs + t * s.codes.token);
    }
}

// quantize: `count` groups of values of `type`, (group, lane_dim) each, contiguous as are codes and
// scales. Of `s` only format, sizes and the stride of codes are used.
inline void quantize_groups(const StoredStream& s, bool divides, Format type, const void* values,
                            char* codes, std::uint16_t* scales, std::int64_t count) {
  Arena& arena = thread_arena();
  arena.reset();
  const std::int64_t size = s.group * s.lane_dim;
  float* widened = type == Format::fp32 ? nullptr : arena.take<float>(size);
  for (std::int64_t i = 0; i < count; ++i) {
    const float* from = widened;
    if (widened == nullptr)
      from = static_cast<const float*>(values) + i * size;
    else
      for (std::int64_t at = 0; at < size; at += kLanes)
        store_as(load_values(type, values, i * size + at), widened + at);
    encode_group(from, s, 0, divides, nullptr, codes + i * s.group * s.codes.token,
                 scales + i * 2 * s.lane_dim);
  }
}

// dequantize: the inverse.
inline void dequantize_groups(const StoredStream& s, Format type, const char* codes,
                              const std::uint16_t* scales, void* values, std::int64_t count) {
  Arena& arena = thread_arena();
  arena.reset();
  const std::int64_t dim = s.lane_dim, size = s.group * dim;
  const auto decode = s.format == Format::q8_channel ? decode_tokens<8> : decode_tokens<4>;
  float* narrowed = type == Format::fp32 ? nullptr : arena.take<float>(size);
  for (std::int64_t i = 0; i < count; ++i) {
    const GroupRows rows{reinterpret_cast<const char*>(scales + i * 2 * dim), 2 * dim, 0, s.group,
                         0};
    float* to = narrowed == nullptr ? static_cast<float*>(values) + i * size : narrowed;
    decode(codes + i * s.group * s.codes.token, s.codes.token, rows, dim, static_cast<int>(s.group),
           to);
    if (narrowed == nullptr) continue;
    for (std::int64_t at = 0; at < size; at += kLanes)
      store_values(type, load_as<Floats>(narrowed + at), values, i * size + at);
  }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
