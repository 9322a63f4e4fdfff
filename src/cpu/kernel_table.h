// The kernels behind forward() and backward(): one function per element type and instruction set.
#pragma once

#include "cpu/kernels.h"
#include "cpu/params.h"

namespace packed_sdpa::cpu {

// Does a whole call and returns the kernel's name.
using ForwardFunction = const char* (*)(const ForwardParams& params, Executor& executor);
using BackwardFunction = const char* (*)(const BackwardParams& params, Executor& executor);

struct CpuKernels {
  ForwardFunction forward = nullptr;
  BackwardFunction backward = nullptr;
};

// Kernels of a set for a type; null members: the set has none of its own, ask the set before it.
namespace scalar {
CpuKernels kernels(ScalarType dtype);
}
#if defined(__x86_64__)
namespace avx2 {
CpuKernels kernels(ScalarType dtype);
}
namespace avx512 {
CpuKernels kernels(ScalarType dtype);
}
namespace avx512_bf16 {
CpuKernels kernels(ScalarType dtype);
}
namespace amx {
CpuKernels kernels(ScalarType dtype);
}
#endif

}  // namespace packed_sdpa::cpu
