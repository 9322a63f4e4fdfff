// The backends there are, one factory each; dispatch.cpp puts them in order.
#pragma once

#include "cpu/kernels.h"
#include "packed_sdpa/backend.h"

namespace packed_sdpa {

const AttentionBackend& cpu_backend();
// Each work item of the CPU kernels' forward (or backward) pass, cut for num_threads but timed on one, in the
// order in which threads take them. The call must be checked and without dropout.
std::vector<cpu::ItemNote> cpu_item_notes(const AttentionCall& call, bool backward, int num_threads);
// Threads that a call's work really runs on: counted, not configured.
int64_t cpu_parallel_threads();
const AttentionBackend& flash_backend();
const AttentionBackend& efficient_backend();
const AttentionBackend& te_backend();
const AttentionBackend& flash_attn_backend();
const AttentionBackend& per_document_backend();
const AttentionBackend& reference_backend();

}  // namespace packed_sdpa
