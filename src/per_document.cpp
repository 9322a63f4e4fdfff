// The last resort on any device: documents of equal length side by side through plain tensor operations, a
// few query rows at a time. Slow beside a kernel, but exact, differentiable and O(tokens) in memory.
//
// S = scale * Q K^T;  P = softmax(S + mask);  Pd = P * keep / (1 - p);  out = Pd V;  lse = log sum exp S
// dV = Pd^T dO;  dP = (dO V^T) * keep / (1 - p);  dS = P * (dP - rowsum(P * dP)) * scale;  dQ = dS K;  dK =
// dS^T Q
//
// Memory: scores of one step are at most kScoreElements numbers, or one query row of one document. Documents
// have at most sqrt(2 T) different lengths between them, so grouping equal ones needs no padded keys and few
// groups. float16 and bfloat16 are computed in float32.
#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "backends.h"
#include "rows.h"
#include "tensors.h"

namespace packed_sdpa {

namespace {

constexpr int64_t kScoreElements = int64_t{1} << 22;  // 16 MiB of float32 scores
constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// Documents with equal counts of queries and keys, which are computed side by side.
struct Group {
  int64_t count_q = 0;
  int64_t count_k = 0;
  std::vector<int64_t> documents;
};

std::vector<Group> group_by_length(const HostOffsets& offsets) {
  std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> by_length;
  for (size_t d = 0; d + 1 < offsets.q.size(); ++d) {
    const int64_t count_q = offsets.q[d + 1] - offsets.q[d];
    const int64_t count_k = offsets.k[d + 1] - offsets.k[d];
    if (count_q > 0 && count_k > 0) by_length[{count_q, count_k}].push_back(static_cast<int64_t>(d));
  }
  std::vector<Group> groups;
  for (auto& [lengths, documents] : by_length) {
    groups.push_back({lengths.first, lengths.second, std::move(documents)});
  }
  return groups;
}

// [n, count] gathered places -> flat rows of the batch.
at::Tensor flat_rows(const at::Tensor& cu_seqlens, const at::Tensor& token_index, const at::Tensor& documents,
                     int64_t count) {
  const at::Tensor first = cu_seqlens.index_select(0, documents).to(at::kLong);
  const at::Tensor place = first.unsqueeze(1) + at::arange(count, first.options());
  if (token_index.numel() == 0) return place;
  return token_index.index_select(0, place.flatten()).view(place.sizes()).to(at::kLong);
}

// Documents of one group in one step, with the rows that they take and where these stand.
struct Step {
  at::Tensor query_rows, key_rows;    // int64 [n, nq], [n, nk]: flat rows
  at::Tensor query_place, key_place;  // int64 [n, nq], [n or 1, nk]: rows from the document's first key
};

Step make_step(const AttentionCall& call, const Group& group, const at::Tensor& documents) {
  Step step;
  step.query_rows = flat_rows(call.layout.cu_seqlens_q, call.layout.token_index_q, documents, group.count_q);
  step.key_rows = flat_rows(call.layout.cu_seqlens_k, call.layout.token_index_k, documents, group.count_k);
  const at::Tensor ranks = at::arange(group.count_q, documents.options()).unsqueeze(0);
  const at::Tensor& diagonals = call.layout.diagonal_offsets;
  const at::Tensor rank = diagonals.numel() == 0
                              ? (ranks + (group.count_k - group.count_q)).expand({documents.numel(), -1})
                              : ranks + diagonals.index_select(0, documents).to(at::kLong).unsqueeze(1);
  step.query_place = rank;
  step.key_place = at::arange(group.count_k, documents.options()).unsqueeze(0);
  if (call.layout.token_index_k.numel() > 0) {
    // A document may have gaps: its places are rows. Ranks beyond its keys go on in steps of one row.
    step.key_place = step.key_rows - step.key_rows.slice(1, 0, 1);
    const at::Tensor known = rank.clamp(0, group.count_k - 1);
    step.query_place = step.key_place.gather(1, known) + (rank - known);
  }
  return step;
}

// bool [n, rows, nk]
at::Tensor visible_keys(const MaskOptions& mask, const at::Tensor& query_place, const at::Tensor& key_place) {
  const at::Tensor behind = query_place.unsqueeze(2) - key_place.unsqueeze(1);
  at::Tensor visible = at::ones_like(behind, at::kBool);
  if (mask.is_causal) visible &= behind >= 0;
  if (mask.window_left >= 0) visible &= behind <= mask.window_left;
  if (!mask.is_causal && mask.window_right >= 0) visible &= behind >= -mask.window_right;
  return visible;
}

// Counter-based dropout: a finalizer of the splitmix64 kind over (query row, head, key row), keyed by the
// seed, so that backward draws the same numbers in any order and no state is read on the host.
at::Tensor mix(at::Tensor bits) {
  const auto xor_shift = [](const at::Tensor& x, int64_t shift) {
    const int64_t logical = (int64_t{1} << (64 - shift)) - 1;  // >> copies the sign
    return x.bitwise_xor(x.bitwise_right_shift(shift).bitwise_and(logical));
  };
  bits = xor_shift(bits, 30) * static_cast<int64_t>(0xBF58476D1CE4E5B9ULL);
  bits = xor_shift(bits, 27) * static_cast<int64_t>(0x94D049BB133111EBULL);
  return xor_shift(bits, 31);
}

// [n, Hq, rows, nk] of 0 or 1 / (1 - p)
at::Tensor keep_scale(const AttentionCall& call, const at::Tensor& seed, const at::Tensor& query_rows,
                      const at::Tensor& key_rows, c10::ScalarType dtype) {
  const int64_t num_heads = call.query.size(1);
  const at::Tensor heads = at::arange(num_heads, query_rows.options()).view({1, num_heads, 1});
  const at::Tensor row_bits = mix(mix(query_rows.unsqueeze(1) * num_heads + heads + seed[0]) + seed[1]);
  const at::Tensor bits =
      mix(row_bits.unsqueeze(3) + mix(key_rows + seed[1]).view({key_rows.size(0), 1, 1, -1}));
  constexpr int64_t kRange = int64_t{1} << 31;
  const auto threshold = static_cast<int64_t>(call.dropout_p * static_cast<double>(kRange));
  return (bits.bitwise_and(kRange - 1) >= threshold).to(dtype).div_(1.0 - call.dropout_p);
}

// Rows [n, count] of packed [T, H, D] -> [n, H, count, D] in the compute type.
at::Tensor take(const at::Tensor& packed, const at::Tensor& rows, c10::ScalarType dtype) {
  return packed.index_select(0, rows.flatten())
      .view({rows.size(0), rows.size(1), packed.size(1), packed.size(2)})
      .permute({0, 2, 1, 3})
      .to(dtype);
}

// [n, H, count, D] -> rows of packed [T, H, D]
void put(at::Tensor& packed, const at::Tensor& rows, const at::Tensor& part) {
  packed.index_copy_(0, rows.flatten(),
                     part.permute({0, 2, 1, 3}).flatten(0, 1).to(packed.scalar_type()).contiguous());
}

// [n, Hq, rows, X] <-> [n, Hkv, G * rows, X]: the query heads of a kv head stand in one matrix, so keys and
// values are not repeated.
at::Tensor fold_heads(const at::Tensor& part, int64_t num_kv_heads) {
  const int64_t repeats = part.size(1) / num_kv_heads;
  return part.reshape({part.size(0), num_kv_heads, repeats * part.size(2), part.size(3)});
}

at::Tensor unfold_heads(const at::Tensor& part, int64_t num_heads) {
  const int64_t rows = part.size(1) * part.size(2) / num_heads;
  return part.reshape({part.size(0), num_heads, rows, part.size(3)});
}

// One block of query rows of a step: what forward and backward both need.
struct Block {
  at::Tensor query;       // [n, Hkv, G * rows, D]
  at::Tensor scores;      // [n, Hq, rows, nk], -inf where masked
  at::Tensor weights;     // softmax of them, rows that see nothing 0
  at::Tensor keep;        // undefined without dropout
  at::Tensor query_rows;  // [n, rows]
};

class PerDocument {
 public:
  explicit PerDocument(const AttentionCall& call)
      : call_(call),
        num_heads_(call.query.size(1)),
        num_kv_heads_(call.key.size(1)),
        dtype_(call.query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat),
        query_(as_rows(call.query)),
        key_(as_rows(call.key)),
        value_(as_rows(call.value)),
        groups_(group_by_length(host_offsets(call.layout))) {}

