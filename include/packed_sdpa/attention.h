// Exact attention over packed documents, on libtorch tensors, differentiable.
//
// Axis letters: B batch, L query rows, S key rows, Hq query heads, Hkv key/value heads (Hq % Hkv == 0), D
// head dim of query and key, Dv head dim of value, Tq / Tk tokens of a packed [T, H, D] tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "packed_sdpa/layout.h"

namespace packed_sdpa {

struct AttentionOptions {
  // Causal: each query sees the keys at or before its own place. Where a document has other counts of queries
  // and keys it is bottom-right aligned: 2 queries over 4 keys are  1 1 1 0
  //                                                             1 1 1 1
  bool is_causal = true;
  int64_t window_left = -1;     // inclusive count of rows behind, -1 unlimited
  int64_t window_right = -1;    // inclusive count of rows ahead, -1 unlimited; must be -1 or 0 when causal
  std::optional<double> scale;  // D ** -0.5 when not given
  double dropout_p = 0.0;       // in [0, 1)
  // auto, or a name from available_backends(): an order, not a wish. auto:NAME takes NAME where it can, else
  // as auto.
  std::string backend = "auto";
};

struct AttentionOutput {
  at::Tensor out;
  at::Tensor lse;  // natural log of the softmax denominator; -inf where a row sees no key; not differentiable
};

// query [B, Hq, L, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv] -> out [B, Hq, L, Dv] in the query's memory
// layout, lse [B, Hq, L] in float32 (float64 for float64). Any strides. Rows outside every document give out
// 0, lse -inf and zero gradients, whatever they hold. Raises c10::Error that names the argument, the value
// and the cure.
AttentionOutput packed_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                 const PackedLayout& layout, const AttentionOptions& options = {});

// query [Tq, Hq, D], key [Tk, Hkv, D], value [Tk, Hkv, Dv], offsets int32 [N + 1] -> out [Tq, Hq, Dv], lse
// [Hq, Tq].
AttentionOutput varlen_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                 const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                 const AttentionOptions& options = {});

}  // namespace packed_sdpa
