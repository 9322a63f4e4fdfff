// Padding between documents, on its way to a kernel with cu_seqlens: a gather or two documents a run?
//
// A gather reads and writes q, k, v and out (and their gradients) once more. A run of padding told as the
// documents (q = n, k = 0) and (q = 0, k = n) copies nothing; each such document costs a few empty thread
// blocks and 128 rows of flash-attention's float32 accumulators in backward. So documents are the better way
// until they would grow these accumulators by a quarter (kDocumentRows below), and a batch with a few rows of
// padding at the ends of its rows is far from that. Longer runs are cut to the length of the longest document
// (to whole tiles), so that they do not enlarge the kernel's grid, which is as deep as the longest document
// for every document. The quarter is reasoned, not measured.
#include "device_layout.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "rows.h"
#include "tensors.h"

namespace packed_sdpa {

namespace {

constexpr int64_t kTile = 128;          // query rows of a thread block, and of the accumulators a document
constexpr int64_t kDocumentRows = 128;  // accumulator rows that a document costs beside its own
constexpr int64_t kFreeDocuments = 32;  // so many are let in for any batch
constexpr int64_t kShareOfRows = 4;     // beyond these: at most rows / 4 accumulator rows more

int64_t whole_tiles(int64_t rows) {
  return std::max<int64_t>((rows + kTile - 1) / kTile, 1) * kTile;
}

bool ascends(const at::Tensor& index) {
  const int32_t* rows = index.const_data_ptr<int32_t>();
  for (int64_t t = 1; t < index.numel(); ++t) {
    if (rows[t] <= rows[t - 1]) return false;
  }
  return true;
}

// Offsets of both sides as they grow, document by document.
class RowOrder {
 public:
  void add(int64_t count_q, int64_t count_k, int32_t diagonal) {
    cu_seqlens_q_.push_back(cu_seqlens_q_.back() + static_cast<int32_t>(count_q));
    cu_seqlens_k_.push_back(cu_seqlens_k_.back() + static_cast<int32_t>(count_k));
    diagonals_.push_back(diagonal);
    longest_q_ = std::max(longest_q_, count_q);
    longest_k_ = std::max(longest_k_, count_k);
  }

  // Padding up to row `end`, in pieces that do not cross a batch row.
  void pad_queries(int64_t end, int64_t rows, int64_t piece) {
    while (cu_seqlens_q_.back() < end) add(next_piece(cu_seqlens_q_.back(), end, rows, piece), 0, 0);
  }
  void pad_keys(int64_t end, int64_t rows, int64_t piece) {
    while (cu_seqlens_k_.back() < end) add(0, next_piece(cu_seqlens_k_.back(), end, rows, piece), 0);
  }

  LayoutTensors tensors(bool bottom_right) const {
    const auto int32_tensor = [](const std::vector<int32_t>& values) { return at::tensor(values, at::kInt); };
    LayoutTensors result;
    result.cu_seqlens_q = int32_tensor(cu_seqlens_q_);
    result.cu_seqlens_k = int32_tensor(cu_seqlens_k_);
    result.token_index_q = at::empty({0}, at::kInt);
    result.token_index_k = at::empty({0}, at::kInt);
    result.diagonal_offsets = bottom_right ? at::empty({0}, at::kInt) : int32_tensor(diagonals_);
    result.max_seqlens = at::tensor({longest_q_, longest_k_}, at::kLong);
    return result;
  }

 private:
  static int64_t next_piece(int64_t begin, int64_t end, int64_t rows, int64_t piece) {
    const int64_t end_of_row = (begin / rows + 1) * rows;
    return std::min({end - begin, piece, end_of_row - begin});
  }

