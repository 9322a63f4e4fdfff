// The library really uses torch's threads: without OpenMP at::parallel_for would silently run on one.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include "packed_sdpa/attention.h"

namespace packed_sdpa {
namespace {

class Parallel : public ::testing::Test {
 protected:
  ~Parallel() override { at::set_num_threads(threads_); }

 private:
  const int threads_ = at::get_num_threads();
};

TEST_F(Parallel, WorkRunsOnAsManyThreadsAsTorchHas) {
  const auto counted = c10::Dispatcher::singleton()
                           .findSchemaOrThrow("packed_sdpa::cpu_parallel_threads", "")
                           .typed<int64_t()>();
  for (const int count : {1, 2, 3}) {
    at::set_num_threads(count);
    EXPECT_EQ(counted.call(), count);
  }
}

TEST_F(Parallel, SameBitsForEveryThreadCount) {
  at::manual_seed(4);
  const PackedLayout layout = PackedLayout::from_doc_ids(at::arange(700).floor_divide(90) + 1);
  const at::Tensor query = at::randn({1, 4, 700, 32});
  const at::Tensor key = at::randn({1, 2, 700, 32});
  at::set_num_threads(1);
  const at::Tensor alone = packed_attention(query, key, key, layout).out;
  for (const int count : {2, 3, 5}) {
    at::set_num_threads(count);
    EXPECT_TRUE(at::equal(packed_attention(query, key, key, layout).out, alone)) << count;
  }
}

}  // namespace
}  // namespace packed_sdpa
