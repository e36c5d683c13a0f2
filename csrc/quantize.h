// Values to codes and scales, with the arithmetic of caramba_fast/ops/quantize.py: fp32 throughout,
// exact division, no contraction, so that codes are the same bits on every backend. Compiled once
// per instruction set, in that set's namespace.
#pragma once

#include "formats.h"
#include "half.h"
#include "vec.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// Bits of the largest magnitude. Non-negative floats are ordered like their bits, with infinity and
// NaN on top, so one integer reduction tells both the magnitude and whether a block is finite.
template <Format T, int N>
inline std::int32_t largest_magnitude(const typename Values<T>::Storage* x) {
  Ints largest = bits(Values<T>::load(x)) & kMagnitude;
  for (int j = kLanes; j < N; j += kLanes)
    largest = larger(largest, bits(Values<T>::load(x + j)) & kMagnitude);
  return largest_of(largest);
}

// Bits of the first element whose magnitude is the largest.
template <Format T, int N>
inline std::int32_t first_largest(const typename Values<T>::Storage* x) {
  const std::int32_t largest = largest_magnitude<T, N>(x);
  std::uint32_t sign = 0;
  for (int j = N - kLanes; j >= 0; j -= kLanes) {  // backwards, so that the first match wins
    const Ints value = bits(Values<T>::load(x + j));
    const std::uint32_t equal = signs_of((value & kMagnitude) == largest);
    const std::uint32_t first = equal & (0u - equal);
    const std::uint32_t keep = equal == 0;  // arithmetic, since a branch would be unpredictable
    sign = (sign & keep) | ((signs_of(value) & first) != 0);
  }
  return largest | static_cast<std::int32_t>(sign << 31);
}

// How a format encodes: what it needs to know of a block; the divisors that give unrounded scales
// (fit "amax" uses the first, fit "mse" tries all, as CANDIDATES of the reference); and the codes
// of values given 1 / scale.
template <Format F>
struct Encoder;

template <>
struct Encoder<Format::q8_0> {
  static constexpr float kDivisors[] = {127.0f};
  template <Format T, int N>
  static std::int32_t extreme(const typename Values<T>::Storage* x) {
    return largest_magnitude<T, N>(x);
  }
  // Rounds half away from zero: adding the float just below 0.5 reaches the next integer from n +
  // 0.5 on but, unlike adding 0.5, not from the float before it. |scaled| is below 127.5: no clamp.
  static Ints code(Floats x, float inverse) {
    const Floats scaled = x * inverse;
    const Ints sign = bits(scaled) & ~kMagnitude;
    return truncated(scaled + floats(sign | bits(splat(0.49999997f))));
  }
};

template <>
struct Encoder<Format::q4_0> {
  static constexpr float kDivisors[] = {-8.0f, -7.25f, -8.5f, -9.0f, -9.5f};
  template <Format T, int N>
  static std::int32_t extreme(const typename Values<T>::Storage* x) {
    return first_largest<T, N>(x);
  }
  // x * inverse is in [-8, 8]: only 16, from the extreme of the other sign, is out of range.
  static Ints code(Floats x, float inverse) {
    return smaller(truncated(x * inverse + 8.5f), splat(15));
  }
};

template <>
struct Encoder<Format::nf4> {
  static constexpr float kDivisors[] = {1.0f, 1.0869565f, 1.1904762f, 1.3157895f};
  template <Format T, int N>
  static std::int32_t extreme(const typename Values<T>::Storage* x) {
    return largest_magnitude<T, N>(x);
  }
  // The number of midpoints below x / scale.
  static Ints code(Floats x, float inverse) {
    const Floats scaled = x * inverse;
#if CARAMBA_FAST_VECTOR_BITS == 512
    Ints index = scaled > splat(kNf4.midpoints[7]) ? splat(8) : splat(0);
    for (int half = 4; half > 0; half /= 2) {  // bisection: a lookup is one instruction
      const Floats middle = lookup(kNf4.midpoints, index + (half - 1));
      index = scaled > middle ? index + half : index;
    }
#else
    Ints index{};
    for (int i = 0; i < 15; ++i) index -= scaled > splat(kNf4.midpoints[i]);
#endif
    return index;
  }
};

// Scales of this many blocks are computed together, so that a division serves a vector of blocks.
inline constexpr int kChunk = 16;

// 1 / scale; for a scale of 0, or below 3e-39, whose reciprocal is not finite, the fp16 scale and
// all values are 0.
inline Floats reciprocal(Floats scale) {
  const Floats inverse = 1.0f / scale;
  const Ints usable = (bits(inverse) & kMagnitude) < splat(kInfinity);
  return floats(bits(inverse) & usable);
}

template <Format F>
inline void chunk_scales(const std::int32_t* extremes, float* inverses, std::uint16_t* scales) {
  for (int i = 0; i < kChunk; i += kLanes) {
    const Ints extreme = load_as<Ints>(extremes + i);
    const Ints finite = (extreme & kMagnitude) < splat(kInfinity);
    const Floats scale = floats(extreme) / Encoder<F>::kDivisors[0];
    store_as(floats(bits(reciprocal(scale)) & finite), inverses + i);
    store_half(finite ? scale : floats(splat(kNaN)), scales + i);
  }
}

template <class E, Format T, Format F, int N>
inline void encode(const typename Values<T>::Storage* x, float inverse, CodeBlock<F, N>& out) {
  if constexpr (CodeBlock<F, N>::kBits == 8) {
    for (int j = 0; j < N; j += kLanes)
      narrow(E::code(Values<T>::load(x + j), inverse), out.bytes + j);
  } else {
    for (int j = 0; j < N / 2; j += kLanes) {
      const Ints low = E::code(Values<T>::load(x + j), inverse);
      const Ints high = E::code(Values<T>::load(x + j + N / 2), inverse);
      narrow(low | high << 4, out.bytes + j);
    }
  }
}

template <Format F, int N, Format T>
void quantize_blocks(const void* values, void* codes, std::uint16_t* scales, std::int64_t count) {
  using Storage = typename Values<T>::Storage;
  static constexpr Storage kZeros[N] = {};  // replaces a block that is not finite
  const auto* from = static_cast<const Storage*>(values);
  auto* to = static_cast<CodeBlock<F, N>*>(codes);
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const int blocks = count - begin < kChunk ? static_cast<int>(count - begin) : kChunk;
    std::int32_t extremes[kChunk] = {};
    float inverses[kChunk];
    std::uint16_t rounded[kChunk];
    for (int i = 0; i < blocks; ++i)
      extremes[i] = Encoder<F>::template extreme<T, N>(from + (begin + i) * N);
    chunk_scales<F>(extremes, inverses, rounded);
    std::memcpy(scales + begin, rounded, blocks * sizeof *rounded);
    for (int i = 0; i < blocks; ++i) {
      const bool finite = (extremes[i] & kMagnitude) < kInfinity;
      encode<Encoder<F>, T>(finite ? from + (begin + i) * N : kZeros, inverses[i], to[begin + i]);
    }
  }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
