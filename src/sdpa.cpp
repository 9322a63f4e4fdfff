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

// Heads as stock takes them: equal ones, one by broadcast on either side, or with enable_gqa groups. False:
// stock refuses them.
bool match_heads(at::Tensor* query, at::Tensor* key, at::Tensor* value, bool enable_gqa) {
  const int64_t heads = std::max({query->size(1), key->size(1), value->size(1)});
  if (query->size(1) == 1 && heads > 1) *query = query->expand({-1, heads, -1, -1});
  if (query->size(1) != heads) return false;
  for (at::Tensor* tensor : {key, value}) {
    const int64_t own = tensor->size(1);
    if (own == 0 || heads % own != 0 || (own != heads && own != 1 && !enable_gqa)) return false;
  }
  if (key->size(1) == value->size(1)) return true;
  for (at::Tensor* tensor : {key, value}) {
    const int64_t group = heads / tensor->size(1);
    if (group > 1) *tensor = tensor->repeat_interleave(group, 1);
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
