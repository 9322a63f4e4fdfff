// Dispatch, once per call.
#include "cpu/kernels.h"

#include "cpu/kernel_table.h"
#include "cpu/padding.h"

namespace packed_sdpa::cpu {
namespace {

CpuKernels select(CpuIsa isa, ScalarType dtype) {
  (void)isa;
  return scalar::kernels(dtype);
}

}  // namespace

const char* forward(const ForwardParams& params, Executor& executor) {
  const CpuKernels kernels = select(cpu_isa(), params.dtype);
  fill_forward_padding(params);
  return kernels.forward(params, executor);
}

const char* backward(const BackwardParams& params, Executor& executor) {
  const CpuKernels kernels = select(cpu_isa(), params.dtype);
  fill_backward_padding(params);
  return kernels.backward(params, executor);
}

}  // namespace packed_sdpa::cpu
