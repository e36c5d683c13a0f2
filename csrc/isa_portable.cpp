// The kernels for any CPU, with what the compiler targets by default.
#define CARAMBA_FAST_ISA portable
#define CARAMBA_FAST_VECTOR_BITS 0
#define CARAMBA_FAST_VNNI 0
#include "isa_table.h"
