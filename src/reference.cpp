// The dense oracle: every document alone, plain softmax in float64, nothing shared with the kernels. Slow on
// purpose.
//
// P = softmax(scale * Q K^T + mask);  out = P V;  lse = log sum exp
// dV = P^T dO;  dP = dO V^T;  dS = P * (dP - rowsum(dO * out));  dQ = scale * dS K;  dK = scale * dS^T Q
#include <ATen/ATen.h>

#include <functional>
#include <limits>

#include "backends.h"
#include "tensors.h"

namespace packed_sdpa {

namespace {

struct DocumentRows {
  at::Tensor query_rows, key_rows;  // int64, within the batch row
  at::Tensor visible;               // bool [nq, nk]
  int64_t batch_row = 0;
};

at::Tensor rows_of(const at::Tensor& index, int64_t begin, int64_t end, const at::Device& device) {
  if (index.numel() == 0) return at::arange(begin, end, at::TensorOptions(device).dtype(at::kLong));
  return index.slice(0, begin, end).to(at::kLong);
}

void for_each_document(const AttentionCall& call, const std::function<void(const DocumentRows&)>& visit) {
  const at::Device device = call.query.device();
  const at::Tensor cu_q = call.layout.cu_seqlens_q.cpu();
  const at::Tensor cu_k = call.layout.cu_seqlens_k.cpu();
  const at::Tensor diagonals = call.layout.diagonal_offsets.cpu();
  const int64_t rows_q = call.query.size(2);
  const int64_t rows_k = call.key.size(2);
  for (int64_t d = 0; d + 1 < cu_q.numel(); ++d) {
    const int64_t begin_q = cu_q[d].item<int64_t>(), end_q = cu_q[d + 1].item<int64_t>();
    const int64_t begin_k = cu_k[d].item<int64_t>(), end_k = cu_k[d + 1].item<int64_t>();
    if (begin_q == end_q || begin_k == end_k) continue;
    const at::Tensor flat_q = rows_of(call.layout.token_index_q, begin_q, end_q, device);
    const at::Tensor flat_k = rows_of(call.layout.token_index_k, begin_k, end_k, device);
    DocumentRows rows;
    rows.batch_row = flat_q[0].item<int64_t>() / rows_q;
    rows.query_rows = flat_q - rows.batch_row * rows_q;
    rows.key_rows = flat_k - rows.batch_row * rows_k;
    const int64_t diagonal =
        diagonals.numel() == 0 ? (end_k - begin_k) - (end_q - begin_q) : diagonals[d].item<int64_t>();
    at::Tensor key_place = rows.key_rows - rows.key_rows[0];
    at::Tensor place = at::arange(diagonal, diagonal + end_q - begin_q, flat_q.options());
    const bool gapped = key_place[-1].item<int64_t>() != end_k - begin_k - 1;
    if (gapped) place = key_place.index_select(0, place);
    const at::Tensor behind = place.unsqueeze(1) - key_place.unsqueeze(0);
    rows.visible = at::ones_like(behind, at::kBool);
    if (call.mask.is_causal) rows.visible &= behind >= 0;
    if (call.mask.window_left >= 0) rows.visible &= behind <= call.mask.window_left;
    if (!call.mask.is_causal && call.mask.window_right >= 0)
      rows.visible &= behind >= -call.mask.window_right;
    visit(rows);
  }
}

// [H, n, D] in float64, key/value heads repeated to the query's.
at::Tensor take(const at::Tensor& tensor, const DocumentRows& rows, const at::Tensor& index,
                int64_t repeats) {
  at::Tensor part = tensor.select(0, rows.batch_row).index_select(1, index).to(at::kDouble);
  return repeats == 1 ? part : part.repeat_interleave(repeats, 0);
}

void put(at::Tensor& target, const DocumentRows& rows, const at::Tensor& index, const at::Tensor& part) {
  target.select(0, rows.batch_row).index_copy_(1, index, part.to(target.scalar_type()));
}

at::Tensor masked_scores(const AttentionCall& call, const DocumentRows& rows, const at::Tensor& q,
                         const at::Tensor& k) {
  const at::Tensor scores = at::matmul(q, k.transpose(1, 2)) * call.scale;
  return scores.masked_fill(rows.visible.logical_not(), -std::numeric_limits<double>::infinity());
}

class ReferenceBackend final : public AttentionBackend {
 public:
  std::string_view name() const override { return "reference"; }

