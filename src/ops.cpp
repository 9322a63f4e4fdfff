// Operator schemas and their kernels below autograd. One kernel serves all devices: the backend list tells
// them apart.
#include "ops.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string_view>

#include "checks.h"
#include "packed_sdpa/backend.h"
#include "tensors.h"

namespace packed_sdpa::ops {

namespace {

// Argument lists, stated once. Layout tensors follow the operands, settings follow the layout.
#define PACKED_SDPA_LAYOUT_SCHEMA                                                                    \
  "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor token_index_q, Tensor token_index_k, "           \
  "Tensor diagonal_offsets, Tensor max_seqlens, bool is_causal, int window_left, int window_right, " \
  "float scale, float dropout_p, str backend"
#define PACKED_SDPA_LAYOUT_PARAMETERS                                                                     \
  const at::Tensor &cu_seqlens_q, const at::Tensor &cu_seqlens_k, const at::Tensor &token_index_q,        \
      const at::Tensor &token_index_k, const at::Tensor &diagonal_offsets, const at::Tensor &max_seqlens, \
      bool is_causal, int64_t window_left, int64_t window_right, double scale, double dropout_p,          \
      [[maybe_unused]] std::string_view backend
#define PACKED_SDPA_LAYOUT_ARGUMENTS                                                                  \
  cu_seqlens_q, cu_seqlens_k, token_index_q, token_index_k, diagonal_offsets, max_seqlens, is_causal, \
      window_left, window_right, scale, dropout_p, backend

using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using ForwardSignature = Three(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, bool, int64_t, int64_t, double, double, std::string_view);
using BackwardSignature = Three(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                const at::Tensor&, bool, int64_t, int64_t, double, double, std::string_view);

AttentionCall checked_call(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           PACKED_SDPA_LAYOUT_PARAMETERS) {
  AttentionCall call;
  call.query = query;
  call.key = key;
  call.value = value;
  call.layout = {cu_seqlens_q, cu_seqlens_k, token_index_q, token_index_k, diagonal_offsets, max_seqlens};
  call.mask = checks::mask({is_causal, window_left, window_right});
  call.scale = scale;
  call.dropout_p = dropout_p;
  checks::attention_inputs(query, key, value);
  checks::dropout(dropout_p);
  checks::scale(scale);
  TORCH_CHECK_VALUE(cu_seqlens_q.device() == query.device(), "the layout is on ", cu_seqlens_q.device(),
                    " but query is on ", query.device(), "; use PackedLayout.tensors(query.device)");
  return call;
}

Three forward_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     PACKED_SDPA_LAYOUT_PARAMETERS) {
  const AttentionCall call = checked_call(query, key, value, PACKED_SDPA_LAYOUT_ARGUMENTS);
  checks::layout_tensors(call.layout, query.size(0), query.size(2), key.size(2));
  const ForwardResult result = select_backend(make_request(call), backend).forward(call);
  return {result.out, result.lse, result.rng_state};
}

Three backward_kernel(const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key,
                      const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
                      const at::Tensor& rng_state, PACKED_SDPA_LAYOUT_PARAMETERS) {
  const AttentionCall call = checked_call(query, key, value, PACKED_SDPA_LAYOUT_ARGUMENTS);
  checks::layout_tensors(call.layout, query.size(0), query.size(2), key.size(2));
  checks::backward_inputs(grad_out, query, value, out, lse, rng_state, dropout_p);
  // Same request, same choice: the backend that ran forward runs backward.
  const Gradients gradients =
      select_backend(make_request(call), backend).backward(call, grad_out, {out, lse, rng_state});
  return {gradients.grad_query, gradients.grad_key, gradients.grad_value};
}

Three forward_meta(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   PACKED_SDPA_LAYOUT_PARAMETERS) {
  const AttentionCall call = checked_call(query, key, value, PACKED_SDPA_LAYOUT_ARGUMENTS);
  ForwardResult result = empty_forward_result(call);
  if (dropout_p > 0.0) result.rng_state = at::empty({2}, result.rng_state.options());
  return {result.out, result.lse, result.rng_state};
}

Three backward_meta(const at::Tensor& /*grad_out*/, const at::Tensor& query, const at::Tensor& key,
                    const at::Tensor& value, const at::Tensor& /*out*/, const at::Tensor& /*lse*/,
                    const at::Tensor& /*rng_state*/, PACKED_SDPA_LAYOUT_PARAMETERS) {
  const AttentionCall call = checked_call(query, key, value, PACKED_SDPA_LAYOUT_ARGUMENTS);
  const Gradients gradients = empty_gradients(call);
  return {gradients.grad_query, gradients.grad_key, gradients.grad_value};
}

const c10::TypedOperatorHandle<ForwardSignature>& forward_handle() {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("packed_sdpa::varlen_attention_forward", "")
                                 .typed<ForwardSignature>();
  return handle;
}

const c10::TypedOperatorHandle<BackwardSignature>& backward_handle() {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("packed_sdpa::varlen_attention_backward", "")
                                 .typed<BackwardSignature>();
  return handle;
}

// As torch's own scaled_dot_product_attention: computed in the autocast dtype.
template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Three forward_autocast(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       PACKED_SDPA_LAYOUT_PARAMETERS) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  const c10::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  return forward_handle().call(
      at::autocast::cached_cast(dtype, query, kDevice), at::autocast::cached_cast(dtype, key, kDevice),
      at::autocast::cached_cast(dtype, value, kDevice), PACKED_SDPA_LAYOUT_ARGUMENTS);
}

}  // namespace

