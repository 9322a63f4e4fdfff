#include "cuda/varlen_rows.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "rows.h"
#include "tensors.h"

namespace packed_sdpa {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kAlignment = 16;  // bytes: kernels load 128 bits at a time

// Documents [begin, end) and the rows that they take, of operands in gathered order.
struct Chunk {
  int64_t begin = 0, end = 0;
  int64_t first_q = 0, count_q = 0;
  int64_t first_k = 0, count_k = 0;
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
};

std::vector<Chunk> plan_chunks(const LayoutTensors& layout, const FitsOneCall& fits, int64_t documents_each) {
  const HostOffsets offsets = host_offsets(layout);
  const auto num_documents = static_cast<int64_t>(offsets.q.size()) - 1;
  std::vector<Chunk> chunks;
  for (int64_t d = 0; d < num_documents; ++d) {
    const auto at = static_cast<size_t>(d);
    const int64_t count_q = offsets.q[at + 1] - offsets.q[at];
    const int64_t count_k = offsets.k[at + 1] - offsets.k[at];
    const bool goes_on = !chunks.empty() && fits((d + 1 - chunks.back().begin) * documents_each,
                                                 std::max(chunks.back().max_seqlen_q, count_q));
    if (!goes_on) {
      Chunk chunk;
      chunk.begin = d;
      chunk.first_q = offsets.q[at];
      chunk.first_k = offsets.k[at];
      chunks.push_back(chunk);
    }
    Chunk& chunk = chunks.back();
    chunk.end = d + 1;
    chunk.count_q += count_q;
    chunk.count_k += count_k;
    chunk.max_seqlen_q = std::max(chunk.max_seqlen_q, count_q);
    chunk.max_seqlen_k = std::max(chunk.max_seqlen_k, count_k);
  }
  return chunks;
}

// Rows that a kernel can load: last stride 1, rows and heads and the start of memory on 16 bytes.
at::Tensor loadable(const at::Tensor& rows, int64_t head_dim_multiple) {
  const int64_t head_dim = rows.size(2);
  const int64_t padded = (head_dim + head_dim_multiple - 1) / head_dim_multiple * head_dim_multiple;
  if (padded != head_dim) return at::constant_pad_nd(rows, {0, padded - head_dim});
  const int64_t elements = kAlignment / rows.element_size();
  const bool strides_fit = rows.stride(2) == 1 && (rows.size(0) <= 1 || rows.stride(0) % elements == 0) &&
                           (rows.size(1) <= 1 || rows.stride(1) % elements == 0);
  const bool starts_aligned = reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kAlignment == 0;
  return strides_fit && starts_aligned ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

at::Tensor without_head_dim_padding(const at::Tensor& rows, int64_t head_dim) {
  return rows.size(2) == head_dim ? rows : rows.slice(2, 0, head_dim);
}

// The rows of one side (queries or keys): gathered if the layout says so, and back.
class Side {
 public:
  Side(const at::Tensor& token_index, int64_t rows, std::optional<int64_t> rows_in_documents)
      : index_(token_index),
        rows_(rows),
        used_(is_gathered() ? token_index.numel() : rows_in_documents.value_or(rows)) {}

  bool is_gathered() const { return index_.numel() > 0; }
  // Rows in documents; those of row order behind them are padding.
  int64_t used() const { return used_; }
  int64_t behind() const { return is_gathered() ? 0 : rows_ - used_; }

  at::Tensor take(const at::Tensor& tensor) const {  // [B, H, S, D] -> [T, H, D]
    const at::Tensor rows = as_rows(tensor);
    return is_gathered() ? rows.index_select(0, index_) : rows;
  }
  at::Tensor take_lse(const at::Tensor& lse) const {  // [B, H, S] -> [H, T]
    const at::Tensor rows = lse_as_rows(lse);
    return is_gathered() ? rows.index_select(1, index_) : rows;
  }
  // Results of the chunks, in order, to all rows of the batch along `dim`; `fill` where there is no document.
  at::Tensor put(const std::vector<at::Tensor>& parts, int64_t dim, double fill) const {
    at::Tensor whole = parts.size() == 1 ? parts.front() : at::cat(parts, dim);
    if (is_gathered()) {
      std::vector<int64_t> sizes = whole.sizes().vec();
      sizes[static_cast<size_t>(dim)] = rows_;
      return at::full(sizes, fill, whole.options())
          .index_copy_(dim, index_.to(at::kLong), whole.contiguous());
    }
    if (behind() == 0) return whole;
    if (whole.size(dim) == rows_) {  // the kernel was handed the rows behind, and left them as they were
      whole.slice(dim, used_, rows_).fill_(fill);
      return whole;
    }
    std::vector<int64_t> sizes = whole.sizes().vec();
    sizes[static_cast<size_t>(dim)] = behind();
    return at::cat({whole, at::full(sizes, fill, whole.options())}, dim);
  }

 private:
  at::Tensor index_;
  int64_t rows_;
  int64_t used_;
};

class Varlen {
 public:
  Varlen(const AttentionCall& call, const KernelTraits& traits)
      : call_(call),
        traits_(traits),
        has_blind_rows_(has_blind_rows(call.layout)),
        documents_each_(call.layout.diagonal_offsets.numel() > 0 ? 2 : 1),
        side_q_(call.layout.token_index_q, call.query.size(0) * call.query.size(2),
                host_total_q(call.layout)),
        side_k_(call.layout.token_index_k, call.key.size(0) * call.key.size(2), host_total_k(call.layout)),
        query_(side_q_.take(call.query)),
        key_(side_k_.take(call.key)),
        value_(side_k_.take(call.value)) {
    const int64_t num_documents = call.layout.cu_seqlens_q.numel() - 1;
    const int64_t* max_seqlens = call.layout.max_seqlens.const_data_ptr<int64_t>();
    if (max_seqlens[0] == 0 || max_seqlens[1] == 0 || num_documents == 0) return;  // nothing sees anything
    if (traits.fits(num_documents * documents_each_, max_seqlens[0])) {
      Chunk whole;
      whole.end = num_documents;
      whole.count_q = side_q_.used() + (traits.takes_rows_behind ? side_q_.behind() : 0);
      whole.count_k = side_k_.used() + (traits.takes_rows_behind ? side_k_.behind() : 0);
      whole.max_seqlen_q = max_seqlens[0];
      whole.max_seqlen_k = max_seqlens[1];
      chunks_.push_back(whole);
    } else {
      chunks_ = plan_chunks(call.layout, traits.fits, documents_each_);
    }
  }

  ForwardResult forward(const KernelForward& kernel) const {
    const int64_t head_dim_v = call_.value.size(3);
    std::vector<at::Tensor> outs, lses;
    ForwardResult result;
    result.rng_state = at::empty({0}, at::TensorOptions(call_.query.device()).dtype(at::kLong));
    for (const Chunk& chunk : chunks_) {
      if (chunk.count_q == 0) continue;
      if (chunk.count_k == 0) {
        outs.push_back(at::zeros({chunk.count_q, query_.size(1), head_dim_v}, query_.options()));
        lses.push_back(
            at::full({query_.size(1), chunk.count_q}, -kInfinity, query_.options().dtype(at::kFloat)));
        continue;
      }
      const KernelResult part = kernel(kernel_call(chunk));
      outs.push_back(without_head_dim_padding(part.out, head_dim_v));
      // Kernels mark a row that sees nothing by +inf or -inf; here it is always -inf.
      lses.push_back(has_blind_rows_ ? part.lse.masked_fill(part.lse == kInfinity, -kInfinity) : part.lse);
      if (part.rng_state.numel() > 0) result.rng_state = part.rng_state;
    }
    if (outs.empty()) {
      result = empty_forward_result(call_);
      result.out.zero_();
      result.lse.fill_(-kInfinity);
      return result;
    }
    result.out = from_rows(side_q_.put(outs, 0, 0.0), call_.query);
    result.lse = lse_from_rows(side_q_.put(lses, 1, -kInfinity), call_.query.size(0));
    return result;
  }

  Gradients backward(const at::Tensor& grad_out, const ForwardResult& saved,
                     const KernelBackward& kernel) const {
    const at::Tensor grad_out_rows = side_q_.take(grad_out);
    const at::Tensor out_rows = side_q_.take(saved.out);
    const at::Tensor lse_rows = side_q_.take_lse(saved.lse);
    std::vector<at::Tensor> grad_queries, grad_keys, grad_values;
    bool any_pair = false;
    for (const Chunk& chunk : chunks_) {
      const KernelCall part = kernel_call(chunk);
      if (chunk.count_q == 0 || chunk.count_k == 0) {
        grad_queries.push_back(at::zeros(part.query.sizes(), part.query.options()));
        grad_keys.push_back(at::zeros(part.key.sizes(), part.key.options()));
        grad_values.push_back(at::zeros(part.value.sizes(), part.value.options()));
        continue;
      }
      any_pair = true;
      const auto rows_of = [&](const at::Tensor& rows) {
        return loadable(rows.narrow(0, chunk.first_q, chunk.count_q), traits_.head_dim_multiple);
      };
      KernelResult saved_part;
      saved_part.out = rows_of(out_rows);
      const at::Tensor lse = lse_rows.narrow(1, chunk.first_q, chunk.count_q);
      saved_part.lse = has_blind_rows_ ? lse.masked_fill(lse == -kInfinity, kInfinity) : lse;
      saved_part.lse = saved_part.lse.contiguous();
      saved_part.rng_state = saved.rng_state;
      const KernelGradients gradients = kernel(part, rows_of(grad_out_rows), saved_part);
      grad_queries.push_back(gradients.query);
      grad_keys.push_back(gradients.key);
      grad_values.push_back(gradients.value);
    }
    if (!any_pair) {
      Gradients zeros = empty_gradients(call_);
      for (at::Tensor* gradient : {&zeros.grad_query, &zeros.grad_key, &zeros.grad_value}) gradient->zero_();
      return zeros;
    }
    const auto finish = [](const Side& side, const std::vector<at::Tensor>& parts, const at::Tensor& like) {
      return from_rows(without_head_dim_padding(side.put(parts, 0, 0.0), like.size(3)), like);
    };
    return {finish(side_q_, grad_queries, call_.query), finish(side_k_, grad_keys, call_.key),
            finish(side_k_, grad_values, call_.value)};
  }

 private:
  KernelCall kernel_call(const Chunk& chunk) const {
    KernelCall part;
    part.query = loadable(query_.narrow(0, chunk.first_q, chunk.count_q), traits_.head_dim_multiple);
    part.key = loadable(key_.narrow(0, chunk.first_k, chunk.count_k), traits_.head_dim_multiple);
    part.value = loadable(value_.narrow(0, chunk.first_k, chunk.count_k), traits_.head_dim_multiple);
    part.cu_seqlens_q = call_.layout.cu_seqlens_q.slice(0, chunk.begin, chunk.end + 1);
    part.cu_seqlens_k = call_.layout.cu_seqlens_k.slice(0, chunk.begin, chunk.end + 1);
    if (chunk.first_q > 0) part.cu_seqlens_q = part.cu_seqlens_q - chunk.first_q;
    if (chunk.first_k > 0) part.cu_seqlens_k = part.cu_seqlens_k - chunk.first_k;
    part.max_seqlen_q = chunk.max_seqlen_q;
    part.max_seqlen_k = chunk.max_seqlen_k;
    if (call_.layout.diagonal_offsets.numel() > 0) split_off_hidden_keys(part, chunk);
    return part;
  }

  // (nq, nk) with its first query at key `diagonal` -> (nq, diagonal + nq) and (0, the rest). Causal masks
  // only.
  void split_off_hidden_keys(KernelCall& part, const Chunk& chunk) const {
    const auto interleave = [](const at::Tensor& ends_first, const at::Tensor& ends_second) {
      return at::cat(
          {at::zeros({1}, ends_first.options()), at::stack({ends_first, ends_second}, 1).flatten()});
    };
    const at::Tensor diagonals = call_.layout.diagonal_offsets.slice(0, chunk.begin, chunk.end);
    const at::Tensor ends_q = part.cu_seqlens_q.slice(0, 1);
    const at::Tensor begins_k = part.cu_seqlens_k.slice(0, 0, -1);
    const at::Tensor ends_k = part.cu_seqlens_k.slice(0, 1);
    const at::Tensor counts_q = ends_q - part.cu_seqlens_q.slice(0, 0, -1);
    part.cu_seqlens_k = interleave(at::minimum(begins_k + diagonals + counts_q, ends_k), ends_k);
    part.cu_seqlens_q = interleave(ends_q, ends_q);
  }

  const AttentionCall& call_;
  const KernelTraits& traits_;
  bool has_blind_rows_;
  int64_t documents_each_;
  Side side_q_, side_k_;
  at::Tensor query_, key_, value_;  // gathered rows
  std::vector<Chunk> chunks_;
};

}  // namespace

int64_t documents_for_kernel(const AttentionRequest& request) {
  return request.num_documents * (request.bottom_right ? 1 : 2);
}

ForwardResult varlen_forward(const AttentionCall& call, const KernelTraits& traits,
                             const KernelForward& kernel) {
  return Varlen(call, traits).forward(kernel);
}

Gradients varlen_backward(const AttentionCall& call, const at::Tensor& grad_out, const ForwardResult& saved,
                          const KernelTraits& traits, const KernelBackward& kernel) {
  return Varlen(call, traits).backward(grad_out, saved, kernel);
}

}  // namespace packed_sdpa
