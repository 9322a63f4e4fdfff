// Result tensors in the memory layout of what they belong to.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "packed_sdpa/backend.h"

namespace packed_sdpa {

// The six tensors as they travel through an op's list (checks::layout_list is the way back).
std::vector<at::Tensor> as_list(const LayoutTensors& tensors);

// Uninitialized [B, H, rows, dim] as `like` lies in memory: [B, rows, H, dim] storage where its rows stride
// over its heads (a transposed view of a projection), else contiguous.
at::Tensor empty_laid_out_like(const at::Tensor& like, c10::SymInt dim);
// lse is float32, for float64 inputs float64.
c10::ScalarType lse_dtype(c10::ScalarType dtype);

ForwardResult empty_forward_result(const AttentionCall& call);  // rng_state is an empty int64 tensor
Gradients empty_gradients(const AttentionCall& call);

// A host tensor's copy on `device`, which neither waits for the device nor is waited for: memory that is not
// page-locked might first be staged, behind the work of the stream.
at::Tensor sent_to(at::Device device, const at::Tensor& host);

}  // namespace packed_sdpa
