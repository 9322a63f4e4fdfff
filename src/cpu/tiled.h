// What the tiled kernels of all instruction sets share: the plan of a call and the order of sums into dQ.
// Built for the plain machine, called from the per-set code.
//
// Stacked rows: the query heads of one key/value head's group are stacked query by query, row = query * group
// + head in group. So a short document still fills a tile, masked corners are as small as they can be, and a
// packed key serves the whole group.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cpu/documents.h"
#include "cpu/dropout.h"
#include "cpu/kernels.h"
#include "cpu/work_items.h"

namespace packed_sdpa::cpu {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

inline int64_t round_up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

// Sizes a buffer block in the same words that Scratch hands it out.
class ScratchSize {
 public:
  template <typename T>
  T* take(int64_t count) {
    bytes_ += Scratch::array_bytes<T>(count);
    return nullptr;
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

// dQ is a sum of terms of so many keys, whatever the blocks of keys that items work on: those are whole
// terms.
constexpr int64_t kKeysPerTerm = 256;

// Stacked rows of an item of forward, at least: neither the shape nor many threads make it smaller.
constexpr int64_t kFinestRows = 256;

struct TiledCall {
  TiledCall(const AttentionParams& params, std::vector<Document> documents_in, SplitBy split_by,
            int64_t block_size_in);

  const AttentionParams& attention;
  Dropout dropout;
  std::vector<Document> documents;
  std::vector<WorkItem> items;
  int64_t group;            // query heads per key/value head
  int64_t block_size;       // queries (forward) or keys (backward) per item
  int64_t max_queries = 0;  // longest document
  int64_t max_keys = 0;

  // keep / (1 - p) of weights [query, keys.begin .. keys.end) of a head.
  void dropout_factors(const Document& document, int64_t head, int64_t query, KeyRange keys,
                       float* factors) const;
};

struct TiledForward : TiledCall {
  TiledForward(const ForwardParams& params_in, std::vector<Document> documents_in, int64_t queries_per_item)
      : TiledCall(params_in, std::move(documents_in), SplitBy::kQueries, queries_per_item),
        params(params_in) {}
  const ForwardParams& params;
};

// Buffers for the sums of a call, handed on by those that are done: fresh memory costs a fault a page, in the
// first block of keys, whose turns all other blocks wait for.
class SumBuffers {
 public:
  struct Buffer {
    std::unique_ptr<float[]> data;
    size_t floats = 0;
  };
  // Buffers of these sizes ahead of time, whose pages all threads meet together.
  void make(const std::vector<size_t>& sizes, Executor& executor);
  Buffer take(size_t floats);  // not initialized; at least as large
  void give_back(Buffer buffer);

 private:
  std::mutex mutex_;
  std::vector<Buffer> free_;
};

// dQ of one long document and key/value head, summed over key blocks in ascending order. Queries are cut into
// tiles of queries_per_tile; tile t gets its terms from key blocks first_block(t) .. last_block(t), each of
// which waits for its turn. Blocks run as items in ascending order too, so the block before is running or
// done.
class GradQuerySum {
 public:
  // abandoned: set when an item of the call failed, so that nobody waits for its turn for ever.
  GradQuerySum(const Document& document, int64_t block_keys, int64_t queries_per_tile, int64_t tile_floats,
               SumBuffers& buffers, const std::atomic<bool>& abandoned);

  int64_t num_tiles() const { return num_tiles_; }
  size_t num_floats() const { return static_cast<size_t>(num_tiles_ * tile_floats_); }
  // The key blocks that tile sees: [first, last]; last < first when it sees none.
  struct Blocks {
    int64_t first;
    int64_t last;
  };
  Blocks blocks(int64_t tile) const;
  // Throws std::runtime_error when the call was abandoned.
  void wait_turn(int64_t tile, int64_t block) const;
  void finish_turn(int64_t tile, int64_t block);
  // Sums of a tile, for types in which dQ itself cannot hold them; allocated when first asked for.
  float* sums(int64_t tile);
  void finish_block();  // the last one gives the sums' buffer back

 private:
  const Document& document_;
  int64_t block_keys_;
  int64_t queries_per_tile_;
  int64_t tile_floats_;
  int64_t num_tiles_;
  SumBuffers& buffers_;
  const std::atomic<bool>& abandoned_;
  std::unique_ptr<std::atomic<int32_t>[]> turns_;  // blocks of this tile that are done
  std::atomic<int64_t> blocks_left_;
  std::mutex sums_mutex_;
  std::atomic<float*> sums_{nullptr};
  SumBuffers::Buffer buffer_;
};

struct TiledBackward : TiledCall {
  TiledBackward(const BackwardParams& params_in, std::vector<Document> documents_in, int64_t keys_per_item,
                int64_t rows_per_tile, bool own_sums);
  const BackwardParams& params;
  int64_t queries_per_tile;
  std::atomic<bool> abandoned{false};
  // Blocks of keys in an order for so many heads at work at once, and buffers for their sums.
  void spread(size_t max_open, Executor& executor);
  // Adds to notes which items take turns, at which tiles.
  void note_turns(std::vector<ItemNote>& notes) const;
  // Null for a document of one block.
  GradQuerySum* grad_query_sum(int32_t document, int32_t kv_head) const {
    const int32_t first = first_sum_[static_cast<size_t>(document)];
    return first < 0 ? nullptr : sums_[static_cast<size_t>(first + kv_head)].get();
  }

 private:
  SumBuffers buffers_;
  std::vector<int32_t> first_sum_;
  std::vector<std::unique_ptr<GradQuerySum>> sums_;
};

// A call, given the kernel's sizes (of forward items the largest) and what it does for one item. These own
// the plan, so that none of its containers is built or destroyed in code of a target region.
using RunItem = void (*)(void* context, int64_t item, Scratch& scratch);
void run_tiled_forward(const ForwardParams& params, Executor& executor, int64_t rows_per_item,
                       size_t (*scratch_bytes)(const TiledForward& call), RunItem run_item);
void run_tiled_backward(const BackwardParams& params, Executor& executor, int64_t keys_per_item,
                        int64_t rows_per_tile, bool own_sums,
                        size_t (*scratch_bytes)(const TiledBackward& call), RunItem run_item);

}  // namespace packed_sdpa::cpu
