// What a CPU attention kernel is told: plain structs of pointers, strides and sizes. No torch in here.
//
// Axis letters: B batch, L query rows of a batch row, S key rows of a batch row, Hq / Hkv query and key/value
// heads, D query/key head dim, Dv value head dim, N documents, Tq / Tk real (non-padding) query and key
// tokens.
#pragma once

#include <cstdint>

namespace packed_sdpa::cpu {

enum class ScalarType : int8_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

// A [B, H, rows, dim] tensor of any strides (in elements, zero and non-unit innermost included).
struct StridedTensor {
  void* data = nullptr;
  int64_t stride_batch = 0;
  int64_t stride_head = 0;
  int64_t stride_row = 0;
  int64_t stride_dim = 0;
};

// Which rows belong to which document. Documents are numbered 0..N-1; the tokens of document d are the
// entries cu_seqlens_q[d] .. cu_seqlens_q[d+1] of the gathered query order, and likewise for keys.
//
// Flat row numbers: query row = b * L + i, key row = b * S + j. All rows of one document lie in one batch row
// and ascend. A document is contiguous when last - first == count - 1; only a document whose id comes back
// after a gap is not.
//
// Alignment: query r of document d (r counts from 0 within the document) stands at key rank
// diagonal_offsets[d] + r. Causal: it sees key ranks <= that; a window counts ROWS, which for a contiguous
// document are the same differences as ranks, and for a document with gaps are differences of token_index_k.
struct DocumentTable {
  int64_t num_documents = 0;
  const int32_t* cu_seqlens_q = nullptr;      // [N + 1]
  const int32_t* cu_seqlens_k = nullptr;      // [N + 1]
  const int32_t* token_index_q = nullptr;     // [Tq] flat query rows, or null: gathered order is row order
  const int32_t* token_index_k = nullptr;     // [Tk] flat key rows, or null
  const int32_t* diagonal_offsets = nullptr;  // [N], or null: bottom-right, (keys - queries) of the document
};

struct AttentionShape {
  int64_t batch = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads =
      0;               // divides num_heads; query head h reads key/value head h / (num_heads / num_kv_heads)
  int64_t rows_q = 0;  // L
  int64_t rows_k = 0;  // S
  int64_t head_dim = 0;    // D
  int64_t head_dim_v = 0;  // Dv
};

struct AttentionParams {
  ScalarType dtype = ScalarType::kFloat32;
  AttentionShape shape;
  DocumentTable documents;
  bool is_causal = true;
  int64_t window_left = -1;   // inclusive count of rows behind, -1 unlimited
  int64_t window_right = -1;  // inclusive count of rows ahead, -1 unlimited; ignored (0) when causal
  double scale = 1.0;
  double dropout_p = 0.0;
  uint64_t dropout_seed =
      0;  // element (b, h, i, j) is kept by a counter-based generator of (seed, offset, b, h,
  uint64_t dropout_offset = 0;  // query row i, key row j): no tile size, thread or instruction set changes it
};

// Forward: out = softmax(scale * Q K^T + mask) V, lse = natural log of the softmax denominator.
// Writes every element of out [B, Hq, L, Dv] and lse [B, Hq, L] (contiguous; float, double for kFloat64):
// padding rows and rows that see no key get out 0 and lse -inf.
struct ForwardParams : AttentionParams {
  StridedTensor query, key, value, out;
  void* lse = nullptr;
};

// Backward. grad_query, grad_key, grad_value are written in full; padding rows get exact zeros and their
// grad_out is never read.
struct BackwardParams : AttentionParams {
  StridedTensor query, key, value, out, grad_out;
  const void* lse = nullptr;
  StridedTensor grad_query, grad_key, grad_value;
};

}  // namespace packed_sdpa::cpu
