#include "packed_sdpa/layout.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "checks.h"
#include "device_layout.h"
#include "id_runs.h"
#include "rows.h"

namespace packed_sdpa {

struct PackedLayout::Data {
  int64_t batch = 0;
  int64_t rows_q = 0;
  int64_t rows_k = 0;
  int64_t total_q = 0;
  int64_t total_k = 0;
  bool has_gaps = false;
  LayoutTensors host;
  mutable std::mutex copies_mutex;
  mutable std::map<std::string, LayoutTensors> copies;  // by device name
};

namespace {

at::Tensor int32_tensor(const std::vector<int32_t>& values) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kInt);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int32_t>());
  return tensor;
}

at::Tensor max_seqlens_tensor(int64_t max_q, int64_t max_k) {
  at::Tensor tensor = at::empty({2}, at::kLong);
  tensor.mutable_data_ptr<int64_t>()[0] = max_q;
  tensor.mutable_data_ptr<int64_t>()[1] = max_k;
  return tensor;
}

int64_t longest(const at::Tensor& cu_seqlens) {
  const int32_t* values = cu_seqlens.const_data_ptr<int32_t>();
  int64_t result = 0;
  for (int64_t d = 1; d < cu_seqlens.numel(); ++d)
    result = std::max<int64_t>(result, values[d] - values[d - 1]);
  return result;
}

// A stretch of equal non-zero ids in one batch row.
struct Run {
  int32_t document;
  int32_t first;  // flat key row
  int32_t count;
};

// Documents in order of first sight. A run whose id was seen before in its row belongs to that document.
std::vector<Run> document_runs(const IdRuns& found, int32_t* num_documents) {
  std::vector<Run> runs;
  int32_t documents = 0;
  std::unordered_map<int64_t, int32_t> seen;
  int64_t end_of_row = 0;
  for (size_t r = 0; r < found.id.size(); ++r) {
    if (found.first[r] >= end_of_row) {
      seen.clear();
      end_of_row = (found.first[r] / found.rows + 1) * found.rows;
    }
    if (found.id[r] == 0) continue;
    const auto [entry, is_new] = seen.try_emplace(found.id[r], documents);
    if (is_new) ++documents;
    runs.push_back({entry->second, static_cast<int32_t>(found.first[r]),
                    static_cast<int32_t>(found.first[r + 1] - found.first[r])});
  }
  *num_documents = documents;
  return runs;
}

bool is_row_order(const std::vector<int32_t>& index, int64_t total_rows) {
  if (static_cast<int64_t>(index.size()) != total_rows) return false;
  for (size_t t = 0; t < index.size(); ++t) {
    if (index[t] != static_cast<int32_t>(t)) return false;
  }
  return true;
}

}  // namespace

PackedLayout PackedLayout::from_tensors(const LayoutTensors& tensors, int64_t batch, int64_t rows_q,
                                        int64_t rows_k) {
  checks::layout_tensors(tensors, batch, rows_q, rows_k);
  auto data = std::make_shared<Data>();
  data->batch = batch;
  data->rows_q = rows_q;
  data->rows_k = rows_k;
  data->host = tensors;
  if (tensors.cu_seqlens_q.is_cpu()) {
    const int64_t num_documents = tensors.cu_seqlens_q.numel() - 1;
    data->total_q = tensors.cu_seqlens_q.const_data_ptr<int32_t>()[num_documents];
    data->total_k = tensors.cu_seqlens_k.const_data_ptr<int32_t>()[num_documents];
    data->has_gaps = packed_sdpa::has_gaps(tensors);
  }
  return PackedLayout(std::move(data));
}

PackedLayout PackedLayout::from_doc_ids(const at::Tensor& doc_ids, int64_t row_offset,
                                        std::optional<int64_t> rows) {
  return layout_of(find_id_runs(doc_ids), row_offset, rows);
}

