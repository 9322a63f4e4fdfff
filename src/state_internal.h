// The armed variable and the timeline, for the bindings and the drop-in.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "packed_sdpa/state.h"
#include "thread_shared.h"
#include "timeline.h"

namespace packed_sdpa::state {

// Numbers of values that nobody refers to any more, for whoever keeps the values themselves.
class ReleasedHandles {
 public:
  void add(int64_t handle);
  std::vector<int64_t> take();

 private:
  std::mutex mutex_;
  std::vector<int64_t> handles_;
};

// What a thread-shared variable holds: a number that stands for a value kept elsewhere, documents, or both.
struct Slot {
  int64_t handle = 0;
  DocumentsPtr documents;
  std::shared_ptr<void> release;  // tells ReleasedHandles, with the last copy of this slot
};
using SlotVar = ThreadSharedVar<Slot>;

Slot make_slot(int64_t handle, DocumentsPtr documents, const std::shared_ptr<ReleasedHandles>& released);

SlotVar& armed_variable();
SlotVar::Token set_armed(Slot slot);
void reset_armed(const SlotVar::Token& token);

Timeline& timeline();
// ran_attention: the node that is being evaluated is a function whose forward is known to have run attention.
Moment this_moment(bool ran_attention = false);
// Null when no documents with this number are alive (or 0 was given).
DocumentsPtr find_documents(int64_t id);
TimelinePtr as_timeline_value(const DocumentsPtr& documents);
// For the recompute of a forward whose attention gave this output: kept by the output's graph. Without one
// (it runs in a checkpoint's forward, or in an evaluation, which cannot be told apart) keep_without_node.
void keep_for_recompute(const at::Tensor& output, const DocumentsPtr& documents);
// Keeps the last 16, where no autograd node is known that could.
void keep_without_node(const DocumentsPtr& documents);
// The documents of an attention call, here and now; ran_attention as in this_moment.
DocumentsPtr resolve(const Caller& caller, bool ran_attention = false);

}  // namespace packed_sdpa::state
