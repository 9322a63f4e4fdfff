// The state for Python: thread-shared variables and documents as torch classes, scopes and evidence as
// operators.
#include <ATen/ATen.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "packed_sdpa/state.h"
#include "state_internal.h"
#include "tensors.h"

namespace packed_sdpa {

namespace {

struct DocumentsHolder : torch::CustomClassHolder {
  explicit DocumentsHolder(DocumentsPtr held) : documents(std::move(held)) {}
  DocumentsHolder(const at::Tensor& doc_ids, std::string backend)
      : documents(ArmedDocuments::make(doc_ids, backend)) {}

  std::vector<at::Tensor> layout() const { return as_list(documents->layout().tensors()); }

  // Copies on devices, made there or asked for before.
  std::vector<std::vector<at::Tensor>> layouts_on_devices() const {
    std::vector<std::vector<at::Tensor>> lists;
    for (const LayoutTensors& tensors : documents->layout().device_tensors())
      lists.push_back(as_list(tensors));
    return lists;
  }

  DocumentsPtr documents;
};

struct TokenHolder : torch::CustomClassHolder {
  state::SlotVar::Token token;
};

// is_armed: the one armed variable of the process; else one of its own.
struct SharedVariable : torch::CustomClassHolder {
  explicit SharedVariable(bool is_armed) : is_armed(is_armed) {}

  // The number given to set(); of documents armed in C++ minus their id; 0 when nothing is set.
  int64_t get() const {
    const state::Slot slot = (is_armed ? state::armed_variable() : own).get().value;
    if (slot.handle != 0 || slot.documents == nullptr) return slot.handle;
    return -slot.documents->id();
  }

  c10::intrusive_ptr<TokenHolder> set(int64_t handle, int64_t documents) {
    auto token = c10::make_intrusive<TokenHolder>();
    state::Slot slot = state::make_slot(handle, state::find_documents(documents), released);
    token->token = is_armed ? state::set_armed(std::move(slot)) : own.set(std::move(slot));
    return token;
  }

  void reset(const c10::intrusive_ptr<TokenHolder>& token) {
    try {
      if (is_armed) {
        state::reset_armed(token->token);
      } else {
        own.reset(token->token);
      }
    } catch (const std::invalid_argument& error) {
      TORCH_CHECK_VALUE(false, error.what());
    }
  }

  std::vector<int64_t> take_released() { return released->take(); }