PackedLayout layout_of(const IdRuns& found, int64_t row_offset, std::optional<int64_t> rows) {
  const c10::InferenceMode normal_tensors(false);  // a layout outlives the mode it was made in
  const int64_t batch = found.batch;
  const int64_t rows_k = found.rows;
  TORCH_CHECK_VALUE(row_offset >= 0 && row_offset <= rows_k, "row_offset must be in [0, ", rows_k, "], got ",
                    row_offset);
  const int64_t rows_q = rows.value_or(rows_k - row_offset);
  TORCH_CHECK_VALUE(rows_q >= 0 && row_offset + rows_q <= rows_k, "rows must be in [0, ", rows_k - row_offset,
                    "] from row_offset ", row_offset, " of ", rows_k, " rows, got ", rows_q);

  int32_t num_documents = 0;
  const std::vector<Run> runs = document_runs(found, &num_documents);

  // Tokens of each document, in keys and in queries, and how many keys stand in front of the first query.
  std::vector<int32_t> cu_seqlens_q(static_cast<size_t>(num_documents) + 1, 0);
  std::vector<int32_t> cu_seqlens_k(static_cast<size_t>(num_documents) + 1, 0);
  std::vector<int32_t> diagonal_offsets(static_cast<size_t>(num_documents), 0);
  const auto query_part =
      [&](const Run& run) {  // [begin, end) of the run's rows that are queries, as key rows
        const int64_t row_begin = run.first / std::max<int64_t>(rows_k, 1) * rows_k;
        const int64_t begin = std::max<int64_t>(run.first, row_begin + row_offset);
        const int64_t end =
            std::min<int64_t>(int64_t{run.first} + run.count, row_begin + row_offset + rows_q);
        return std::pair<int64_t, int64_t>{begin, std::max(begin, end)};
      };
  for (const Run& run : runs) {
    const auto document = static_cast<size_t>(run.document);
    const auto [begin, end] = query_part(run);
    cu_seqlens_k[document + 1] += run.count;
    cu_seqlens_q[document + 1] += static_cast<int32_t>(end - begin);
    const int64_t row_begin = run.first / rows_k * rows_k;
    diagonal_offsets[document] +=
        static_cast<int32_t>(std::clamp<int64_t>(row_begin + row_offset - run.first, 0, run.count));
  }
  bool bottom_right = true;
  for (size_t d = 0; d < static_cast<size_t>(num_documents); ++d) {
    const bool has_queries = cu_seqlens_q[d + 1] > 0;
    bottom_right &= !has_queries || diagonal_offsets[d] == cu_seqlens_k[d + 1] - cu_seqlens_q[d + 1];
  }
  for (size_t d = 0; d < static_cast<size_t>(num_documents); ++d) {
    cu_seqlens_k[d + 1] += cu_seqlens_k[d];
    cu_seqlens_q[d + 1] += cu_seqlens_q[d];
  }

  std::vector<int32_t> token_index_q(static_cast<size_t>(cu_seqlens_q.back()));
  std::vector<int32_t> token_index_k(static_cast<size_t>(cu_seqlens_k.back()));
  std::vector<int32_t> next_q(cu_seqlens_q.begin(), cu_seqlens_q.end() - 1);
  std::vector<int32_t> next_k(cu_seqlens_k.begin(), cu_seqlens_k.end() - 1);
  for (const Run& run : runs) {
    const auto document = static_cast<size_t>(run.document);
    for (int32_t t = 0; t < run.count; ++t) {
      token_index_k[static_cast<size_t>(next_k[document]++)] = run.first + t;
    }
    const auto [begin, end] = query_part(run);
    const int64_t b = run.first / rows_k;
    for (int64_t row = begin; row < end; ++row) {
      token_index_q[static_cast<size_t>(next_q[document]++)] =
          static_cast<int32_t>(b * rows_q + row - b * rows_k - row_offset);
    }
  }
  if (is_row_order(token_index_q, batch * rows_q)) token_index_q.clear();
  if (is_row_order(token_index_k, batch * rows_k)) token_index_k.clear();
  if (bottom_right) diagonal_offsets.clear();

  LayoutTensors tensors;
  tensors.cu_seqlens_q = int32_tensor(cu_seqlens_q);
  tensors.cu_seqlens_k = int32_tensor(cu_seqlens_k);
  tensors.token_index_q = int32_tensor(token_index_q);
  tensors.token_index_k = int32_tensor(token_index_k);
  tensors.diagonal_offsets = int32_tensor(diagonal_offsets);
  tensors.max_seqlens = max_seqlens_tensor(longest(tensors.cu_seqlens_q), longest(tensors.cu_seqlens_k));
  PackedLayout layout = PackedLayout::from_tensors(tensors, batch, rows_q, rows_k);
  if (found.device_first.defined()) {
    const at::Device device = found.device_first.device();
    layout.data_->copies[device.str()] =
        device_layout(layout.tensors(), batch, rows_q, rows_k, device, {found.first, found.device_first});
  }
  return layout;
}

