// Fit "mse" of quantize: the candidate scale of least squared error, with the arithmetic of
// encode_mse in caramba_fast/ops/quantize.py, including the order of its sums. Compiled once per
// instruction set, in that set's namespace.
#pragma once

#include "dequantize.h"
#include "quantize.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// Scales smaller than that of fit "amax" put values beyond the codes on either side.
template <Format F>
struct FitEncoder : Encoder<F> {};

template <>
struct FitEncoder<Format::q4_0> : Encoder<Format::q4_0> {
  static Ints code(Floats x, float inverse) {
    return larger(Encoder<Format::q4_0>::code(x, inverse), splat(0));
  }
};

// kLanes partial sums of x q and of q q, where q are the values of the codes of x: the second half
// of the vectors is added to the first until one is left.
template <Format F, int N>
inline void partial_sums(const float* x, float inverse, Floats& product, Floats& square) {
  Floats products[N / kLanes], squares[N / kLanes];
  for (int i = 0; i < N / kLanes; ++i) {
    const Floats value = load_as<Floats>(x + i * kLanes);
    const Floats q = Decoder<F>::value(FitEncoder<F>::code(value, inverse));
    products[i] = value * q;
    squares[i] = q * q;
  }
  for (int half = N / kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) {
      products[i] += products[i + half];
      squares[i] += squares[i + half];
    }
  product = products[0];
  square = squares[0];
}

// The best scales of up to kLanes blocks and the reciprocals that give their codes. The scale
// refitted to codes of values q is x q / q q and leaves the error x x - (x q)^2 / (q q), so the
// largest (x q)^2 / (q q) wins, the first of equals.
template <Format F, int N>
inline void best_scales(const float (*x)[N], int blocks, Floats extreme, Floats& inverse,
                        Floats& scale) {
  Floats gain = splat(-1.0f);
  Floats products[kLanes] = {}, squares[kLanes] = {};
  for (const float divisor : Encoder<F>::kDivisors) {
    const Floats tried = reciprocal(extreme / divisor);
    float inverses[kLanes];
    store_as(tried, inverses);
    for (int i = 0; i < blocks; ++i) partial_sums<F, N>(x[i], inverses[i], products[i], squares[i]);
    const Floats product = sums_of(products);
    const Floats square = sums_of(squares);
    const Floats refitted = square > splat(0.0f) ? product / square : splat(0.0f);
    const Floats reached = product * refitted;
    const Ints better = reached > gain;
    gain = better ? reached : gain;
    scale = better ? refitted : scale;
    inverse = better ? tried : inverse;
  }
}

// Codes and scales of up to kLanes blocks; those that are not finite are overwritten with zeros.
template <Format F, int N>
void fit_chunk(float (*x)[N], int blocks, CodeBlock<F, N>* codes, std::uint16_t* scales) {
  std::int32_t extremes[kLanes] = {};
  for (int i = 0; i < blocks; ++i) {
    extremes[i] = Encoder<F>::template extreme<Format::fp32, N>(x[i]);
    if ((extremes[i] & kMagnitude) >= kInfinity) std::memset(x[i], 0, sizeof x[i]);
  }
  const Ints extreme = load_as<Ints>(extremes);
  const Ints finite = (extreme & kMagnitude) < splat(kInfinity);
  Floats inverse{}, scale{};
  best_scales<F, N>(x, blocks, floats(extreme & finite), inverse, scale);
  float inverses[kLanes];
  std::uint16_t rounded[kLanes];
  store_as(inverse, inverses);
  store_half(finite ? scale : floats(splat(kNaN)), rounded);
  std::memcpy(scales, rounded, blocks * sizeof *rounded);
  for (int i = 0; i < blocks; ++i) encode<FitEncoder<F>, Format::fp32>(x[i], inverses[i], codes[i]);
}

template <Format F, int N, Format T>
void fit_blocks(const void* values, void* codes, std::uint16_t* scales, std::int64_t count) {
  const auto* from = static_cast<const typename Values<T>::Storage*>(values);
  auto* to = static_cast<CodeBlock<F, N>*>(codes);
  float x[kLanes][N];  // widened once, since each candidate reads them
  for (std::int64_t begin = 0; begin < count; begin += kLanes) {
    const int blocks = count - begin < kLanes ? static_cast<int>(count - begin) : kLanes;
    for (int i = 0; i < blocks; ++i)
      for (int j = 0; j < N; j += kLanes)
        store_as(Values<T>::load(from + (begin + i) * N + j), x[i] + j);
    fit_chunk<F, N>(x, blocks, to + begin, scales + begin);
  }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
