// What a CUDA device can, asked without CUDA headers.
#pragma once

#include <c10/core/Device.h>

namespace packed_sdpa {

// 80 for 8.0, 90 for 9.0, ...; 0 when it is not known (no CUDA driver in this process, or another kind of
// device).
int compute_capability(const c10::Device& device);

}  // namespace packed_sdpa
