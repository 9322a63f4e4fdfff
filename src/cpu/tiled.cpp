#include "cpu/tiled.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <thread>
#include <utility>

namespace packed_sdpa::cpu {
namespace {

// A wait is for the rest of a neighbour's tile, some microseconds; after that many looks the thread gives its
// core away, because the neighbour may be waiting for one.
constexpr int kSpins = 2000;

// Floats of sums that one item touches, and of a page.
constexpr size_t kFloatsTouched = size_t{1} << 18;
constexpr size_t kPageFloats = 4096 / sizeof(float);

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

TiledCall::TiledCall(const AttentionParams& params, std::vector<Document> documents_in, SplitBy split_by,
                     int64_t block_size_in)
    : attention(params),
      dropout(params),
      documents(std::move(documents_in)),
      items(make_work_items(documents, params.shape.num_kv_heads, split_by, block_size_in)),
      group(params.shape.num_heads / params.shape.num_kv_heads),
      block_size(block_size_in) {
  for (const Document& document : documents) {
    max_queries = std::max(max_queries, document.num_queries);
    max_keys = std::max(max_keys, document.num_keys);
  }
}

void TiledCall::dropout_factors(const Document& document, int64_t head, int64_t query, KeyRange keys,
                                float* factors) const {
  Dropout::Row row(dropout, document.batch * attention.shape.num_heads + head, document.query_row(query));
  const float scale = static_cast<float>(dropout.keep_scale());
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    factors[j - keys.begin] = row.keeps(document.key_row(j)) ? scale : 0.0f;
  }
}

void SumBuffers::make(const std::vector<size_t>& sizes, Executor& executor) {
  struct Touch {
    std::vector<std::pair<float*, size_t>> pieces;
    static void run(void* context, int64_t item, Scratch& /*scratch*/) {
      const auto [data, floats] = static_cast<const Touch*>(context)->pieces[static_cast<size_t>(item)];
      for (size_t i = 0; i < floats; i += kPageFloats) data[i] = 0.0f;
    }
  } touch;
  for (const size_t floats : sizes) {
    free_.push_back({std::unique_ptr<float[]>(new float[floats]), floats});
    for (size_t first = 0; first < floats; first += kFloatsTouched) {
      touch.pieces.emplace_back(free_.back().data.get() + first, std::min(kFloatsTouched, floats - first));
    }
  }
  run_work_items(executor, static_cast<int64_t>(touch.pieces.size()), 0, &Touch::run, &touch);
}

SumBuffers::Buffer SumBuffers::take(size_t floats) {
  Buffer buffer;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    // The smallest that is large enough; else the largest, which makes room for a new one.
    const auto better = [floats](const Buffer& a, const Buffer& b) {
      const bool fits = a.floats >= floats;
      if (fits != (b.floats >= floats)) return fits;
      return fits ? a.floats < b.floats : a.floats > b.floats;
    };
    const auto best = std::min_element(free_.begin(), free_.end(), better);
    if (best != free_.end()) {
      buffer = std::move(*best);
      free_.erase(best);
    }
  }
  if (buffer.floats < floats) {
    buffer.data.reset();
    buffer = {std::unique_ptr<float[]>(new float[floats]), floats};
  }
  return buffer;
}

void SumBuffers::give_back(Buffer buffer) {
  if (buffer.data == nullptr) return;
  const std::lock_guard<std::mutex> guard(mutex_);
  free_.push_back(std::move(buffer));
}

GradQuerySum::GradQuerySum(const Document& document, int64_t block_keys, int64_t queries_per_tile,
                           int64_t tile_floats, SumBuffers& buffers, const std::atomic<bool>& abandoned)
    : document_(document),
      block_keys_(block_keys),
      queries_per_tile_(queries_per_tile),
      tile_floats_(tile_floats),
      num_tiles_((document.num_queries + queries_per_tile - 1) / queries_per_tile),
      buffers_(buffers),
      abandoned_(abandoned),
      turns_(new std::atomic<int32_t>[static_cast<size_t>(num_tiles_)]),
      blocks_left_((document.num_keys + block_keys - 1) / block_keys) {
  for (int64_t t = 0; t < num_tiles_; ++t) turns_[static_cast<size_t>(t)].store(0, std::memory_order_relaxed);
}

