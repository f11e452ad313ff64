// Which kernels this CPU can run.
#include <cstring>

#include "kernels.h"

namespace embedserve {

extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels, kAvx512Kernels;
#elif defined(__aarch64__)
extern const Kernels kNeonKernels;
#endif

const Kernels* kernels_named(const char* name) {
  if (!std::strcmp(name, "scalar")) return &kScalarKernels;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!std::strcmp(name, "avx512") && avx512) return &kAvx512Kernels;
  if (!std::strcmp(name, "avx2") && avx2) return &kAvx2Kernels;
#elif defined(__aarch64__)
  if (!std::strcmp(name, "neon")) return &kNeonKernels;
#endif
  return nullptr;
}

const Kernels& best_kernels() {
  static const Kernels* const best = [] {
    for (const char* name : {"avx512", "avx2", "neon"}) {
      if (const Kernels* kernels = kernels_named(name)) return kernels;
    }
    return &kScalarKernels;
  }();
  return *best;
}

}  // namespace embedserve
