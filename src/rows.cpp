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
  const int64_t heads = lse_rows.size(0);
  const int64_t count = batch == 0 ? 0 : lse_rows.size(1) / batch;
  const at::Tensor lse = lse_rows.reshape({heads, batch, count}).transpose(0, 1);
  // as_strided: strides of dims of size 1 too are those that the meta kernel tells.
  if (lse.is_contiguous()) return lse.as_strided({batch, heads, count}, {heads * count, count, 1});
  return lse.contiguous();
}

at::Tensor lse_as_rows(const at::Tensor& lse) {
  return lse.transpose(0, 1).flatten(1, 2);
}

namespace {

// The mirror behind max_seqlens: [longest q, longest k, flags, cu_seqlens_q ..., cu_seqlens_k ...].
constexpr int64_t kMirrorFlags = 2;
constexpr int64_t kMirrorOffsets = 3;
constexpr int64_t kHasGaps = 1;
constexpr int64_t kHasBlindRows = 2;
constexpr int64_t kHasUnequalCounts = 4;

bool has_mirror(const LayoutTensors& layout) {
  return layout.max_seqlens.numel() > kMirrorOffsets;
}

// Entry `at` of cu_seqlens_q (or _k) on the host.
std::optional<int64_t> host_offset(const LayoutTensors& layout, bool of_queries, int64_t at) {
  const at::Tensor& cu_seqlens = of_queries ? layout.cu_seqlens_q : layout.cu_seqlens_k;
  if (cu_seqlens.is_cpu()) return cu_seqlens.const_data_ptr<int32_t>()[at];
  if (!has_mirror(layout)) return std::nullopt;
  const int64_t* mirror = layout.max_seqlens.const_data_ptr<int64_t>() + kMirrorOffsets;
  return mirror[(of_queries ? 0 : cu_seqlens.numel()) + at];
}

}  // namespace

bool has_host_offsets(const LayoutTensors& layout) {
  return layout.cu_seqlens_q.is_cpu() || has_mirror(layout);
}

HostOffsets host_offsets(const LayoutTensors& layout) {
  TORCH_CHECK(has_host_offsets(layout),
              "packed_sdpa: a backend that reads offsets on the host was given a layout ",
              "without them; this is a bug in packed_sdpa");
  HostOffsets offsets;
  for (int64_t d = 0; d < layout.cu_seqlens_q.numel(); ++d) {
    offsets.q.push_back(*host_offset(layout, true, d));
    offsets.k.push_back(*host_offset(layout, false, d));
  }
  return offsets;
}

std::optional<int64_t> host_total_q(const LayoutTensors& layout) {
  return host_offset(layout, true, layout.cu_seqlens_q.numel() - 1);
}

std::optional<int64_t> host_total_k(const LayoutTensors& layout) {
  return host_offset(layout, false, layout.cu_seqlens_k.numel() - 1);
}

namespace {

bool mirror_flag(const LayoutTensors& layout, int64_t flag) {
  const int64_t* values = layout.max_seqlens.const_data_ptr<int64_t>();
  return layout.max_seqlens.numel() > kMirrorFlags && (values[kMirrorFlags] & flag) != 0;
}

}  // namespace

bool has_gaps(const LayoutTensors& layout) {
  if (layout.token_index_k.numel() == 0) return false;
  if (!layout.token_index_k.is_cpu()) return mirror_flag(layout, kHasGaps);
  const int32_t* offsets = layout.cu_seqlens_k.const_data_ptr<int32_t>();
  const int32_t* rows = layout.token_index_k.const_data_ptr<int32_t>();
  for (int64_t d = 0; d + 1 < layout.cu_seqlens_k.numel(); ++d) {
    const int32_t count = offsets[d + 1] - offsets[d];
    if (count > 0 && rows[offsets[d + 1] - 1] - rows[offsets[d]] != count - 1) return true;
  }
  return false;
}

bool has_blind_rows(const LayoutTensors& layout) {
  if (!layout.cu_seqlens_q.is_cpu()) return !has_mirror(layout) || mirror_flag(layout, kHasBlindRows);
  const int32_t* q = layout.cu_seqlens_q.const_data_ptr<int32_t>();
  const int32_t* k = layout.cu_seqlens_k.const_data_ptr<int32_t>();
  const bool bottom_right = layout.diagonal_offsets.numel() == 0;
  for (int64_t d = 0; d + 1 < layout.cu_seqlens_q.numel(); ++d) {
    const int32_t count_q = q[d + 1] - q[d];
    const int32_t count_k = k[d + 1] - k[d];
    const int32_t diagonal =
        bottom_right ? count_k - count_q : layout.diagonal_offsets.const_data_ptr<int32_t>()[d];
    if (count_q > 0 && (diagonal < 0 || diagonal + count_q > count_k)) return true;
  }
  return false;
}

bool has_unequal_counts(const LayoutTensors& layout) {
  if (!layout.cu_seqlens_q.is_cpu()) return mirror_flag(layout, kHasUnequalCounts);
  const int32_t* q = layout.cu_seqlens_q.const_data_ptr<int32_t>();
  const int32_t* k = layout.cu_seqlens_k.const_data_ptr<int32_t>();
  for (int64_t d = 0; d + 1 < layout.cu_seqlens_q.numel(); ++d) {
    const int32_t count_q = q[d + 1] - q[d];
    const int32_t count_k = k[d + 1] - k[d];
    if (count_q > 0 && count_k > 0 && count_q != count_k) return true;
  }
  return false;
}

at::Tensor host_mirror(const LayoutTensors& host) {
  const int64_t flags = (has_gaps(host) ? kHasGaps : 0) | (has_blind_rows(host) ? kHasBlindRows : 0) |
                        (has_unequal_counts(host) ? kHasUnequalCounts : 0);
  return at::cat({host.max_seqlens.slice(0, 0, 2), at::tensor({flags}, at::kLong),
                  host.cu_seqlens_q.to(at::kLong), host.cu_seqlens_k.to(at::kLong)});
}

}  // namespace packed_sdpa
