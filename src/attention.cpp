// The public C++ calls: options become operator arguments, the layout goes to the query's device.
#include "packed_sdpa/attention.h"

#include <ATen/ATen.h>

#include <cmath>

#include "checks.h"
#include "ops.h"

namespace packed_sdpa {

AttentionOutput packed_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                 const PackedLayout& layout, const AttentionOptions& options) {
  checks::attention_inputs(query, key, value);
  checks::options(options);
  TORCH_CHECK_VALUE(
      layout.batch() == query.size(0) && layout.rows_q() == query.size(2) && layout.rows_k() == key.size(2),
      "layout is for B ", layout.batch(), ", ", layout.rows_q(), " query rows and ", layout.rows_k(),
      " key rows, got query ", checks::shape_string(query), " and key ", checks::shape_string(key),
      "; make the layout from this batch's doc_ids");
  const ops::Settings settings{{options.is_causal, options.window_left, options.window_right},
                               options.scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(3)))),
                               options.dropout_p,
                               options.backend};
  auto [out, lse, rng_state] =
      ops::varlen_attention_forward(query, key, value, layout.tensors(query.device()), settings);
  return {std::move(out), std::move(lse)};
}

AttentionOutput varlen_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                 const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                 const AttentionOptions& options) {
  for (const auto& [tensor, name] :
       {std::pair{query, "query"}, std::pair{key, "key"}, std::pair{value, "value"}}) {
    TORCH_CHECK_VALUE(tensor.defined() && tensor.dim() == 3, name, " must be 3-D [T, H, D], got shape ",
                      tensor.defined() ? checks::shape_string(tensor) : "none");
  }
  const PackedLayout layout =
      PackedLayout::from_cu_seqlens(cu_seqlens_q, cu_seqlens_k, query.size(0), key.size(0));
  const auto as_batch = [](const at::Tensor& packed) { return packed.transpose(0, 1).unsqueeze(0); };
  const AttentionOutput output =
      packed_attention(as_batch(query), as_batch(key), as_batch(value), layout, options);
  return {output.out.squeeze(0).transpose(0, 1), output.lse.squeeze(0)};
}

}  // namespace packed_sdpa
