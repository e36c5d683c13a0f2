// Rotary position embedding of heads: rotates pairs (d, d + D / 2) by the angle of their token.
// Each product and the sum are rounded to the element type, as in torch, so that results have the
// same bits. Compiled once per instruction set, in that set's namespace.
#pragma once

#include <cstdint>
#include <cstring>

#include "formats.h"
#include "half.h"
#include "vec.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

template <Format T>
inline Floats rounded_to(Floats v) {
  if constexpr (T == Format::fp32) return v;
  typename Values<T>::Storage kept[kLanes];
  Values<T>::store(v, kept);
  return Values<T>::load(kept);
}

// kLanes pairs: `a` and `b` from the two halves of a head.
template <Format T, class S>
inline void rotate_lanes(const S* a, const S* b, const S* cos_a, const S* sin_a, const S* cos_b,
                         const S* sin_b, S* out_a, S* out_b) {
  using V = Values<T>;
  const Floats x = V::load(a), y = V::load(b);
  V::store(rounded_to<T>(x * V::load(cos_a)) + rounded_to<T>(-y * V::load(sin_a)), out_a);
  V::store(rounded_to<T>(y * V::load(cos_b)) + rounded_to<T>(x * V::load(sin_b)), out_b);
}

template <Format T>
void rotate_token(const void* from, std::int64_t from_head, const void* cosines, const void* sines,
                  std::int64_t second, void* to, std::int64_t to_head, std::int64_t heads,
                  std::int64_t dim) {
  using S = typename Values<T>::Storage;
  const auto* cos = static_cast<const S*>(cosines);
  const auto* sin = static_cast<const S*>(sines);
  const std::int64_t half = dim / 2;
  for (std::int64_t h = 0; h < heads; ++h) {
    const S* x = static_cast<const S*>(from) + h * from_head;
    S* out = static_cast<S*>(to) + h * to_head;
    std::int64_t d = 0;
    for (; d + kLanes <= half; d += kLanes)
      rotate_lanes<T>(x + d, x + half + d, cos + d, sin + d, cos + second + d, sin + second + d,
                      out + d, out + half + d);
    if (d == half) continue;
    S part[8][kLanes] = {};  // remainders of x, cos, sin of both halves, and of the results
    const std::size_t bytes = static_cast<std::size_t>(half - d) * sizeof(S);
    const S* given[6] = {x + d, x + half + d, cos + d, sin + d, cos + second + d, sin + second + d};
    for (int i = 0; i < 6; ++i) std::memcpy(part[i], given[i], bytes);
    rotate_lanes<T>(part[0], part[1], part[2], part[3], part[4], part[5], part[6], part[7]);
    std::memcpy(out + d, part[6], bytes);
    std::memcpy(out + half + d, part[7], bytes);
  }
}

// The heads of one token, `from_head` and `to_head` elements apart; cos and sin for the second half
// of a head begin at element `second`.
inline void rotate_heads(Format type, const void* from, std::int64_t from_head, const void* cos,
                         const void* sin, std::int64_t second, void* to, std::int64_t to_head,
                         std::int64_t heads, std::int64_t dim) {
  const auto run = type == Format::fp32   ? rotate_token<Format::fp32>
                   : type == Format::fp16 ? rotate_token<Format::fp16>
                                          : rotate_token<Format::bf16>;
  run(from, from_head, cos, sin, second, to, to_head, heads, dim);
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
