#include "cpu/work_items.h"

#include <algorithm>
#include <chrono>
#include <queue>
#include <tuple>

namespace packed_sdpa::cpu {
namespace {

struct Run {
  Executor* executor;
  int64_t num_items;
  size_t scratch_bytes;
  void (*run_item)(void* context, int64_t item, Scratch& scratch);
  void* context;
  std::vector<ItemNote>* notes;
  std::atomic<int64_t> next{0};
};

void run_body(void* context, int /*thread*/) {
  Run& run = *static_cast<Run*>(context);
  if (run.next.load(std::memory_order_relaxed) >= run.num_items) return;
  Scratch scratch(
      run.scratch_bytes);  // before an item is taken: what fails here leaves nobody waiting for it
  for (;;) {
    const int64_t item = run.next.fetch_add(1, std::memory_order_relaxed);
    if (item >= run.num_items) return;
    scratch.reset();
    if (run.notes == nullptr) {
      run.run_item(run.context, item, scratch);
      continue;
    }
    const auto begin = std::chrono::steady_clock::now();
    run.run_item(run.context, item, scratch);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    (*run.notes)[static_cast<size_t>(item)].seconds = seconds.count();
  }
}

int64_t size_of(const Document& document, SplitBy split_by) {
  return split_by == SplitBy::kQueries ? document.num_queries : document.num_keys;
}

// Costs in pairs of a query and a key, measured: a row's packing, softmax and writing; a thread's waking, as
// part of an item that is worth it (it takes about half of that).
constexpr int64_t kRowCost = 16;
constexpr int64_t kSmallestShare = 1024;

// Pairs of a query and a key of the block from `first` on, of one head.
int64_t pairs_of_block(const Document& document, SplitBy split_by, int64_t first, int64_t block_size) {
  const int64_t count = std::min(block_size, size_of(document, split_by) - first);
  const int64_t last = first + count - 1;
  if (split_by == SplitBy::kQueries) {
    return count * (document.visible_keys(last).end - document.visible_keys(first).begin);
  }
  return count * (document.first_query_past(last) - document.first_query_reaching(first));
}

}  // namespace

std::vector<WorkItem> make_work_items(const std::vector<Document>& documents, int64_t num_kv_heads,
                                      SplitBy split_by, int64_t block_size) {
  const int32_t num_documents = static_cast<int32_t>(documents.size());
  std::vector<int32_t> long_documents;
  for (int32_t d = 0; d < num_documents; ++d) {
    if (size_of(documents[static_cast<size_t>(d)], split_by) > block_size) long_documents.push_back(d);
  }
  std::stable_sort(long_documents.begin(), long_documents.end(), [&](int32_t a, int32_t b) {
    return size_of(documents[static_cast<size_t>(a)], split_by) >
           size_of(documents[static_cast<size_t>(b)], split_by);
  });

  std::vector<WorkItem> items;
  for (const int32_t d : long_documents) {
    const int64_t blocks =
        (size_of(documents[static_cast<size_t>(d)], split_by) + block_size - 1) / block_size;
    const int32_t num_blocks = static_cast<int32_t>(blocks);
    if (split_by == SplitBy::kQueries) {
      // Causal: late blocks see the most keys, so they come first.
      for (int32_t block = num_blocks - 1; block >= 0; --block) {
        for (int32_t head = 0; head < num_kv_heads; ++head)
          items.push_back({d, d + 1, head, head + 1, block});
      }
      continue;
    }
    // Key block 0 is seen by the most queries, and block j adds to dQ after block j - 1.
    for (int32_t head = 0; head < num_kv_heads; ++head) {
      for (int32_t block = 0; block < num_blocks; ++block) items.push_back({d, d + 1, head, head + 1, block});
    }
  }
  const int64_t run_size = std::max<int64_t>(1, block_size / num_kv_heads);
  for (int32_t first = 0; first < num_documents;) {
    int64_t size = std::max<int64_t>(1, size_of(documents[static_cast<size_t>(first)], split_by));
    if (size > block_size) {
      ++first;
      continue;
    }
    int32_t last = first + 1;
    while (last < num_documents) {
      const int64_t next = std::max<int64_t>(1, size_of(documents[static_cast<size_t>(last)], split_by));
      if (size + next > run_size) break;
      size += next;
      ++last;
    }
    const int32_t heads = static_cast<int32_t>(std::clamp<int64_t>(block_size / size, 1, num_kv_heads));
    for (int32_t head = 0; head < num_kv_heads; head += heads) {
      items.push_back({first, last, head, std::min(head + heads, static_cast<int32_t>(num_kv_heads)), 0});
    }
    first = last;
  }
  return items;
}

std::vector<WorkItem> share_heads(std::vector<WorkItem> items, const std::vector<Document>& documents,
                                  SplitBy split_by, int64_t group, int num_threads) {
  const auto cost = [&](const WorkItem& item) {
    int64_t of_head = 0;
    for (int32_t d = item.first_document; d < item.last_document; ++d) {
      const Document& document = documents[static_cast<size_t>(d)];
      const int64_t size = size_of(document, split_by);
      if (size > 0) of_head += kRowCost * size + pairs_of_block(document, split_by, 0, size);
    }
    return of_head * group * (item.last_kv_head - item.first_kv_head);
  };
  while (items.size() < static_cast<size_t>(num_threads)) {
    size_t costliest = items.size();
    int64_t most = 2 * kSmallestShare - 1;
    for (size_t i = 0; i < items.size(); ++i) {
      if (items[i].last_kv_head - items[i].first_kv_head > 1 && cost(items[i]) > most) {
        costliest = i;
        most = cost(items[i]);
      }
    }
    if (costliest == items.size()) break;
    WorkItem half = items[costliest];
    half.first_kv_head += (half.last_kv_head - half.first_kv_head) / 2;
    items[costliest].last_kv_head = half.first_kv_head;
    items.insert(items.begin() + static_cast<std::ptrdiff_t>(costliest) + 1, half);
  }
  return items;
}

bool blocks_are_too_coarse(const std::vector<Document>& documents, SplitBy split_by, int64_t num_kv_heads,
                           int64_t block_size, int num_threads) {
  int64_t heaviest = 0;  // in pairs of a query and a key, of one head
  int64_t total = 0;
  for (const Document& document : documents) {
    for (int64_t first = 0; first < size_of(document, split_by); first += block_size) {
      const int64_t pairs = pairs_of_block(document, split_by, first, block_size);
      heaviest = std::max(heaviest, pairs);
      total += pairs;
    }
  }
  return 4 * heaviest * num_threads > total * num_kv_heads;
}

std::vector<WorkItem> spread_key_blocks(const std::vector<WorkItem>& items,
                                        const std::vector<Document>& documents, int64_t block_keys,
                                        size_t max_open) {
  const auto document_of = [&](const WorkItem& item) -> const Document& {
    return documents[static_cast<size_t>(item.first_document)];
  };
  const auto weight = [&](size_t item) {
    return pairs_of_block(document_of(items[item]), SplitBy::kKeys, items[item].block * block_keys,
                          block_keys);
  };
  const auto is_block = [&](const WorkItem& item) { return document_of(item).num_keys > block_keys; };

  size_t next = 0;  // first block of the next head to be opened; whole documents come after all blocks
  const auto next_head = [&] {
    do ++next;
    while (next < items.size() && items[next].block != 0);
  };
  std::vector<WorkItem> spread;
  spread.reserve(items.size());
  // The next block of each open head: heaviest first, of equals the first of its head, then in the order of
  // items.
  std::priority_queue<std::tuple<int64_t, int64_t, int64_t>> open;
  const auto push = [&](size_t item) {
    open.push({weight(item), -int64_t{items[item].block}, -static_cast<int64_t>(item)});
  };
  const auto open_heads = [&] {
    while (open.size() < max_open && next < items.size() && is_block(items[next])) {
      push(next);
      next_head();
    }
  };
  for (open_heads(); !open.empty(); open_heads()) {
    const size_t item = static_cast<size_t>(-std::get<2>(open.top()));
    open.pop();
    spread.push_back(items[item]);
    const size_t after = item + 1;
    if (after < items.size() && items[after].block != 0) push(after);
  }
  spread.insert(spread.end(), items.begin() + static_cast<std::ptrdiff_t>(spread.size()), items.end());
  return spread;
}

void run_work_items(Executor& executor, int64_t num_items, size_t scratch_bytes,
                    void (*run_item)(void* context, int64_t item, Scratch& scratch), void* context) {
  if (num_items == 0) return;
  std::vector<ItemNote>* notes = executor.item_notes();
  if (notes != nullptr) notes->assign(static_cast<size_t>(num_items), {});
  Run run{&executor, num_items, scratch_bytes, run_item, context, notes};
  if (num_items == 1) {  // waking other threads takes longer than a small call
    run_body(&run, 0);
  } else {
    executor.run(&run_body, &run);
  }
}

}  // namespace packed_sdpa::cpu
