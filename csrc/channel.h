// Kinds by channel: groups of tokens of which each channel has a scale and a zero of its own, value
// = zero + scale * code. Tokens to fp32, and a group of tokens to codes, as the reference has it
// (caramba_fast/ops/quantize.py, encode_groups). Compiled once per instruction set, in that set's
// namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "half.h"
#include "numeric.h"
#include "streams.h"
#include "vec.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

inline constexpr int kPacked = 32;  // values whose nibbles lie in 16 bytes
inline constexpr int kMostGroup = 128;

// Tokens [phase, phase + count) of consecutive groups to fp32, `width` values from one place of
// the lane on. `scales` are those of the first group, their zeros lie `zeros` bytes behind, those
// of the next group `scales_stride`.
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
          const Floats scale = load_half(scales + d + j), zero = load_half(zeros + d + j);
          for (int i = t; i < stop; ++i)
            store_as(fused(scale, converted(widen(from + i * stride + d + j)), zero),
                     to + i * width + d + j);
        }
      } else {
        for (int j = 0; j < kPacked / 2; j += kLanes) {
          const Floats low_scale = load_half(scales + d + j), low = load_half(zeros + d + j);
          const Floats high_scale = load_half(scales + d + j + kPacked / 2);
          const Floats high = load_half(zeros + d + j + kPacked / 2);
          for (int i = t; i < stop; ++i) {
            const Ints pair = widen(from + i * stride + d / 2 + j);
            float* out = to + i * width + d + j;
            store_as(fused(low_scale, converted(pair & 15), low), out);
            store_as(fused(high_scale, converted(pair >> 4), high), out + kPacked / 2);
          }
        }
      }
    }
    t = stop;
  }
}

inline float rounded_to_half(float x, std::uint16_t& half) {
  std::uint16_t stored[kLanes];
  store_half(splat(x), stored);
  half = stored[0];
  return load_half(stored)[0];
}

// One group: `values` are (group, lane_dim) fp32, already rounded to fp16; tokens from `counted` on
// count for the range. Codes go to `codes`, token by token, scales and zeros to `scales`.
inline void encode_group(const float* values, const StoredStream& s, std::int64_t counted,
                         char* codes, std::uint16_t* scales) {
  const bool nibbles = s.format == Format::q4_channel;
  const float most = nibbles ? 15.0f : 255.0f;
  const std::int64_t dim = s.lane_dim, group = s.group;
  for (std::int64_t d = 0; d < dim; ++d) {
    float low = std::numeric_limits<float>::infinity(), high = -low;
    bool sound = true;
    for (std::int64_t t = std::min(counted, group); t < group; ++t) {
      const float x = values[t * dim + d];
      sound = sound && std::isfinite(x);
      low = x < low ? x : low;
      high = x > high ? x : high;
    }
    if (counted >= group) low = high = 0;
    const float zero = rounded_to_half(low, scales[dim + d]);
    const float scale = rounded_to_half((high - zero) / most, scales[d]);
    if (!sound || !std::isfinite(zero) || !std::isfinite(scale))
      scales[d] = scales[dim + d] = static_cast<std::uint16_t>(kHalfNaN);
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    for (std::int64_t t = 0; t < group; ++t) {
      float scaled = (values[t * dim + d] - zero) * inverse;
      scaled = !(scaled > 0) ? 0 : scaled < most ? scaled : most;  // NaN becomes 0
      const auto code = static_cast<std::uint8_t>(std::min(std::floor(scaled + 0.5f), most));
      auto* row = reinterpret_cast<std::uint8_t*>(codes + t * s.codes.token);
      if (!nibbles) {
        row[d] = code;
        continue;
      }
      const std::int64_t block = d / kPacked, place = d % kPacked, half = kPacked / 2;
      std::uint8_t& pair = row[block * half + place % half];
      pair = place < half ? code
                          : static_cast<std::uint8_t>(pair | static_cast<std::uint8_t>(code << 4));
    }
  }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
