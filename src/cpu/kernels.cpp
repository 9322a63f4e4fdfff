// Dispatch, once per call.
#include "cpu/kernels.h"

#include "cpu/kernel_table.h"
#include "cpu/padding.h"

namespace packed_sdpa::cpu {
namespace {

CpuKernels select(CpuIsa isa, ScalarType dtype) {
#if defined(__x86_64__)
  using Kernels = CpuKernels (*)(ScalarType);
  static constexpr Kernels kSets[] = {&scalar::kernels, &avx2::kernels, &avx512::kernels,
                                      &avx512_bf16::kernels, &amx::kernels};
  for (int set = static_cast<int>(isa); set > 0; --set) {
    const CpuKernels kernels = kSets[set](dtype);
    if (kernels.forward != nullptr) return kernels;
  }
#else
  static_cast<void>(isa);  // only the scalar set is ever detected
#endif
  return scalar::kernels(dtype);
}

}  // namespace

const char* forward(const ForwardParams& params, Executor& executor) {
  const CpuKernels kernels = select(cpu_isa(), params.dtype);
  fill_forward_padding(params, executor);
  return kernels.forward(params, executor);
}

const char* backward(const BackwardParams& params, Executor& executor) {
  const CpuKernels kernels = select(cpu_isa(), params.dtype);
  fill_backward_padding(params, executor);
  return kernels.backward(params, executor);
}

}  // namespace packed_sdpa::cpu
