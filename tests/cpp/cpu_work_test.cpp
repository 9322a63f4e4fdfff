// The plan of a call: every block of every document and head is done once, whatever runs the items.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/documents.h"
#include "cpu/huge_pages.h"
#include "cpu/tiled.h"
#include "cpu/work_items.h"
#include "cpu_testing.h"

namespace packed_sdpa::cpu::testing {
namespace {

std::vector<Document> documents_of(const std::vector<int64_t>& lengths) {
  std::vector<Document> documents;
  for (const int64_t length : lengths) {
    Document document;
    document.num_queries = length;
    document.num_keys = length;
    document.window_right = 0;
    documents.push_back(document);
  }
  return documents;
}

TEST(WorkItemsTest, QueryBlocksDescendWithTheirHeadsSideBySide) {
  constexpr int64_t kHeads = 3;
  constexpr int64_t kBlock = 64;
  const std::vector<Document> documents = documents_of({40, 300, 64, 129});
  std::vector<std::tuple<int64_t, int64_t, int64_t>> order;
  std::map<std::tuple<int64_t, int64_t, int64_t>, int> seen;
  for (const WorkItem& item : make_work_items(documents, kHeads, SplitBy::kQueries, kBlock)) {
    for (int32_t d = item.first_document; d < item.last_document; ++d) {
      for (int32_t head = item.first_kv_head; head < item.last_kv_head; ++head) ++seen[{d, item.block, head}];
    }
    if (documents[static_cast<size_t>(item.first_document)].num_queries > kBlock) {
      order.emplace_back(item.first_document, item.block, item.first_kv_head);
    }
  }
  std::vector<std::tuple<int64_t, int64_t, int64_t>> expected;
  for (const auto& [document, blocks] : {std::pair<int64_t, int64_t>{1, 5}, {3, 3}}) {  // the longest first
    for (int64_t block = blocks - 1; block >= 0; --block) {
      for (int64_t head = 0; head < kHeads; ++head) expected.emplace_back(document, block, head);
    }
  }
  EXPECT_EQ(order, expected);
  EXPECT_EQ(seen.size(), expected.size() + 2 * kHeads);  // and the two short documents, whole
  for (const auto& [key, count] : seen) EXPECT_EQ(count, 1);
}

TEST(WorkItemsTest, EveryBlockOnceAndKeyBlocksInOrder) {
  std::mt19937_64 generator(3);
  for (int round = 0; round < 50; ++round) {
    std::vector<int64_t> lengths;
    for (int d = 0; d < 30; ++d)
      lengths.push_back(static_cast<int64_t>(generator() % (d % 5 == 0 ? 900 : 60)));
    const std::vector<Document> documents = documents_of(lengths);
    const int64_t heads = 1 + static_cast<int64_t>(generator() % 5);
    const int64_t block = 1 + static_cast<int64_t>(generator() % 200);
    std::map<std::tuple<int64_t, int64_t, int64_t>, int> seen;
    std::map<std::pair<int64_t, int64_t>, int64_t> next_block;
    for (const WorkItem& item : make_work_items(documents, heads, SplitBy::kKeys, block)) {
      for (int32_t d = item.first_document; d < item.last_document; ++d) {
        for (int32_t head = item.first_kv_head; head < item.last_kv_head; ++head) {
          ++seen[{d, head, item.block}];
          EXPECT_EQ(item.block, (next_block[{d, head}]++)) << "key blocks must come in ascending order";
        }
      }
    }
    int64_t expected = 0;
    for (const int64_t length : lengths)
      expected += std::max<int64_t>(1, (length + block - 1) / block) * heads;
    EXPECT_EQ(static_cast<int64_t>(seen.size()), expected);
    for (const auto& [key, count] : seen) EXPECT_EQ(count, 1);
  }
}

TEST(WorkItemsTest, KeyBlocksAreTooCoarseForManyThreads) {
  const std::vector<Document> eight = documents_of(std::vector<int64_t>(8, 700));  // of one block of 512 each
  const auto too_coarse = [](const std::vector<Document>& documents, int64_t heads, int threads) {
    return blocks_are_too_coarse(documents, SplitBy::kKeys, heads, 512, threads);
  };
  EXPECT_FALSE(too_coarse(eight, 2, 1));
  EXPECT_FALSE(too_coarse(eight, 2, 4));  // 8 (512 * 700 + 188 * 188) * 2 heads / (4 * 512 * 700) = 4.4
  EXPECT_TRUE(too_coarse(eight, 2, 5));
  EXPECT_FALSE(too_coarse(eight, 4, 8));
  EXPECT_TRUE(too_coarse(documents_of({1100}), 2, 1));
  EXPECT_FALSE(too_coarse(documents_of({}), 2, 64));
  std::vector<Document> windows = eight;
  for (Document& document : windows) document.window_left = 100;
  EXPECT_FALSE(too_coarse(windows, 2, 4));  // 8 (512 * 612 + 188 * 188) * 2 heads / (4 * 512 * 612) = 4.5
  EXPECT_TRUE(too_coarse(windows, 2, 5));
}

TEST(WorkItemsTest, QueryBlocksAreTooCoarseForManyThreads) {
  const std::vector<Document> eight = documents_of(std::vector<int64_t>(8, 700));
  const auto too_coarse = [](const std::vector<Document>& documents, int64_t heads, int threads) {
    return blocks_are_too_coarse(documents, SplitBy::kQueries, heads, 512, threads);
  };
  EXPECT_FALSE(too_coarse(eight, 2, 1));
  EXPECT_FALSE(too_coarse(eight, 2, 4));  // 8 (512 * 512 + 188 * 700) * 2 heads / (4 * 512 * 512) = 6.008
  EXPECT_FALSE(too_coarse(eight, 2, 6));
  EXPECT_TRUE(too_coarse(eight, 2, 7));
  EXPECT_FALSE(too_coarse(documents_of({}), 2, 64));
  std::vector<Document> windows = eight;
  for (Document& document : windows) document.window_left = 100;
  EXPECT_FALSE(too_coarse(windows, 2, 4));  // 8 (512 * 512 + 188 * 288) * 2 heads / (4 * 512 * 512) = 4.8
  EXPECT_TRUE(too_coarse(windows, 2, 5));
}

TEST(WorkItemsTest, SpreadKeyBlocksGoByWeightInAFewHeadsAtATime) {
  constexpr int64_t kHeads = 2;
  constexpr int64_t kBlock = 100;
  const std::vector<Document> documents = documents_of({250, 30, 390});
  const std::vector<WorkItem> items = make_work_items(documents, kHeads, SplitBy::kKeys, kBlock);
  const auto order = [&](size_t max_open) {
    std::vector<std::tuple<int32_t, int32_t, int32_t>> keys;  // document, head, block
    for (const WorkItem& item : spread_key_blocks(items, documents, kBlock, max_open)) {
      keys.emplace_back(item.first_document, item.first_kv_head, item.block);
    }
    return keys;
  };
  using Order = std::vector<std::tuple<int32_t, int32_t, int32_t>>;
  // Pairs of document 2: 100 * 390, 100 * 290, 100 * 190, 90 * 90; of document 0: 100 * 250, 100 * 150, 50
  // * 50.
  const Order all = {{2, 0, 0}, {2, 1, 0}, {2, 0, 1}, {2, 1, 1}, {0, 0, 0}, {0, 1, 0}, {2, 0, 2}, {2, 1, 2},
                     {0, 0, 1}, {0, 1, 1}, {2, 0, 3}, {2, 1, 3}, {0, 0, 2}, {0, 1, 2}, {1, 0, 0}};
  EXPECT_EQ(order(4), all);
  EXPECT_EQ(order(64), all);
  const Order three = {{2, 0, 0}, {2, 1, 0}, {2, 0, 1}, {2, 1, 1}, {0, 0, 0}, {2, 0, 2}, {2, 1, 2}, {0, 0, 1},
                       {2, 0, 3}, {0, 1, 0}, {0, 1, 1}, {2, 1, 3}, {0, 0, 2}, {0, 1, 2}, {1, 0, 0}};
  EXPECT_EQ(order(3), three);
  Order one;
  for (const WorkItem& item : items) one.emplace_back(item.first_document, item.first_kv_head, item.block);
  EXPECT_EQ(order(1), one);
  EXPECT_TRUE(spread_key_blocks({}, documents, kBlock, 3).empty());

  // Blocks of one weight, all queries seeing all keys: no head has its next before the others have theirs.
  std::vector<Document> whole = documents_of({300});
  whole[0].window_right = -1;
  Order alternating;
  for (const WorkItem& item :
       spread_key_blocks(make_work_items(whole, kHeads, SplitBy::kKeys, kBlock), whole, kBlock, 4)) {
    alternating.emplace_back(item.first_document, item.first_kv_head, item.block);
  }
  EXPECT_EQ(alternating, (Order{{0, 0, 0}, {0, 1, 0}, {0, 0, 1}, {0, 1, 1}, {0, 0, 2}, {0, 1, 2}}));
}

using Heads = std::vector<std::tuple<int32_t, int32_t, int32_t>>;  // first document, heads [from, to)

Heads heads_of(const std::vector<WorkItem>& items) {
  Heads heads;
  for (const WorkItem& item : items)
    heads.emplace_back(item.first_document, item.first_kv_head, item.last_kv_head);
  return heads;
}

TEST(WorkItemsTest, HeadsAreSharedWhereThreadsWouldHaveNothing) {
  for (const SplitBy split_by : {SplitBy::kQueries, SplitBy::kKeys}) {
    const auto shared = [&](const std::vector<int64_t>& lengths, int64_t kv_heads, int64_t group,
                            int threads) {
      const std::vector<Document> documents = documents_of(lengths);
      return heads_of(share_heads(make_work_items(documents, kv_heads, split_by, 256), documents, split_by,
                                  group, threads));
    };
    // 8 heads of 16 * (16 + 16): four parts of 1,024.
    EXPECT_EQ(shared({16}, 8, 1, 1), (Heads{{0, 0, 8}}));
    EXPECT_EQ(shared({16}, 8, 1, 2), (Heads{{0, 0, 4}, {0, 4, 8}}));
    EXPECT_EQ(shared({16}, 8, 1, 3), (Heads{{0, 0, 2}, {0, 2, 4}, {0, 4, 8}}));
    EXPECT_EQ(shared({16}, 8, 1, 64), (Heads{{0, 0, 2}, {0, 2, 4}, {0, 4, 6}, {0, 6, 8}}));
    EXPECT_EQ(shared({15}, 4, 1, 2), (Heads{{0, 0, 4}}));  // 4 * 15 * 31: not worth a second thread
    EXPECT_EQ(shared({15}, 2, 3, 2), (Heads{{0, 0, 1}, {0, 1, 2}}));  // of three query heads each
    EXPECT_EQ(shared({4, 4, 0, 4}, 8, 1, 2), (Heads{{0, 0, 8}}));     // one item of 12 tokens
    // Two heads of 100 * 116 cost more than three of 80 * 96, then less.
    EXPECT_EQ(shared({100, 80}, 3, 1, 3), (Heads{{0, 0, 2}, {0, 2, 3}, {1, 0, 3}}));
    EXPECT_EQ(shared({100, 80}, 3, 1, 4), (Heads{{0, 0, 1}, {0, 1, 2}, {0, 2, 3}, {1, 0, 3}}));
    EXPECT_EQ(shared({100, 80}, 3, 1, 5), (Heads{{0, 0, 1}, {0, 1, 2}, {0, 2, 3}, {1, 0, 1}, {1, 1, 3}}));
    EXPECT_EQ(shared({}, 8, 1, 2), Heads{});
  }
}

TEST(HugePagesTest, MemoryKeepsWhatItHolds) {
  for (const size_t bytes : {size_t{0}, size_t{100}, size_t{16} << 20, (size_t{21} << 20) + 4321}) {
    std::vector<unsigned char> memory(bytes + 3, 7);
    advise_huge_pages(memory.data() + 1, bytes);
    for (size_t i = 0; i < memory.size(); i += 511) {
      ASSERT_EQ(memory[i], 7);
      memory[i] = 8;
    }
  }
}

TEST(WorkItemsTest, ExecutorsDoEveryItemOnce) {
  for (const int threads : {1, 2, 7}) {
    for (const bool serial : {false, true}) {
      std::vector<std::atomic<int>> done(1000);
      ThreadExecutor executor(threads, serial);
      run_work_items(
          executor, 1000, 128,
          [](void* context, int64_t item, Scratch& scratch) {
            scratch.take<float>(32)[31] = 1.0f;
            (*static_cast<std::vector<std::atomic<int>>*>(context))[static_cast<size_t>(item)].fetch_add(1);
          },
          &done);
      for (const std::atomic<int>& count : done) EXPECT_EQ(count.load(), 1);
    }
  }
}

// The closed forms and the searches agree with a plain look at every query.
TEST(DocumentsTest, QueriesOfAKeyAreThoseThatSeeIt) {
  std::mt19937_64 generator(5);
  for (int round = 0; round < 300; ++round) {
    Document document;
    document.num_queries = static_cast<int64_t>(generator() % 12);
    document.num_keys = 1 + static_cast<int64_t>(generator() % 12);
    document.diagonal = static_cast<int64_t>(generator() % 20) - 10;
    document.window_left = static_cast<int64_t>(generator() % 5) - 1;
    document.window_right = static_cast<int64_t>(generator() % 4) - 1;
    std::vector<int32_t> rows;
    int32_t row = 0;
    for (int64_t j = 0; j < document.num_keys; ++j) {
      row += 1 + static_cast<int32_t>(generator() % 3);
      rows.push_back(row);
    }
    if (round % 2 == 0) document.key_rows = rows.data();
    for (int64_t key = 0; key < document.num_keys; ++key) {
      const int64_t begin = document.first_query_reaching(key);
      const int64_t end = document.first_query_past(key);
      for (int64_t q = 0; q < document.num_queries; ++q) {
        const KeyRange range = document.visible_keys(q);
        EXPECT_EQ(range.begin <= key && key < range.end, begin <= q && q < end)
            << round << " " << key << " " << q;
      }
    }
    const RowRun seeing = seeing_queries(document);
    for (int64_t q = 0; q < document.num_queries; ++q) {
      const KeyRange range = document.visible_keys(q);
      EXPECT_EQ(range.begin < range.end, seeing.begin <= q && q < seeing.end) << round << " " << q;
    }
  }
}

TEST(SumBuffersTest, BuffersAreHandedOn) {
  SumBuffers buffers;
  SumBuffers::Buffer first = buffers.take(100);
  SumBuffers::Buffer second = buffers.take(50);
  ASSERT_NE(first.data.get(), second.data.get());
  const float* memory = first.data.get();
  buffers.give_back(std::move(second));
  buffers.give_back(std::move(first));
  SumBuffers::Buffer third = buffers.take(80);  // the one that is large enough
  EXPECT_EQ(third.data.get(), memory);
  EXPECT_EQ(third.floats, 100U);
  SumBuffers::Buffer fourth = buffers.take(60);  // none is large enough
  EXPECT_EQ(fourth.floats, 60U);
  buffers.give_back({});  // of a sum that never asked for one
  EXPECT_EQ(buffers.take(1).floats, 1U);
}

TEST(SumBuffersTest, EachTakesTheSmallestThatIsLargeEnough) {
  ThreadExecutor executor(3, false);
  SumBuffers buffers;
  const std::vector<size_t> sizes = {size_t{1} << 19, 70, 5000, 70};  // the first is touched in two pieces
  buffers.make(sizes, executor);
  for (const size_t floats : {size_t{70}, size_t{60}, size_t{71}, size_t{5001}}) {
    const SumBuffers::Buffer buffer = buffers.take(floats);
    EXPECT_EQ(buffer.floats, floats <= 70 ? 70U : floats == 71 ? 5000U : sizes[0]);
    for (size_t i = 0; i < buffer.floats; i += 1024) EXPECT_EQ(buffer.data[i], 0.0f);
  }
  EXPECT_EQ(buffers.take(1).floats, 1U);  // all were taken
}

// The sums of the heads of a long document share memory, and not at the same time.
TEST(SumBuffersTest, HeadsFollowEachOtherInOneBuffer) {
  SumBuffers buffers;
  const std::atomic<bool> abandoned{false};
  Document document;
  document.num_queries = document.num_keys = 8;
  document.window_right = 0;
  GradQuerySum first(document, /*block_keys=*/4, /*queries_per_tile=*/4, /*tile_floats=*/16, buffers,
                     abandoned);
  GradQuerySum second(document, 4, 4, 16, buffers, abandoned);
  float* memory = first.sums(0);
  EXPECT_EQ(first.sums(1), memory + 16);
  first.finish_block();
  EXPECT_EQ(first.sums(0), memory);
  first.finish_block();
  EXPECT_EQ(second.sums(0), memory);
}

// A thread that fails takes no turn any more; the others must not wait for it.
TEST(GradQuerySumTest, NobodyWaitsForAFailedThread) {
  Document document;
  document.num_queries = 8;
  document.num_keys = 8;
  std::atomic<bool> abandoned{false};
  SumBuffers buffers;
  GradQuerySum sum(document, /*block_keys=*/4, /*queries_per_tile=*/8, /*tile_floats=*/0, buffers, abandoned);
  std::thread waiting([&] { EXPECT_THROW(sum.wait_turn(0, 1), std::runtime_error); });
  abandoned = true;
  waiting.join();
}

}  // namespace
}  // namespace packed_sdpa::cpu::testing
