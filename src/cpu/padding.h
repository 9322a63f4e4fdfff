// Rows that belong to no document: written as exact zeros, never read. Backward does the same for the dQ of
// queries that see no key, which no tile of a kernel reaches.
#pragma once

#include "cpu/kernels.h"
#include "cpu/params.h"

namespace packed_sdpa::cpu {

void fill_forward_padding(const ForwardParams& params, Executor& executor);    // out 0, lse -inf
void fill_backward_padding(const BackwardParams& params, Executor& executor);  // gradients 0

}  // namespace packed_sdpa::cpu
