// PackedLayout: documents from ids, the mask against the definition, and every refusal.
#include "packed_sdpa/layout.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>
#include <vector>

namespace packed_sdpa {
namespace {

at::Tensor ids(const std::vector<int64_t>& values) {
  return at::tensor(values, at::kLong);
}

// The rule, element by element.
at::Tensor mask_by_definition(const at::Tensor& doc_ids, int64_t row_offset, int64_t rows,
                              const MaskOptions& options) {
  at::Tensor mask = at::zeros({doc_ids.size(0), rows, doc_ids.size(1)}, at::kBool);
  const auto id = doc_ids.accessor<int64_t, 2>();
  auto visible = mask.accessor<bool, 3>();
  for (int64_t b = 0; b < doc_ids.size(0); ++b) {
    for (int64_t i = row_offset; i < row_offset + rows; ++i) {
      for (int64_t j = 0; j < doc_ids.size(1); ++j) {
        bool sees = id[b][i] == id[b][j] && id[b][i] != 0;
        if (options.is_causal) sees = sees && j <= i;
        if (options.window_left >= 0) sees = sees && i - j <= options.window_left;
        if (!options.is_causal && options.window_right >= 0) sees = sees && j - i <= options.window_right;
        visible[b][i - row_offset][j] = sees;
      }
    }
  }
  return mask;
}

TEST(Layout, MaskIsTheDefinition) {
  const std::vector<at::Tensor> packings = {ids({1, 1, 1, 0, 2, 2, 0, 0}).unsqueeze(0),
                                            ids({0, 0, 1, 1, 2}).unsqueeze(0),
                                            ids({1, 1, 2, 1, 1}).unsqueeze(0),
                                            ids({1, 0, 1, 1}).unsqueeze(0),
                                            ids({9, 9, 3, 3, 700}).unsqueeze(0),
                                            ids({1, 2, 2, 2}).view({2, 2}),
                                            ids({0, 0, 0, 0}).view({2, 2}),
                                            ids({1, 2, 1, 2, 3, 1, 0, 2, 3}).unsqueeze(0)};
  const std::vector<MaskOptions> masks = {
      {true, -1, -1}, {true, 1, -1}, {false, -1, -1}, {false, 2, 1}, {true, 0, 0}};
  for (const at::Tensor& packing : packings) {
    for (int64_t offset = 0; offset <= packing.size(1); ++offset) {
      for (int64_t rows = 0; offset + rows <= packing.size(1); ++rows) {
        const PackedLayout layout = PackedLayout::from_doc_ids(packing, offset, rows);
        for (const MaskOptions& mask : masks) {
          EXPECT_TRUE(
              at::equal(layout.materialize_mask(mask), mask_by_definition(packing, offset, rows, mask)))
              << packing << " offset " << offset << " rows " << rows;
        }
      }
    }
  }
}

TEST(Layout, CountsAndFlags) {
  const PackedLayout layout = PackedLayout::from_doc_ids(ids({1, 1, 0, 2, 1}));
  EXPECT_EQ(layout.num_documents(), 2);
  EXPECT_EQ(layout.total_q(), 4);
  EXPECT_EQ(layout.max_seqlen_k(), 3);
  EXPECT_TRUE(layout.has_gaps());
  EXPECT_TRUE(layout.is_bottom_right());
  const PackedLayout plain = PackedLayout::from_doc_ids(ids({5, 5, 2}));
  EXPECT_FALSE(plain.has_gaps());
  EXPECT_EQ(plain.tensors().token_index_q.numel(), 0);
  EXPECT_FALSE(PackedLayout::from_doc_ids(ids({1, 1, 1, 1}), 1, 2).is_bottom_right());
  EXPECT_TRUE(PackedLayout::from_doc_ids(ids({1, 1, 1, 1}), 2, 2).is_bottom_right());
}

TEST(Layout, IdsAreCopied) {
  at::Tensor buffer = ids({1, 1, 2});
  const PackedLayout layout = PackedLayout::from_doc_ids(buffer);
  buffer.fill_(7);
  EXPECT_EQ(layout.num_documents(), 2);
}

TEST(Layout, TensorsOfADeviceAreKept) {
  const PackedLayout layout = PackedLayout::from_doc_ids(ids({1, 1, 2}));
  const LayoutTensors& meta = layout.tensors(at::Device(at::kMeta));
  EXPECT_TRUE(meta.cu_seqlens_q.is_meta());
  EXPECT_TRUE(meta.max_seqlens.is_cpu());
  EXPECT_EQ(&meta, &layout.tensors(at::Device(at::kMeta)));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] { EXPECT_EQ(&layout.tensors(at::Device(at::kMeta)), &meta); });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Layout, TensorsFromElsewhereAreChecked) {
  const LayoutTensors good = PackedLayout::from_doc_ids(ids({1, 1, 0, 2})).tensors();
  EXPECT_EQ(PackedLayout::from_tensors(good, 1, 4, 4).num_documents(), 2);
  const auto with = [&](const std::function<void(LayoutTensors&)>& change) {
    LayoutTensors bad = good;
    change(bad);
    return [bad] { PackedLayout::from_tensors(bad, 1, 4, 4); };
  };
  const auto int32 = [](const std::vector<int32_t>& values) { return at::tensor(values, at::kInt); };
  EXPECT_THROW(with([&](auto& t) { t.cu_seqlens_q = int32({1, 2, 3}); })(), c10::ValueError);
  EXPECT_THROW(with([&](auto& t) { t.cu_seqlens_q = int32({0, 3, 2}); })(), c10::ValueError);
  EXPECT_THROW(with([&](auto& t) { t.cu_seqlens_q = int32({0, 3}); })(), c10::ValueError);
  EXPECT_THROW(with([&](auto& t) { t.cu_seqlens_k = int32({0, 2, 9}); })(), c10::ValueError);
  EXPECT_THROW(with([&](auto& t) { t.token_index_k = int32({0, 1, 4}); })(), c10::ValueError);
  EXPECT_THROW(with([&](auto& t) { t.token_index_k = int32({1, 0, 3}); })(), c10::ValueError);
  EXPECT_THROW(with([&](auto& t) { t.token_index_k = int32({0, 1}); })(), c10::ValueError);
  EXPECT_THROW(with([&](auto& t) { t.diagonal_offsets = int32({0}); })(), c10::ValueError);
  EXPECT_THROW(with([&](auto& t) { t.cu_seqlens_q = t.cu_seqlens_q.to(at::kLong); })(), c10::ValueError);
  EXPECT_THROW(with([&](auto& t) { t.max_seqlens = at::zeros({4}, at::kLong); })(), c10::ValueError);
  EXPECT_THROW(with([&](auto& t) { t.max_seqlens = at::ones({2}, at::kLong); })(), c10::ValueError);
  EXPECT_THROW(with([&](auto& t) { t.token_index_q = t.token_index_q.to(at::kMeta); })(), c10::ValueError);
}

