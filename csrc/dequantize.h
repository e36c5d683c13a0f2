// Codes and scales back to values: multiplied in fp32, then rounded to the output type. Compiled
// once per instruction set, in that set's namespace.
#pragma once

#include "formats.h"
#include "half.h"
#include "vec.h"

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

// How a format decodes: the values of codes at scale 1.
template <Format F>
struct Decoder;

template <>
struct Decoder<Format::q8_0> {
  static Floats value(Ints code) { return converted(code); }
};

template <>
struct Decoder<Format::q4_0> {
  static Floats value(Ints code) { return converted(code - 8); }
};

template <>
struct Decoder<Format::nf4> {
  static Floats value(Ints code) { return lookup(kNf4.levels, code); }
};

template <Format F, Format T, int N>
inline void decode(const CodeBlock<F, N>& codes, float scale, typename Values<T>::Storage* out) {
  if constexpr (CodeBlock<F, N>::kBits == 8) {
    const auto* bytes = reinterpret_cast<const std::int8_t*>(codes.bytes);
    for (int j = 0; j < N; j += kLanes)
      Values<T>::store(Decoder<F>::value(widen(bytes + j)) * scale, out + j);
  } else {
    for (int j = 0; j < N / 2; j += kLanes) {
      const Ints pair = widen(codes.bytes + j);
      Values<T>::store(Decoder<F>::value(pair & 15) * scale, out + j);
      Values<T>::store(Decoder<F>::value(pair >> 4) * scale, out + j + N / 2);
    }
  }
}

template <Format F, int N, Format T>
void dequantize_blocks(const void* codes, const std::uint16_t* scales, void* values,
                       std::int64_t count) {
  const auto* from = static_cast<const CodeBlock<F, N>*>(codes);
  auto* to = static_cast<typename Values<T>::Storage*>(values);
  for (std::int64_t begin = 0; begin < count; begin += kLanes) {
    const int blocks = count - begin < kLanes ? static_cast<int>(count - begin) : kLanes;
    std::uint16_t rounded[kLanes] = {};
    std::memcpy(rounded, scales + begin, blocks * sizeof *rounded);
    float chunk_scales[kLanes];
    store_as(load_half(rounded), chunk_scales);
    for (int i = 0; i < blocks; ++i)
      decode<F, T, N>(from[begin + i], chunk_scales[i], to + (begin + i) * N);
  }
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
