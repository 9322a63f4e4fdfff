// The drop-in for at::scaled_dot_product_attention.
#include <ATen/ATen.h>

#include <algorithm>

#include "packed_sdpa/attention.h"
#include "packed_sdpa/state.h"
#include "state_internal.h"

namespace packed_sdpa {

namespace {

bool is_full_packed_call(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const PackedLayout& layout) {
  for (const at::Tensor* tensor : {&query, &key, &value}) {
    if (tensor->dim() != 4 || tensor->size(0) != layout.batch() || tensor->size(2) != layout.rows_k())
      return false;
  }
  return true;
}

// Makes the head counts such as the kernels take. False: stock refuses them. Stock takes equal ones; with
// enable_gqa those of key and value that divide the query's; without it one head by broadcast on any side.
bool match_heads(at::Tensor* query, at::Tensor* key, at::Tensor* value, bool enable_gqa) {
  const int64_t heads_q = query->size(1);
  const int64_t heads_k = key->size(1);
  const int64_t heads_v = value->size(1);
  if (heads_q == heads_k && heads_q == heads_v) return true;
  if (enable_gqa) {
    if (heads_q == 0 || heads_k == 0 || heads_v == 0) return false;
    if (heads_q % heads_k != 0 || heads_q % heads_v != 0) return false;
    if (heads_k != heads_v) {
      *key = key->repeat_interleave(heads_q / heads_k, 1);
      *value = value->repeat_interleave(heads_q / heads_v, 1);
    }
    return true;
  }
  const int64_t most = std::max({heads_q, heads_k, heads_v});
  for (const int64_t heads : {heads_q, heads_k, heads_v}) {
    if (heads != 1 && heads != most) return false;
  }
  *query = query->expand({-1, most, -1, -1});
  if (heads_k != heads_v) {
    *key = key->expand({-1, most, -1, -1});
    *value = value->expand({-1, most, -1, -1});
  }
  return true;
}

}  // namespace

at::Tensor scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
                                        double dropout_p, bool is_causal, std::optional<double> scale,
                                        bool enable_gqa) {
  const DocumentsPtr documents = state::resolve({});
  at::Tensor grouped_query = query;
  at::Tensor grouped_key = key;
  at::Tensor grouped_value = value;
  if (documents == nullptr || !is_full_packed_call(query, key, value, documents->layout()) ||
      !match_heads(&grouped_query, &grouped_key, &grouped_value, enable_gqa)) {
    const at::Tensor out = at::scaled_dot_product_attention(query, key, value, attn_mask, dropout_p,
                                                            is_causal, scale, enable_gqa);
    if (documents != nullptr) state::keep_for_recompute(out, documents);
    return out;
  }
  AttentionOptions options;
  options.scale = scale;
  options.dropout_p = dropout_p;
  options.backend = documents->backend();
  at::Tensor out =
      packed_attention(grouped_query, grouped_key, grouped_value, documents->layout(), options).out;
  state::keep_for_recompute(out, documents);
  return out;
}

}  // namespace packed_sdpa