PackedLayout PackedLayout::from_seqlens(const at::Tensor& seqlens, std::optional<int64_t> total) {
  const at::Tensor lengths = checks::host_lengths(seqlens, "seqlens");
  if (lengths.numel() > 0) {
    const int64_t smallest = lengths.min().item<int64_t>();
    TORCH_CHECK_VALUE(smallest >= 0, "seqlens must not be negative, got ", smallest);
  }
  const int64_t sum = lengths.sum().item<int64_t>();
  TORCH_CHECK_VALUE(!total || sum <= *total, "seqlens sum to ", sum, " but the row has only ",
                    total.value_or(0), " tokens; shorten them or give a larger total");
  const at::Tensor cu_seqlens = at::cat({at::zeros({1}, at::kLong), lengths.cumsum(0)});
  return from_cu_seqlens(cu_seqlens, cu_seqlens, total, total);
}

PackedLayout PackedLayout::from_cu_seqlens(const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                           std::optional<int64_t> total_q, std::optional<int64_t> total_k) {
  const c10::InferenceMode normal_tensors(false);  // a layout outlives the mode it was made in
  const at::Tensor host_q = checks::host_lengths(cu_seqlens_q, "cu_seqlens_q");
  const at::Tensor host_k = checks::host_lengths(cu_seqlens_k, "cu_seqlens_k");
  constexpr int64_t kNoLimit = std::numeric_limits<int32_t>::max();
  checks::offsets(host_q, "cu_seqlens_q", total_q.value_or(kNoLimit));
  checks::offsets(host_k, "cu_seqlens_k", total_k.value_or(kNoLimit));
  TORCH_CHECK_VALUE(host_q.numel() == host_k.numel(), "cu_seqlens_q and cu_seqlens_k must describe the same ",
                    "documents, got ", host_q.numel(), " and ", host_k.numel(), " entries");
  LayoutTensors tensors;
  tensors.cu_seqlens_q = host_q.to(at::kInt);
  tensors.cu_seqlens_k = host_k.to(at::kInt);
  tensors.token_index_q = at::empty({0}, at::kInt);
  tensors.token_index_k = at::empty({0}, at::kInt);
  tensors.diagonal_offsets = at::empty({0}, at::kInt);
  tensors.max_seqlens = max_seqlens_tensor(longest(tensors.cu_seqlens_q), longest(tensors.cu_seqlens_k));
  return from_tensors(tensors, 1, total_q.value_or(host_q[-1].item<int64_t>()),
                      total_k.value_or(host_k[-1].item<int64_t>()));
}

PackedLayout PackedLayout::from_position_ids(const at::Tensor& position_ids) {
  const at::Tensor given = checks::given_ids(position_ids, "position_ids");
  const at::Tensor positions = given.to(given.is_cuda() ? given.device() : at::Device(at::kCPU), at::kLong);
  at::Tensor begins = at::zeros_like(positions);
  if (positions.size(1) > 0) {
    begins.narrow(1, 1, positions.size(1) - 1)
        .copy_(positions.narrow(1, 1, positions.size(1) - 1) !=
               positions.narrow(1, 0, positions.size(1) - 1) + 1);
  }
  return from_doc_ids(begins.cumsum(1) + 1);
}

