// Random packings and settings against the oracle. A failure prints its seed; PACKED_SDPA_TEST_SEED=N runs
// that one alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/scratch.h"
#include "cpu_testing.h"

namespace packed_sdpa::cpu::testing {
namespace {

constexpr uint64_t kNumSeeds = 25;

struct RandomCase {
  Packing packing;
  Settings settings;
};

RandomCase make_case(uint64_t seed, ScalarType dtype) {
  std::mt19937_64 generator(seed);
  const auto pick = [&generator](const std::vector<int64_t>& choices) {
    return choices[generator() % choices.size()];
  };
  RandomCase result;
  Settings& s = result.settings;
  s.dtype = dtype;
  s.num_kv_heads = pick({1, 2, 3});
  s.num_heads = s.num_kv_heads * pick({1, 2, 3, 5});
  s.head_dim = pick({1, 8, 16, 31, 33, 59, 64, 80, 96});
  s.head_dim_v = pick({1, 16, 24, 40, 64, 72, s.head_dim});
  s.is_causal = pick({1, 1, 0}) == 1;
  s.window_left = pick({-1, -1, 0, 3, 20});
  s.window_right = s.is_causal ? -1 : pick({-1, 0, 2, 30});
  s.scale = pick({0, 1, 2}) == 0 ? -0.2 : 0.15;
  s.dropout_p = pick({0, 0, 0, 1}) == 1 ? 0.3 : 0.0;
  s.layout = static_cast<int>(pick({0, 1, 1, 2, 3}));
  s.data_seed = seed + 1;

  Packing& packing = result.packing;
  packing.name = "random_seed_" + std::to_string(seed);
  packing.batch = pick({1, 1, 2});
  const int64_t rows = pick({1, 7, 40, 100, 170});
  const int64_t style =
      pick({0, 0, 1, 2});  // runs; ids scattered over the row; runs, with other lengths of keys
  for (int64_t b = 0; b < packing.batch; ++b) {
    int64_t id = 1;
    for (int64_t row = 0; row < rows;) {
      const int64_t length = std::min(rows - row, pick({1, 2, 15, 16, 17, 33, 64, 90}));
      const bool padding = pick({0, 0, 0, 0, 1}) == 1;
      for (int64_t i = 0; i < length; ++i) {
        const int64_t value = padding ? 0 : style == 1 ? pick({0, 1, 2, 3}) : id;
        packing.query_ids.push_back(value);
        packing.key_ids.push_back(value);
      }
      row += length;
      ++id;
    }
  }
  if (style == 2) {  // keys: every run of the first row again, but all rows shifted and stretched
    packing.key_ids.clear();
    const int64_t keys = pick({rows, rows + 13, 2 * rows});
    for (int64_t b = 0; b < packing.batch; ++b) {
      for (int64_t j = 0; j < keys; ++j) {
        packing.key_ids.push_back(packing.query_ids[static_cast<size_t>(b * rows + j * rows / keys)]);
      }
    }
  }
  return result;
}

class RandomTest : public ::testing::TestWithParam<std::tuple<std::string, ScalarType>> {
 protected:
  void SetUp() override {
    set_cpu_isa(std::get<0>(GetParam()));
    Scratch::poison_for_tests(true);
  }
  void TearDown() override {
    Scratch::poison_for_tests(false);
    set_cpu_isa(isa_names().back());
  }
};

TEST_P(RandomTest, MatchesOracle) {
  const char* only = std::getenv("PACKED_SDPA_TEST_SEED");
  const uint64_t first = only != nullptr ? std::strtoull(only, nullptr, 10) : 0;
  const uint64_t last = only != nullptr ? first + 1 : kNumSeeds;
  for (uint64_t seed = first; seed < last; ++seed) {
    const RandomCase random = make_case(seed, std::get<1>(GetParam()));
    SCOPED_TRACE("PACKED_SDPA_TEST_SEED=" + std::to_string(seed) + " --gtest_filter=*RandomTest*" +
                 std::get<0>(GetParam()) + "_" + dtype_name(std::get<1>(GetParam())));
    Problem problem(random.packing, random.settings);
    ThreadExecutor executor(static_cast<int>(1 + seed % 3), seed % 2 == 0);
    problem.run_forward(executor);
    expect_forward_matches(problem);
    problem.run_backward(executor);
    expect_backward_matches(problem);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, RandomTest,
                         ::testing::Combine(::testing::ValuesIn(isa_names()),
                                            ::testing::Values(ScalarType::kFloat32, ScalarType::kFloat64,
                                                              ScalarType::kBFloat16, ScalarType::kFloat16)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + dtype_name(std::get<1>(info.param));
                         });

// Lengths around the tiles of keys of forward (64, 128, 256) and the blocks of keys of backward (256, 512),
// and documents of several of them.
class TileEdgeTest : public RandomTest {};

TEST_P(TileEdgeTest, MatchesOracle) {
  ThreadExecutor executor(2);
  for (const std::vector<int64_t>& lengths :
       {std::vector<int64_t>{127, 128, 129}, {255, 1, 257}, {0, 511, 0}, {513}, {700}}) {
    for (const int64_t window : {-1, 100}) {
      Settings settings;
      settings.dtype = std::get<1>(GetParam());
      settings.num_heads = 2;
      settings.num_kv_heads = 1;
      settings.head_dim = 8;
      settings.head_dim_v = 8;
      settings.window_left = window;
      std::string name = "edges";
      for (const int64_t length : lengths) name.append("_").append(std::to_string(length));
      Problem problem(packing_from_lengths(name, lengths), settings);
      problem.run_forward(executor);
      expect_forward_matches(problem);
      problem.run_backward(executor);
      expect_backward_matches(problem);
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Isas, TileEdgeTest,
    ::testing::Combine(::testing::ValuesIn(isa_names()),
                       ::testing::Values(ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16)),
    [](const auto& info) { return std::get<0>(info.param) + "_" + dtype_name(std::get<1>(info.param)); });

// Documents of several blocks of queries of forward, which are items of their own and, in a window, begin
// with other keys. A block has 2,048 stacked rows (queries times heads of the group) at small head dims, and
// at 256 256 or 512 (forward_item_rows); plain kernels take 1,024 queries.
class QueryBlockTest : public RandomTest {};

TEST_P(QueryBlockTest, MatchesOracleAndThreadsDoNotMatter) {
  struct Case {
    std::vector<int64_t> lengths;
    int64_t group, dim, window;
  };
  for (const Case& c : {Case{{1023, 1024, 1025}, 2, 4, -1},
                        {{1023, 1024, 1025}, 2, 4, 100},
                        {{2100}, 1, 4, -1},
                        {{2100}, 1, 4, 100},
                        {{300}, 1, 256, 30},
                        {{300}, 2, 256, 30},
                        {{300}, 4, 256, 30}}) {
    Settings settings;
    settings.dtype = std::get<1>(GetParam());
    settings.num_heads = c.group;
    settings.num_kv_heads = 1;
    settings.head_dim = c.dim;
    settings.head_dim_v = c.dim;
    settings.window_left = c.window;
    settings.scale = c.dim == 4 ? 0.5 : 0.0625;
    std::string name = "query_blocks";
    for (const int64_t length : c.lengths) name.append("_").append(std::to_string(length));
    const Packing packing = packing_from_lengths(name, c.lengths);
    ThreadExecutor one(1);
    Problem expected(packing, settings);
    expected.run_forward(one);
    expect_forward_matches(expected);
    expected.run_backward(one);
    expect_backward_matches(expected);
    if (HasFailure()) return;
    for (const int threads : {-5, 2, 3}) {  // less than 0: one after another
      ThreadExecutor executor(std::abs(threads), threads < 0);
      Problem problem(packing, settings);
      problem.run_forward(executor);
      problem.run_backward(executor);
      const std::string repro =
          describe(packing, settings).append(" threads=").append(std::to_string(threads));
      EXPECT_EQ(problem.out.bytes(), expected.out.bytes()) << repro;
      EXPECT_EQ(problem.lse_float, expected.lse_float) << repro;
      EXPECT_EQ(problem.grad_query.bytes(), expected.grad_query.bytes()) << repro;
      EXPECT_EQ(problem.grad_key.bytes(), expected.grad_key.bytes()) << repro;
      EXPECT_EQ(problem.grad_value.bytes(), expected.grad_value.bytes()) << repro;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Isas, QueryBlockTest,
    ::testing::Combine(::testing::ValuesIn(isa_names()),
                       ::testing::Values(ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16)),
    [](const auto& info) { return std::get<0>(info.param) + "_" + dtype_name(std::get<1>(info.param)); });

// Every head dim that models use, and stacked groups larger than a tile.
TEST_P(RandomTest, HeadDimsAndLargeGroups) {
  ThreadExecutor executor(1);
  struct Shape {
    int64_t heads, kv_heads, dim, dim_v;
  };
  for (const Shape shape : {Shape{1, 1, 80, 80},
                            {2, 1, 128, 128},
                            {1, 1, 192, 128},
                            {1, 1, 96, 64},
                            {1, 1, 256, 256},
                            {1, 1, 512, 512},
                            {150, 1, 16, 16},
                            {9, 3, 16, 16}}) {
    Settings settings;
    settings.dtype = std::get<1>(GetParam());
    settings.num_heads = shape.heads;
    settings.num_kv_heads = shape.kv_heads;
    settings.head_dim = shape.dim;
    settings.head_dim_v = shape.dim_v;
    settings.scale = 0.1;
    Problem problem(packing_from_lengths("dims", {1, 18, 0, 21}), settings);
    problem.run_forward(executor);
    expect_forward_matches(problem);
    problem.run_backward(executor);
    expect_backward_matches(problem);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace packed_sdpa::cpu::testing
