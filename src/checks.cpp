#include "checks.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <sstream>
#include <utility>
#include <vector>

namespace packed_sdpa::checks {

namespace {

constexpr int64_t kMaxFlatRows = std::numeric_limits<int32_t>::max();

bool is_integral_or_bool(c10::ScalarType dtype) {
  return c10::isIntegralType(dtype, /*includeBool=*/true);
}

template <typename Offset>
void from_zero_ascending(const Offset* values, int64_t count, const char* argument) {
  TORCH_CHECK_VALUE(values[0] == 0, argument, " must start at 0, got ", values[0],
                    "; give cumulative lengths: 0, n0, n0 + n1, ...");
  for (int64_t d = 1; d < count; ++d) {
    TORCH_CHECK_VALUE(values[d] >= values[d - 1], argument, " must not decrease, but entry ", d, " is ",
                      values[d], " after ", values[d - 1], "; give cumulative lengths: 0, n0, n0 + n1, ...");
  }
}

void has_values(const at::Tensor& tensor, const char* argument) {
  TORCH_CHECK_NOT_IMPLEMENTED(!in_func_transform(), argument,
                              " cannot be read within a torch.func transform (vmap, grad, jvp, ...); make "
                              "the layout, or arm, outside of it");
  TORCH_CHECK_VALUE(!tensor.is_meta(), argument,
                    " is on the meta device, which holds no values; give a tensor with values");
}

}  // namespace

bool in_func_transform() {
  constexpr auto kKey = c10::DispatchKey::FuncTorchDynamicLayerBackMode;
  return c10::impl::tls_is_dispatch_key_included(kKey) && !c10::impl::tls_is_dispatch_key_excluded(kKey);
}

std::string shape_string(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sym_sizes();
  return text.str();
}

at::Tensor given_ids(const at::Tensor& given, const char* argument) {
  TORCH_CHECK_VALUE(given.defined(), argument,
                    " is an undefined tensor; give an integer tensor [B, S] or [S]");
  has_values(given, argument);
  TORCH_CHECK_TYPE(is_integral_or_bool(given.scalar_type()), argument,
                   " must have an integer dtype (or bool), got ", given.scalar_type(),
                   "; convert with .long()");
  TORCH_CHECK_VALUE(given.dim() == 1 || given.dim() == 2, argument, " must be [B, S] or [S], got shape ",
                    shape_string(given));
  TORCH_CHECK_VALUE(given.numel() <= kMaxFlatRows, argument, " has ", given.numel(),
                    " entries; at most 2**31 - 1 rows of a batch are supported, so split the batch");
  const at::Tensor rows = given.detach();
  return rows.dim() == 1 ? rows.unsqueeze(0) : rows;
}

void not_negative(int64_t smallest, const char* argument) {
  TORCH_CHECK_VALUE(smallest >= 0, argument, " must not be negative, got ", smallest,
                    "; use 0 for padding and positive ids for documents");
}

at::Tensor host_ids(const at::Tensor& given, const char* argument) {
  at::Tensor host = given_ids(given, argument)
                        .to(at::TensorOptions(at::kCPU).dtype(at::kLong), /*non_blocking=*/false,
                            /*copy=*/true, at::MemoryFormat::Contiguous);
  // Large unsigned ids wrap when they become int64; only their equality counts.
  if (given.scalar_type() != at::kUInt64 && host.numel() > 0) {
    not_negative(host.min().item<int64_t>(), argument);
  }
  return host;
}

at::Tensor host_lengths(const at::Tensor& lengths, const char* argument) {
  TORCH_CHECK_VALUE(lengths.defined(), argument, " is an undefined tensor; give a 1-D integer tensor");
  has_values(lengths, argument);
  TORCH_CHECK_TYPE(c10::isIntegralType(lengths.scalar_type(), /*includeBool=*/false), argument,
                   " must have an integer dtype, got ", lengths.scalar_type(), "; convert with .int()");
  TORCH_CHECK_VALUE(lengths.dim() == 1, argument, " must be 1-D, got shape ", shape_string(lengths));
  return lengths.detach().to(at::TensorOptions(at::kCPU).dtype(at::kLong), false, /*copy=*/true,
                             at::MemoryFormat::Contiguous);
}

void offsets(const at::Tensor& host_offsets, const char* argument, int64_t total) {
  TORCH_CHECK_VALUE(host_offsets.dim() == 1 && host_offsets.numel() >= 1, argument,
                    " must be 1-D with at least one entry (the leading 0), got shape ",
                    shape_string(host_offsets));
  const at::Tensor as_long = host_offsets.to(at::kLong).contiguous();
  const int64_t* values = as_long.const_data_ptr<int64_t>();
  const int64_t count = as_long.numel();
  from_zero_ascending(values, count, argument);
  TORCH_CHECK_VALUE(values[count - 1] <= total, argument, " ends at ", values[count - 1],
                    " but there are only ", total, " tokens; the last offset must not pass the token count");
}

void token_index(const at::Tensor& index, const at::Tensor& offsets, const char* argument, int64_t batch,
                 int64_t rows) {
  const int32_t* cu_seqlens = offsets.const_data_ptr<int32_t>();
  const int64_t num_documents = offsets.numel() - 1;
  const int64_t total = cu_seqlens[num_documents];
  TORCH_CHECK_VALUE(index.numel() == 0 || index.numel() == total, argument,
                    " must have as many entries as tokens (", total, ") or none, got ", index.numel());
  if (index.numel() == 0) {
    // Row order: a document may not run over the end of a batch row.
    for (int64_t d = 0; d < num_documents && batch > 1; ++d) {
      if (cu_seqlens[d + 1] == cu_seqlens[d]) continue;
      const int64_t first = cu_seqlens[d];
      const int64_t last = cu_seqlens[d + 1] - 1;
      TORCH_CHECK_VALUE(first / rows == last / rows, argument, ": document ", d, " (rows ", first, " to ",
                        last, ") runs over a batch row of ", rows,
                        " tokens; end documents at the end of their row");
    }
    return;
  }
  const int32_t* rows_of = index.const_data_ptr<int32_t>();
  bool in_order = true;  // over all documents: then no two share a row
  int64_t last_before = -1;
  for (int64_t d = 0; d < num_documents; ++d) {
    const int64_t begin = cu_seqlens[d];
    const int64_t end = cu_seqlens[d + 1];
    if (begin == end) continue;
    int32_t disorder = 0;
    for (int64_t t = begin + 1; t < end; ++t) disorder |= static_cast<int32_t>(rows_of[t] <= rows_of[t - 1]);
    TORCH_CHECK_VALUE(disorder == 0, argument, ": the rows of document ", d, " must ascend");
    const int64_t first = rows_of[begin];
    const int64_t last = rows_of[end - 1];
    TORCH_CHECK_VALUE(first >= 0 && last < batch * rows, argument, ": document ", d, " has rows ", first,
                      " to ", last, " outside the ", batch * rows, " rows of the batch");
    TORCH_CHECK_VALUE(first / rows == last / rows, argument, ": document ", d, " (rows ", first, " to ", last,
                      ") runs over a batch row of ", rows, " tokens; end documents at the end of their row");
    in_order = in_order && first > last_before;
    last_before = last;
  }
  if (in_order) return;
  std::vector<uint8_t> taken(static_cast<size_t>(batch * rows), 0);
  for (int64_t t = 0; t < total; ++t) {
    uint8_t& row = taken[static_cast<size_t>(rows_of[t])];
    TORCH_CHECK_VALUE(row == 0, argument, ": row ", rows_of[t],
                      " belongs to two documents; give each row to one document");
    row = 1;
  }
}

LayoutTensors layout_list(at::TensorList tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 6, "layout must be the 6 tensors of PackedLayout.tensors(), got ",
                    tensors.size());
  return {tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], tensors[5]};
}

