// Choice of the instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>

#include "cpu/half.h"
#include "cpu_testing.h"

namespace packed_sdpa::cpu::testing {
namespace {

TEST(CpuIsaTest, ScalarIsAlwaysThereAndListIsAscending) {
  ASSERT_FALSE(available_cpu_isas().empty());
  EXPECT_EQ(available_cpu_isas().front(), CpuIsa::kScalar);
  for (size_t i = 1; i < available_cpu_isas().size(); ++i) {
    EXPECT_LT(available_cpu_isas()[i - 1], available_cpu_isas()[i]);
  }
}

// A set that is missing here leaves its tests out; PACKED_SDPA_REQUIRE (as tests/python/required.py reads it)
// makes that a failure.
TEST(CpuIsaTest, RequiredSetsAreThere) {
  const char* value = std::getenv("PACKED_SDPA_REQUIRE");
  std::istringstream names(value == nullptr ? "" : value);
  for (std::string name; std::getline(names, name, ',');) {
    name.erase(std::remove(name.begin(), name.end(), ' '), name.end());
    if (name.empty() || name == "cuda") continue;
    const std::vector<std::string> there = isa_names();
    EXPECT_EQ(std::count(there.begin(), there.end(), name), 1)
        << "PACKED_SDPA_REQUIRE: this machine has no instruction set '" << name << "', or none is called so";
  }
}

TEST(CpuIsaTest, Avx512Bf16IsPreferredWhereItIsFast) {
  const std::vector<CpuIsa> all = {CpuIsa::kScalar, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16,
                                   CpuIsa::kAmx};
  for (const bool is_intel : {false, true}) {
    for (size_t count = 1; count <= all.size(); ++count) {
      const std::vector<CpuIsa> isas(all.begin(), all.begin() + static_cast<int64_t>(count));
      const bool is_slow = is_intel && isas.back() == CpuIsa::kAvx512Bf16;
      EXPECT_EQ(preferred_isa(isas, is_intel), is_slow ? CpuIsa::kAvx512 : isas.back());
    }
  }
}

TEST(CpuIsaTest, SetTakesEveryAvailableName) {
  for (const std::string& name : isa_names()) {
    set_cpu_isa(name);
    EXPECT_EQ(isa_name(cpu_isa()), name);
  }
  set_cpu_isa(isa_names().back());
}

TEST(CpuIsaTest, UnknownNameIsAnErrorThatListsTheNames) {
  const CpuIsa before = cpu_isa();
  try {
    set_cpu_isa("avx1024");
    FAIL() << "no exception";
  } catch (const std::invalid_argument& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("'avx1024'"), std::string::npos) << message;
    for (const std::string& name : isa_names()) EXPECT_NE(message.find(name), std::string::npos) << message;
  }
  EXPECT_EQ(cpu_isa(), before);
}

// Which kernel runs: never of a set above the forced one, and of the forced set itself where it has one.
TEST(CpuIsaTest, KernelNamesTellTheSet) {
  ThreadExecutor executor(1);
  for (const std::string& isa : isa_names()) {
    set_cpu_isa(isa);
    for (const ScalarType dtype :
         {ScalarType::kFloat32, ScalarType::kFloat64, ScalarType::kBFloat16, ScalarType::kFloat16}) {
      Settings settings;
      settings.dtype = dtype;
      Problem problem(packing_from_lengths("short", {3, 4}), settings);
      problem.run_forward(executor);
      problem.run_backward(executor);
      const std::string set = problem.forward_kernel.substr(0, problem.forward_kernel.find(':'));
      EXPECT_EQ(problem.backward_kernel.substr(0, problem.backward_kernel.find(':')), set);
      // float64 is plain everywhere; the sets above avx512 add bfloat16 kernels only.
      std::string expected = isa;
      if (dtype == ScalarType::kFloat64) {
        expected = "scalar";
      } else if (dtype != ScalarType::kBFloat16 && (isa == "avx512_bf16" || isa == "amx")) {
        expected = "avx512";
      }
      EXPECT_EQ(set, expected) << isa << " " << dtype_name(dtype);
    }
  }
  set_cpu_isa(isa_names().back());
}

TEST(HalfTest, EveryValueGoesThereAndBack) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const Float16 half{static_cast<uint16_t>(bits)};
    const BFloat16 brain{static_cast<uint16_t>(bits)};
    const float from_half = to_float(half);
    const float from_brain = to_float(brain);
    if (from_half == from_half) {
      EXPECT_EQ(float16_from_float(from_half).bits, half.bits);
    }
    if (from_brain == from_brain) {
      EXPECT_EQ(bfloat16_from_float(from_brain).bits, brain.bits);
    }
  }
}

TEST(HalfTest, RoundsToNearestEven) {
  for (const float value : {1.0f, 1.00048828125f, 1.0009765625f, 1.00146484375f, 65519.0f, 3.1e-5f, 6e-8f,
                            2.9e-8f, -0.333333f, 1234.567f}) {
    EXPECT_EQ(to_float(float16_from_float(value)),
              static_cast<float>(round_to(ScalarType::kFloat16, static_cast<double>(value))))
        << value;
    EXPECT_EQ(to_float(bfloat16_from_float(value)),
              static_cast<float>(round_to(ScalarType::kBFloat16, static_cast<double>(value))))
        << value;
  }
  EXPECT_EQ(float16_from_float(65520.0f).bits, 0x7c00);
  EXPECT_EQ(float16_from_float(1e30f).bits, 0x7c00);
}

}  // namespace
}  // namespace packed_sdpa::cpu::testing
