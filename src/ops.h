// The torch operators, as typed C++ calls through the dispatcher (so autograd, autocast and tracing see
// them).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>

#include "packed_sdpa/layout.h"

namespace packed_sdpa::ops {

// Scalars of a call that stay the same from batch to batch.
struct Settings {
  MaskOptions mask;
  double scale = 1.0;
  double dropout_p = 0.0;
  std::string backend = "auto";
};

// -> out, lse, rng_state
std::tuple<at::Tensor, at::Tensor, at::Tensor> varlen_attention_forward(const at::Tensor& query,
                                                                        const at::Tensor& key,
                                                                        const at::Tensor& value,
                                                                        const LayoutTensors& layout,
                                                                        const Settings& settings);
// -> grad_query, grad_key, grad_value
std::tuple<at::Tensor, at::Tensor, at::Tensor> varlen_attention_backward(
    const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& rng_state, const LayoutTensors& layout,
    const Settings& settings);

}  // namespace packed_sdpa::ops
