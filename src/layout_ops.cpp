// PackedLayout for Python: constructors as operators on tensors. Each returns the six LayoutTensors in their
// order, those of ids once more for the ids' CUDA device.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <vector>

#include "checks.h"
#include "device_layout.h"
#include "packed_sdpa/layout.h"
#include "tensors.h"

namespace packed_sdpa {

namespace {

// Host tensors, and behind them those on the device of the ids (or positions) where they were read there.
std::vector<at::Tensor> with_those_made_on(const at::Tensor& ids, const PackedLayout& layout) {
  std::vector<at::Tensor> tensors = as_list(layout.tensors());
  if (!ids.is_cuda() || ids.numel() == 0) return tensors;
  const std::vector<at::Tensor> there = as_list(layout.tensors(ids.device()));
  tensors.insert(tensors.end(), there.begin(), there.end());
  return tensors;
}

std::vector<at::Tensor> layout_from_doc_ids(const at::Tensor& doc_ids, int64_t row_offset,
                                            std::optional<int64_t> rows) {
  return with_those_made_on(doc_ids, PackedLayout::from_doc_ids(doc_ids, row_offset, rows));
}

std::vector<at::Tensor> layout_from_seqlens(const at::Tensor& seqlens, std::optional<int64_t> total) {
  return as_list(PackedLayout::from_seqlens(seqlens, total).tensors());
}

std::vector<at::Tensor> layout_from_cu_seqlens(const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                               std::optional<int64_t> total_q,
                                               std::optional<int64_t> total_k) {
  return as_list(PackedLayout::from_cu_seqlens(cu_seqlens_q, cu_seqlens_k, total_q, total_k).tensors());
}

std::vector<at::Tensor> layout_from_position_ids(const at::Tensor& position_ids) {
  return with_those_made_on(position_ids, PackedLayout::from_position_ids(position_ids));
}

LayoutTensors host_layout(at::TensorList tensors, int64_t batch, int64_t rows_q, int64_t rows_k) {
  LayoutTensors layout = checks::layout_list(tensors);
  TORCH_CHECK_VALUE(layout.cu_seqlens_q.is_cpu(), "layout tensors must be on the CPU, got ",
                    layout.cu_seqlens_q.device(),
                    "; make the PackedLayout of host tensors, and take PackedLayout.tensors(device) from it");
  checks::layout_tensors(layout, batch, rows_q, rows_k);
  return layout;
}

// The form for kernels on a device (device_layout.h).
std::vector<at::Tensor> layout_to_device(at::TensorList tensors, int64_t batch, int64_t rows_q,
                                         int64_t rows_k, at::Device device) {
  return as_list(device_layout(host_layout(tensors, batch, rows_q, rows_k), batch, rows_q, rows_k, device));
}

// Row order to the last row, padding as documents in pieces: on the host, for GraphLayout. Empty list:
// documents have gaps.
std::vector<at::Tensor> layout_in_row_order(at::TensorList tensors, int64_t batch, int64_t rows_q,
                                            int64_t rows_k, int64_t piece) {
  const std::optional<LayoutTensors> form = row_order_layout(
      host_layout(tensors, batch, rows_q, rows_k), batch, rows_q, rows_k, /*to_the_end=*/true, piece, piece);
  return form ? as_list(*form) : std::vector<at::Tensor>{};
}

// How many tensors (saved for a backward, for one) share the memory of this one, itself included.
int64_t storage_use_count(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.storage().use_count());
}

// Checks tensors that somebody else made, and gives the dense mask of them.
at::Tensor layout_mask(at::TensorList tensors, int64_t batch, int64_t rows_q, int64_t rows_k, bool is_causal,
                       int64_t window_left, int64_t window_right) {
  const PackedLayout layout = PackedLayout::from_tensors(checks::layout_list(tensors), batch, rows_q, rows_k);
  return layout.materialize_mask({is_causal, window_left, window_right});
}

// vmap over the ids themselves: no layout could describe them all.
void refuse_vmap(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.operator_name().name,
      " cannot read ids that torch.func.vmap runs over; give one [B, S] tensor of ids "
      "for the whole batch, and make the layout outside of vmap");
}

}  // namespace

// Composite: they take ids from any device, so no device kernel of their own.
TORCH_LIBRARY_FRAGMENT(packed_sdpa, library) {
  library.def("layout_from_doc_ids(Tensor doc_ids, int row_offset, int? rows) -> Tensor[]",
              layout_from_doc_ids);
  library.def("layout_from_seqlens(Tensor seqlens, int? total) -> Tensor[]", layout_from_seqlens);
  library.def(
      "layout_from_cu_seqlens(Tensor cu_seqlens_q, Tensor cu_seqlens_k, int? total_q, int? total_k) -> "
      "Tensor[]",
      layout_from_cu_seqlens);
  library.def("layout_from_position_ids(Tensor position_ids) -> Tensor[]", layout_from_position_ids);
  library.def(
      "layout_to_device(Tensor[] tensors, int batch, int rows_q, int rows_k, Device device) -> Tensor[]",
      layout_to_device);
  library.def(
      "layout_in_row_order(Tensor[] tensors, int batch, int rows_q, int rows_k, int piece) -> Tensor[]",
      layout_in_row_order);
  library.def("sent_to(Device device, Tensor host) -> Tensor", sent_to);
  library.def("storage_use_count(Tensor tensor) -> int", storage_use_count);
  library.def(
      "layout_mask(Tensor[] tensors, int batch, int rows_q, int rows_k, bool is_causal, int window_left, "
      "int window_right) -> Tensor",
      layout_mask);
}

TORCH_LIBRARY_IMPL(packed_sdpa, FuncTorchBatched, library) {
  for (const char* op :
       {"layout_from_doc_ids", "layout_from_seqlens", "layout_from_cu_seqlens", "layout_from_position_ids"}) {
    library.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse_vmap>());
  }
}

}  // namespace packed_sdpa