int64_t PackedLayout::batch() const {
  return data_->batch;
}
int64_t PackedLayout::rows_q() const {
  return data_->rows_q;
}
int64_t PackedLayout::rows_k() const {
  return data_->rows_k;
}
int64_t PackedLayout::num_documents() const {
  return data_->host.cu_seqlens_q.numel() - 1;
}
int64_t PackedLayout::total_q() const {
  return data_->total_q;
}
int64_t PackedLayout::total_k() const {
  return data_->total_k;
}
int64_t PackedLayout::max_seqlen_q() const {
  return data_->host.max_seqlens.const_data_ptr<int64_t>()[0];
}
int64_t PackedLayout::max_seqlen_k() const {
  return data_->host.max_seqlens.const_data_ptr<int64_t>()[1];
}
bool PackedLayout::has_gaps() const {
  return data_->has_gaps;
}
bool PackedLayout::is_bottom_right() const {
  return data_->host.diagonal_offsets.numel() == 0;
}
const LayoutTensors& PackedLayout::tensors() const {
  return data_->host;
}

const LayoutTensors& PackedLayout::tensors(const at::Device& device) const {
  if (device == data_->host.cu_seqlens_q.device()) return data_->host;
  TORCH_CHECK_VALUE(!device.is_cuda() || device.has_index(), "device ", device,
                    " has no index; say which one, as cuda:0");
  const std::lock_guard<std::mutex> guard(data_->copies_mutex);
  const auto [entry, is_new] = data_->copies.try_emplace(device.str());
  if (is_new) entry->second = device_layout(data_->host, data_->batch, data_->rows_q, data_->rows_k, device);
  return entry->second;
}

std::vector<LayoutTensors> PackedLayout::device_tensors() const {
  const std::lock_guard<std::mutex> guard(data_->copies_mutex);
  std::vector<LayoutTensors> tensors;
  for (const auto& [device, copy] : data_->copies) tensors.push_back(copy);
  return tensors;
}

at::Tensor PackedLayout::materialize_mask(const MaskOptions& given) const {
  const MaskOptions options = checks::mask(given);
  const LayoutTensors& host = data_->host;
  at::Tensor mask = at::zeros({batch(), rows_q(), rows_k()}, at::kBool);
  at::Tensor flat = mask.view({-1, rows_k()});
  const auto rows_of = [](const at::Tensor& index, int64_t begin, int64_t end) {
    return (index.numel() == 0 ? at::arange(begin, end, at::kLong)
                               : index.slice(0, begin, end).to(at::kLong));
  };
  const int32_t* cu_q = host.cu_seqlens_q.const_data_ptr<int32_t>();
  const int32_t* cu_k = host.cu_seqlens_k.const_data_ptr<int32_t>();
  for (int64_t d = 0; d < num_documents(); ++d) {
    const int64_t count_q = cu_q[d + 1] - cu_q[d];
    const int64_t count_k = cu_k[d + 1] - cu_k[d];
    if (count_q == 0 || count_k == 0) continue;
    const int64_t diagonal = is_bottom_right() ? count_k - count_q : host.diagonal_offsets[d].item<int64_t>();
    const at::Tensor query_rows = rows_of(host.token_index_q, cu_q[d], cu_q[d + 1]);
    const at::Tensor key_rows = rows_of(host.token_index_k, cu_k[d], cu_k[d + 1]);
    // Where the queries stand among the keys, in rows: through the keys' own rows where the document has
    // gaps.
    at::Tensor place = at::arange(diagonal, diagonal + count_q, at::kLong);
    at::Tensor key_place = at::arange(count_k, at::kLong);
    if (data_->has_gaps) {
      key_place = key_rows - key_rows[0];
      place = key_place.index_select(0, place);
    }
    const at::Tensor behind =
        place.unsqueeze(1) - key_place.unsqueeze(0);  // rows that the key lies behind the query
    at::Tensor visible = at::ones_like(behind, at::kBool);
    if (options.is_causal) visible &= behind >= 0;
    if (options.window_left >= 0) visible &= behind <= options.window_left;
    if (!options.is_causal && options.window_right >= 0) visible &= behind >= -options.window_right;
    const at::Tensor columns = key_rows.remainder(rows_k());
    flat.index_put_({query_rows.unsqueeze(1), columns.unsqueeze(0)}, visible);
  }
  return mask;
}

}  // namespace packed_sdpa
