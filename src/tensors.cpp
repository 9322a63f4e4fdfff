#include "tensors.h"

#include <ATen/ATen.h>

namespace packed_sdpa {

std::vector<at::Tensor> as_list(const LayoutTensors& tensors) {
  return {tensors.cu_seqlens_q,  tensors.cu_seqlens_k,     tensors.token_index_q,
          tensors.token_index_k, tensors.diagonal_offsets, tensors.max_seqlens};
}

at::Tensor empty_laid_out_like(const at::Tensor& like, c10::SymInt dim) {
  const bool rows_over_heads = like.sym_stride(2) > like.sym_stride(1);
  if (rows_over_heads) {
    return at::empty_symint({like.sym_size(0), like.sym_size(2), like.sym_size(1), std::move(dim)},
                            like.options())
        .transpose(1, 2);
  }
  return at::empty_symint({like.sym_size(0), like.sym_size(1), like.sym_size(2), std::move(dim)},
                          like.options());
}

c10::ScalarType lse_dtype(c10::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

ForwardResult empty_forward_result(const AttentionCall& call) {
  ForwardResult result;
  result.out = empty_laid_out_like(call.query, call.value.sym_size(3));
  result.lse = at::empty_symint({call.query.sym_size(0), call.query.sym_size(1), call.query.sym_size(2)},
                                call.query.options().dtype(lse_dtype(call.query.scalar_type())));
  result.rng_state = at::empty({0}, at::TensorOptions(call.query.device()).dtype(at::kLong));
  return result;
}

Gradients empty_gradients(const AttentionCall& call) {
  return {empty_laid_out_like(call.query, call.query.sym_size(3)),
          empty_laid_out_like(call.key, call.key.sym_size(3)),
          empty_laid_out_like(call.value, call.value.sym_size(3))};
}

at::Tensor sent_to(at::Device device, const at::Tensor& host) {
  if (host.numel() == 0) return at::empty(host.sizes(), host.options().device(device));
  return (device.is_cuda() ? host.pin_memory() : host).to(device, /*non_blocking=*/true);
}

}  // namespace packed_sdpa
