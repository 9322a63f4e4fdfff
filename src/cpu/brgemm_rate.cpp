// For the benchmark: how fast torch's tile product (oneDNN's brgemm) runs on one thread out of its cache. No
// kernel uses it.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "cpu/kernels.h"

// Private to torch (ATen/native/CPUBlas.h), so weak: a torch without them still loads this library.
namespace at::native::cpublas {
[[gnu::weak]] void brgemm(int64_t M, int64_t N, int64_t K, int64_t ld_a, int64_t ld_b, int64_t ld_c,
                          const bool add_C, const float* A, const float* B, float* C, bool is_vnni);
[[gnu::weak]] void brgemm(int64_t M, int64_t N, int64_t K, int64_t ld_a, int64_t ld_b, int64_t ld_c,
                          const bool add_C, const at::BFloat16* A, const at::BFloat16* B, float* C,
                          bool is_vnni);
[[gnu::weak]] void brgemm_release(bool is_vnni);
}  // namespace at::native::cpublas

namespace packed_sdpa {

namespace {

// A [64, 128] times B [128, 128]: with C they fill most of a first-level cache, as the tiles of a kernel do.
constexpr int64_t kRows = 64;
constexpr int64_t kColumns = 128;
constexpr int64_t kDepth = 128;

template <typename T>
double brgemm_seconds(int64_t products, bool is_vnni) {
  using Brgemm =
      void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const T*, const T*, float*, bool);
  const Brgemm brgemm = &at::native::cpublas::brgemm;
  TORCH_CHECK_NOT_IMPLEMENTED(brgemm != nullptr && &at::native::cpublas::brgemm_release != nullptr,
                              "this torch has no at::native::cpublas::brgemm");
  const auto options = at::TensorOptions(c10::CppTypeToScalarType<T>::value);
  const at::Tensor a = at::ones({kRows, kDepth}, options);
  const at::Tensor b = at::ones({kDepth, kColumns}, options);
  at::Tensor c = at::zeros({kRows, kColumns}, at::kFloat);
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < products; ++i) {
    brgemm(kRows, kColumns, kDepth, kDepth, kColumns, kColumns, /*add_C=*/false, a.const_data_ptr<T>(),
           b.const_data_ptr<T>(), c.mutable_data_ptr<float>(), is_vnni);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  at::native::cpublas::brgemm_release(is_vnni);
  TORCH_CHECK(c.eq(static_cast<double>(kDepth)).all().item<bool>(), "brgemm gave a wrong product");
  return seconds.count();
}

// Seconds of so many tile products of 2 * 64 * 128 * 128 floating-point operations. Raises
// NotImplementedError where torch has none for the type or the machine.
double cpu_brgemm_seconds(at::ScalarType dtype, int64_t products) {
  switch (dtype) {
    case at::kFloat:
      return brgemm_seconds<float>(products, /*is_vnni=*/false);
    case at::kBFloat16: {
      const std::vector<cpu::CpuIsa> isas = cpu::available_cpu_isas();
      TORCH_CHECK_NOT_IMPLEMENTED(std::find(isas.begin(), isas.end(), cpu::CpuIsa::kAvx512Bf16) != isas.end(),
                                  "brgemm in bfloat16 needs a processor with avx512_bf16; measure float32");
      return brgemm_seconds<at::BFloat16>(products, /*is_vnni=*/true);
    }
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "brgemm is measured in float32 and bfloat16, got ", dtype);
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(packed_sdpa, library) {
  library.def("cpu_brgemm_seconds(ScalarType dtype, int products) -> float", cpu_brgemm_seconds);
}

}  // namespace packed_sdpa