  bool is_armed;
  state::SlotVar own;
  std::shared_ptr<state::ReleasedHandles> released = std::make_shared<state::ReleasedHandles>();
};

DocumentsPtr documents_with(int64_t id) {
  DocumentsPtr documents = state::find_documents(id);
  TORCH_CHECK(id == 0 || documents != nullptr, "documents ", id, " are not alive any more");
  return documents;
}

// Nothing where they are not alive any more.
std::optional<c10::intrusive_ptr<DocumentsHolder>> find_documents(int64_t id) {
  DocumentsPtr documents = state::find_documents(id);
  if (documents == nullptr) return std::nullopt;
  return c10::make_intrusive<DocumentsHolder>(std::move(documents));
}

void keep_documents(int64_t id) {
  state::keep_without_node(documents_with(id));
}

int64_t resolve_documents(at::IntArrayRef attachments, int64_t hooked_thread, int64_t hooked_sequence,
                          bool ran_attention) {
  const NodePlace hooked_at{static_cast<uint64_t>(hooked_thread), static_cast<uint64_t>(hooked_sequence)};
  const DocumentsPtr documents = state::resolve({attachments.vec(), hooked_at}, ran_attention);
  return documents == nullptr ? 0 : documents->id();
}

// By content; 0: none. Not alive any more: equal to nothing.
bool same_documents_by_id(int64_t a, int64_t b) {
  if (a == b) return true;
  const DocumentsPtr left = state::find_documents(a);
  const DocumentsPtr right = state::find_documents(b);
  return left != nullptr && right != nullptr &&
         same_documents(state::as_timeline_value(left), state::as_timeline_value(right));
}

int64_t enter_scope(int64_t attachment, int64_t documents) {
  TORCH_CHECK_VALUE(attachment > 0, "attachment must be positive, got ", attachment,
                    "; take one from new_attachment()");
  return state::timeline().enter_scope(state::this_moment(), attachment,
                                       state::as_timeline_value(documents_with(documents)));
}

// Leaving by this number ends every scope that this thread enters from now on.
int64_t scope_mark() {
  return state::timeline().next_scope(state::this_moment());
}

void leave_scope(int64_t scope) {
  state::timeline().leave_scope(state::this_moment(), scope);
}

bool in_scope(int64_t attachment) {
  return state::timeline().in_scope(state::this_moment(), attachment);
}

std::tuple<int64_t, int64_t> this_place() {
  const Moment now = state::this_moment();
  return {static_cast<int64_t>(now.thread), static_cast<int64_t>(now.sequence)};
}

// A class, since a selective checkpoint refuses an operator that runs in its recompute alone.
struct Recompute final : torch::CustomClassHolder {};

std::vector<int64_t> recomputed_nodes(bool ran_attention) {
  std::vector<int64_t> flat;
  for (const Timeline::Asker& asker : state::timeline().askers(state::this_moment(ran_attention))) {
    flat.push_back(static_cast<int64_t>(asker.node.thread));
    flat.push_back(static_cast<int64_t>(asker.node.sequence));
    flat.push_back(static_cast<int64_t>(asker.precedes_region));
  }
  return flat;
}

void refuse_other_documents() {
  try {
    Timeline::refuse_other_documents();
  } catch (const TimelineError& error) {
    TORCH_CHECK(false, error.what());
  }
}

std::vector<int64_t> state_statistics() {
  const Timeline::Statistics counts = state::timeline().statistics();
  return {counts.threads, counts.intervals, counts.redirects, counts.scopes, counts.values_alive};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(packed_sdpa, library) {
  library.class_<DocumentsHolder>("ArmedDocuments")
      .def(torch::init<const at::Tensor&, std::string>())
      .def("id", [](const c10::intrusive_ptr<DocumentsHolder>& self) { return self->documents->id(); })
      .def("doc_ids",
           [](const c10::intrusive_ptr<DocumentsHolder>& self) { return self->documents->doc_ids(); })
      .def("backend",
           [](const c10::intrusive_ptr<DocumentsHolder>& self) { return self->documents->backend(); })
      .def("layout", &DocumentsHolder::layout)
      .def("layouts_on_devices", &DocumentsHolder::layouts_on_devices);
  library.class_<TokenHolder>("SharedVariableToken");
  library.class_<SharedVariable>("SharedVariable")
      .def(torch::init<bool>())
      .def("get", &SharedVariable::get)
      .def("set", &SharedVariable::set)
      .def("reset", &SharedVariable::reset)
      .def("take_released", &SharedVariable::take_released);
  library.class_<Recompute>("Recompute")
      .def(torch::init<>())
      .def("place", [](const c10::intrusive_ptr<Recompute>&) { return this_place(); })
      // The node whose forward is recomputed here: thread, sequence number, whether it precedes its region
      // (0: no, 1: perhaps, 2: yes); a second one where it cannot be told which; nothing outside of a
      // backward.
      .def("nodes", [](const c10::intrusive_ptr<Recompute>&,
                       bool ran_attention) { return recomputed_nodes(ran_attention); })
      .def("refuse_other_documents", [](const c10::intrusive_ptr<Recompute>&) { refuse_other_documents(); });
  library.def("find_documents(int id) -> __torch__.torch.classes.packed_sdpa.ArmedDocuments?",
              find_documents);
  library.def(
      "resolve_documents(int[] attachments, int hooked_thread, int hooked_sequence, bool ran_attention) -> "
      "int",
      resolve_documents);
  library.def("keep_documents(int id) -> ()", keep_documents);
  library.def("same_documents(int a, int b) -> bool", same_documents_by_id);
  library.def("enter_scope(int attachment, int documents) -> int", enter_scope);
  library.def("scope_mark() -> int", scope_mark);
  library.def("leave_scope(int scope) -> ()", leave_scope);
  library.def("in_scope(int attachment) -> bool", in_scope);
  library.def("this_place() -> (int thread, int sequence)", this_place);
  // threads, intervals, redirects, scopes, intervals whose documents are alive
  library.def("state_statistics() -> int[]", state_statistics);
}

}  // namespace packed_sdpa
