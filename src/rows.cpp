#include "rows.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <array>

namespace packed_sdpa {

at::Tensor as_rows(const at::Tensor& tensor) {
  return tensor.transpose(1, 2).flatten(0, 1);
}

at::Tensor from_rows(const at::Tensor& rows, const at::Tensor& like) {
  const int64_t batch = like.size(0), heads = rows.size(1), count = like.size(2), dim = rows.size(2);
  const std::array<int64_t, 4> sizes = {batch, heads, count, dim};
  const bool rows_over_heads = like.stride(2) > like.stride(1);
  const std::array<int64_t, 4> wanted =
      rows_over_heads ? std::array<int64_t, 4>{count * heads * dim, dim, heads * dim, 1}
                      : std::array<int64_t, 4>{heads * count * dim, count * dim, dim, 1};
  const std::array<int64_t, 4> given = {count * rows.stride(0), rows.stride(1), rows.stride(0),
                                        rows.stride(2)};
  bool lies_alike = rows.numel() > 0;
  for (size_t d = 0; d < 4; ++d) lies_alike &= sizes[d] <= 1 || wanted[d] == given[d];
  if (lies_alike) return rows.as_strided(sizes, wanted);
  const at::Tensor result = at::empty_strided(sizes, wanted, rows.options());
  return result.copy_(rows.as_strided(sizes, given));
}

at::Tensor lse_from_rows(const at::Tensor& lse_rows, int64_t batch) {
  const int64_t count = batch == 0 ? 0 : lse_rows.size(1) / batch;
  return lse_rows.reshape({lse_rows.size(0), batch, count}).transpose(0, 1).contiguous();
}

at::Tensor lse_as_rows(const at::Tensor& lse) {
  return lse.transpose(0, 1).flatten(1, 2);
}

bool has_host_offsets(const LayoutTensors& layout) {
  return layout.cu_seqlens_q.is_cpu() || layout.max_seqlens.numel() > 2;
}

HostOffsets host_offsets(const LayoutTensors& layout) {
  TORCH_CHECK(has_host_offsets(layout),
              "packed_sdpa: a backend that reads offsets on the host was given a layout ",
              "without them; this is a bug in packed_sdpa");
  const int64_t count = layout.cu_seqlens_q.numel();
  HostOffsets offsets;
  if (layout.cu_seqlens_q.is_cpu()) {
    const int32_t* q = layout.cu_seqlens_q.const_data_ptr<int32_t>();
    const int32_t* k = layout.cu_seqlens_k.const_data_ptr<int32_t>();
    offsets.q.assign(q, q + count);
    offsets.k.assign(k, k + count);
  } else {
    const int64_t* mirror = layout.max_seqlens.const_data_ptr<int64_t>() + 2;
    offsets.q.assign(mirror, mirror + count);
    offsets.k.assign(mirror + count, mirror + 2 * count);
  }
  return offsets;
}

}  // namespace packed_sdpa