namespace {

int64_t flat_row(const at::Tensor& index, int64_t place) {
  return index.numel() == 0 ? place : index.const_data_ptr<int32_t>()[place];
}

// Both sides of a document: one batch row, maxima that hold, queries that stand among their keys.
void documents(const LayoutTensors& tensors, int64_t rows_q, int64_t rows_k) {
  const int32_t* cu_q = tensors.cu_seqlens_q.const_data_ptr<int32_t>();
  const int32_t* cu_k = tensors.cu_seqlens_k.const_data_ptr<int32_t>();
  const int32_t* diagonals =
      tensors.diagonal_offsets.numel() == 0 ? nullptr : tensors.diagonal_offsets.const_data_ptr<int32_t>();
  int64_t longest_q = 0;
  int64_t longest_k = 0;
  for (int64_t d = 0; d + 1 < tensors.cu_seqlens_q.numel(); ++d) {
    const int64_t count_q = cu_q[d + 1] - cu_q[d];
    const int64_t count_k = cu_k[d + 1] - cu_k[d];
    longest_q = std::max(longest_q, count_q);
    longest_k = std::max(longest_k, count_k);
    if (count_q == 0 || count_k == 0) continue;
    const int64_t query_batch = flat_row(tensors.token_index_q, cu_q[d]) / rows_q;
    const int64_t first_key = flat_row(tensors.token_index_k, cu_k[d]);
    TORCH_CHECK_VALUE(query_batch == first_key / rows_k, "token_index_k: document ", d,
                      " has its queries in batch row ", query_batch, " and its keys in batch row ",
                      first_key / rows_k, "; take layouts from PackedLayout.from_*()");
    const bool has_gaps = flat_row(tensors.token_index_k, cu_k[d + 1] - 1) - first_key != count_k - 1;
    const int64_t diagonal = diagonals == nullptr ? count_k - count_q : diagonals[d];
    // Rows of a document with gaps are looked up among its keys, so each query must stand at one of them.
    TORCH_CHECK_VALUE(!has_gaps || (diagonal >= 0 && diagonal + count_q <= count_k),
                      "diagonal_offsets: document ", d, " has gaps, ", count_q, " queries and ", count_k,
                      " keys, so its offset must be in [0, ", count_k - count_q, "], got ", diagonal);
  }
  const int64_t* maxima = tensors.max_seqlens.const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(maxima[0] >= longest_q && maxima[1] >= longest_k, "max_seqlens is [", maxima[0], ", ",
                    maxima[1], "] but the longest document has ", longest_q, " queries and ", longest_k,
                    " keys; take layouts from PackedLayout.from_*()");
}

}  // namespace

