// Documents of a packed batch: which query and key rows belong together. Values are validated once, here.
//
// Axis letters: B batch, L query rows and S key rows of a batch row, N documents, Tq / Tk real tokens.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace packed_sdpa {

struct IdRuns;

// The tensors that travel with a call. All are on one device but max_seqlens, which stays on the host.
// Offsets index the *gathered* order, in which the tokens of a document stand side by side; token_index_*
// maps that order to flat rows (query row b * L + i, key row b * S + j) and is empty when gathered order is
// row order.
struct LayoutTensors {
  at::Tensor cu_seqlens_q;   // int32 [N + 1], starts 0, ends Tq
  at::Tensor cu_seqlens_k;   // int32 [N + 1], starts 0, ends Tk
  at::Tensor token_index_q;  // int32 [Tq] or [0]
  at::Tensor token_index_k;  // int32 [Tk] or [0]
  at::Tensor
      diagonal_offsets;  // int32 [N] or [0]: key rank of a document's first query; [0] means bottom-right
  // int64 [2] on the host: longest document in queries, in keys. Beside device tensors what the host knows
  // follows, so that no backend reads the device: flags, cu_seqlens_q [N + 1], cu_seqlens_k [N + 1]. A
  // GraphLayout, which is refilled on the device, has [3]: no offsets, and its documents cover every row.
  at::Tensor max_seqlens;
};

// What a mask lets through: shared by kernels, backends and materialize_mask.
// causal: key row <= query row. window_left / window_right: inclusive counts of rows behind / ahead, -1
// unlimited.
struct MaskOptions {
  bool is_causal = true;
  int64_t window_left = -1;
  int64_t window_right = -1;
};

// Immutable and cheap to copy. Raises c10::ValueError / c10::TypeError that name the argument, the value and
// the cure.
class PackedLayout {
 public:
  // doc_ids: integer or bool [B, S] or [S], any device; 0 is padding, equal ids of one row are one document.
  // Ids are copied. Queries are rows row_offset .. row_offset + rows of each batch row (rows: the rest when
  // not given). Ids on a CUDA device are searched for documents there; the host waits for them once (twice
  // for more than max(2^15, tokens / 4) stretches of equal ids), and tensors(device) of that device does not
  // wait again.
  static PackedLayout from_doc_ids(const at::Tensor& doc_ids, int64_t row_offset = 0,
                                   std::optional<int64_t> rows = std::nullopt);
  // seqlens: integer [N], lengths of the documents of one row of `total` tokens (their sum when not given);
  // what is left behind them is padding.
  static PackedLayout from_seqlens(const at::Tensor& seqlens, std::optional<int64_t> total = std::nullopt);
  // cu_seqlens_q, cu_seqlens_k: integer [N + 1], start 0, never decrease. total_q / total_k: rows that the
  // tensors will have (the last offset when not given); what is left is padding.
  static PackedLayout from_cu_seqlens(const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                      std::optional<int64_t> total_q = std::nullopt,
                                      std::optional<int64_t> total_k = std::nullopt);
  // position_ids: integer [B, S] or [S]; a document begins wherever a position is not its left neighbour plus
  // one.
  static PackedLayout from_position_ids(const at::Tensor& position_ids);
  // From tensors that were made by one of the above (or came through an op); host tensors are checked in
  // full.
  static PackedLayout from_tensors(const LayoutTensors& tensors, int64_t batch, int64_t rows_q,
                                   int64_t rows_k);

  int64_t batch() const;
  int64_t rows_q() const;  // L
  int64_t rows_k() const;  // S
  int64_t num_documents() const;
  int64_t total_q() const;  // real query tokens
  int64_t total_k() const;
  int64_t max_seqlen_q() const;
  int64_t max_seqlen_k() const;
  // Some document has other rows between its own (its id came back after a gap).
  bool has_gaps() const;
  // Every document's last query stands at its last key, as flash-attention's varlen kernels take for granted.
  bool is_bottom_right() const;

  const LayoutTensors& tensors() const;  // on the host
  // For kernels on a device, copied there once and then kept. Padding between documents may be told as
  // documents (q = n, k = 0) and (q = 0, k = n), which saves a gather; totals and maxima are then those of
  // that form. ValueError: a CUDA device without an index.
  const LayoutTensors& tensors(const at::Device& device) const;
  // Copies on devices that were made so far, one a device, in no particular order.
  std::vector<LayoutTensors> device_tensors() const;

  // Dense bool mask [B, L, S], true where a query sees a key. O(B * L * S): for debugging and tests only.
  at::Tensor materialize_mask(const MaskOptions& options = {}) const;

 private:
  friend PackedLayout layout_of(const IdRuns& runs, int64_t row_offset, std::optional<int64_t> rows);
  struct Data;
  explicit PackedLayout(std::shared_ptr<const Data> data) : data_(std::move(data)) {}
  std::shared_ptr<const Data> data_;
};

}  // namespace packed_sdpa
