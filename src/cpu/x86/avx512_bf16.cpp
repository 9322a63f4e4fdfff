// AVX-512 with BF16 kernels: bfloat16 by VDPBF16PS.
#include <cstddef>
#include <cstdint>

#include "cpu/half.h"
#include "cpu/kernel_table.h"
#include "cpu/target_region.h"
#include "cpu/tiled.h"

PACKED_SDPA_BEGIN_TARGET("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

#define PACKED_SDPA_HAS_BF16 1

namespace packed_sdpa::cpu::avx512_bf16 {
namespace {

constexpr int64_t kPanel = 64;
constexpr int64_t kMicroRows = 6;
constexpr int64_t kMicroVecs = 4;

// Each builds on those before it.
// clang-format off
#include "cpu/x86/avx512_vec-inl.h"
#include "cpu/generic/rows-inl.h"
#include "cpu/generic/gemm_broadcast-inl.h"
#include "cpu/generic/exp-inl.h"
#include "cpu/generic/pack-inl.h"
#include "cpu/generic/softmax-inl.h"
#include "cpu/generic/gemm_dot_bf16-inl.h"
#include "cpu/generic/engine_bf16-inl.h"
#include "cpu/generic/forward-inl.h"
#include "cpu/generic/backward-inl.h"
// clang-format on

const char* forward_bf16(const ForwardParams& params, Executor& executor) {
  run_forward<EngineBf16<DotBf16>, BFloat16>(params, executor);
  return "avx512_bf16::forward_bf16_tile96x128";
}
const char* backward_bf16(const BackwardParams& params, Executor& executor) {
  run_backward<EngineBf16<DotBf16>, BFloat16>(params, executor);
  return "avx512_bf16::backward_bf16_tile96x64";
}

}  // namespace

CpuKernels kernels(ScalarType dtype) {
  if (dtype == ScalarType::kBFloat16) return {&forward_bf16, &backward_bf16};
  return {};
}

}  // namespace packed_sdpa::cpu::avx512_bf16

PACKED_SDPA_END_TARGET()