void layout_tensors(const LayoutTensors& tensors, int64_t batch, int64_t rows_q, int64_t rows_k) {
  const auto int32_1d = [](const at::Tensor& tensor, const char* argument) {
    TORCH_CHECK_VALUE(tensor.defined() && tensor.dim() == 1 && tensor.scalar_type() == at::kInt, argument,
                      " must be a 1-D int32 tensor, got ", tensor.defined() ? shape_string(tensor) : "none",
                      " ", tensor.defined() ? toString(tensor.scalar_type()) : "",
                      "; take layouts from PackedLayout.from_*()");
    TORCH_CHECK_VALUE(tensor.is_contiguous(), argument, " must be contiguous; call .contiguous()");
  };
  int32_1d(tensors.cu_seqlens_q, "cu_seqlens_q");
  int32_1d(tensors.cu_seqlens_k, "cu_seqlens_k");
  int32_1d(tensors.token_index_q, "token_index_q");
  int32_1d(tensors.token_index_k, "token_index_k");
  int32_1d(tensors.diagonal_offsets, "diagonal_offsets");
  // Beside device tensors what the host knows must travel too: kernels are told by it which rows no document
  // covers.
  const auto maxima_fit = [&] {
    const int64_t count = tensors.max_seqlens.numel();
    return count == 3 || count == 3 + 2 * tensors.cu_seqlens_q.numel() ||
           (count == 2 && tensors.cu_seqlens_q.is_cpu());
  };
  TORCH_CHECK_VALUE(
      tensors.max_seqlens.defined() && tensors.max_seqlens.dim() == 1 &&
          tensors.max_seqlens.scalar_type() == at::kLong && tensors.max_seqlens.is_cpu() && maxima_fit(),
      "max_seqlens must be int64 [2] on the host, with the host's mirror of the offsets behind it "
      "beside device tensors; take layouts from PackedLayout.from_*() and .tensors(device)");
  TORCH_CHECK_VALUE(tensors.cu_seqlens_q.numel() == tensors.cu_seqlens_k.numel(),
                    "cu_seqlens_q and cu_seqlens_k must describe the same documents, got ",
                    tensors.cu_seqlens_q.numel(), " and ", tensors.cu_seqlens_k.numel(), " entries");
  TORCH_CHECK_VALUE(tensors.cu_seqlens_q.numel() >= 1,
                    "cu_seqlens_q must have at least one entry (the leading 0), got none");
  const int64_t num_documents = tensors.cu_seqlens_q.numel() - 1;
  TORCH_CHECK_VALUE(
      tensors.diagonal_offsets.numel() == 0 || tensors.diagonal_offsets.numel() == num_documents,
      "diagonal_offsets must have an entry a document (", num_documents, ") or none, got ",
      tensors.diagonal_offsets.numel());
  const at::Device device = tensors.cu_seqlens_q.device();
  for (const at::Tensor& tensor :
       {tensors.cu_seqlens_k, tensors.token_index_q, tensors.token_index_k, tensors.diagonal_offsets}) {
    TORCH_CHECK_VALUE(tensor.device() == device, "layout tensors must be on one device, got ",
                      tensor.device(), " beside ", device, "; use PackedLayout.tensors(device)");
  }
  if (!device.is_cpu()) return;  // device values were checked where the layout was made
  TORCH_CHECK_VALUE(batch * rows_q <= kMaxFlatRows && batch * rows_k <= kMaxFlatRows, "a batch of ", batch,
                    " x ", std::max(rows_q, rows_k), " rows passes 2**31 - 1; split the batch");
  const auto check_side = [&](const at::Tensor& cu_seqlens, const at::Tensor& index, const char* offsets_name,
                              const char* index_name, int64_t rows) {
    const int32_t* values = cu_seqlens.const_data_ptr<int32_t>();
    from_zero_ascending(values, cu_seqlens.numel(), offsets_name);
    TORCH_CHECK_VALUE(values[num_documents] <= batch * rows, offsets_name, " ends at ", values[num_documents],
                      " but there are only ", batch * rows, " rows; the layout belongs to other tensors");
    token_index(index, cu_seqlens, index_name, batch, rows);
  };
  check_side(tensors.cu_seqlens_q, tensors.token_index_q, "cu_seqlens_q", "token_index_q", rows_q);
  check_side(tensors.cu_seqlens_k, tensors.token_index_k, "cu_seqlens_k", "token_index_k", rows_k);
  documents(tensors, rows_q, rows_k);
}

