// What kernels with cu_seqlens have in common: [B, H, S, D] operands as packed rows, gathered where a
// document has gaps, documents in chunks that the kernel can take, and results put back so that every row of
// padding is exact.
//
// Padding reaches a kernel in one of three ways:
// - behind the last document: not at all; its rows of the results are filled with zeros afterwards;
// - as documents (q = n, k = 0) and (q = 0, k = n), made when the layout goes to the device: the kernel
//   writes zeros for them and no operand is copied;
// - where token indices are left (gaps, or so many short runs of padding that documents would cost more):
//   rows are gathered, and results scattered into zeros.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "packed_sdpa/backend.h"

namespace packed_sdpa {

// True when one kernel call can take `documents` of which the longest has `max_seqlen_q` queries.
using FitsOneCall = std::function<bool(int64_t documents, int64_t max_seqlen_q)>;

// Documents that a kernel sees for those of the layout: queries that do not end with their document's keys
// (diagonal offsets) turn it into one with the keys up to its last query and one (q = 0) with those that no
// query may see.
int64_t documents_for_kernel(const AttentionRequest& request);

// Why they refuse a window then.
inline constexpr const char* kWindowOverGaps =
    "a window counts rows, and a document here has other rows between its own";

struct KernelCall {
  at::Tensor query, key, value;  // [tq, Hq, D], [tk, Hkv, D], [tk, Hkv, Dv], last stride 1, 16-byte aligned
  at::Tensor cu_seqlens_q, cu_seqlens_k;  // int32 [n + 1] on the device
  int64_t max_seqlen_q = 0;
  int64_t max_seqlen_k = 0;
};

struct KernelResult {
  at::Tensor out;        // [tq, Hq, Dv]
  at::Tensor lse;        // [Hq, tq]
  at::Tensor rng_state;  // int64 [2] or [0]
};

struct KernelGradients {
  at::Tensor query, key, value;  // as the operands
};

using KernelForward = std::function<KernelResult(const KernelCall&)>;
// saved: out, lse (+inf for rows that see no key, so that exp(score - lse) is 0) and rng_state of the
// forward.
using KernelBackward =
    std::function<KernelGradients(const KernelCall&, const at::Tensor& grad_out, const KernelResult& saved)>;

struct KernelTraits {
  FitsOneCall fits;
  // It may be handed rows behind the last document (they are not written, then).
  bool takes_rows_behind = false;
  // Head dims are padded with zeros to a multiple of this.
  int64_t head_dim_multiple = 8;
};

ForwardResult varlen_forward(const AttentionCall& call, const KernelTraits& traits,
                             const KernelForward& kernel);
Gradients varlen_backward(const AttentionCall& call, const at::Tensor& grad_out, const ForwardResult& saved,
                          const KernelTraits& traits, const KernelBackward& kernel);

}  // namespace packed_sdpa
