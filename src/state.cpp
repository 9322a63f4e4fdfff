#include "packed_sdpa/state.h"

#include <ATen/ATen.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <unordered_map>
#include <utility>

#include "id_runs.h"
#include "packed_sdpa/backend.h"
#include "state_internal.h"

namespace packed_sdpa {

namespace {

class Documents final : public ArmedDocuments, public TimelineValue {
 public:
  Documents(at::Tensor ids, PackedLayout layout, std::string backend)
      : ids_(std::move(ids)), layout_(std::move(layout)), backend_(std::move(backend)) {
    static std::atomic<int64_t> last{0};
    id_ = ++last;
  }

  int64_t id() const override { return id_; }
  const at::Tensor& doc_ids() const override { return ids_; }
  const PackedLayout& layout() const override { return layout_; }
  const std::string& backend() const override { return backend_; }

  bool same_as(const TimelineValue& other) const override {
    const auto& documents = static_cast<const Documents&>(other);
    if (ids_.sizes() != documents.ids_.sizes() || backend_ != documents.backend_) return false;
    const int64_t* mine = ids_.const_data_ptr<int64_t>();
    return std::equal(mine, mine + ids_.numel(), documents.ids_.const_data_ptr<int64_t>());
  }

 private:
  int64_t id_ = 0;
  at::Tensor ids_;
  PackedLayout layout_;
  std::string backend_;
};

// Documents by number, weakly.
class Registry {
 public:
  void add(const std::shared_ptr<const Documents>& documents) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (++added_ % 64 == 0) std::erase_if(entries_, [](const auto& entry) { return entry.second.expired(); });
    entries_[documents->id()] = documents;
  }
  std::shared_ptr<const Documents> find(int64_t id) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto entry = entries_.find(id);
    return entry == entries_.end() ? nullptr : entry->second.lock();
  }

 private:
  std::mutex mutex_;
  int64_t added_ = 0;
  std::unordered_map<int64_t, std::weak_ptr<const Documents>> entries_;
};

// These outlive every thread and every static that may still use them.
Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

// A token that lives as long as the running graph task.
std::weak_ptr<BackwardTask> graph_task_token(int64_t graph_task) {
  thread_local std::vector<std::pair<int64_t, std::weak_ptr<BackwardTask>>> tokens;
  std::erase_if(tokens, [](const auto& entry) { return entry.second.expired(); });
  for (const auto& [known, token] : tokens) {
    if (known == graph_task) return token;
  }
  auto token = std::make_shared<BackwardTask>();
  // Destroyed with the task, however it ends.
  torch::autograd::Engine::get_default_engine().queue_callback([token]() {});
  tokens.emplace_back(graph_task, token);
  return token;
}

// A Python autograd.Function is made before its own forward runs; its node's name has no number at the end.
// Where it is not known to have run attention there, it may ask for a tensor that it saved; under
// saved-tensor hooks it is taken to do so.
Precedes precedes_its_region(const torch::autograd::Node& node, bool ran_attention) {
  if (!node.name().ends_with("Backward")) return Precedes::kNo;
  if (ran_attention) return Precedes::kYes;
  return at::SavedTensorDefaultHooks::get_tls_state().stack.empty() ? Precedes::kMaybe : Precedes::kNo;
}

// A hook that does nothing but live as long as its node.
class KeepsDocuments final : public torch::autograd::FunctionPostHook {
 public:
  explicit KeepsDocuments(DocumentsPtr documents) : documents_(std::move(documents)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads_of_inputs,
                                            const torch::autograd::variable_list& /*grads*/) override {
    return grads_of_inputs;
  }

 private:
  DocumentsPtr documents_;
};

void check_backend_name(const std::string& backend) {
  explain(AttentionRequest{}, backend);  // raises for a name that is not known
}

}  // namespace

