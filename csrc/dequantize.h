// Codes and scales to values: multiplied in fp32, then rounded to the output type. Compiled once
// per instruction set, in that set's namespace.
#pragma once

#include <cstdint>
#include <cstring>

#include "formats.h"
#include "half.h"
#include "prefetch.h"
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

// Some tokens of a stream, `blocks` blocks of each, to fp32: token t's values begin at
// values[t * blocks * N]. Strides are in bytes.
template <Format F, int N>
void dequantize_tokens(const char* codes, std::int64_t codes_stride, const char* scales,
                       std::int64_t scales_stride, int blocks, int count, float* values) {
  for (int t = 0; t < count; ++t) {
    const auto* block = token_at<CodeBlock<F, N>>(codes, codes_stride, t);
    const auto* scale = token_at<std::uint16_t>(scales, scales_stride, t);
    for (int i = 0; i < blocks; ++i) {
      std::uint16_t padded[kLanes] = {scale[i]};
      decode<F, Format::fp32, N>(block[i], load_half(padded)[0], values + (t * blocks + i) * N);
    }
  }
}

using DequantizeTokens = void (*)(const char* codes, std::int64_t codes_stride, const char* scales,
                                  std::int64_t scales_stride, int blocks, int count, float* values);

template <Format F>
inline constexpr DequantizeTokens kDequantizeTokens[kBlockCount] = {
    dequantize_tokens<F, 32>, dequantize_tokens<F, 64>, dequantize_tokens<F, 128>};

inline DequantizeTokens dequantizer(Format format, int block) {
  const int size = block_index(block);
  if (format == Format::q8_0) return kDequantizeTokens<Format::q8_0>[size];
  if (format == Format::q4_0) return kDequantizeTokens<Format::q4_0>[size];
  return kDequantizeTokens<Format::nf4>[size];
}

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
