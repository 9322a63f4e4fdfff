// A variable that every thread sees: a thread that set a value itself sees its own, one that never did the
// latest.
//
// Torch-free, so that it can be tested under ThreadSanitizer. T is cheap to copy (a shared pointer, a
// handle).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

namespace packed_sdpa {

namespace detail {

class ThreadSlots {  // what a thread must be told of when it ends
 public:
  virtual ~ThreadSlots() = default;
  virtual void thread_ended(uint64_t thread) = 0;
};

// A number of its own for each thread, never used again.
uint64_t this_thread();
void call_at_thread_end(const std::weak_ptr<ThreadSlots>& slots);

}  // namespace detail

template <typename T>
class ThreadSharedVar {
  struct Entry {
    uint64_t number = 0;  // order of set() over all threads; 0: nothing was ever set
    T value{};
  };
  struct State;

 public:
  struct Reading {
    T value{};
    bool is_own = false;  // the calling thread set it
  };

  // Undoes one set(). Movable handle; used at most once, in the thread that got it.
  class Token {
   public:
    Token() = default;

   private:
    friend class ThreadSharedVar;
    struct Undo {
      std::weak_ptr<State> state;
      uint64_t thread = 0;
      std::optional<Entry> own;     // what the thread had set before
      std::optional<Entry> orphan;  // the latest value of a thread that has ended
      bool used = false;
    };
    std::shared_ptr<Undo> undo_;
  };

  ThreadSharedVar() : state_(std::make_shared<State>()) {}

  Reading get() const {
    const uint64_t thread = detail::this_thread();
    const std::lock_guard<std::mutex> guard(state_->mutex);
    const auto own = state_->own.find(thread);
    if (own != state_->own.end()) return {own->second.value, true};
    const Entry* latest = state_->latest();
    return latest == nullptr ? Reading{} : Reading{latest->value, false};
  }

  Token set(T value) {
    const uint64_t thread = detail::this_thread();
    detail::call_at_thread_end(state_);
    Token token;
    token.undo_ = std::make_shared<typename Token::Undo>();
    token.undo_->state = state_;
    token.undo_->thread = thread;
    // A value is let go outside the lock: its destructor may come back here.
    Entry entry{0, std::move(value)};
    const std::lock_guard<std::mutex> guard(state_->mutex);
    entry.number = ++state_->last_number;
    token.undo_->orphan.swap(state_->orphan);
    const auto [slot, is_new] = state_->own.try_emplace(thread);
    if (!is_new) token.undo_->own = std::move(slot->second);
    slot->second = std::move(entry);
    return token;
  }

  void reset(const Token& token) {
    if (token.undo_ == nullptr || token.undo_->state.lock() != state_) {
      throw std::invalid_argument(
          "token was made by another variable; give the one that this variable's set() returned");
    }
    if (token.undo_->thread != detail::this_thread()) {
      throw std::invalid_argument(
          "token was made in another thread; reset() belongs to the thread that called set()");
    }
    Entry dropped;
    const std::lock_guard<std::mutex> guard(state_->mutex);
    if (token.undo_->used)
      throw std::runtime_error("token has already been used once; call set() again for a new one");
    token.undo_->used = true;
    const auto slot = state_->own.find(token.undo_->thread);
    if (slot != state_->own.end()) {
      dropped = std::move(slot->second);
      if (token.undo_->own) {
        slot->second = std::move(*token.undo_->own);
      } else {
        state_->own.erase(slot);
      }
    }
    const std::optional<Entry>& before = token.undo_->orphan;
    if (before && (!state_->orphan || state_->orphan->number < before->number)) {
      state_->orphan.swap(token.undo_->orphan);
    }
  }

 private:
  struct State final : detail::ThreadSlots {
    mutable std::mutex mutex;
    uint64_t last_number = 0;
    std::unordered_map<uint64_t, Entry> own;  // by thread
    std::optional<Entry> orphan;  // of threads that have ended only the latest, until the next set()

    const Entry* latest() const {
      const Entry* latest = orphan ? &*orphan : nullptr;
      for (const auto& [thread, entry] : own) {
        if (latest == nullptr || entry.number > latest->number) latest = &entry;
      }
      return latest;
    }

    void thread_ended(uint64_t thread) override {
      std::optional<Entry> dropped;  // outlives the lock
      const std::lock_guard<std::mutex> guard(mutex);
      const auto slot = own.find(thread);
      if (slot == own.end()) return;
      // It may be the latest again when a newer set() is undone.
      dropped = std::move(slot->second);
      own.erase(slot);
      if (!orphan || orphan->number < dropped->number) orphan.swap(dropped);
    }
  };

  std::shared_ptr<State> state_;
};

}  // namespace packed_sdpa