namespace state {

void ReleasedHandles::add(int64_t handle) {
  const std::lock_guard<std::mutex> guard(mutex_);
  handles_.push_back(handle);
}

std::vector<int64_t> ReleasedHandles::take() {
  const std::lock_guard<std::mutex> guard(mutex_);
  return std::exchange(handles_, {});
}

Slot make_slot(int64_t handle, DocumentsPtr documents, const std::shared_ptr<ReleasedHandles>& released) {
  Slot slot{handle, std::move(documents), nullptr};
  if (handle != 0) {
    slot.release = std::shared_ptr<void>(nullptr, [released, handle](void*) { released->add(handle); });
  }
  return slot;
}

SlotVar& armed_variable() {
  static auto* const instance = new SlotVar;
  return *instance;
}

Timeline& timeline() {
  static auto* const instance = new Timeline;
  return *instance;
}

Moment this_moment(bool ran_attention) {
  Moment now;
  now.thread = at::RecordFunction::currentThreadId();
  now.sequence = at::sequence_number::peek();
  now.graph_task = torch::autograd::get_current_graph_task_id();
  if (now.graph_task == kNoGraphTask) return now;
  now.task = graph_task_token(now.graph_task);
  if (const auto node = torch::autograd::get_current_node()) {
    now.node = NodePlace{node->thread_id(), node->sequence_nr()};
    now.node_precedes_region = precedes_its_region(*node, ran_attention);
  }
  return now;
}

DocumentsPtr find_documents(int64_t id) {
  return id == 0 ? nullptr : registry().find(id);
}

TimelinePtr as_timeline_value(const DocumentsPtr& documents) {
  return std::static_pointer_cast<const Documents>(documents);
}

SlotVar::Token set_armed(Slot slot) {
  const TimelinePtr value = as_timeline_value(slot.documents);
  SlotVar::Token token = armed_variable().set(std::move(slot));
  timeline().armed(this_moment(), value, true);
  return token;
}

void reset_armed(const SlotVar::Token& token) {
  armed_variable().reset(token);
  const SlotVar::Reading reading = armed_variable().get();
  timeline().armed(this_moment(), as_timeline_value(reading.value.documents), reading.is_own);
}

void keep_without_node(const DocumentsPtr& documents) {
  constexpr size_t kKept = 16;
  static auto* const mutex = new std::mutex;
  static auto* const kept = new std::deque<DocumentsPtr>;
  DocumentsPtr dropped;  // outlives the lock
  const std::lock_guard<std::mutex> guard(*mutex);
  std::erase(*kept, documents);  // the latest use counts
  kept->push_back(documents);
  if (kept->size() <= kKept) return;
  dropped = std::move(kept->front());
  kept->pop_front();
}

void keep_for_recompute(const at::Tensor& output, const DocumentsPtr& documents) {
  if (const auto& node = output.grad_fn()) {
    node->add_post_hook(std::make_unique<KeepsDocuments>(documents));
  } else if (!at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled()) {
    keep_without_node(documents);
  }
}

DocumentsPtr resolve(const Caller& caller, bool ran_attention) {
  const SlotVar::Reading armed = armed_variable().get();
  const ArmedReading reading{as_timeline_value(armed.value.documents), armed.is_own};
  try {
    return std::static_pointer_cast<const Documents>(
        timeline().resolve(this_moment(ran_attention), caller, reading));
  } catch (const TimelineError& error) {  // free of torch; callers are promised c10::Error
    TORCH_CHECK(false, error.what());
  }
}

}  // namespace state

std::shared_ptr<const ArmedDocuments> ArmedDocuments::make(const at::Tensor& doc_ids,
                                                           const std::string& backend) {
  check_backend_name(backend);
  const IdRuns runs = find_id_runs(doc_ids);
  auto documents = std::make_shared<const Documents>(ids_of(runs), layout_of(runs), backend);
  registry().add(documents);
  return documents;
}

DocumentsPtr armed_documents() {
  return state::armed_variable().get().value.documents;
}

void arm(const DocumentsPtr& documents) {
  state::set_armed({0, documents, nullptr});
}
void arm(const at::Tensor& doc_ids, const std::string& backend) {
  arm(ArmedDocuments::make(doc_ids, backend));
}
void disarm() {
  state::set_armed({});
}

struct PackedAttentionScope::Undo {
  state::SlotVar::Token token;
};

PackedAttentionScope::PackedAttentionScope(const DocumentsPtr& documents)
    : documents_(documents), undo_(std::make_unique<Undo>()) {
  undo_->token = state::set_armed({0, documents, nullptr});
}

PackedAttentionScope::PackedAttentionScope(const at::Tensor& doc_ids, const std::string& backend)
    : PackedAttentionScope(ArmedDocuments::make(doc_ids, backend)) {}

PackedAttentionScope::~PackedAttentionScope() {
  state::reset_armed(undo_->token);
}

}  // namespace packed_sdpa
