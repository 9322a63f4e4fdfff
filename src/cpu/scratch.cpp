#include "cpu/scratch.h"

#include <atomic>
#include <cassert>
#include <cstdlib>
#include <cstring>
#include <new>

namespace packed_sdpa::cpu {
namespace {

// Blocks above this go back to the system after the call.
constexpr size_t kKeepBytes = size_t{16} << 20;
// Whole pages, and room for the sum to be rounded up.
constexpr size_t kGranule = 4096;

std::atomic<bool> poison_blocks{false};

struct CachedBlock {
  std::byte* data = nullptr;
  size_t size = 0;
  ~CachedBlock() { std::free(data); }
};

thread_local CachedBlock cached_block;

}  // namespace

Scratch::Scratch(size_t bytes) {
  const size_t needed = (bytes + kGranule - 1) / kGranule * kGranule;
  CachedBlock& cached = cached_block;
  if (cached.size >= needed) {
    base_ = cached.data;
    size_ = cached.size;
    cached.data = nullptr;  // taken: a kernel inside a kernel gets a block of its own
    cached.size = 0;
  } else {
    base_ = static_cast<std::byte*>(std::aligned_alloc(kGranule, needed));
    if (base_ == nullptr) throw std::bad_alloc();
    size_ = needed;
  }
  if (size_ > 0 && poison_blocks.load(std::memory_order_relaxed)) std::memset(base_, 0xff, size_);
}

Scratch::~Scratch() {
  CachedBlock& cached = cached_block;
  if (size_ <= kKeepBytes && size_ > cached.size) {
    std::free(cached.data);
    cached.data = base_;
    cached.size = size_;
  } else {
    std::free(base_);
  }
}

void* Scratch::take_bytes(size_t bytes) {
  assert(used_ + bytes <= size_);
  void* result = base_ + used_;
  used_ += bytes;
  return result;
}

void Scratch::poison_for_tests(bool poison) {
  poison_blocks.store(poison, std::memory_order_relaxed);
}

}  // namespace packed_sdpa::cpu
