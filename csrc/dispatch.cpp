#include "dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#if CARAMBA_FAST_X86
#include <cpuid.h>
#endif

namespace caramba_fast {
namespace {

constexpr const char* kVariable = "CARAMBA_FAST_CPU_ISA";

#if CARAMBA_FAST_AVX_VNNI
// Some compilers do not know AVX-VNNI by name; its registers are AVX2's.
bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
}
#endif

// Best first; the last runs everywhere.
std::vector<const Kernels*> supported() {
  std::vector<const Kernels*> tables;
#if CARAMBA_FAST_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
#if CARAMBA_FAST_AVX512
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512vnni")) tables.push_back(&avx512_vnni::kernels);
  if (avx512) tables.push_back(&avx512::kernels);
#endif
#if CARAMBA_FAST_AVX_VNNI
  if (avx2 && has_avx_vnni()) tables.push_back(&avx2_vnni::kernels);
#endif
  if (avx2) tables.push_back(&avx2::kernels);
#endif
  tables.push_back(&CARAMBA_FAST_BASE::kernels);
  return tables;
}

const Kernels& choose() {
  const auto tables = supported();
  const char* wanted = std::getenv(kVariable);
  if (wanted == nullptr || *wanted == '\0') return *tables.front();
  std::string names;
  for (const Kernels* table : tables) {
    if (std::string(wanted) == table->isa) return *table;
    names += names.empty() ? "" : ", ";
    names += table->isa;
  }
  throw std::runtime_error(std::string(kVariable) + " is '" + wanted +
                           "'; this build on this CPU runs: " + names);
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace caramba_fast