  ForwardResult forward() const {
    ForwardResult result;
    if (call_.dropout_p > 0.0) {
      result.rng_state = at::randint(std::numeric_limits<int64_t>::max(), {2}, index_options());
    } else {
      result.rng_state = at::empty({0}, index_options());
    }
    at::Tensor out = at::zeros({query_.size(0), num_heads_, value_.size(2)}, query_.options());
    at::Tensor lse = at::full({query_.size(0), num_heads_, 1}, kMinusInfinity,
                              query_.options().dtype(lse_dtype(query_.scalar_type())));
    for_each_step([&](const Group& group, const Step& step) {
      const at::Tensor key = take(key_, step.key_rows, dtype_);
      const at::Tensor value = take(value_, step.key_rows, dtype_);
      for_each_block(group, step, key, result.rng_state, [&](const Block& block) {
        const at::Tensor dropped = block.keep.defined() ? block.weights * block.keep : block.weights;
        const at::Tensor part = at::matmul(fold_heads(dropped, num_kv_heads_), value);
        put(out, block.query_rows, unfold_heads(part, num_heads_));
        put(lse, block.query_rows, block.scores.logsumexp(-1, /*keepdim=*/true));
      });
    });
    result.out = from_rows(out, call_.query);
    result.lse = lse_from_rows(lse.squeeze(2).transpose(0, 1), call_.query.size(0));
    return result;
  }

