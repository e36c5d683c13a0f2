// The kernels of one instruction set. Included at the end of each isa_*.cpp, which first defines
//   CARAMBA_FAST_ISA           the namespace, also the name users see
//   CARAMBA_FAST_VECTOR_BITS   widest vectors that intrinsics may use: 0, 256 or 512
//   CARAMBA_FAST_VNNI          1 with sums of products of bytes (VNNI), else 0
//   CARAMBA_FAST_STORE_ISA     the set whose StoreKernels serve, if it is another
// and raises the compiler's target. System headers must come before that: otherwise the linker
// would merge their inline functions, compiled for a newer CPU, with everyone else's copies.
#include "append.h"
#include "attend.h"
#include "channel.h"
#include "dequantize.h"
#include "formats.h"
#include "kernels.h"
#include "quantize.h"
#include "quantize_fit.h"
#include "rotary.h"

#define CARAMBA_FAST_STRING_OF(name) #name
#define CARAMBA_FAST_STRING(name) CARAMBA_FAST_STRING_OF(name)

namespace caramba_fast {
namespace CARAMBA_FAST_ISA {

#ifdef CARAMBA_FAST_STORE_ISA
using CARAMBA_FAST_STORE_ISA::store_kernels;
#else
template <Format F>
inline constexpr FormatKernels kFormatKernels = {
    {{{quantize_blocks<F, 32, Format::fp32>, quantize_blocks<F, 32, Format::fp16>,
       quantize_blocks<F, 32, Format::bf16>},
      {quantize_blocks<F, 64, Format::fp32>, quantize_blocks<F, 64, Format::fp16>,
       quantize_blocks<F, 64, Format::bf16>},
      {quantize_blocks<F, 128, Format::fp32>, quantize_blocks<F, 128, Format::fp16>,
       quantize_blocks<F, 128, Format::bf16>}},
     {{fit_blocks<F, 32, Format::fp32>, fit_blocks<F, 32, Format::fp16>,
       fit_blocks<F, 32, Format::bf16>},
      {fit_blocks<F, 64, Format::fp32>, fit_blocks<F, 64, Format::fp16>,
       fit_blocks<F, 64, Format::bf16>},
      {fit_blocks<F, 128, Format::fp32>, fit_blocks<F, 128, Format::fp16>,
       fit_blocks<F, 128, Format::bf16>}}},
    {{dequantize_blocks<F, 32, Format::fp32>, dequantize_blocks<F, 32, Format::fp16>,
      dequantize_blocks<F, 32, Format::bf16>},
     {dequantize_blocks<F, 64, Format::fp32>, dequantize_blocks<F, 64, Format::fp16>,
      dequantize_blocks<F, 64, Format::bf16>},
     {dequantize_blocks<F, 128, Format::fp32>, dequantize_blocks<F, 128, Format::fp16>,
      dequantize_blocks<F, 128, Format::bf16>}}};

// constexpr: filled by the linker, so that loading the library runs no code of this target.
extern constexpr StoreKernels store_kernels = {
    {kFormatKernels<Format::q8_0>, kFormatKernels<Format::q4_0>, kFormatKernels<Format::nf4>},
    quantize_groups,
    dequantize_groups,
    merge_states,
    append_tokens,
    rotate_heads};
#endif

extern constexpr Kernels kernels = {CARAMBA_FAST_STRING(CARAMBA_FAST_ISA), &store_kernels,
                                    attend_tasks, merge_partials, partial_floats};

}  // namespace CARAMBA_FAST_ISA
}  // namespace caramba_fast
