// AMX kernels: bfloat16 in tile registers, softmax in AVX-512.
#include <cstddef>
#include <cstdint>

#include "cpu/half.h"
#include "cpu/kernel_table.h"
#include "cpu/target_region.h"
#include "cpu/tiled.h"

PACKED_SDPA_BEGIN_TARGET("amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

#define PACKED_SDPA_HAS_BF16 1

namespace packed_sdpa::cpu::amx {
namespace {

constexpr int64_t kPanel = 32;
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
#include "cpu/x86/gemm_amx-inl.h"
#include "cpu/generic/engine_bf16-inl.h"
#include "cpu/generic/forward-inl.h"
#include "cpu/generic/backward-inl.h"
// clang-format on

const char* forward_bf16(const ForwardParams& params, Executor& executor) {
  run_forward<EngineBf16<AmxBf16>, BFloat16>(params, executor);
  return "amx::forward_bf16_tile64x256";
}
const char* backward_bf16(const BackwardParams& params, Executor& executor) {
  run_backward<EngineBf16<AmxBf16>, BFloat16>(params, executor);
  return "amx::backward_bf16_tile64x128";
}

}  // namespace

CpuKernels kernels(ScalarType dtype) {
  if (dtype == ScalarType::kBFloat16) return {&forward_bf16, &backward_bf16};
  return {};
}

}  // namespace packed_sdpa::cpu::amx

PACKED_SDPA_END_TARGET()
