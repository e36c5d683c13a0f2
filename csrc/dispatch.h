// Picks the instruction set, once per process.
#pragma once

#include "kernels.h"

namespace caramba_fast {

// The best table this CPU can run, or the one CARAMBA_FAST_CPU_ISA names. Throws std::runtime_error
// when it names one that is unknown or that this CPU lacks.
const Kernels& kernels();

}  // namespace caramba_fast
