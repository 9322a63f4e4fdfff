// AVX2 (with FMA and F16C) kernels: float tiles for float32, bfloat16 and float16.
#include <cstddef>
#include <cstdint>

#include "cpu/half.h"
#include "cpu/kernel_table.h"
#include "cpu/target_region.h"
#include "cpu/tiled.h"

PACKED_SDPA_BEGIN_TARGET("avx2,fma,f16c")

#define PACKED_SDPA_SET "avx2"

namespace packed_sdpa::cpu::avx2 {
namespace {

constexpr int64_t kPanel = 16;
constexpr int64_t kMicroRows = 6;
constexpr int64_t kMicroVecs = 2;

// Each builds on those before it.
// clang-format off
#include "cpu/x86/avx2_vec-inl.h"
#include "cpu/generic/rows-inl.h"
#include "cpu/generic/gemm_broadcast-inl.h"
#include "cpu/generic/exp-inl.h"
#include "cpu/generic/pack-inl.h"
#include "cpu/generic/softmax-inl.h"
#include "cpu/generic/engine_f32-inl.h"
#include "cpu/generic/forward-inl.h"
#include "cpu/generic/backward-inl.h"
#include "cpu/generic/float_kernels-inl.h"
// clang-format on

}  // namespace

CpuKernels kernels(ScalarType dtype) {
  return float_kernels(dtype);
}

}  // namespace packed_sdpa::cpu::avx2

PACKED_SDPA_END_TARGET()
