// The CPU kernels against the dense oracle: every instruction set, every type, the named packings.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu_testing.h"

namespace packed_sdpa::cpu::testing {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::vector<Packing> packings() {
  std::vector<Packing> all = {
      packing_from_ids("three_documents_padding", {1, 1, 1, 0, 2, 2, 0, 0}),
      packing_from_ids("head_padding", {0, 0, 1, 1, 2}),
      packing_from_ids("padding_between", {1, 0, 2, 0, 3}),
      packing_from_ids("two_rows", {1, 2, 2, 2}, 2),
      packing_from_ids("three_rows", {1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 2, 3, 3, 3}, 3),
      packing_from_ids("id_comes_back", {1, 1, 2, 1, 1}),
      packing_from_ids("gaps", {1, 0, 1, 1, 2, 1, 2, 0, 2, 1, 1, 2}),
      packing_from_ids("all_padding", {0, 0, 0, 0}, 2),
      packing_from_lengths("mixed", {1, 17, 5, 64, 33, 2}),
      packing_from_lengths("tile_edges", {15, 16, 17, 31, 32, 33, 63, 65}),
      packing_from_lengths("one_long", {150}),
  };
  Packing longer_keys = packing_from_ids("more_keys_than_queries", {1, 1, 2, 2, 2});
  longer_keys.key_ids = {1, 1, 1, 1, 2, 2, 2, 3, 3};  // document 3 has keys only
  all.push_back(longer_keys);
  Packing longer_queries = packing_from_ids("more_queries_than_keys", {1, 1, 1, 1, 1, 2, 2, 3});
  longer_queries.key_ids = {1, 1, 2, 2};  // document 3 has queries only; early queries see nothing
  all.push_back(longer_queries);
  Packing offsets = packing_from_lengths("diagonal_offsets", {9, 9, 9, 9});
  offsets.diagonal_offsets = {-4, 3, 20, -20};
  all.push_back(offsets);
  Packing slice = packing_from_ids("row_slice", {1, 1, 1, 1, 2, 2});
  slice.key_ids = {1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2};
  slice.diagonal_offsets = {4, 0};
  all.push_back(slice);
  return all;
}

struct Variant {
  const char* name;
  Settings settings;
};

std::vector<Variant> variants() {
  std::vector<Variant> all;
  const auto add = [&all](const char* name, auto change) {
    Variant variant{name, {}};
    change(variant.settings);
    all.push_back(variant);
  };
  add("plain", [](Settings&) {});
  add("heads_first", [](Settings& s) { s.layout = 0; });
  add("inner_stride", [](Settings& s) { s.layout = 2; });
  add("expanded_keys", [](Settings& s) { s.layout = 3; });
  add("one_kv_head_odd_dim", [](Settings& s) {
    s.num_heads = 3;
    s.num_kv_heads = 1;
    s.head_dim = 59;
    s.head_dim_v = 33;
  });
  add("no_groups_wide_value", [](Settings& s) {
    s.num_kv_heads = 4;
    s.head_dim = 24;
    s.head_dim_v = 40;
  });
  add("whole_document", [](Settings& s) { s.is_causal = false; });
  add("window", [](Settings& s) { s.window_left = 2; });
  add("window_both_sides", [](Settings& s) {
    s.is_causal = false;
    s.window_left = 3;
    s.window_right = 1;
  });
  add("window_ahead_only", [](Settings& s) {
    s.is_causal = false;
    s.window_right = 2;
  });
  add("window_one", [](Settings& s) { s.window_left = 0; });
  add("window_wide", [](Settings& s) { s.window_left = 40; });
  add("scale_one", [](Settings& s) { s.scale = 1.0; });
  add("dropout", [](Settings& s) { s.dropout_p = 0.4; });
  return all;
}

class AttentionTest : public ::testing::TestWithParam<std::tuple<std::string, ScalarType>> {
 protected:
  void SetUp() override { set_cpu_isa(std::get<0>(GetParam())); }
  void TearDown() override { set_cpu_isa(isa_names().back()); }
  ScalarType dtype() const { return std::get<1>(GetParam()); }
};

TEST_P(AttentionTest, MatchesOracle) {
  ThreadExecutor executor(2);
  for (const Packing& packing : packings()) {
    for (const Variant& variant : variants()) {
      SCOPED_TRACE(variant.name);
      Settings settings = variant.settings;
      settings.dtype = dtype();
      Problem problem(packing, settings);
      problem.run_forward(executor);
      expect_forward_matches(problem);
      problem.run_backward(executor);
      expect_backward_matches(problem);
      if (HasFailure()) return;
    }
  }
}

TEST_P(AttentionTest, UniformProbe) {
  struct Probe {
    Packing packing;
    int64_t window_left;
    std::vector<double> expected;
  };
  Packing slice = packing_from_ids("row_offset_4", {1, 1, 1, 1});
  slice.key_ids = {1, 1, 1, 1, 1, 1, 1, 1};
  const std::vector<Probe> probes = {
      {packing_from_ids("case_1", {1, 1, 1, 0, 2, 2, 0, 0}), -1, {0, .5, 1, 0, 4, 4.5, 0, 0}},
      {packing_from_ids("case_2", {0, 0, 1, 1, 2}), -1, {0, 0, 2, 2.5, 4}},
      {packing_from_ids("case_3", {1, 0, 2, 0, 3}), -1, {0, 0, 2, 0, 4}},
      {packing_from_ids("case_4", {1, 2, 2, 2}, 2), -1, {0, 1, 0, .5}},
      {packing_from_ids("case_6", {1, 1, 2, 1, 1}), -1, {0, .5, 2, 4.0 / 3, 2}},
      {packing_from_ids("case_16", {1, 1, 1, 1, 1, 1}), 2, {0, .5, 1, 2, 3, 4}},
      {packing_from_ids("case_17", {1, 1, 1, 2, 2, 2}), 1, {0, .5, 1.5, 3, 3.5, 4.5}},
      {packing_from_ids("case_17a", {1, 1, 2, 1, 1}), 1, {0, .5, 2, 3, 3.5}},
      {packing_from_ids("case_17a_padding", {1, 0, 1, 1}), 1, {0, 0, 2, 2.5}},
      {slice, -1, {2, 2.5, 3, 3.5}},
  };
  ThreadExecutor executor(1);
  for (const Probe& probe : probes) {
    Settings settings;
    settings.dtype = dtype();
    settings.window_left = probe.window_left;
    Problem problem(probe.packing, settings);
    for (int64_t b = 0; b < problem.packing.batch; ++b) {
      for (int64_t h = 0; h < settings.num_heads; ++h) {
        for (int64_t i = 0; i < problem.packing.rows_q(); ++i) {
          for (int64_t d = 0; d < settings.head_dim; ++d) problem.query.set(b, h, i, d, 0.0);
        }
      }
      for (int64_t h = 0; h < settings.num_kv_heads; ++h) {
        for (int64_t j = 0; j < problem.packing.rows_k(); ++j) {
          for (int64_t d = 0; d < settings.head_dim; ++d) problem.key.set(b, h, j, d, 0.0);
          for (int64_t d = 0; d < settings.head_dim_v; ++d) {
            problem.value.set(b, h, j, d, static_cast<double>(j));
          }
        }
      }
    }
    problem.run_forward(executor);
    const int64_t rows = problem.packing.rows_q();
    for (size_t n = 0; n < probe.expected.size(); ++n) {
      const int64_t flat = static_cast<int64_t>(n);
      for (int64_t h = 0; h < settings.num_heads; ++h) {
        const double got = problem.out.get(flat / rows, h, flat % rows, 3);
        EXPECT_NEAR(got, probe.expected[n], epsilon(settings.dtype) * 4 * probe.expected[n])
            << probe.packing.name << " row " << n;
        if (problem.query_document[n] < 0) {
          EXPECT_EQ(got, 0.0);
        }
      }
    }
  }
}

// NaN and Inf in one document reach no other, and padding of NaN reaches nothing (Problem leaves padding
// NaN).
TEST_P(AttentionTest, PoisonStaysInItsDocument) {
  ThreadExecutor executor(1);
  for (const Packing& packing : {packing_from_lengths("neighbours", {5, 19, 7, 40}),
                                 packing_from_ids("interleaved", {1, 2, 1, 2, 0, 1, 2, 1, 1, 2, 3, 3, 1})}) {
    Settings settings;
    settings.dtype = dtype();
    Problem clean(packing, settings);
    Problem poisoned(packing, settings);
    for (int64_t i = 0; i < packing.rows_q(); ++i) {
      if (poisoned.query_document[static_cast<size_t>(i)] != 1) continue;
      for (int64_t d = 0; d < settings.head_dim; ++d) {
        const double poison = i % 2 == 0 ? kNaN : std::numeric_limits<double>::infinity();
        poisoned.query.set(0, 1, i, d, poison);
        poisoned.key.set(0, 0, i, d, poison);
        poisoned.value.set(0, 0, i, d, poison);
        poisoned.grad_out.set(0, 1, i, d, poison);
      }
    }
    for (Problem* problem : {&clean, &poisoned}) {
      problem->run_forward(executor);
      problem->run_backward(executor);
    }
    const auto compare = [&](const Tensor& a, const Tensor& b) {
      for (int64_t h = 0; h < a.heads; ++h) {
        for (int64_t i = 0; i < a.rows; ++i) {
          if (clean.query_document[static_cast<size_t>(i)] == 1) continue;
          for (int64_t d = 0; d < a.dim; ++d) EXPECT_EQ(a.get(0, h, i, d), b.get(0, h, i, d)) << "row " << i;
        }
      }
    };
    compare(clean.out, poisoned.out);
    compare(clean.grad_query, poisoned.grad_query);
    compare(clean.grad_key, poisoned.grad_key);
    compare(clean.grad_value, poisoned.grad_value);
  }
}

// Scores that differ by hundreds, wherever in a row and its tiles the large ones stand: a reference that was
// chosen before they were seen must not cost the result anything.
TEST_P(AttentionTest, LargeScoresAnywhereInARow) {
  constexpr int64_t kLength = 560;
  const std::vector<std::pair<const char*, std::function<double(int64_t)>>> profiles = {
      {"rising", [](int64_t j) { return static_cast<double>(j); }},
      {"falling", [](int64_t j) { return static_cast<double>(-j); }},
      {"rising slowly", [](int64_t j) { return static_cast<double>(j) / 32; }},
      {"peaks inside tiles", [](int64_t j) { return j % 256 == 100 || j == 550 ? 200.0 : 0.0; }},
      {"low ends", [](int64_t j) { return j % 256 < 16 || j % 256 >= 240 ? -250.0 : 3.0; }},
      {"high ends", [](int64_t j) { return j % 256 < 16 ? 250.0 : -3.0; }},
      {"all low", [](int64_t) { return -500.0; }},
      {"two sides", [](int64_t j) { return j % 2 == 0 ? 90.0 : -90.0; }},
      {"at the edge of overflow", [](int64_t j) { return j < 512 ? 0.0 : 11.0; }},
  };
  const double size =
      dtype() == ScalarType::kFloat64 ? 1.0 / 64 : 1.0;  // its oracle rounds scores as it does
  ThreadExecutor executor(2);
  for (size_t n = 0; n < profiles.size(); ++n) {
    const auto& [name, profile] = profiles[n];
    SCOPED_TRACE(name);
    Settings settings;
    settings.dtype = dtype();
    settings.num_heads = 2;
    settings.num_kv_heads = 1;
    settings.window_left = n % 3 == 2 ? 300 : -1;
    Problem problem(packing_from_lengths("one", {kLength}), settings);
    for (int64_t i = 0; i < kLength; ++i) {  // the first element of query and key adds the profile to a score
      for (int64_t h = 0; h < settings.num_heads; ++h) problem.query.set(0, h, i, 0, 4.0);
      problem.key.set(0, 0, i, 0, size * profile(i));
    }
    problem.run_forward(executor);
    expect_forward_matches(problem);
    problem.run_backward(executor);
    expect_backward_matches(problem);
    if (HasFailure()) return;
  }
}

// One key: its weight is exactly 1, so the value comes back, grad_out goes to it, and query and key get what
// the rounding of two sums of float32 leaves.
TEST_P(AttentionTest, OneKeyOfAnyScore) {
  ThreadExecutor executor(1);
  for (const double element : {4.0, 64.0, 1024.0, 32768.0}) {  // scores of 2^8 to 2^34
    Settings settings;
    settings.dtype = dtype();
    settings.scale = 1.0;
    settings.num_heads = settings.num_kv_heads = 1;
    Problem problem(packing_from_lengths("ones", std::vector<int64_t>(40, 1)), settings);
    for (int64_t i = 0; i < 40; ++i) {
      for (int64_t d = 0; d < settings.head_dim; ++d) {
        problem.query.set(0, 0, i, d, element);
        problem.key.set(0, 0, i, d, i % 2 == 0 ? element : -element);
      }
    }
    problem.run_forward(executor);
    problem.run_backward(executor);
    for (int64_t i = 0; i < 40; ++i) {
      double size = 0.0;
      for (int64_t d = 0; d < settings.head_dim; ++d) {
        EXPECT_EQ(problem.out.get(0, 0, i, d), problem.value.get(0, 0, i, d)) << element;
        EXPECT_EQ(problem.grad_value.get(0, 0, i, d), problem.grad_out.get(0, 0, i, d)) << element;
        size += std::abs(problem.value.get(0, 0, i, d) * problem.grad_out.get(0, 0, i, d));
      }
      const double bound = 16 * epsilon(ScalarType::kFloat32) * size * element;
      for (int64_t d = 0; d < settings.head_dim; ++d) {
        EXPECT_LE(std::abs(problem.grad_query.get(0, 0, i, d)), bound) << element;
        EXPECT_LE(std::abs(problem.grad_key.get(0, 0, i, d)), bound) << element;
      }
    }
  }
}

// The same bits for any number of threads, although many get smaller blocks of keys, and for bodies that run
// one after another.
TEST_P(AttentionTest, EveryThreadCountGivesTheSameBits) {
  const std::vector<int64_t> many_long(8, 700);
  const std::vector<std::pair<Packing, int64_t>> cases = {
      {packing_from_lengths("mixed", {300, 3, 40, 1, 700, 16}), -1},
      {packing_from_lengths("long", {1100}), -1},
      {packing_from_lengths("many", many_long), -1},
      {packing_from_lengths("many in windows", many_long), 300}};
  for (const auto& [packing, window_left] : cases) {
    Settings settings;
    settings.dtype = dtype();
    settings.window_left = window_left;
    ThreadExecutor one(1);
    Problem expected(packing, settings);
    expected.run_forward(one);
    expected.run_backward(one);
    for (const int threads : {-33, -3, 2, 7}) {
      ThreadExecutor executor(std::abs(threads), threads < 0);
      Problem problem(packing, settings);
      problem.run_forward(executor);
      problem.run_backward(executor);
      EXPECT_EQ(problem.out.bytes(), expected.out.bytes()) << threads;
      EXPECT_EQ(problem.lse_float.size(), expected.lse_float.size());
      EXPECT_EQ(problem.grad_query.bytes(), expected.grad_query.bytes()) << threads;
      EXPECT_EQ(problem.grad_key.bytes(), expected.grad_key.bytes()) << threads;
      EXPECT_EQ(problem.grad_value.bytes(), expected.grad_value.bytes()) << threads;
    }
  }
}

// A document gives the same bits alone, at another place in the row, and beside other neighbours.
TEST_P(AttentionTest, NeighboursAndPlaceDoNotMatter) {
  ThreadExecutor executor(2);
  for (const int64_t length : {5, 67, 600}) {
    Settings settings;
    settings.dtype = dtype();
    Problem alone(packing_from_lengths("alone", {length}), settings);
    alone.run_forward(executor);
    alone.run_backward(executor);
    const int64_t before = 37;
    settings.data_seed = 9;
    Problem packed(packing_from_lengths("packed", {before, length, 81}), settings);
    const auto transplant = [&](const Tensor& from, Tensor* to) {
      for (int64_t h = 0; h < from.heads; ++h) {
        for (int64_t i = 0; i < length; ++i) {
          for (int64_t d = 0; d < from.dim; ++d) to->set(0, h, before + i, d, from.get(0, h, i, d));
        }
      }
    };
    transplant(alone.query, &packed.query);
    transplant(alone.key, &packed.key);
    transplant(alone.value, &packed.value);
    transplant(alone.grad_out, &packed.grad_out);
    packed.run_forward(executor);
    packed.run_backward(executor);
    const auto compare = [&](const char* what, const Tensor& a, const Tensor& b) {
      int64_t different = 0;
      for (int64_t h = 0; h < a.heads; ++h) {
        for (int64_t i = 0; i < length; ++i) {
          for (int64_t d = 0; d < a.dim; ++d) different += a.get(0, h, i, d) != b.get(0, h, before + i, d);
        }
      }
      EXPECT_EQ(different, 0) << what << " length " << length;
    };
    compare("out", alone.out, packed.out);
    compare("grad_query", alone.grad_query, packed.grad_query);
    compare("grad_key", alone.grad_key, packed.grad_key);
    compare("grad_value", alone.grad_value, packed.grad_value);
  }
}

TEST_P(AttentionTest, SeventyThousandOneTokenDocuments) {
  Settings settings;
  settings.dtype = dtype();
  settings.num_heads = 2;
  settings.num_kv_heads = 1;
  settings.head_dim = 2;
  settings.head_dim_v = 2;
  ThreadExecutor executor(2);
  Problem problem(packing_from_lengths("ones", std::vector<int64_t>(70000, 1)), settings);
  problem.run_forward(executor);
  problem.run_backward(executor);
  int64_t wrong = 0;
  double largest_grad = 0.0;
  for (int64_t i = 0; i < 70000; ++i) {
    for (int64_t d = 0; d < 2; ++d) {
      wrong += problem.out.get(0, 0, i, d) != problem.value.get(0, 0, i, d);
      wrong += problem.out.get(0, 1, i, d) != problem.value.get(0, 0, i, d);
      largest_grad = std::max(largest_grad, std::abs(problem.grad_query.get(0, 1, i, d)));
      largest_grad = std::max(largest_grad, std::abs(problem.grad_key.get(0, 0, i, d)));
      const double grad = problem.grad_out.get(0, 0, i, d) + problem.grad_out.get(0, 1, i, d);
      wrong += std::abs(problem.grad_value.get(0, 0, i, d) - grad) >
               16 * epsilon(settings.dtype) * (1 + std::abs(grad));
    }
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_LE(largest_grad, 32 * epsilon(settings.dtype));
}

INSTANTIATE_TEST_SUITE_P(Isas, AttentionTest,
                         ::testing::Combine(::testing::ValuesIn(isa_names()),
                                            ::testing::Values(ScalarType::kFloat32, ScalarType::kFloat64,
                                                              ScalarType::kBFloat16, ScalarType::kFloat16)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + dtype_name(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace packed_sdpa::cpu::testing