MaskOptions mask(const MaskOptions& mask) {
  TORCH_CHECK_VALUE(mask.window_left >= -1, "window_size[0] must be -1 (unlimited) or at least 0, got ",
                    mask.window_left);
  TORCH_CHECK_VALUE(mask.window_right >= -1, "window_size[1] must be -1 (unlimited) or at least 0, got ",
                    mask.window_right);
  TORCH_CHECK_VALUE(!mask.is_causal || mask.window_right <= 0,
                    "window_size[1] must be -1 or 0 when is_causal, got ", mask.window_right,
                    "; a causal row sees no row ahead");
  // No two rows are so far apart; kernels add to these counts, some in int32.
  const auto reachable = [](int64_t rows) { return rows < kMaxFlatRows ? rows : -1; };
  return {mask.is_causal, reachable(mask.window_left), reachable(mask.window_right)};
}

void dropout(double dropout_p) {
  TORCH_CHECK_VALUE(dropout_p >= 0.0 && dropout_p < 1.0, "dropout_p must be in [0, 1), got ", dropout_p);
}

void scale(double scale) {
  TORCH_CHECK_VALUE(std::isfinite(scale), "scale must be finite, got ", scale,
                    "; None takes head_dim ** -0.5");
}

void backward_inputs(const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& value,
                     const at::Tensor& out, const at::Tensor& lse, const at::Tensor& rng_state,
                     double dropout_p) {
  const std::vector<int64_t> out_sizes = {query.size(0), query.size(1), query.size(2), value.size(3)};
  for (const auto& [tensor, name] : {std::pair{out, "out"}, std::pair{grad_out, "grad_out"}}) {
    TORCH_CHECK_VALUE(tensor.sizes() == out_sizes && tensor.scalar_type() == query.scalar_type() &&
                          tensor.device() == query.device(),
                      name, " must be ", out_sizes, " ", query.scalar_type(), " on ", query.device(),
                      ", got ", shape_string(tensor), " ", tensor.scalar_type(), " on ", tensor.device());
  }
  const c10::ScalarType lse_type = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK_VALUE(
      lse.numel() == 0 || (lse.sizes() == query.sizes().slice(0, 3) && lse.scalar_type() == lse_type),
      "lse must be ", query.sizes().slice(0, 3), " ", lse_type, ", got ", shape_string(lse), " ",
      lse.scalar_type());
  TORCH_CHECK_VALUE(dropout_p == 0.0 || (rng_state.scalar_type() == at::kLong && rng_state.numel() == 2),
                    "rng_state must be int64 [2] when dropout_p is not 0, got ", shape_string(rng_state), " ",
                    rng_state.scalar_type(), "; hand over what varlen_attention_forward gave");
}

