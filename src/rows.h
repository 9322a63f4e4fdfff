// [B, H, S, D] tensors as packed rows [B * S, H, D] and back, without a copy where strides allow it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "packed_sdpa/layout.h"

namespace packed_sdpa {

// A view for [B, S, H, D]-strided tensors of any B and for every tensor of B = 1; else a copy.
at::Tensor as_rows(const at::Tensor& tensor);
// [B * S, H, D] -> [B, H, S, D] in the memory layout of empty_laid_out_like(like, D); a view where rows lie
// that way.
at::Tensor from_rows(const at::Tensor& rows, const at::Tensor& like);
// lse [H, B * S] -> contiguous [B, H, S], and back.
at::Tensor lse_from_rows(const at::Tensor& lse_rows, int64_t batch);
at::Tensor lse_as_rows(const at::Tensor& lse);

// What is known on the host about a layout, from its own tensors when they are there, else from the mirror
// that follows max_seqlens (layout.h). No device tensor is read. A GraphLayout on a device has no mirror: it
// is refilled there.
struct HostOffsets {
  std::vector<int64_t> q, k;  // [N + 1]
};
bool has_host_offsets(const LayoutTensors& layout);
HostOffsets host_offsets(const LayoutTensors& layout);
std::optional<int64_t> host_total_q(const LayoutTensors& layout);  // real tokens
std::optional<int64_t> host_total_k(const LayoutTensors& layout);
// Some document has other rows between its own. A GraphLayout never has.
bool has_gaps(const LayoutTensors& layout);
// Some query may see no key at all (padding told as a document, more queries than keys): where a kernel's lse
// is not -inf by itself. True where it is not known.
bool has_blind_rows(const LayoutTensors& layout);
// Some document has queries and keys, but not as many of one as of the other. A GraphLayout never has.
bool has_unequal_counts(const LayoutTensors& layout);
// max_seqlens of a host layout with the mirror behind it.
at::Tensor host_mirror(const LayoutTensors& host);

}  // namespace packed_sdpa
