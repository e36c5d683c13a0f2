// What one instruction set offers: a table of functions over contiguous blocks. Every ISA fills one
// (isa_*.cpp); dispatch.h picks the table once per process.
#pragma once

#include <cstdint>

#include "formats.h"

#if defined(__x86_64__) || defined(_M_X64)
#define CARAMBA_FAST_X86 1
#else
#define CARAMBA_FAST_X86 0
#endif

namespace caramba_fast {

// values -> codes and fp16 scales of `count` blocks
using QuantizeBlocks = void (*)(const void* values, void* codes, std::uint16_t* scales,
                                std::int64_t count);
// codes and fp16 scales of `count` blocks -> values
using DequantizeBlocks = void (*)(const void* codes, const std::uint16_t* scales, void* values,
                                  std::int64_t count);

// One format: a function for each fit (in the order of kFits), block size (kBlocks) and element
// type.
struct FormatKernels {
  QuantizeBlocks quantize[kFitCount][kBlockCount][kValueTypes];
  DequantizeBlocks dequantize[kBlockCount][kValueTypes];
};

struct Kernels {
  const char* isa;
  FormatKernels formats[kQuantizedFormats];  // in the order of kQuantized
};

namespace portable {
extern const Kernels kernels;
}
#if CARAMBA_FAST_X86
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

}  // namespace caramba_fast
