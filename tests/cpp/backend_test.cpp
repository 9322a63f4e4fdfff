// Choice of a backend: pure, ordered, with reasons.
#include "packed_sdpa/backend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace packed_sdpa {
namespace {

AttentionRequest cpu_request() {
  AttentionRequest request;
  request.batch = 1;
  request.num_heads = request.num_kv_heads = 2;
  request.rows_q = request.rows_k = 8;
  request.head_dim = request.head_dim_v = 16;
  return request;
}

TEST(Backend, AutoTakesTheCpuKernelsForCpuTensors) {
  EXPECT_EQ(select_backend(cpu_request(), "auto").name(), "cpu");
  EXPECT_EQ(select_backend(cpu_request(), "auto:reference").name(), "reference");
}

TEST(Backend, ANameIsAnOrder) {
  EXPECT_EQ(select_backend(cpu_request(), "reference").name(), "reference");
  AttentionRequest request = cpu_request();
  request.device = at::Device(at::kCUDA, 0);
  try {
    select_backend(request, "cpu");
    FAIL();
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("backend 'cpu' cannot take this call"), std::string::npos) << text;
    EXPECT_NE(text.find("it takes CPU tensors, these are on cuda:0"), std::string::npos) << text;
  }
  EXPECT_THROW(select_backend(request, "nope"), c10::ValueError);
  EXPECT_THROW(select_backend(request, "auto:nope"), c10::ValueError);
}

TEST(Backend, ExplainNamesOneChoiceAndEveryReason) {
  const std::vector<BackendReport> reports = explain(cpu_request());
  EXPECT_EQ(reports.size(), available_backends().size());
  EXPECT_EQ(std::count_if(reports.begin(), reports.end(),
                          [](const BackendReport& report) { return report.chosen; }),
            1);
  AttentionRequest dropout = cpu_request();
  dropout.dropout_p = 0.5;
  EXPECT_EQ(select_backend(dropout, "auto").name(), "cpu");
  EXPECT_THROW(select_backend(dropout, "reference"), c10::Error);
}

}  // namespace
}  // namespace packed_sdpa