  std::vector<int32_t> cu_seqlens_q_{0}, cu_seqlens_k_{0}, diagonals_;
  int64_t longest_q_ = 0, longest_k_ = 0;
};

}  // namespace

std::optional<LayoutTensors> row_order_layout(const LayoutTensors& host, int64_t batch, int64_t rows_q,
                                              int64_t rows_k, bool to_the_end, int64_t piece_q,
                                              int64_t piece_k) {
  if (has_gaps(host) || !ascends(host.token_index_q) || !ascends(host.token_index_k)) return std::nullopt;
  const int32_t* cu_q = host.cu_seqlens_q.const_data_ptr<int32_t>();
  const int32_t* cu_k = host.cu_seqlens_k.const_data_ptr<int32_t>();
  const auto first_row = [](const at::Tensor& index, int64_t token) {
    return index.numel() == 0 ? token : int64_t{index.const_data_ptr<int32_t>()[token]};
  };
  const bool bottom_right = host.diagonal_offsets.numel() == 0;
  if (piece_q == 0) piece_q = whole_tiles(host.max_seqlens.const_data_ptr<int64_t>()[0]);
  if (piece_k == 0) piece_k = whole_tiles(host.max_seqlens.const_data_ptr<int64_t>()[1]);
  RowOrder order;
  for (int64_t d = 0; d + 1 < host.cu_seqlens_q.numel(); ++d) {
    const int64_t count_q = cu_q[d + 1] - cu_q[d];
    const int64_t count_k = cu_k[d + 1] - cu_k[d];
    if (count_q > 0) order.pad_queries(first_row(host.token_index_q, cu_q[d]), rows_q, piece_q);
    if (count_k > 0) order.pad_keys(first_row(host.token_index_k, cu_k[d]), rows_k, piece_k);
    order.add(count_q, count_k, bottom_right ? 0 : host.diagonal_offsets.const_data_ptr<int32_t>()[d]);
  }
  if (to_the_end) {
    order.pad_queries(batch * rows_q, rows_q, piece_q);
    order.pad_keys(batch * rows_k, rows_k, piece_k);
  }
  return order.tensors(bottom_right);
}

namespace {

// The offsets of `there`, cut to those of `offsets`; undefined when they are others.
at::Tensor same_offsets(const at::Tensor& offsets, const DeviceOffsets& there) {
  const int32_t* values = offsets.const_data_ptr<int32_t>();
  const int64_t count = offsets.numel();
  const bool are_there = there.device.defined() && count <= there.device.numel() &&
                         std::equal(values, values + count, there.host.begin());
  return are_there ? there.device.slice(0, 0, count) : at::Tensor();
}

}  // namespace

LayoutTensors device_layout(const LayoutTensors& host, int64_t batch, int64_t rows_q, int64_t rows_k,
                            const c10::Device& device, const DeviceOffsets& there) {
  LayoutTensors form = host;
  if (host.token_index_q.numel() > 0 || host.token_index_k.numel() > 0) {
    const std::optional<LayoutTensors> row_order = row_order_layout(host, batch, rows_q, rows_k, false);
    const int64_t limit = kFreeDocuments * kDocumentRows + batch * rows_q / kShareOfRows;
    const auto pays = [&](const LayoutTensors& candidate) {
      return (candidate.cu_seqlens_q.numel() - host.cu_seqlens_q.numel()) * kDocumentRows <= limit;
    };
    if (row_order && pays(*row_order)) form = *row_order;
  }
  LayoutTensors result;
  result.cu_seqlens_q = same_offsets(form.cu_seqlens_q, there);
  result.cu_seqlens_k = same_offsets(form.cu_seqlens_k, there);
  // The rest: one buffer, one copy.
  std::vector<std::pair<at::Tensor*, at::Tensor>> missing = {
      {&result.token_index_q, form.token_index_q},
      {&result.token_index_k, form.token_index_k},
      {&result.diagonal_offsets, form.diagonal_offsets}};
  if (!result.cu_seqlens_q.defined()) missing.emplace_back(&result.cu_seqlens_q, form.cu_seqlens_q);
  if (!result.cu_seqlens_k.defined()) missing.emplace_back(&result.cu_seqlens_k, form.cu_seqlens_k);
  std::vector<at::Tensor> parts;
  for (const auto& [place, part] : missing) parts.push_back(part);
  const at::Tensor buffer = sent_to(device, at::cat(parts));
  int64_t begin = 0;
  for (const auto& [place, part] : missing) {
    *place = buffer.slice(0, begin, begin + part.numel());
    begin += part.numel();
  }
  result.max_seqlens = host_mirror(form);
  return result;
}

}  // namespace packed_sdpa
