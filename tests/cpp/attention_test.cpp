// The public C++ calls against plain loops in double.
#include "packed_sdpa/attention.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace packed_sdpa {
namespace {

at::Tensor ids(const std::vector<int64_t>& values) {
  return at::tensor(values, at::kLong);
}

// out[b, h, i] = sum_j softmax_j(scale q_i k_j) v_j over the visible j, one number at a time.
at::Tensor by_loops(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const at::Tensor& mask) {
  const auto q = query.accessor<double, 4>();
  const auto k = key.accessor<double, 4>();
  const auto v = value.accessor<double, 4>();
  const auto visible = mask.accessor<bool, 3>();
  at::Tensor out = at::zeros({query.size(0), query.size(1), query.size(2), value.size(3)}, at::kDouble);
  auto result = out.accessor<double, 4>();
  const int64_t group = query.size(1) / key.size(1);
  const double scale = 1.0 / std::sqrt(static_cast<double>(query.size(3)));
  for (int64_t b = 0; b < query.size(0); ++b) {
    for (int64_t h = 0; h < query.size(1); ++h) {
      for (int64_t i = 0; i < query.size(2); ++i) {
        double sum = 0.0;
        for (int64_t j = 0; j < key.size(2); ++j) {
          if (!visible[b][i][j]) continue;
          double score = 0.0;
          for (int64_t d = 0; d < query.size(3); ++d) score += q[b][h][i][d] * k[b][h / group][j][d];
          const double weight = std::exp(score * scale);
          sum += weight;
          for (int64_t d = 0; d < value.size(3); ++d) result[b][h][i][d] += weight * v[b][h / group][j][d];
        }
        for (int64_t d = 0; d < value.size(3) && sum > 0.0; ++d) result[b][h][i][d] /= sum;
      }
    }
  }
  return out;
}

TEST(Attention, EqualsPlainLoops) {
  at::manual_seed(1);
  const at::Tensor doc_ids = ids({1, 1, 0, 2, 1, 3, 3, 0, 5, 5, 5, 0, 0, 0, 6, 6}).view({2, 8});
  const PackedLayout layout = PackedLayout::from_doc_ids(doc_ids);
  const at::Tensor query = at::randn({2, 4, 8, 6}, at::kDouble);
  const at::Tensor key = at::randn({2, 2, 8, 6}, at::kDouble);
  const at::Tensor value = at::randn({2, 2, 8, 5}, at::kDouble);
  for (const bool is_causal : {true, false}) {
    AttentionOptions options;
    options.is_causal = is_causal;
    options.window_left = is_causal ? 3 : -1;
    const at::Tensor expected =
        by_loops(query, key, value, layout.materialize_mask({is_causal, options.window_left, -1}));
    for (const char* backend : {"auto", "cpu", "reference"}) {
      options.backend = backend;
      const at::Tensor out = packed_attention(query, key, value, layout, options).out;
      EXPECT_TRUE(at::allclose(out, expected, 1e-12, 1e-12)) << backend;
    }
  }
}

TEST(Attention, GradientsFlowWithoutPython) {
  at::manual_seed(2);
  const PackedLayout layout = PackedLayout::from_doc_ids(ids({1, 1, 1, 2, 2, 0}));
  const at::Tensor query = at::randn({1, 2, 6, 4}, at::kDouble).requires_grad_();
  const at::Tensor key = at::randn({1, 1, 6, 4}, at::kDouble).requires_grad_();
  const at::Tensor value = at::randn({1, 1, 6, 4}, at::kDouble).requires_grad_();
  const at::Tensor weight = at::randn({1, 2, 6, 4}, at::kDouble);
  const auto loss = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return (packed_attention(q, k, v, layout).out * weight).sum();
  };
  loss(query, key, value).backward();
  // Central differences of a few entries of each operand.
  const double step = 1e-6;
  for (const at::Tensor& operand : {query, key, value}) {
    for (const int64_t entry : {0, 5, 17}) {
      const auto moved = [&](double by) {
        at::Tensor shift = at::zeros_like(operand).detach();
        shift.view(-1)[entry] += by;
        const auto pick = [&](const at::Tensor& tensor) {
          return tensor.is_same(operand) ? tensor.detach() + shift : tensor.detach();
        };
        return loss(pick(query), pick(key), pick(value)).item<double>();
      };
      const double numeric = (moved(step) - moved(-step)) / (2 * step);
      EXPECT_NEAR(operand.grad().reshape(-1)[entry].item<double>(), numeric, 1e-7);
    }
  }
}

