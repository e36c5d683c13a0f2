// The kernels for any CPU, for the compiler's default target; on 64-bit ARM that has NEON.
#include "kernels.h"

#define CARAMBA_FAST_ISA CARAMBA_FAST_BASE
#define CARAMBA_FAST_VECTOR_BITS 0
#define CARAMBA_FAST_VNNI 0
#include "isa_table.h"