GradQuerySum::Blocks GradQuerySum::blocks(int64_t tile) const {
  const int64_t first_query = tile * queries_per_tile_;
  const int64_t last_query = std::min(document_.num_queries, first_query + queries_per_tile_) - 1;
  const int64_t begin = document_.visible_keys(first_query).begin;
  const int64_t end = document_.visible_keys(last_query).end;
  if (begin >= end) return {0, -1};
  return {begin / block_keys_, (end - 1) / block_keys_};
}

void GradQuerySum::wait_turn(int64_t tile, int64_t block) const {
  const int64_t turn = block - blocks(tile).first;
  const std::atomic<int32_t>& done = turns_[static_cast<size_t>(tile)];
  for (int spin = 0; done.load(std::memory_order_acquire) != turn; ++spin) {
    if (abandoned_.load(std::memory_order_relaxed)) {
      throw std::runtime_error("packed_sdpa: backward was given up because another of its threads failed");
    }
    if (spin < kSpins) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

void GradQuerySum::finish_turn(int64_t tile, int64_t block) {
  const int64_t turn = block - blocks(tile).first;
  turns_[static_cast<size_t>(tile)].store(static_cast<int32_t>(turn + 1), std::memory_order_release);
}

float* GradQuerySum::sums(int64_t tile) {
  float* base = sums_.load(std::memory_order_acquire);
  if (base == nullptr) {
    const std::lock_guard<std::mutex> lock(sums_mutex_);
    if (buffer_.data == nullptr) buffer_ = buffers_.take(num_floats());
    base = buffer_.data.get();
    sums_.store(base, std::memory_order_release);
  }
  return base + tile * tile_floats_;
}

void GradQuerySum::finish_block() {
  if (blocks_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) buffers_.give_back(std::move(buffer_));
}

TiledBackward::TiledBackward(const BackwardParams& params_in, std::vector<Document> documents_in,
                             int64_t keys_per_item, int64_t rows_per_tile, bool own_sums)
    : TiledCall(params_in, std::move(documents_in), SplitBy::kKeys, keys_per_item),
      params(params_in),
      queries_per_tile(std::max<int64_t>(1, rows_per_tile / group)) {
  const AttentionShape& shape = params.shape;
  const int64_t tile_floats =
      own_sums ? round_up(shape.head_dim, 32) * round_up(queries_per_tile * group, 64) : 0;
  first_sum_.assign(documents.size(), -1);
  for (size_t d = 0; d < documents.size(); ++d) {
    if (documents[d].num_keys <= block_size) continue;
    first_sum_[d] = static_cast<int32_t>(sums_.size());
    for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
      sums_.push_back(std::make_unique<GradQuerySum>(documents[d], block_size, queries_per_tile, tile_floats,
                                                     buffers_, abandoned));
    }
  }
}

void TiledBackward::spread(size_t max_open, Executor& executor) {
  items = spread_key_blocks(items, documents, block_size, max_open);
  std::vector<size_t> sizes;
  for (const std::unique_ptr<GradQuerySum>& sum : sums_) {
    if (sum->num_floats() > 0) sizes.push_back(sum->num_floats());
  }
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  if (sizes.size() > max_open) sizes.resize(max_open);
  buffers_.make(sizes, executor);
}

void TiledBackward::note_turns(std::vector<ItemNote>& notes) const {
  for (size_t i = 0; i < items.size(); ++i) {
    const WorkItem& item = items[i];
    const GradQuerySum* sum = grad_query_sum(item.first_document, item.first_kv_head);
    if (sum == nullptr) continue;
    ItemNote& note = notes[i];
    note.sum = item.first_document * params.shape.num_kv_heads + item.first_kv_head;
    for (int64_t tile = 0; tile < sum->num_tiles(); ++tile) {
      const GradQuerySum::Blocks blocks = sum->blocks(tile);
      if (item.block < blocks.first || item.block > blocks.last) continue;
      if (note.num_tiles++ == 0) note.first_tile = tile;
    }
  }
}

void run_tiled_forward(const ForwardParams& params, Executor& executor, int64_t rows_per_item,
                       size_t (*scratch_bytes)(const TiledForward& call), RunItem run_item) {
  const int64_t group = params.shape.num_heads / params.shape.num_kv_heads;
  std::vector<Document> documents = read_documents(params);
  const auto queries = [&] { return std::max<int64_t>(1, rows_per_item / group); };
  const int threads = executor.num_threads();
  // With a window, tiles of keys begin where the item's rows do, so the cut would show in the bits.
  while (threads > 1 && params.window_left < 0 && rows_per_item > kFinestRows &&
         blocks_are_too_coarse(documents, SplitBy::kQueries, params.shape.num_kv_heads, queries(), threads)) {
    rows_per_item /= 2;
  }
  TiledForward call(params, std::move(documents), queries());
  call.items = share_heads(std::move(call.items), call.documents, SplitBy::kQueries, group, threads);
  run_work_items(executor, static_cast<int64_t>(call.items.size()), scratch_bytes(call), run_item, &call);
}

namespace {

// An item of backward that fails takes its turn in no sum: those who wait for it are told.
struct GuardedBackward {
  TiledBackward* call;
  RunItem run_item;
};

void run_guarded_item(void* context, int64_t item, Scratch& scratch) {
  const GuardedBackward& guarded = *static_cast<const GuardedBackward*>(context);
  try {
    guarded.run_item(guarded.call, item, scratch);
  } catch (...) {
    guarded.call->abandoned.store(true, std::memory_order_relaxed);
    throw;
  }
}

// Rows of dQ that one item touches.
constexpr int64_t kRowsTouched = 256;

// Meets the page faults of a fresh dQ: writes a zero at the start of each row, which is written whole later.
void touch_grad_query_item(void* context, int64_t item, Scratch& /*scratch*/) {
  const BackwardParams& params = *static_cast<const BackwardParams*>(context);
  const AttentionShape& shape = params.shape;
  const StridedTensor& target = params.grad_query;
  const int64_t end = std::min(shape.batch * shape.rows_q, (item + 1) * kRowsTouched);
  for (int64_t flat = item * kRowsTouched; flat < end; ++flat) {
    for (int64_t head = 0; head < shape.num_heads; ++head) {
      static_cast<float*>(target.data)[flat / shape.rows_q * target.stride_batch + head * target.stride_head +
                                       flat % shape.rows_q * target.stride_row] = 0.0f;
    }
  }
}

}  // namespace

void run_tiled_backward(const BackwardParams& params, Executor& executor, int64_t keys_per_item,
                        int64_t rows_per_tile, bool own_sums,
                        size_t (*scratch_bytes)(const TiledBackward& call), RunItem run_item) {
  std::vector<Document> documents = read_documents(params);
  const int threads = executor.num_threads();  // one alone leaves nobody waiting
  const bool finer = threads > 1 && blocks_are_too_coarse(documents, SplitBy::kKeys,
                                                          params.shape.num_kv_heads, keys_per_item, threads);
  if (finer) {
    keys_per_item = kKeysPerTerm;
    if (!own_sums) {  // else the first block of keys meets them, and the turns of all others wait for it
      const int64_t rows = params.shape.batch * params.shape.rows_q;
      run_work_items(executor, (rows + kRowsTouched - 1) / kRowsTouched, 0, &touch_grad_query_item,
                     const_cast<BackwardParams*>(&params));
    }
  }
  TiledBackward call(params, std::move(documents), keys_per_item, rows_per_tile, own_sums);
  if (finer) call.spread(static_cast<size_t>(threads), executor);
  call.items = share_heads(std::move(call.items), call.documents, SplitBy::kKeys, call.group, threads);
  GuardedBackward guarded{&call, run_item};
  run_work_items(executor, static_cast<int64_t>(call.items.size()), scratch_bytes(call), &run_guarded_item,
                 &guarded);
  if (executor.item_notes() != nullptr) call.note_turns(*executor.item_notes());
}

}  // namespace packed_sdpa::cpu