TEST(Layout, ADocumentMayNotRunOverItsRow) {
  LayoutTensors tensors = PackedLayout::from_seqlens(ids({3, 5})).tensors();
  EXPECT_THROW(PackedLayout::from_tensors(tensors, 2, 4, 4), c10::ValueError);
  EXPECT_EQ(PackedLayout::from_tensors(tensors, 1, 8, 8).num_documents(), 2);
}

TEST(Layout, BothSidesOfADocumentLieInOneBatchRow) {
  LayoutTensors tensors = PackedLayout::from_doc_ids(ids({1, 1, 0, 0, 2, 0}).view({2, 3})).tensors();
  tensors.token_index_k = at::tensor(std::vector<int32_t>{3, 4, 5}, at::kInt);
  EXPECT_THROW(PackedLayout::from_tensors(tensors, 2, 3, 3), c10::ValueError);
}

TEST(Layout, QueriesOfADocumentWithGapsStandAtItsKeys) {
  LayoutTensors tensors = PackedLayout::from_doc_ids(ids({1, 2, 1, 1}), 1, 2).tensors();
  ASSERT_EQ(tensors.diagonal_offsets.numel(), 2);
  tensors.diagonal_offsets = at::tensor(std::vector<int32_t>{3, 0}, at::kInt);
  EXPECT_THROW(PackedLayout::from_tensors(tensors, 1, 2, 4), c10::ValueError);
}

}  // namespace
}  // namespace packed_sdpa
