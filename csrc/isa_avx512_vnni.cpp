// The kernels for x86 CPUs with AVX-512 F, BW, VL, DQ and VNNI.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels.h"

#if CARAMBA_FAST_AVX512
#include <immintrin.h>

#define CARAMBA_FAST_ISA avx512_vnni
#define CARAMBA_FAST_VECTOR_BITS 512
#define CARAMBA_FAST_VNNI 1
#define CARAMBA_FAST_STORE_ISA avx512
#if defined(__clang__)
#pragma clang attribute push(                                                               \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"))), \
    apply_to = function)
#else
// gcc 12 warns about the undefined lanes of its own AVX-512 intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#endif

#include "isa_table.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