Three varlen_attention_forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const LayoutTensors& layout, const Settings& settings) {
  return forward_handle().call(
      query, key, value, layout.cu_seqlens_q, layout.cu_seqlens_k, layout.token_index_q, layout.token_index_k,
      layout.diagonal_offsets, layout.max_seqlens, settings.mask.is_causal, settings.mask.window_left,
      settings.mask.window_right, settings.scale, settings.dropout_p, settings.backend);
}

Three varlen_attention_backward(const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
                                const at::Tensor& rng_state, const LayoutTensors& layout,
                                const Settings& settings) {
  return backward_handle().call(grad_out, query, key, value, out, lse, rng_state, layout.cu_seqlens_q,
                                layout.cu_seqlens_k, layout.token_index_q, layout.token_index_k,
                                layout.diagonal_offsets, layout.max_seqlens, settings.mask.is_causal,
                                settings.mask.window_left, settings.mask.window_right, settings.scale,
                                settings.dropout_p, settings.backend);
}

TORCH_LIBRARY_FRAGMENT(packed_sdpa, library) {
  library.def("varlen_attention_forward(Tensor query, Tensor key, Tensor value, " PACKED_SDPA_LAYOUT_SCHEMA
              ") -> (Tensor out, Tensor lse, Tensor rng_state)",
              {at::Tag::nondeterministic_seeded, at::Tag::pt2_compliant_tag});
  library.def(
      "varlen_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor "
      "lse, "
      "Tensor rng_state, " PACKED_SDPA_LAYOUT_SCHEMA
      ") -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(packed_sdpa, CPU, library) {
  library.impl("varlen_attention_forward", forward_kernel);
  library.impl("varlen_attention_backward", backward_kernel);
}

TORCH_LIBRARY_IMPL(packed_sdpa, CUDA, library) {
  library.impl("varlen_attention_forward", forward_kernel);
  library.impl("varlen_attention_backward", backward_kernel);
}

TORCH_LIBRARY_IMPL(packed_sdpa, Meta, library) {
  library.impl("varlen_attention_forward", forward_meta);
  library.impl("varlen_attention_backward", backward_meta);
}

TORCH_LIBRARY_IMPL(packed_sdpa, AutocastCPU, library) {
  library.impl("varlen_attention_forward",
               forward_autocast<c10::DeviceType::CPU, c10::DispatchKey::AutocastCPU>);
}

TORCH_LIBRARY_IMPL(packed_sdpa, AutocastCUDA, library) {
  library.impl("varlen_attention_forward",
               forward_autocast<c10::DeviceType::CUDA, c10::DispatchKey::Autocast>);
}

}  // namespace packed_sdpa::ops
