#include "timeline.h"

#include <algorithm>
#include <string>

namespace packed_sdpa {

namespace {

// An interval is some 80 bytes; a graph that is thousands of forwards old is not waiting for its backward.
constexpr size_t kMaxIntervals = 4096;
// Logs of threads are kept after their end (a forward in one thread, its backward in another).
constexpr size_t kMaxLogs = 1024;
// Autograd moves a backward that is nested deeper than 60 to another thread, where nodes cannot be told from
// those of other forwards.
constexpr size_t kMaxNesting = 50;

constexpr const char* kCure =
    " Arm (or call the attached model) in the thread that runs the layers, before the checkpointed region, "
    "and keep "
    "the hooks attached until backward has run.";

[[noreturn]] void raise(const std::string& text, const char* cure = kCure) {
  throw TimelineError("packed_sdpa: " + text + cure);
}

void keep_until_end(const Moment& now, const TimelinePtr& value) {
  if (const std::shared_ptr<BackwardTask> task = now.task.lock()) task->keep(value);
}

std::string place(const NodePlace& node) {
  return "autograd node " + std::to_string(node.sequence) + " of thread " + std::to_string(node.thread);
}

}  // namespace

bool same_documents(const TimelinePtr& a, const TimelinePtr& b) {
  if (a == b) return true;
  return a != nullptr && b != nullptr && a->same_as(*b);
}

Timeline::LogPtr Timeline::find_log(uint64_t thread) const {
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto entry = logs_.find(thread);
  return entry == logs_.end() ? nullptr : entry->second;
}

Timeline::LogPtr Timeline::log_of(uint64_t thread) {
  const std::lock_guard<std::mutex> guard(mutex_);
  LogPtr& entry = logs_[thread];
  if (entry == nullptr) entry = std::make_shared<ThreadLog>();
  const LogPtr log = entry;
  log->last_use = ++uses_;
  if (logs_.size() > kMaxLogs) drop_oldest_logs();
  return log;
}

void Timeline::drop_oldest_logs() {
  std::vector<uint64_t> uses;
  for (const auto& [thread, log] : logs_) uses.push_back(log->last_use);
  const auto middle = uses.begin() + static_cast<std::ptrdiff_t>(uses.size() / 2);
  std::nth_element(uses.begin(), middle, uses.end());
  std::erase_if(logs_, [&](const auto& entry) { return entry.second->last_use < *middle; });
}

TimelinePtr Timeline::value_of(const Interval& interval) {
  if (!interval.is_armed) return nullptr;
  TimelinePtr value = interval.value.lock();
  if (value == nullptr) {
    raise(
        "the documents of the forward that is recomputed are gone: nothing that is left of it holds its "
        "attention's outputs, or it ran without a graph in a checkpoint that keeps nothing of its forward "
        "(written in C++, or with setup_context), and 16 later ones did so too.",
        " Run that backward before so many forwards, or use a checkpoint that is given its context, as "
        "torch.utils.checkpoint is.");
  }
  return value;
}

bool Timeline::states_equal(const Interval& a, const Interval& b) {
  if (a.is_armed != b.is_armed) return false;
  if (!a.is_armed) return true;
  const TimelinePtr left = a.value.lock();
  const TimelinePtr right = b.value.lock();
  return left != nullptr && right != nullptr && same_documents(left, right);
}

// At a place that is known: somebody armed, disarmed, entered or left in this thread.
void Timeline::close_open(History& history, uint64_t sequence, bool keep_empty) {
  if (history.intervals.empty() || !history.intervals.back().is_open) return;
  Interval& last = history.intervals.back();
  last.is_open = false;
  last.to = sequence;
  last.exact_to = true;
  const bool is_empty = last.exact_from && last.to <= last.from && !last.has_call();
  if (is_empty && !keep_empty) history.intervals.pop_back();
}

void Timeline::forget_old(History& history) {
  if (history.intervals.size() <= kMaxIntervals) return;
  for (size_t i = 0; i < kMaxIntervals / 2; ++i) {
    history.forgotten_below = history.intervals.front().to;
    history.intervals.pop_front();
  }
}

void Timeline::open_exact(History& history, uint64_t sequence, const TimelinePtr& value) {
  Interval next;
  next.from = sequence;
  next.exact_from = true;
  next.is_armed = value != nullptr;
  next.value = value;
  history.intervals.push_back(std::move(next));
  forget_old(history);
}

// A thread that follows the others sees the armed value change without knowing where: only calls are
// evidence.
void Timeline::observe(History& history, uint64_t sequence, const ArmedReading& reading) {
  if (!reading.is_own) {
    Interval seen;
    seen.from = sequence;
    seen.is_armed = reading.value != nullptr;
    seen.value = reading.value;
    Interval* last = history.intervals.empty() ? nullptr : &history.intervals.back();
    const bool goes_on = last != nullptr && last->is_open && !last->exact_from && states_equal(*last, seen);
    if (!goes_on) {
      if (last != nullptr && last->is_open) {
        last->is_open = false;
        last->to = last->last_call + 1;
      }
      history.intervals.push_back(std::move(seen));
      forget_old(history);
    }
  } else if (history.intervals.empty() || !history.intervals.back().is_open) {
    open_exact(history, sequence, reading.value);
  }
  Interval& current = history.intervals.back();
  if (!current.has_call()) current.first_call = sequence;
  current.last_call = sequence;
}

void Timeline::drop_ended(ThreadLog& log) {
  std::erase_if(log.redirects, [](const Redirect& entry) { return entry.task.expired(); });
  std::erase_if(log.recomputed_scopes, [](const RecomputedScope& entry) { return entry.task.expired(); });
  if (log.armed_in_backward && log.armed_in_backward->task.expired()) log.armed_in_backward.reset();
}

void Timeline::armed(const Moment& now, const TimelinePtr& value, bool is_own) {
  if (value != nullptr) ever_armed_ = true;
  const LogPtr log = log_of(now.thread);
  const std::lock_guard<std::mutex> guard(log->mutex);
  drop_ended(*log);
  History& history = log->histories[kArmed];
  close_open(history, now.sequence);
  if (is_own) open_exact(history, now.sequence, value);
  if (now.graph_task != kNoGraphTask) {
    keep_until_end(now, value);
    log->armed_in_backward = ArmedInBackward{now.graph_task, value, now.task};
  }
  log->last_event = now.sequence;
  log->last_event_is_forward_call = false;
}

const Timeline::Scope* Timeline::innermost_scope(const ThreadLog& log, int64_t attachment,
                                                 int64_t graph_task) {
  const auto found = std::find_if(log.scopes.rbegin(), log.scopes.rend(), [&](const Scope& scope) {
    return scope.counts && scope.attachment == attachment && scope.graph_task == graph_task;
  });
  return found == log.scopes.rend() ? nullptr : &*found;
}

int64_t Timeline::enter_scope(const Moment& now, int64_t attachment, const TimelinePtr& value) {
  const LogPtr log = log_of(now.thread);
  const std::lock_guard<std::mutex> guard(log->mutex);
  drop_ended(*log);
  const Scope* around = innermost_scope(*log, attachment, now.graph_task);
  const bool counts = around == nullptr || !same_documents(around->value, value);
  const bool is_nested = around != nullptr;
  const int64_t number = ++log->last_scope;
  log->scopes.push_back({number, attachment, now.graph_task, counts, counts ? value : nullptr});
  if (!counts) return number;
  if (value != nullptr) ever_armed_ = true;
  log->last_event = now.sequence;
  log->last_event_is_forward_call = false;
  if (now.graph_task == kNoGraphTask) {
    History& history = log->histories[attachment];
    if (is_nested) close_open(history, now.sequence, true);  // a region that holds both begins with it
    open_exact(history, now.sequence, value);
  } else {
    keep_until_end(now, value);
    log->recomputed_scopes.push_back(
        {number, attachment, now.graph_task, now.sequence, UINT64_MAX, value, now.task});
  }
  return number;
}

int64_t Timeline::next_scope(const Moment& now) {
  const LogPtr log = log_of(now.thread);
  const std::lock_guard<std::mutex> guard(log->mutex);
  return log->last_scope + 1;
}

void Timeline::leave_scope(const Moment& now, int64_t scope) {
  const LogPtr log = log_of(now.thread);
  std::vector<Scope> left;  // let go outside the lock
  bool ended = false;       // one that counts
  const std::lock_guard<std::mutex> guard(log->mutex);
  while (!log->scopes.empty() && log->scopes.back().number >= scope) {
    left.push_back(std::move(log->scopes.back()));
    log->scopes.pop_back();
    const Scope& last = left.back();
    ended |= last.counts;
    if (last.counts && last.graph_task == kNoGraphTask) {
      History& history = log->histories[last.attachment];
      close_open(history, now.sequence);
      const Scope* around = innermost_scope(*log, last.attachment, kNoGraphTask);
      if (around != nullptr) open_exact(history, now.sequence, around->value);
    } else if (last.counts) {
      for (RecomputedScope& entry : log->recomputed_scopes) {
        if (entry.number == last.number) entry.to = now.sequence;
      }
    }
  }
  if (!ended) return;
  log->last_event = now.sequence;
  log->last_event_is_forward_call = false;
}

bool Timeline::in_scope(const Moment& now, int64_t attachment) const {
  const LogPtr log = find_log(now.thread);
  if (log == nullptr) return false;
  const std::lock_guard<std::mutex> guard(log->mutex);
  return std::any_of(log->scopes.begin(), log->scopes.end(), [&](const Scope& scope) {
    return scope.attachment == attachment && scope.graph_task == now.graph_task;
  });
}

Timeline::Chain Timeline::chain_of(const Moment& now) const {
  Chain chain{{*now.node}, now.node_precedes_region, true};
  int64_t graph_task = now.graph_task;
  // A deeper backward runs in the thread of the recompute that started it.
  while (chain.nodes.back().thread == now.thread) {
    const uint64_t sequence = chain.nodes.back().sequence;
    const LogPtr log = find_log(now.thread);
    if (log == nullptr) break;
    const std::lock_guard<std::mutex> guard(log->mutex);
    const Redirect* found = nullptr;
    for (const Redirect& entry : log->redirects) {
      const bool covers = entry.graph_task < graph_task && entry.from <= sequence;
      if (covers && !entry.task.expired()) found = &entry;
    }
    if (found == nullptr) break;
    // A node that precedes its region is followed by that region's own call, so it cannot be a forward's
    // tail.
    if (sequence < found->certain_from && chain.precedes_region == Precedes::kNo) chain.is_certain = false;
    chain.nodes.push_back(found->asked_by);
    chain.precedes_region = found->asker_precedes_region;
    graph_task = found->graph_task;
  }
  return chain;
}

std::optional<TimelinePtr> Timeline::recomputed_scope_at(const Moment& now, const NodePlace& node,
                                                         int64_t attachment) const {
  const LogPtr log = find_log(node.thread);
  if (log == nullptr) return std::nullopt;
  const std::lock_guard<std::mutex> guard(log->mutex);
  for (auto entry = log->recomputed_scopes.rbegin(); entry != log->recomputed_scopes.rend(); ++entry) {
    const bool covers = entry->attachment == attachment && entry->graph_task < now.graph_task &&
                        entry->from <= node.sequence && node.sequence < entry->to;
    if (!covers) continue;
    const std::shared_ptr<BackwardTask> task = entry->task.lock();  // which keeps the documents
    if (task != nullptr) return entry->value.lock();
  }
  return std::nullopt;
}

std::optional<TimelinePtr> Timeline::scope_at(const NodePlace& node, int64_t attachment) const {
  const LogPtr log = find_log(node.thread);
  if (log == nullptr) return std::nullopt;
  const std::lock_guard<std::mutex> guard(log->mutex);
  const auto found = log->histories.find(attachment);
  if (found == log->histories.end()) return std::nullopt;
  const History& history = found->second;
  if (node.sequence < history.forgotten_below) raise(place(node) + " is older than the last 2,000 forwards.");
  for (auto interval = history.intervals.rbegin(); interval != history.intervals.rend(); ++interval) {
    if (interval->from > node.sequence) continue;
    if (interval->is_open || node.sequence < interval->to) return value_of(*interval);
    break;
  }
  return std::nullopt;
}

// A region that holds a whole forward is asked for by a node outside of that forward's interval, but next to
// it: before it when the node precedes its region, on either side otherwise. Where this attachment ran
// nothing before, the node may be in a forward of an earlier attachment of the same model.
bool Timeline::fits_beside(const NodePlace& node, Precedes precedes_region, const Scope& scope) const {
  const LogPtr log = find_log(node.thread);
  if (log == nullptr) return true;
  const std::lock_guard<std::mutex> guard(log->mutex);
  const auto found = log->histories.find(scope.attachment);
  if (found == log->histories.end()) return !ran_under_another(*log, node, scope);
  const Interval* before = nullptr;
  const Interval* after = nullptr;
  for (auto interval = found->second.intervals.rbegin(); interval != found->second.intervals.rend();
       ++interval) {
    if (interval->from > node.sequence) {
      after = &*interval;
      continue;
    }
    before = &*interval;
    break;
  }
  const auto fits = [&](const Interval* interval) {
    if (interval == nullptr) return false;
    const TimelinePtr value = interval->value.lock();
    const bool is_gone = interval->is_armed && value == nullptr;  // nothing to compare with
    return is_gone || same_documents(value, scope.value);
  };
  if (before == nullptr && ran_under_another(*log, node, scope)) return false;
  if (precedes_region != Precedes::kNo) return after == nullptr || fits(after);
  return (before == nullptr && after == nullptr) || fits(before) || fits(after);
}

bool Timeline::ran_under_another(const ThreadLog& log, const NodePlace& node, const Scope& scope) {
  const auto covers = [&](const Interval& interval) {
    return interval.from <= node.sequence && (interval.is_open || node.sequence < interval.to);
  };
  for (const auto& [attachment, history] : log.histories) {
    if (attachment == kArmed || attachment == scope.attachment) continue;
    for (const Interval& interval : history.intervals) {
      if (!covers(interval)) continue;
      const TimelinePtr value = interval.value.lock();
      if ((interval.is_armed && value == nullptr) || !same_documents(value, scope.value)) return true;
    }
  }
  return false;
}

std::optional<TimelinePtr> Timeline::scope_on(const Moment& now, const std::vector<NodePlace>& nodes,
                                              int64_t attachment) const {
  for (const NodePlace& node : nodes) {
    if (std::optional<TimelinePtr> value = recomputed_scope_at(now, node, attachment)) return value;
  }
  return scope_at(nodes.back(), attachment);
}

TimelinePtr Timeline::armed_at(const NodePlace& node, Precedes precedes_region,
                               const std::optional<TimelinePtr>& armed_in_backward) const {
  const auto ran_without_us = [&]() {
    raise("the forward of " + place(node) + " ran no hooked attention, but its recompute does.");
  };
  const LogPtr log = find_log(node.thread);
  if (log == nullptr) ran_without_us();
  const std::lock_guard<std::mutex> guard(log->mutex);
  const auto found = log->histories.find(kArmed);
  if (found == log->histories.end()) ran_without_us();
  const History& history = found->second;
  if (node.sequence < history.forgotten_below) raise(place(node) + " is older than the last 2,000 forwards.");

  const Interval* at = nullptr;     // the last that begins at or before the node
  const Interval* after = nullptr;  // the first with a call after the node
  for (auto interval = history.intervals.rbegin(); interval != history.intervals.rend(); ++interval) {
    if (interval->has_call() && interval->last_call > node.sequence) after = &*interval;
    if (interval->from > node.sequence) continue;
    at = &*interval;
    break;
  }
  const bool is_within = at != nullptr && (at->is_open || node.sequence < at->to);
  const bool is_known = is_within && (at->exact_from || at->exact_to || at->last_call >= node.sequence);
  // A node known to precede its region is followed by that region's own call.
  if (precedes_region == Precedes::kYes && after == nullptr) ran_without_us();
  if (precedes_region != Precedes::kNo && after != nullptr) {
    TimelinePtr value = value_of(*after);
    // If other documents were armed between the node and that call, it may be the last node of its region (a
    // saved tensor of it is unpacked, and made again), and the call a later forward's; unless the arming is
    // the region's own, as its recompute then does again. Where another thread arms, only the node's kind
    // tells.
    const bool may_be_at_the_end = precedes_region == Precedes::kMaybe || is_known;
    if (may_be_at_the_end && at != nullptr && after != at && !(at->has_call() && states_equal(*at, *after)) &&
        !(armed_in_backward && same_documents(*armed_in_backward, value))) {
      raise("cannot tell whether " + place(node) +
            " was made before the region that is recomputed, or at its end, and other documents were armed "
            "between "
            "them.");
    }
    return value;
  }
  if (is_known) {
    if (!at->has_call()) ran_without_us();
    return value_of(*at);
  }
  // The armed value was changed by another thread somewhere between two calls of this one: a region's own
  // calls are the next ones on either side of its nodes.
  const Interval* before = at != nullptr && at->has_call() && (at->is_open || !at->exact_to) ? at : nullptr;
  if (before == nullptr && after == nullptr) ran_without_us();
  if (before == nullptr) return value_of(*after);
  if (after == nullptr || states_equal(*before, *after)) return value_of(*before);
  raise("the documents of " + place(node) + " were armed by another thread at a place that cannot be told.");
}

void Timeline::redirect_to_asker(const Moment& now, ThreadLog& log) {
  const auto is_over = [&](const Redirect& entry) {
    const bool same = entry.graph_task == now.graph_task && entry.asked_by.thread == now.node->thread &&
                      entry.asked_by.sequence == now.node->sequence;
    return entry.graph_task > now.graph_task || (entry.graph_task == now.graph_task && !same);
  };
  std::erase_if(log.redirects, is_over);
  if (!log.redirects.empty() && log.redirects.back().graph_task == now.graph_task) return;
  if (log.redirects.size() >= kMaxNesting) {
    raise(
        "checkpoints are nested " + std::to_string(kMaxNesting) + " deep; at most that many can be followed.",
        " Nest fewer checkpoints.");
  }
  const uint64_t certain_from = log.last_event_is_forward_call ? now.sequence : log.last_event;
  log.redirects.push_back(
      {now.graph_task, *now.node, now.node_precedes_region, log.last_event, certain_from, now.task});
}

TimelinePtr Timeline::value_at(const Moment& now, const Caller& caller, const Chain& chain,
                               const std::optional<TimelinePtr>& armed_in_backward, bool* by_scope) const {
  *by_scope = true;
  for (const int64_t attachment : caller.attachments) {
    if (const std::optional<TimelinePtr> value = scope_on(now, chain.nodes, attachment)) return *value;
  }
  *by_scope = false;
  const NodePlace& origin = chain.nodes.back();
  if (origin.thread == caller.hooked_at.thread && origin.sequence < caller.hooked_at.sequence) {
    raise("the forward of " + place(origin) +
          " ran before this attention was hooked, but its recompute is hooked.");
  }
  return armed_at(origin, chain.precedes_region, armed_in_backward);
}

TimelinePtr Timeline::resolve_in_backward(const Moment& now, const Caller& caller, ThreadLog& log) {
  std::vector<Scope> scopes;  // of one attachment, the innermost last
  std::optional<ArmedInBackward> armed_here;
  std::optional<TimelinePtr> armed_in_backward;  // here, or in a backward around this one
  {
    const std::lock_guard<std::mutex> guard(log.mutex);
    drop_ended(log);
    for (const int64_t attachment : caller.attachments) {
      for (const Scope& entry : log.scopes) {
        const bool counts =
            entry.counts && entry.attachment == attachment && entry.graph_task == now.graph_task;
        if (counts) scopes.push_back(entry);
      }
      if (!scopes.empty()) break;
    }
    if (log.armed_in_backward) armed_in_backward = log.armed_in_backward->value.lock();
    if (log.armed_in_backward && log.armed_in_backward->graph_task == now.graph_task) {
      armed_here = log.armed_in_backward;
    }
  }
  if (!now.node) {
    raise(
        "attention runs within a backward, but no autograd node is being evaluated (compiled autograd?), so "
        "its "
        "documents cannot be told.");
  }
  const Chain chain = chain_of(now);
  const NodePlace& origin = chain.nodes.back();
  TimelinePtr value;
  if (!scopes.empty()) {
    value = scopes.back().value;
    // What asks is made in any of them: one forward within another is repeated with it.
    const std::optional<TimelinePtr> at_node = scope_on(now, chain.nodes, scopes.back().attachment);
    const auto is_repeated = [&](const Scope& scope) {
      return at_node ? same_documents(*at_node, scope.value)
                     : fits_beside(origin, chain.precedes_region, scope);
    };
    if (std::none_of(scopes.begin(), scopes.end(), is_repeated)) {
      refuse_other_documents();
    }
  } else {
    bool by_scope = false;
    value = value_at(now, caller, chain, armed_in_backward, &by_scope);
    if (!chain.is_certain) {
      bool other_by_scope = false;
      const TimelinePtr other = value_at(now, caller, {{*now.node}, now.node_precedes_region, true},
                                         armed_in_backward, &other_by_scope);
      if (!same_documents(value, other)) {
        raise("cannot tell whether " + place(*now.node) +
              " was made by a recompute or by the forward before it.");
      }
    }
    if (armed_here && !by_scope && !same_documents(armed_here->value.lock(), value)) {
      raise(
          "documents were armed within this backward that differ from those of the forward that is "
          "recomputed; run a "
          "fresh forward outside of backward, or disarm before it goes on.");
    }
  }
  const std::lock_guard<std::mutex> guard(log.mutex);
  redirect_to_asker(now, log);
  log.last_event = now.sequence;
  log.last_event_is_forward_call = false;
  return value;
}

std::vector<Timeline::Asker> Timeline::askers(const Moment& now) const {
  if (now.graph_task == kNoGraphTask || !now.node) return {};
  const Chain chain = chain_of(now);
  std::vector<Asker> found{{chain.nodes.back(), chain.precedes_region}};
  if (!chain.is_certain) found.push_back({*now.node, now.node_precedes_region});
  return found;
}

void Timeline::refuse_other_documents() {
  raise(
      "a forward that is recomputed found other documents than it ran under; was its doc_ids buffer "
      "overwritten, its handle switched on or off, or its model attached anew?",
      " Leave the model as it is until backward has run. Where one checkpointed region runs the model under "
      "several documents, checkpoint each of its forwards by itself, or use the interface route.");
}

TimelinePtr Timeline::resolve(const Moment& now, const Caller& caller, const ArmedReading& reading) {
  const LogPtr log = log_of(now.thread);
  if (now.graph_task != kNoGraphTask && !ever_armed_) return nullptr;
  if (now.graph_task != kNoGraphTask) return resolve_in_backward(now, caller, *log);
  const std::lock_guard<std::mutex> guard(log->mutex);
  log->redirects.clear();
  log->last_event = now.sequence;
  log->last_event_is_forward_call = true;
  for (const int64_t attachment : caller.attachments) {
    const Scope* scope = innermost_scope(*log, attachment, kNoGraphTask);
    if (scope == nullptr) continue;
    Interval& interval = log->histories[attachment].intervals.back();
    if (!interval.has_call()) interval.first_call = now.sequence;
    interval.last_call = now.sequence;
    return scope->value;
  }
  observe(log->histories[kArmed], now.sequence, reading);
  return reading.value;
}

Timeline::Statistics Timeline::statistics() const {
  Statistics counts;
  const std::lock_guard<std::mutex> guard(mutex_);
  for (const auto& [thread, log] : logs_) {
    const std::lock_guard<std::mutex> log_guard(log->mutex);
    ++counts.threads;
    drop_ended(*log);
    counts.redirects += static_cast<int64_t>(log->redirects.size());
    counts.scopes += static_cast<int64_t>(log->scopes.size());
    for (const auto& [attachment, history] : log->histories) {
      counts.intervals += static_cast<int64_t>(history.intervals.size());
      for (const Interval& interval : history.intervals)
        counts.values_alive += interval.value.expired() ? 0 : 1;
    }
  }
  return counts;
}

}  // namespace packed_sdpa
