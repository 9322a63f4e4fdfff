// The backends there are, one factory each; dispatch.cpp puts them in order.
#pragma once

#include "packed_sdpa/backend.h"

namespace packed_sdpa {

const AttentionBackend& cpu_backend();
const AttentionBackend& flash_backend();
const AttentionBackend& efficient_backend();
const AttentionBackend& te_backend();
const AttentionBackend& flash_attn_backend();
const AttentionBackend& per_document_backend();
const AttentionBackend& reference_backend();

}  // namespace packed_sdpa
