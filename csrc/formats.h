// The storage formats, as in caramba_fast/formats.py (tests/ops/test_extension.py compares the
// two), and the layout of codes. No functions with linkage, since translation units of different
// instruction sets share this header.
#pragma once

#include <cstdint>

namespace caramba_fast {

// The `index` column of formats.py. The first three are unquantized and also name the element types
// of inputs and outputs.
enum class Format : int {
  fp32 = 0,
  fp16 = 1,
  bf16 = 2,
  q8_0 = 3,
  q4_0 = 4,
  nf4 = 5,
  q8_channel = 6,
  q4_channel = 7
};

inline constexpr int kValueTypes = 3;
inline constexpr int kQuantizedFormats = 3;

struct FormatRow {
  const char* name;
  Format format;
  int bits;
};

// The formats with scales per block of a token, in the order of `Format`.
inline constexpr FormatRow kQuantized[kQuantizedFormats] = {
    {"q8_0", Format::q8_0, 8},
    {"q4_0", Format::q4_0, 4},
    {"nf4", Format::nf4, 4},
};
static_assert(static_cast<int>(kQuantized[0].format) == kValueTypes &&
                  static_cast<int>(kQuantized[2].format) == kValueTypes + 2,
              "kQuantized must follow the order of Format");

inline constexpr int kBlockCount = 3;
inline constexpr int kBlocks[kBlockCount] = {32, 64, 128};

// Static, since the linker would merge inline functions of several instruction sets.
static constexpr bool is_quantized(Format format) {
  return static_cast<int>(format) >= kValueTypes;
}

// Whether scales and zeros are per channel of a group of tokens.
static constexpr bool is_by_channel(Format format) {
  return format == Format::q8_channel || format == Format::q4_channel;
}

// Bits of a value or of a code.
static constexpr int bits_of(Format format) {
  if (is_by_channel(format)) return format == Format::q8_channel ? 8 : 4;
  if (format == Format::fp32) return 32;
  return is_quantized(format) ? kQuantized[static_cast<int>(format) - kValueTypes].bits : 16;
}

// The index of a block size in kBlocks; -1 if there is none.
static constexpr int block_index(std::int64_t block) {
  return block == 32 ? 0 : block == 64 ? 1 : block == 128 ? 2 : -1;
}

// How scales are fitted, as FITS of caramba_fast/ops/quantize.py.
inline constexpr int kFitCount = 2;
inline constexpr const char* kFits[kFitCount] = {"amax", "mse"};

// The codes of one block of N values; its fp16 scale is in another tensor.
//
//   q8_0          byte j = value j, a signed int8
//   q4_0, nf4     byte j = value j + N/2 in the high nibble, value j in the low one, j < N/2
//
//                  7   6   5   4 | 3   2   1   0
//                 value j + N/2  |    value j
//
// q4_channel has channels j and j + 16 of 32 in a byte, which divide its bits (channel.h).
template <Format F, int N>
struct CodeBlock {
  static constexpr int kBits = F == Format::q8_0 ? 8 : 4;
  std::uint8_t bytes[N * kBits / 8];
};
static_assert(sizeof(CodeBlock<Format::q8_0, 32>) == 32 &&
              alignof(CodeBlock<Format::q8_0, 32>) == 1);
static_assert(sizeof(CodeBlock<Format::q4_0, 32>) == 16 &&
              alignof(CodeBlock<Format::q4_0, 32>) == 1);
static_assert(sizeof(CodeBlock<Format::nf4, 128>) == 64);

// The 16 quantiles of QLoRA's NormalFloat (arXiv:2305.14314, appendix E), ascending.
struct Nf4Table {
  float levels[16] = {-1.0f,
                      -0.6961928009986877f,
                      -0.5250730514526367f,
                      -0.39491748809814453f,
                      -0.28444138169288635f,
                      -0.18477343022823334f,
                      -0.09105003625154495f,
                      0.0f,
                      0.07958029955625534f,
                      0.16093020141124725f,
                      0.24611230194568634f,
                      0.33791524171829224f,
                      0.44070982933044434f,
                      0.5626170039176941f,
                      0.7229568362236023f,
                      1.0f};
  // Midpoints of neighbouring levels; a value on one takes the lower level. The 16th is padding.
  float midpoints[16] = {};

  constexpr Nf4Table() {
    for (int i = 0; i < 15; ++i) midpoints[i] = (levels[i + 1] + levels[i]) / 2;
  }
};
inline constexpr Nf4Table kNf4{};

}  // namespace caramba_fast
