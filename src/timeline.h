// Which documents does an attention call belong to? In a forward: the ones in force. In a recompute during
// backward: those under which the autograd node that asks for the recompute was made.
//
// Each thread has a log of intervals of its autograd sequence numbers, with the documents in force in each.
// Nothing is guessed: a call whose documents cannot be told raises TimelineError, whose text says the cure.
//
// Torch-free, so that it can be tested under ThreadSanitizer; what torch knows comes in as a Moment.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <vector>

namespace packed_sdpa {

// What intervals refer to. Held weakly: forward graphs, scopes, running backwards and the armed state keep it
// alive.
class TimelineValue {
 public:
  virtual ~TimelineValue() = default;
  virtual bool same_as(const TimelineValue& other) const = 0;  // by content, on the host
};
using TimelinePtr = std::shared_ptr<const TimelineValue>;  // null: unarmed

// One running backward. It keeps what must live until it ends, however it ends.
class BackwardTask {
 public:
  void keep(const TimelinePtr& value) {
    if (value == nullptr) return;
    const std::lock_guard<std::mutex> guard(mutex_);
    kept_.push_back(value);
  }

 private:
  std::mutex mutex_;
  std::vector<TimelinePtr> kept_;
};

// state::resolve() hands it on as c10::Error.
class TimelineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Where an autograd node was made. Sequence numbers count per thread.
struct NodePlace {
  uint64_t thread = 0;
  uint64_t sequence = 0;
};

constexpr int64_t kNoGraphTask = -1;

// Whether a node was made before the region that it recomputes (a Python autograd.Function such as the
// reentrant checkpoint's), or within it or at its end (a node whose saved tensor is unpacked, and made
// again).
enum class Precedes { kNo, kMaybe, kYes };

// Here and now, as torch tells it.
struct Moment {
  uint64_t thread = 0;
  uint64_t sequence = 0;              // the next node made in this thread gets this number
  int64_t graph_task = kNoGraphTask;  // of the running backward
  std::optional<NodePlace> node;      // that is being evaluated
  Precedes node_precedes_region = Precedes::kNo;
  std::weak_ptr<BackwardTask> task;  // expires with the graph task
};

// The armed value as a thread sees it.
struct ArmedReading {
  TimelinePtr value;
  bool is_own = false;  // set by this very thread, so the log has its exact place
};

// Whose call it is. Attachments are scopes' owners, newest first; the armed state comes after all of them.
struct Caller {
  std::vector<int64_t> attachments;
  // Where the module was hooked: nodes made before that ran without us.
  NodePlace hooked_at;
};

class Timeline {
 public:
  // This thread armed or disarmed. Called right after the armed variable changed; is_own is false when the
  // thread is back to following the others.
  void armed(const Moment& now, const TimelinePtr& value, bool is_own);

  // One outer forward of an attachment's model begins / ends in this thread. One within another of the same
  // attachment does nothing if its documents are the same, else it counts until it ends. Leaving by number
  // makes unwinding after an interrupt safe: everything entered later ends as well.
  int64_t enter_scope(const Moment& now, int64_t attachment, const TimelinePtr& value);
  int64_t next_scope(const Moment& now);  // the number that the next scope of this thread will get
  void leave_scope(const Moment& now, int64_t scope);

  // The documents of an attention call, null for unarmed.
  TimelinePtr resolve(const Moment& now, const Caller& caller, const ArmedReading& reading);

  // An outer forward of this attachment runs in this thread (and in the same backward, if in one).
  bool in_scope(const Moment& now, int64_t attachment) const;

  // The node whose forward is recomputed here and now. Two where it cannot be told which; none outside of a
  // backward.
  struct Asker {
    NodePlace node;
    Precedes precedes_region = Precedes::kNo;
  };
  std::vector<Asker> askers(const Moment& now) const;

  // Throws what is said of a forward whose recompute was given documents that it did not run under.
  [[noreturn]] static void refuse_other_documents();

  struct Statistics {
    int64_t threads = 0;
    int64_t intervals = 0;
    int64_t redirects = 0;
    int64_t scopes = 0;
    int64_t values_alive = 0;
  };
  Statistics statistics() const;

 private:
  // from <= sequence < to. An exact end is where somebody armed, disarmed, entered or left in this thread;
  // the others are the first and last call that was seen.
  struct Interval {
    uint64_t from = 0;
    uint64_t to = 0;
    bool exact_from = false;
    bool exact_to = false;
    bool is_open = true;
    bool is_armed = false;
    std::weak_ptr<const TimelineValue> value;
    // Attention calls that were seen in it; none: last_call < first_call.
    uint64_t first_call = 1;
    uint64_t last_call = 0;

