// AVX2 (with FMA and F16C) kernels: float tiles for float32, bfloat16 and float16.
#include <cstddef>
#include <cstdint>

#include "cpu/half.h"
#include "cpu/kernel_table.h"
#include "cpu/target_region.h"
#include "cpu/tiled.h"

#if defined(__x86_64__)

PACKED_SDPA_BEGIN_TARGET("avx2,fma,f16c")

namespace packed_sdpa::cpu::avx2 {
namespace {

constexpr int64_t kPanel = 16;
constexpr int64_t kMicroRows = 6;
constexpr int64_t kMicroVecs = 2;

// Each builds on those before it.
// clang-format off
#include "cpu/x86/avx2_vec-inl.h"
#include "cpu/generic/gemm_broadcast-inl.h"
#include "cpu/generic/exp-inl.h"
#include "cpu/generic/pack-inl.h"
#include "cpu/generic/softmax-inl.h"
#include "cpu/generic/engine_f32-inl.h"
#include "cpu/generic/forward-inl.h"
#include "cpu/generic/backward-inl.h"
// clang-format on

const char* forward_f32(const ForwardParams& params, Executor& executor) {
  run_forward<EngineF32, float>(params, executor);
  return "avx2::forward_f32_tile96x64";
}
const char* backward_f32(const BackwardParams& params, Executor& executor) {
  run_backward<EngineF32, float>(params, executor);
  return "avx2::backward_f32_tile48x64";
}
const char* forward_bf16(const ForwardParams& params, Executor& executor) {
  run_forward<EngineF32, BFloat16>(params, executor);
  return "avx2::forward_bf16_as_f32_tile96x64";
}
const char* backward_bf16(const BackwardParams& params, Executor& executor) {
  run_backward<EngineF32, BFloat16>(params, executor);
  return "avx2::backward_bf16_as_f32_tile48x64";
}
const char* forward_f16(const ForwardParams& params, Executor& executor) {
  run_forward<EngineF32, Float16>(params, executor);
  return "avx2::forward_f16_as_f32_tile96x64";
}
const char* backward_f16(const BackwardParams& params, Executor& executor) {
  run_backward<EngineF32, Float16>(params, executor);
  return "avx2::backward_f16_as_f32_tile48x64";
}

}  // namespace

CpuKernels kernels(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::kFloat32:
      return {&forward_f32, &backward_f32};
    case ScalarType::kBFloat16:
      return {&forward_bf16, &backward_bf16};
    case ScalarType::kFloat16:
      return {&forward_f16, &backward_f16};
    case ScalarType::kFloat64:
      break;
  }
  return {};
}

}  // namespace packed_sdpa::cpu::avx2

PACKED_SDPA_END_TARGET()

#else

namespace packed_sdpa::cpu::avx2 {
CpuKernels kernels(ScalarType) {
  return {};
}
}  // namespace packed_sdpa::cpu::avx2

#endif
