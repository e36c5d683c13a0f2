// The kernels for x86 CPUs with AVX2, FMA, F16C and AVX-VNNI.
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

#if CARAMBA_FAST_AVX_VNNI
#include <immintrin.h>

#define CARAMBA_FAST_ISA avx2_vnni
#define CARAMBA_FAST_VECTOR_BITS 256
#define CARAMBA_FAST_VNNI 1
#define CARAMBA_FAST_STORE_ISA avx2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif

#include "isa_table.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