    bool has_call() const { return last_call >= first_call; }
  };

  struct Scope {
    int64_t number = 0;
    int64_t attachment = 0;
    int64_t graph_task = kNoGraphTask;
    bool counts = false;  // no other of its attachment and graph task runs around it with the same documents
    TimelinePtr value;
  };

  // Nodes that a recompute made in this thread stand for the node that asked for it, for deeper backwards
  // only.
  struct Redirect {
    int64_t graph_task = 0;
    NodePlace asked_by;
    Precedes asker_precedes_region = Precedes::kNo;
    uint64_t from = 0;
    // Nodes below this number may as well be the tail of the forward that ran last before the backward.
    uint64_t certain_from = 0;
    std::weak_ptr<BackwardTask> task;
  };

  // A scope that was entered within a backward.
  struct RecomputedScope {
    int64_t number = 0;
    int64_t attachment = 0;
    int64_t graph_task = 0;
    uint64_t from = 0;
    uint64_t to = UINT64_MAX;
    std::weak_ptr<const TimelineValue> value;  // null: unarmed
    std::weak_ptr<BackwardTask> task;          // keeps the value
  };

  struct ArmedInBackward {
    int64_t graph_task = 0;
    std::weak_ptr<const TimelineValue> value;  // null: disarmed
    std::weak_ptr<BackwardTask> task;          // keeps the value
  };

  struct History {
    std::deque<Interval> intervals;
    uint64_t forgotten_below = 0;  // intervals that were dropped ended before this number
  };

  struct ThreadLog {
    mutable std::mutex mutex;
    std::unordered_map<int64_t, History> histories;  // by attachment; kArmed is the armed state
    std::vector<Scope> scopes;
    std::vector<Redirect> redirects;
    std::vector<RecomputedScope> recomputed_scopes;
    std::optional<ArmedInBackward> armed_in_backward;
    uint64_t last_event = 0;
    bool last_event_is_forward_call = false;
    int64_t last_scope = 0;
    uint64_t last_use = 0;
  };
  using LogPtr = std::shared_ptr<ThreadLog>;

  static constexpr int64_t kArmed = 0;

  // The node that asks, and those that it stands for when a recompute made it, the forward's own last.
  struct Chain {
    std::vector<NodePlace> nodes;
    Precedes precedes_region = Precedes::kNo;  // the last one
    bool is_certain = true;
  };

  LogPtr log_of(uint64_t thread);
  // The one that counts for this attachment's calls.
  static const Scope* innermost_scope(const ThreadLog& log, int64_t attachment, int64_t graph_task);
  LogPtr find_log(uint64_t thread) const;
  void drop_oldest_logs();

  static void close_open(History& history, uint64_t sequence, bool keep_empty = false);
  static void open_exact(History& history, uint64_t sequence, const TimelinePtr& value);
  static void forget_old(History& history);
  static void observe(History& history, uint64_t sequence, const ArmedReading& reading);
  static void drop_ended(ThreadLog& log);
  static bool states_equal(const Interval& a, const Interval& b);
  static TimelinePtr value_of(const Interval& interval);
  static void redirect_to_asker(const Moment& now, ThreadLog& log);

  Chain chain_of(const Moment& now) const;
  std::optional<TimelinePtr> recomputed_scope_at(const Moment& now, const NodePlace& node,
                                                 int64_t attachment) const;
  std::optional<TimelinePtr> scope_at(const NodePlace& node, int64_t attachment) const;
  std::optional<TimelinePtr> scope_on(const Moment& now, const std::vector<NodePlace>& nodes,
                                      int64_t attachment) const;
  bool fits_beside(const NodePlace& node, Precedes precedes_region, const Scope& scope) const;
  static bool ran_under_another(const ThreadLog& log, const NodePlace& node, const Scope& scope);
  TimelinePtr armed_at(const NodePlace& node, Precedes precedes_region,
                       const std::optional<TimelinePtr>& armed_in_backward) const;
  TimelinePtr value_at(const Moment& now, const Caller& caller, const Chain& chain,
                       const std::optional<TimelinePtr>& armed_in_backward, bool* by_scope) const;
  TimelinePtr resolve_in_backward(const Moment& now, const Caller& caller, ThreadLog& log);

  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, LogPtr> logs_;
  uint64_t uses_ = 0;
  std::atomic<bool> ever_armed_{false};
};

bool same_documents(const TimelinePtr& a, const TimelinePtr& b);

}  // namespace packed_sdpa