void options(const AttentionOptions& options) {
  mask({options.is_causal, options.window_left, options.window_right});
  dropout(options.dropout_p);
  if (options.scale) scale(*options.scale);
}

void attention_inputs(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  for (const auto& [tensor, name] :
       {std::pair{query, "query"}, std::pair{key, "key"}, std::pair{value, "value"}}) {
    TORCH_CHECK_VALUE(tensor.defined(), name, " is an undefined tensor");
    TORCH_CHECK_VALUE(tensor.dim() == 4, name, " must be 4-D [B, H, S, D], got shape ", shape_string(tensor));
    const c10::ScalarType dtype = tensor.scalar_type();
    TORCH_CHECK_TYPE(
        dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf, name,
        " must be float32, float64, bfloat16 or float16, got ", dtype, "; convert it first");
  }
  TORCH_CHECK_TYPE(query.scalar_type() == key.scalar_type() && query.scalar_type() == value.scalar_type(),
                   "query, key and value must have one dtype, got ", query.scalar_type(), ", ",
                   key.scalar_type(), " and ", value.scalar_type(), "; convert them to one");
  TORCH_CHECK_VALUE(query.device() == key.device() && query.device() == value.device(),
                    "query, key and value must be on one device, got ", query.device(), ", ", key.device(),
                    " and ", value.device(), "; move them to one");
  TORCH_CHECK_VALUE(query.sym_size(0) == key.sym_size(0) && query.sym_size(0) == value.sym_size(0),
                    "query, key and value must have one batch size, got shapes ", shape_string(query), ", ",
                    shape_string(key), " and ", shape_string(value));
  TORCH_CHECK_VALUE(key.sym_size(1) == value.sym_size(1),
                    "key and value must have equal numbers of heads, got ", key.sym_size(1), " and ",
                    value.sym_size(1));
  TORCH_CHECK_VALUE(key.sym_size(2) == value.sym_size(2),
                    "key and value must have equal numbers of rows, got ", key.sym_size(2), " and ",
                    value.sym_size(2));
  TORCH_CHECK_VALUE(query.sym_size(3) == key.sym_size(3), "query and key must have equal head_dim, got ",
                    query.sym_size(3), " and ", key.sym_size(3));
  TORCH_CHECK_VALUE(query.sym_size(1) > 0 && key.sym_size(1) > 0,
                    "num_heads and num_kv_heads must be at least 1, got ", query.sym_size(1), " and ",
                    key.sym_size(1));
  TORCH_CHECK_VALUE(query.sym_size(3) > 0, "head_dim must be at least 1, got shape ", shape_string(query));
  TORCH_CHECK_VALUE(query.sym_size(1) % key.sym_size(1) == 0, "num_heads (", query.sym_size(1),
                    ") must be a multiple of num_kv_heads (", key.sym_size(1),
                    "); repeat or drop heads so that it is");
}

}  // namespace packed_sdpa::checks