  std::vector<std::string> unsupported_reasons(const AttentionRequest& request) const override {
    if (request.dropout_p > 0.0)
      return {"it has no dropout (dropout_p " + std::to_string(request.dropout_p) + ")"};
    return {};
  }

  ForwardResult forward(const AttentionCall& call) const override {
    const int64_t repeats = call.query.size(1) / call.key.size(1);
    ForwardResult result = empty_forward_result(call);
    result.out.zero_();
    result.lse.fill_(-std::numeric_limits<double>::infinity());
    at::Tensor lse = result.lse.unsqueeze(3);
    for_each_document(call, [&](const DocumentRows& rows) {
      const at::Tensor q = take(call.query, rows, rows.query_rows, 1);
      const at::Tensor k = take(call.key, rows, rows.key_rows, repeats);
      const at::Tensor v = take(call.value, rows, rows.key_rows, repeats);
      const at::Tensor scores = masked_scores(call, rows, q, k);
      const at::Tensor sees_any = rows.visible.any(1).view({1, -1, 1});
      const at::Tensor weights = at::where(sees_any, scores.softmax(-1), 0.0);
      put(result.out, rows, rows.query_rows, at::matmul(weights, v));
      put(lse, rows, rows.query_rows, scores.logsumexp(-1, /*keepdim=*/true));
    });
    return result;
  }

  Gradients backward(const AttentionCall& call, const at::Tensor& grad_out,
                     const ForwardResult& /*saved*/) const override {
    const int64_t num_kv_heads = call.key.size(1);
    const int64_t repeats = call.query.size(1) / num_kv_heads;
    Gradients gradients = empty_gradients(call);
    gradients.grad_query.zero_();
    gradients.grad_key.zero_();
    gradients.grad_value.zero_();
    const auto sum_group = [&](const at::Tensor& part) {  // [Hq, n, D] -> [Hkv, n, D]
      return part.view({num_kv_heads, repeats, part.size(1), part.size(2)}).sum(1);
    };
    for_each_document(call, [&](const DocumentRows& rows) {
      const at::Tensor q = take(call.query, rows, rows.query_rows, 1);
      const at::Tensor k = take(call.key, rows, rows.key_rows, repeats);
      const at::Tensor v = take(call.value, rows, rows.key_rows, repeats);
      const at::Tensor d_out = take(grad_out, rows, rows.query_rows, 1);
      const at::Tensor sees_any = rows.visible.any(1).view({1, -1, 1});
      const at::Tensor weights = at::where(sees_any, masked_scores(call, rows, q, k).softmax(-1), 0.0);
      const at::Tensor d_weights = at::matmul(d_out, v.transpose(1, 2));
      const at::Tensor delta = (d_out * at::matmul(weights, v)).sum(-1, /*keepdim=*/true);
      const at::Tensor d_scores = weights * (d_weights - delta) * call.scale;
      put(gradients.grad_query, rows, rows.query_rows, at::matmul(d_scores, k));
      put(gradients.grad_key, rows, rows.key_rows, sum_group(at::matmul(d_scores.transpose(1, 2), q)));
      put(gradients.grad_value, rows, rows.key_rows, sum_group(at::matmul(weights.transpose(1, 2), d_out)));
    });
    return gradients;
  }
};

}  // namespace

const AttentionBackend& reference_backend() {
  static const ReferenceBackend backend;
  return backend;
}

}  // namespace packed_sdpa
