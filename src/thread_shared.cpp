#include "thread_shared.h"

#include <atomic>

namespace packed_sdpa::detail {

namespace {

struct ThisThread {
  ThisThread() {
    static std::atomic<uint64_t> last{0};
    id = ++last;
  }
  ~ThisThread() {
    for (const std::weak_ptr<ThreadSlots>& entry : slots) {
      if (const std::shared_ptr<ThreadSlots> alive = entry.lock()) alive->thread_ended(id);
    }
  }
  ThisThread(const ThisThread&) = delete;
  ThisThread& operator=(const ThisThread&) = delete;

  uint64_t id = 0;
  std::vector<std::weak_ptr<ThreadSlots>> slots;
};

ThisThread& current() {
  thread_local ThisThread thread;
  return thread;
}

}  // namespace

uint64_t this_thread() {
  return current().id;
}

void call_at_thread_end(const std::weak_ptr<ThreadSlots>& slots) {
  auto& known = current().slots;
  const auto is_same = [&](const std::weak_ptr<ThreadSlots>& entry) {
    return !entry.owner_before(slots) && !slots.owner_before(entry);
  };
  for (const auto& entry : known) {
    if (is_same(entry)) return;
  }
  std::erase_if(known, [](const std::weak_ptr<ThreadSlots>& entry) { return entry.expired(); });
  known.push_back(slots);
}

}  // namespace packed_sdpa::detail
