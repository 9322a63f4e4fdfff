// The one place that validates arguments. Every message names the argument, the rule, the value and a cure.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "packed_sdpa/attention.h"
#include "packed_sdpa/backend.h"
#include "packed_sdpa/layout.h"

namespace packed_sdpa::checks {

// torch.func transforms (vmap, grad, jvp, ...) are at work on what is called here.
bool in_func_transform();

// Python-like print of sizes: [2, 8, 16, 64].
std::string shape_string(const at::Tensor& tensor);

// doc_ids / position_ids: integer or bool, 1-D or 2-D; returns [B, S] where they are. No value is looked at.
// TypeError: dtype; ValueError: undefined, another shape, more than 2^31 - 1 entries.
at::Tensor given_ids(const at::Tensor& given, const char* argument);
// ValueError when the smallest id is below 0.
void not_negative(int64_t smallest, const char* argument);
// given_ids as int64 [B, S] on the host, contiguous, a copy, values checked.
at::Tensor host_ids(const at::Tensor& given, const char* argument);
// seqlens / cu_seqlens: integer, 1-D; returns int64 on the host.
at::Tensor host_lengths(const at::Tensor& lengths, const char* argument);

// Offsets start at 0, never decrease, end at or before `total`.
void offsets(const at::Tensor& host_offsets, const char* argument, int64_t total);
// Flat rows stay in [0, batch * rows), ascend within a document, never leave its batch row and belong to one
// document. `index` int32 [T].
void token_index(const at::Tensor& index, const at::Tensor& offsets, const char* argument, int64_t batch,
                 int64_t rows);
// The six tensors as they travel through an op's list.
LayoutTensors layout_list(at::TensorList tensors);
void layout_tensors(const LayoutTensors& tensors, int64_t batch, int64_t rows_q, int64_t rows_k);

// Options alone: window, dropout, scale, backend name. mask: the same, with -1 for counts that no two rows
// are apart.
void options(const AttentionOptions& options);
MaskOptions mask(const MaskOptions& mask);
void dropout(double dropout_p);
void scale(double scale);
// query, key, value: 4-D, floating, same dtype and device, equal batch, Hq % Hkv == 0, equal D and S.
void attention_inputs(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value);

// What a backward call is handed beside the operands: results of the forward call and the gradient of `out`.
void backward_inputs(const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& value,
                     const at::Tensor& out, const at::Tensor& lse, const at::Tensor& rng_state,
                     double dropout_p);

}  // namespace packed_sdpa::checks
