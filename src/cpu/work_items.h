// How a call is cut into pieces of work, and how threads take them.
//
// The cut depends on the documents and the kernel's block sizes; many threads get smaller blocks of keys and
// fewer heads, which changes no sum (kKeysPerTerm). Items are taken in order from one counter. So the result
// is the same for every thread count, and an item may wait for items before it (those have been taken by a
// running thread, or are done) without any danger of a deadlock, also when the executor runs its bodies one
// after another.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/documents.h"
#include "cpu/kernels.h"
#include "cpu/scratch.h"

namespace packed_sdpa::cpu {

// Either one block (of queries in forward, of keys in backward) of one long document and one key/value head,
// or a run of whole short documents and one or more heads.
struct WorkItem {
  int32_t first_document = 0;
  int32_t last_document = 0;  // exclusive
  int32_t first_kv_head = 0;
  int32_t last_kv_head = 0;  // exclusive
  int32_t block = 0;
};

enum class SplitBy : int8_t { kQueries, kKeys };

// Documents longer than block_size (in queries or keys) are cut into blocks; shorter ones stay whole and
// share an item with their neighbours, and with the other key/value heads, up to the size of a block: the
// heads of a token lie side by side in memory, so going through them together meets each page once. For the
// same reason the key/value heads of a block of queries follow each other; blocks of keys go head by head,
// because each needs the block before it (GradQuerySum), whose float sums live until its head is done (see
// spread_key_blocks for many threads). Long documents come first, so that the tail of a call is made of small
// items.
std::vector<WorkItem> make_work_items(const std::vector<Document>& documents, int64_t num_kv_heads,
                                      SplitBy split_by, int64_t block_size);

// Whether, with blocks of so many queries or keys, the heaviest item could keep one of the threads busy for
// more than a quarter of a thread's share after the others are done.
bool blocks_are_too_coarse(const std::vector<Document>& documents, SplitBy split_by, int64_t num_kv_heads,
                           int64_t block_size, int num_threads);

// For many threads: the blocks of keys of max_open heads (of one document or several) in the order of their
// weight, not head by head, so that neighbours of one head are not taken together, each to wait for the turns
// of the one before it. A head's blocks stay in order; a head is opened when another has come to its end.
std::vector<WorkItem> spread_key_blocks(const std::vector<WorkItem>& items,
                                        const std::vector<Document>& documents, int64_t block_keys,
                                        size_t max_open);

// Where threads would be left without an item: those of several heads are halved, the costliest first, while
// each half is worth waking a thread for. A head's work and its sums stay as they are.
std::vector<WorkItem> share_heads(std::vector<WorkItem> items, const std::vector<Document>& documents,
                                  SplitBy split_by, int64_t group, int num_threads);

// Calls run_item(context, item index, scratch) for every item, on the executor's threads.
void run_work_items(Executor& executor, int64_t num_items, size_t scratch_bytes,
                    void (*run_item)(void* context, int64_t item, Scratch& scratch), void* context);

}  // namespace packed_sdpa::cpu
