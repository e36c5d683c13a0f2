// The table of functions of one instruction set, over contiguous blocks. Every isa_*.cpp fills one;
// dispatch.h picks the table once per process.
#pragma once

#include <cstdint>

#include "formats.h"

#if defined(__x86_64__) || defined(_M_X64)
#define CARAMBA_FAST_X86 1
#else
#define CARAMBA_FAST_X86 0
#endif
// Every 64-bit ARM CPU has NEON, which the portable kernels use there.
#if defined(__aarch64__) && defined(__ARM_NEON)
#define CARAMBA_FAST_NEON 1
#define CARAMBA_FAST_BASE neon
#include <arm_neon.h>
#else
#define CARAMBA_FAST_NEON 0
#define CARAMBA_FAST_BASE portable
#endif
// A build for gcc's checks leaves out the sets that its machine cannot run (setup.py).
#ifndef CARAMBA_FAST_AVX512
#define CARAMBA_FAST_AVX512 CARAMBA_FAST_X86
#endif
// Older compilers do not know AVX-VNNI.
#ifndef CARAMBA_FAST_AVX_VNNI
#if CARAMBA_FAST_X86 && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define CARAMBA_FAST_AVX_VNNI 1
#else
#define CARAMBA_FAST_AVX_VNNI 0
#endif
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

struct AttentionJob;
struct Task;
struct AppendJob;
struct AppendStream;
struct StoredStream;

// What writes codes and moves values. It uses no sums of products of bytes, so that the sets with
// and without VNNI share it.
struct StoreKernels {
  FormatKernels formats[kQuantizedFormats];  // in the order of kQuantized
  // values of `type` -> codes and scales of `count` groups by channel, and back.
  void (*quantize_groups)(const StoredStream& s, bool divides, Format type, const void* values,
                          char* codes, std::uint16_t* scales, std::int64_t count);
  void (*dequantize_groups)(const StoredStream& s, Format type, const char* codes,
                            const std::uint16_t* scales, void* values, std::int64_t count);
  // Merges the rows of two partial attentions (out of `type`, lse).
  void (*merge_states)(Format type, const void* a, const float* lse_a, const void* b,
                       const float* lse_b, void* out, float* lse, std::int64_t rows,
                       std::int64_t dim);
  // Writes new tokens [begin, end) of the lanes [first, last) of one row of one stream.
  void (*append)(const AppendJob& job, const AppendStream& stream, std::int64_t row,
                 std::int64_t first, std::int64_t last, std::int64_t begin, std::int64_t end);
  // Applies RoPE to the heads of one token (rotary.h).
  void (*rotate_heads)(Format type, const void* from, std::int64_t from_head, const void* cos,
                       const void* sin, std::int64_t second, void* to, std::int64_t to_head,
                       std::int64_t heads, std::int64_t dim);
};

struct Kernels {
  const char* isa;
  const StoreKernels* store;
  // Decode attention: runs `count` tasks; merges the partial results of one (row, lane); the number
  // of floats of a partial result.
  void (*attend)(const AttentionJob& a, const Task* tasks, std::int64_t count);
  void (*merge)(const AttentionJob& a, std::int64_t row, std::int64_t lane,
                const std::int64_t* partials, int count);
  std::int64_t (*partial_floats)(const AttentionJob& a);
};

namespace CARAMBA_FAST_BASE {
extern const StoreKernels store_kernels;
extern const Kernels kernels;
}  // namespace CARAMBA_FAST_BASE
#if CARAMBA_FAST_X86
namespace avx2 {
extern const StoreKernels store_kernels;
extern const Kernels kernels;
}  // namespace avx2
namespace avx2_vnni {
extern const Kernels kernels;
}
namespace avx512 {
extern const StoreKernels store_kernels;
extern const Kernels kernels;
}  // namespace avx512
namespace avx512_vnni {
extern const Kernels kernels;
}
#endif

}  // namespace caramba_fast
