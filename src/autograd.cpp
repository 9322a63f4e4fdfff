// The gradient of varlen_attention_forward. Documents travel in the node, so backward never asks any global
// state.
#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "checks.h"
#include "ops.h"

namespace packed_sdpa {

namespace {

constexpr const char* kInstead =
    "; use loss.backward() or torch.autograd.grad, or stock scaled_dot_product_attention for it (detach the "
    "model, or disarm)";

// Derivatives of other kinds than backward's, told before anything is computed.
void only_reverse_mode(const char* op, at::TensorList tensors) {
  // vmap does not come here: it calls the operator sample by sample, outside of itself.
  TORCH_CHECK_NOT_IMPLEMENTED(!checks::in_func_transform(), "packed_sdpa: ", op,
                              " does not support torch.func transforms that differentiate (grad, vjp, jvp, "
                              "jacrev, jacfwd, hessian)",
                              kInstead);
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !tensor.defined() || !tensor._fw_grad(/*level=*/0).defined(), "packed_sdpa: ", op,
        " does not support forward-mode automatic differentiation (dual tensors, jvp)", kInstead);
  }
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class VarlenAttention : public torch::autograd::Function<VarlenAttention> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const at::Tensor& cu_seqlens_q,
                               const at::Tensor& cu_seqlens_k, const at::Tensor& token_index_q,
                               const at::Tensor& token_index_k, const at::Tensor& diagonal_offsets,
                               const at::Tensor& max_seqlens, bool is_causal, int64_t window_left,
                               int64_t window_right, double scale, double dropout_p, std::string backend) {
    const LayoutTensors layout{cu_seqlens_q,  cu_seqlens_k,     token_index_q,
                               token_index_k, diagonal_offsets, max_seqlens};
    const ops::Settings settings{{is_causal, window_left, window_right}, scale, dropout_p, backend};
    const auto [out, lse, rng_state] = [&] {
      const at::AutoDispatchBelowADInplaceOrView guard;
      return ops::varlen_attention_forward(query, key, value, layout, settings);
    }();
    // Not the output itself: where a hook on saved tensors raises (a checkpoint that stops its recompute
    // early), the node would keep it, and it the node, for good. A detached one shares its version counter.
    ctx->save_for_backward({query, key, value, out.detach(), lse, rng_state, cu_seqlens_q, cu_seqlens_k,
                            token_index_q, token_index_k, diagonal_offsets, max_seqlens});
    ctx->saved_data["is_causal"] = is_causal;
    ctx->saved_data["window_left"] = window_left;
    ctx->saved_data["window_right"] = window_right;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["dropout_p"] = dropout_p;
    ctx->saved_data["backend"] = std::move(backend);
    ctx->mark_non_differentiable({lse, rng_state});
    return {out, lse, rng_state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const LayoutTensors layout{saved[6], saved[7], saved[8], saved[9], saved[10], saved[11]};
    const ops::Settings settings{
        {ctx->saved_data["is_causal"].toBool(), ctx->saved_data["window_left"].toInt(),
         ctx->saved_data["window_right"].toInt()},
        ctx->saved_data["scale"].toDouble(),
        ctx->saved_data["dropout_p"].toDouble(),
        ctx->saved_data["backend"].toStringRef()};
    auto [grad_query, grad_key, grad_value] = ops::varlen_attention_backward(
        grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], layout, settings);
    variable_list gradients(15);
    gradients[0] = std::move(grad_query);
    gradients[1] = std::move(grad_key);
    gradients[2] = std::move(grad_value);
    return gradients;
  }
};

// Second derivatives: said clearly, when they are asked for.
class VarlenAttentionBackward : public torch::autograd::Function<VarlenAttentionBackward> {
 public:
  static variable_list forward(AutogradContext* /*ctx*/, at::TensorList tensors,
                               const ops::Settings& settings) {
    const LayoutTensors layout{tensors[7], tensors[8], tensors[9], tensors[10], tensors[11], tensors[12]};
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [grad_query, grad_key, grad_value] = ops::varlen_attention_backward(
        tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], tensors[5], tensors[6], layout, settings);
    return {grad_query, grad_key, grad_value};
  }

  static variable_list backward(AutogradContext* /*ctx*/, const variable_list& /*grads*/) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "packed_sdpa: the second derivative of varlen_attention is not supported; call backward() without "
        "create_graph=True, or use stock scaled_dot_product_attention for it");
  }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward_autograd(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& cu_seqlens_q,
    const at::Tensor& cu_seqlens_k, const at::Tensor& token_index_q, const at::Tensor& token_index_k,
    const at::Tensor& diagonal_offsets, const at::Tensor& max_seqlens, bool is_causal, int64_t window_left,
    int64_t window_right, double scale, double dropout_p, std::string_view backend) {
  only_reverse_mode("varlen_attention", {query, key, value});
  if (!at::GradMode::is_enabled() ||
      !(query.requires_grad() || key.requires_grad() || value.requires_grad())) {
    // No graph, so no node; but calls of regions without a graph (reentrant checkpoints) must stay apart in
    // the timeline, so this one takes a number as a node does.
    at::sequence_number::get_and_increment();
    const at::AutoDispatchBelowADInplaceOrView guard;
    return ops::varlen_attention_forward(
        query, key, value,
        {cu_seqlens_q, cu_seqlens_k, token_index_q, token_index_k, diagonal_offsets, max_seqlens},
        {{is_causal, window_left, window_right}, scale, dropout_p, std::string(backend)});
  }
  const variable_list outputs = VarlenAttention::apply(
      query, key, value, cu_seqlens_q, cu_seqlens_k, token_index_q, token_index_k, diagonal_offsets,
      max_seqlens, is_causal, window_left, window_right, scale, dropout_p, std::string(backend));
  return {outputs[0], outputs[1], outputs[2]};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_autograd(
    const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& rng_state, const at::Tensor& cu_seqlens_q,
    const at::Tensor& cu_seqlens_k, const at::Tensor& token_index_q, const at::Tensor& token_index_k,
    const at::Tensor& diagonal_offsets, const at::Tensor& max_seqlens, bool is_causal, int64_t window_left,
    int64_t window_right, double scale, double dropout_p, std::string_view backend) {
  only_reverse_mode("the gradient of varlen_attention", {grad_out, query, key, value});
  const ops::Settings settings{
      {is_causal, window_left, window_right}, scale, dropout_p, std::string(backend)};
  const variable_list tensors{grad_out,     query,         key,           value,
                              out,          lse,           rng_state,     cu_seqlens_q,
                              cu_seqlens_k, token_index_q, token_index_k, diagonal_offsets,
                              max_seqlens};
  const variable_list gradients = VarlenAttentionBackward::apply(at::TensorList(tensors), settings);
  return {gradients[0], gradients[1], gradients[2]};
}

}  // namespace

TORCH_LIBRARY_IMPL(packed_sdpa, Autograd, library) {
  library.impl("varlen_attention_forward", forward_autograd);
  library.impl("varlen_attention_backward", backward_autograd);
}

}  // namespace packed_sdpa