  Gradients backward(const at::Tensor& grad_out, const at::Tensor& rng_state) const {
    const at::Tensor d_out_rows = as_rows(grad_out);
    at::Tensor grad_query = at::zeros(query_.sizes(), query_.options());
    at::Tensor grad_key = at::zeros(key_.sizes(), key_.options());
    at::Tensor grad_value = at::zeros(value_.sizes(), value_.options());
    for_each_step([&](const Group& group, const Step& step) {
      const at::Tensor key = take(key_, step.key_rows, dtype_);
      const at::Tensor value = take(value_, step.key_rows, dtype_);
      at::Tensor d_key = at::zeros_like(key);
      at::Tensor d_value = at::zeros_like(value);
      for_each_block(group, step, key, rng_state, [&](const Block& block) {
        const at::Tensor d_out = fold_heads(take(d_out_rows, block.query_rows, dtype_), num_kv_heads_);
        const at::Tensor dropped = block.keep.defined() ? block.weights * block.keep : block.weights;
        d_value += at::matmul(fold_heads(dropped, num_kv_heads_).transpose(2, 3), d_out);
        at::Tensor d_weights = unfold_heads(at::matmul(d_out, value.transpose(2, 3)), num_heads_);
        if (block.keep.defined()) d_weights = d_weights * block.keep;
        const at::Tensor delta = (block.weights * d_weights).sum(-1, /*keepdim=*/true);
        const at::Tensor d_scores =
            fold_heads(block.weights * (d_weights - delta) * call_.scale, num_kv_heads_);
        put(grad_query, block.query_rows, unfold_heads(at::matmul(d_scores, key), num_heads_));
        d_key += at::matmul(d_scores.transpose(2, 3), block.query);
      });
      put(grad_key, step.key_rows, d_key);
      put(grad_value, step.key_rows, d_value);
    });
    return {from_rows(grad_query, call_.query), from_rows(grad_key, call_.key),
            from_rows(grad_value, call_.value)};
  }

 private:
  at::TensorOptions index_options() const { return at::TensorOptions(query_.device()).dtype(at::kLong); }

  template <typename Visit>
  void for_each_step(const Visit& visit) const {
    for (const Group& group : groups_) {
      const int64_t scores_each = num_heads_ * group.count_q * group.count_k;
      const auto count = static_cast<int64_t>(group.documents.size());
      const int64_t documents_a_step = std::clamp<int64_t>(kScoreElements / scores_each, 1, count);
      const at::Tensor documents =
          sent_to(query_.device(), at::tensor(group.documents, at::TensorOptions(at::kLong)));
      for (int64_t begin = 0; begin < count; begin += documents_a_step) {
        const int64_t end = std::min(begin + documents_a_step, count);
        visit(group, make_step(call_, group, documents.slice(0, begin, end)));
      }
    }
  }

  template <typename Visit>
  void for_each_block(const Group& group, const Step& step, const at::Tensor& key, const at::Tensor& seed,
                      const Visit& visit) const {
    const int64_t scores_a_row = step.query_rows.size(0) * num_heads_ * group.count_k;
    const int64_t rows_a_block = std::clamp<int64_t>(kScoreElements / scores_a_row, 1, group.count_q);
    for (int64_t begin = 0; begin < group.count_q; begin += rows_a_block) {
      const int64_t end = std::min(begin + rows_a_block, group.count_q);
      Block block;
      block.query_rows = step.query_rows.slice(1, begin, end);
      const at::Tensor visible =
          visible_keys(call_.mask, step.query_place.slice(1, begin, end), step.key_place).unsqueeze(1);
      block.query = fold_heads(take(query_, block.query_rows, dtype_), num_kv_heads_);
      block.scores = unfold_heads(at::matmul(block.query, key.transpose(2, 3)), num_heads_)
                         .mul_(call_.scale)
                         .masked_fill_(visible.logical_not(), kMinusInfinity);
      block.weights =
          block.scores.softmax(-1).masked_fill_(visible.any(-1, /*keepdim=*/true).logical_not(), 0.0);
      if (call_.dropout_p > 0.0)
        block.keep = keep_scale(call_, seed, block.query_rows, step.key_rows, dtype_);
      visit(block);
    }
  }

  const AttentionCall& call_;
  int64_t num_heads_;
  int64_t num_kv_heads_;
  c10::ScalarType dtype_;
  at::Tensor query_, key_, value_;  // [T, H, D]
  std::vector<Group> groups_;
};

class PerDocumentBackend final : public AttentionBackend {
 public:
  std::string_view name() const override { return "per_document"; }

  std::vector<std::string> unsupported_reasons(const AttentionRequest& request) const override {
    if (!request.host_offsets) {
      return {
          "it groups documents by length on the host, and this layout (GraphLayout) is known to the device "
          "alone"};
    }
    return {};
  }

  ForwardResult forward(const AttentionCall& call) const override { return PerDocument(call).forward(); }

  Gradients backward(const AttentionCall& call, const at::Tensor& grad_out,
                     const ForwardResult& saved) const override {
    return PerDocument(call).backward(grad_out, saved.rng_state);
  }
};

}  // namespace

const AttentionBackend& per_document_backend() {
  static const PerDocumentBackend backend;
  return backend;
}

}  // namespace packed_sdpa
