// Layouts for kernels on a device: row order wherever it can be had, and what the host knows beside them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "packed_sdpa/layout.h"

namespace packed_sdpa {

// A host layout whose documents stand in row order without gaps, told without token indices: what lies
// between them becomes documents (q = n, k = 0) and (q = 0, k = n) of at most piece_q / piece_k rows (0: the
// longest document's length, to whole tiles of 128). Rows behind the last document stay out, or become such
// documents too when `to_the_end`. Not given when documents have gaps or do not stand in row order.
std::optional<LayoutTensors> row_order_layout(const LayoutTensors& host, int64_t batch, int64_t rows_q,
                                              int64_t rows_k, bool to_the_end, int64_t piece_q = 0,
                                              int64_t piece_k = 0);

// Offsets that were made on a device, and the same on the host.
struct DeviceOffsets {
  std::vector<int64_t> host;
  at::Tensor device;  // int32
};

// The tensors of a host layout for kernels on `device`: in row order where that pays, with the host's mirror.
// Offsets that `there` begins with are taken from it; all else is moved in one copy that does not wait for
// the device.
LayoutTensors device_layout(const LayoutTensors& host, int64_t batch, int64_t rows_q, int64_t rows_k,
                            const c10::Device& device, const DeviceOffsets& there = {});

}  // namespace packed_sdpa
