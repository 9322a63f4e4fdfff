// Large pages for large results.
#pragma once

#include <cstddef>

namespace packed_sdpa::cpu {

// Asks the system (Linux, transparent_hugepage "madvise" or "always") to back fresh memory with 2 MB pages:
// one fault in place of 512, and 1 TLB entry for rows that lie a page apart in the [B, S, H, D] layout.
// Memory below 16 MB is left alone: the allocator uses it again without faults.
void advise_huge_pages(void* data, size_t bytes);

}  // namespace packed_sdpa::cpu