TEST(Attention, VarlenTakesPackedTensors) {
  at::manual_seed(3);
  const at::Tensor query = at::randn({7, 4, 8});
  const at::Tensor key = at::randn({7, 2, 8});
  const at::Tensor value = at::randn({7, 2, 3});
  const at::Tensor cu_seqlens = at::tensor(std::vector<int32_t>{0, 3, 7}, at::kInt);
  const AttentionOutput packed = varlen_attention(query, key, value, cu_seqlens, cu_seqlens);
  EXPECT_EQ(packed.out.sizes(), (std::vector<int64_t>{7, 4, 3}));
  EXPECT_EQ(packed.lse.sizes(), (std::vector<int64_t>{4, 7}));
  const PackedLayout layout = PackedLayout::from_doc_ids(ids({1, 1, 1, 2, 2, 2, 2}));
  const auto batch = [](const at::Tensor& tensor) { return tensor.transpose(0, 1).unsqueeze(0); };
  const AttentionOutput padded = packed_attention(batch(query), batch(key), batch(value), layout);
  EXPECT_TRUE(at::equal(padded.out.squeeze(0).transpose(0, 1), packed.out));
  EXPECT_TRUE(at::equal(padded.lse.squeeze(0), packed.lse));
}

void expect_refusal(const std::function<void()>& call, const std::string& text) {
  try {
    call();
    FAIL() << "expected: " << text;
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what_without_backtrace()).find(text), std::string::npos)
        << error.what_without_backtrace();
  }
}

TEST(Attention, RefusalsNameArgumentAndValue) {
  const PackedLayout layout = PackedLayout::from_doc_ids(ids({1, 1, 2, 2}));
  const at::Tensor q = at::randn({1, 4, 4, 8});
  const at::Tensor k = at::randn({1, 2, 4, 8});
  const auto with_options = [&](const std::function<void(AttentionOptions&)>& change) {
    return [&, change] {
      AttentionOptions options;
      change(options);
      packed_attention(q, k, k, layout, options);
    };
  };
  expect_refusal(with_options([](auto& o) { o.dropout_p = std::nan(""); }),
                 "dropout_p must be in [0, 1), got nan");
  expect_refusal(with_options([](auto& o) { o.dropout_p = 1.0; }), "dropout_p must be in [0, 1), got 1");
  expect_refusal(with_options([](auto& o) { o.window_left = -2; }), "window_size[0] must be -1");
  expect_refusal(with_options([](auto& o) { o.window_right = 1; }),
                 "window_size[1] must be -1 or 0 when is_causal");
  expect_refusal(with_options([](auto& o) { o.scale = INFINITY; }), "scale must be finite");
  expect_refusal(with_options([](auto& o) { o.backend = "flsh"; }), "backend must be one of auto, ");
  expect_refusal(
      [&] {
        packed_attention(q, at::randn({1, 3, 4, 8}), at::randn({1, 3, 4, 8}), layout);
      },
      "num_heads (4) must be a multiple of num_kv_heads (3)");
  expect_refusal([&] { packed_attention(q.slice(1, 0, 0), k, k, layout); },
                 "must be at least 1, got 0 and 2");
  expect_refusal([&] { packed_attention(q.slice(3, 0, 0), k.slice(3, 0, 0), k, layout); },
                 "head_dim must be at least 1");
  expect_refusal([&] { packed_attention(q, k.to(at::kDouble), k, layout); }, "must have one dtype");
  expect_refusal(
      [&] {
        packed_attention(q, at::randn({2, 2, 4, 8}), at::randn({2, 2, 4, 8}), layout);
      },
      "one batch size");
  expect_refusal([&] { packed_attention(q[0], k, k, layout); }, "query must be 4-D");
  expect_refusal([&] { packed_attention(q.to(at::kInt), k, k, layout); }, "query must be float32");
  expect_refusal(
      [&] {
        packed_attention(q, k, k, PackedLayout::from_doc_ids(ids({1, 1, 2})));
      },
      "layout is for B 1, 3 query rows");
}

}  // namespace
}  // namespace packed_sdpa
