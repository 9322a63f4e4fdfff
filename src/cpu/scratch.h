// Scratch memory of one thread: one aligned block, cut into arrays by a bump pointer. The block is kept by
// the thread for its next call (fresh pages cost more than a small attention), except when it is large.
#pragma once

#include <cstddef>
#include <cstdint>

namespace packed_sdpa::cpu {

class Scratch {
 public:
  static constexpr size_t kAlignment = 64;  // a cache line, a zmm register, a row of an AMX tile

  explicit Scratch(size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Uninitialized array of `count` elements, aligned to kAlignment. The sum of array_bytes() of what is taken
  // between two resets must fit into what the constructor was given.
  template <typename T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(array_bytes<T>(count)));
  }
  void reset() { used_ = 0; }

  template <typename T>
  static size_t array_bytes(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // Tests: fill every block with NaN bytes before it is handed out.
  static void poison_for_tests(bool poison);

 private:
  void* take_bytes(size_t bytes);

  std::byte* base_ = nullptr;
  size_t size_ = 0;
  size_t used_ = 0;
};

}  // namespace packed_sdpa::cpu
