// The thread-shared variable and the timeline without torch: also built with ThreadSanitizer.
#include "timeline.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "thread_shared.h"

namespace packed_sdpa {
namespace {

struct Value : TimelineValue {
  explicit Value(int n) : number(n) {}
  bool same_as(const TimelineValue& other) const override {
    return static_cast<const Value&>(other).number == number;
  }
  int number;
};

TimelinePtr value(int number) {
  return std::make_shared<const Value>(number);
}
int number_of(const TimelinePtr& held) {
  return held == nullptr ? 0 : static_cast<const Value&>(*held).number;
}

using Shared = ThreadSharedVar<int>;

template <typename Function>
void in_thread(Function function) {
  std::thread thread(function);
  thread.join();
}

TEST(ThreadSharedVar, OwnValueElseTheLatest) {
  Shared shared;
  EXPECT_EQ(shared.get().value, 0);
  shared.set(1);
  in_thread([&] {
    EXPECT_EQ(shared.get().value, 1);
    EXPECT_FALSE(shared.get().is_own);
    shared.set(2);
    EXPECT_TRUE(shared.get().is_own);
  });
  EXPECT_EQ(shared.get().value, 1);
  in_thread([&] { EXPECT_EQ(shared.get().value, 2); });  // the latest, of a thread that has ended
}

TEST(ThreadSharedVar, TokensNestAndAreUsedOnce) {
  Shared shared;
  const Shared::Token first = shared.set(1);
  const Shared::Token second = shared.set(2);
  shared.reset(second);
  EXPECT_EQ(shared.get().value, 1);
  EXPECT_THROW(shared.reset(second), std::runtime_error);
  in_thread([&] { EXPECT_THROW(shared.reset(first), std::invalid_argument); });
  Shared other;
  EXPECT_THROW(other.reset(first), std::invalid_argument);
  shared.reset(first);
  EXPECT_EQ(shared.get().value, 0);
}

TEST(ThreadSharedVar, ValuesOfEndedThreadsAreLetGo) {
  ThreadSharedVar<std::shared_ptr<int>> shared;
  std::weak_ptr<int> alive;
  in_thread([&] {
    const auto held = std::make_shared<int>(1);
    alive = held;
    shared.set(held);
  });
  EXPECT_FALSE(alive.expired());
  shared.set(nullptr);
  EXPECT_TRUE(alive.expired());
}

TEST(ThreadSharedVar, ManyThreads) {
  Shared shared;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 1; t <= 8; ++t) {
    threads.emplace_back([&, t] {
      shared.get();
      for (int i = 0; i < 2000; ++i) {
        const Shared::Token token = shared.set(t);
        if (shared.get().value != t) ++wrong;
        if (i % 2 == 0) shared.reset(token);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// A thread as torch would show it: its sequence counter and the backward that runs in it.
struct Clock {
  uint64_t thread = 1;
  uint64_t sequence = 0;

  Moment forward() const { return {thread, sequence, kNoGraphTask, std::nullopt, Precedes::kNo, {}}; }
  Moment backward(int64_t task, NodePlace node, const std::shared_ptr<BackwardTask>& alive,
                  Precedes precedes = Precedes::kNo) const {
    return {thread, sequence, task, node, precedes, alive};
  }
  NodePlace make_node() { return {thread, sequence++}; }
};

struct Process {
  Timeline timeline;
  Clock clock;
  TimelinePtr armed;
  std::shared_ptr<BackwardTask> task = std::make_shared<BackwardTask>();

  void arm(const TimelinePtr& documents) {
    armed = documents;
    timeline.armed(clock.forward(), documents, true);
  }
  int call() { return number_of(timeline.resolve(clock.forward(), {}, {armed, true})); }
  int recompute(NodePlace node, int64_t graph_task = 1, Precedes precedes = Precedes::kNo) {
    return number_of(timeline.resolve(clock.backward(graph_task, node, task, precedes), {}, {armed, true}));
  }
};

constexpr const char* kCure =
    " Arm (or call the attached model) in the thread that runs the layers, before the checkpointed region, "
    "and "
    "keep the hooks attached until backward has run.";

constexpr const char* kLeaveTheModel =
    " Leave the model as it is until backward has run. Where one checkpointed region runs the model under "
    "several "
    "documents, checkpoint each of its forwards by itself, or use the interface route.";

// What is raised is a TimelineError of this text, with the cure behind it.
template <typename Function>
void expect_error(const std::string& text, Function function, const std::string& cure = kCure) {
  try {
    function();
    ADD_FAILURE() << "nothing was raised; expected: " << text;
  } catch (const TimelineError& error) {
    EXPECT_EQ(error.what(), "packed_sdpa: " + text + cure);
  }
}

constexpr const char* kGone =
    "the documents of the forward that is recomputed are gone: nothing that is left of it holds its "
    "attention's "
    "outputs, or it ran without a graph in a checkpoint that keeps nothing of its forward (written in C++, "
    "or with "
    "setup_context), and 16 later ones did so too.";

std::string ran_no_hooked_attention(const NodePlace& node) {
  return "the forward of autograd node " + std::to_string(node.sequence) + " of thread " +
         std::to_string(node.thread) + " ran no hooked attention, but its recompute does.";
}

TEST(Timeline, RecomputeReadsTheForwardOfItsNode) {
  Process process;
  const TimelinePtr a = value(1);
  const TimelinePtr b = value(2);
  process.arm(a);
  const NodePlace before_a = process.clock.make_node();
  EXPECT_EQ(process.call(), 1);
  const NodePlace in_a = process.clock.make_node();
  process.arm(b);
  EXPECT_EQ(process.call(), 2);
  const NodePlace in_b = process.clock.make_node();
  process.arm(nullptr);
  EXPECT_EQ(process.call(), 0);
  const NodePlace unarmed = process.clock.make_node();
  EXPECT_EQ(process.recompute(in_a), 1);
  EXPECT_EQ(process.recompute(in_b), 2);
  EXPECT_EQ(process.recompute(before_a), 1);
  EXPECT_EQ(process.recompute(before_a, 1, Precedes::kYes), 1);
  EXPECT_EQ(process.recompute(unarmed), 0);
}

TEST(Timeline, DeeperBackwardsFollowTheNodeThatAsked) {
  Process process;
  const TimelinePtr a = value(1);
  const TimelinePtr b = value(2);
  process.arm(a);
  const NodePlace outer = process.clock.make_node();
  process.call();
  process.arm(b);
  process.call();
  const NodePlace tail_of_b = process.clock.make_node();
  const NodePlace inner = process.clock.make_node();  // made by the recompute, before its first call
  EXPECT_EQ(process.recompute(outer, 1, Precedes::kYes), 1);
  expect_error(
      "cannot tell whether autograd node 1 of thread 1 was made by a recompute or by the forward before it.",
      [&] { process.recompute(tail_of_b, 2); });
  const NodePlace after_call = process.clock.make_node();
  EXPECT_EQ(process.recompute(inner, 2, Precedes::kYes), 1);
  EXPECT_EQ(process.recompute(after_call, 2), 1);
  EXPECT_EQ(process.recompute(tail_of_b, 1), 2);  // same backward: not deeper
  process.task.reset();                           // the backward has ended, however
  process.task = std::make_shared<BackwardTask>();
  EXPECT_EQ(process.recompute(tail_of_b, 3), 2);
  EXPECT_EQ(process.timeline.statistics().redirects, 1);
}

TEST(Timeline, AskersAreTheNodesWhoseForwardIsRecomputed) {
  Process process;
  const TimelinePtr a = value(1);
  process.arm(a);
  const NodePlace outer = process.clock.make_node();
  process.call();
  const NodePlace unsure = process.clock.make_node();  // of that forward, or of the recompute
  const auto askers = [&](int64_t graph_task, NodePlace node, Precedes precedes) {
    std::vector<std::pair<uint64_t, Precedes>> found;
    const Moment now = process.clock.backward(graph_task, node, process.task, precedes);
    for (const Timeline::Asker& asker : process.timeline.askers(now)) {
      EXPECT_EQ(asker.node.thread, process.clock.thread);
      found.emplace_back(asker.node.sequence, asker.precedes_region);
    }
    return found;
  };
  using Found = std::vector<std::pair<uint64_t, Precedes>>;
  EXPECT_TRUE(process.timeline.askers(process.clock.forward()).empty());
  EXPECT_EQ(askers(1, outer, Precedes::kYes), (Found{{outer.sequence, Precedes::kYes}}));
  EXPECT_EQ(process.recompute(outer, 1, Precedes::kYes), 1);
  const NodePlace inner = process.clock.make_node();
  EXPECT_EQ(askers(2, inner, Precedes::kNo), (Found{{outer.sequence, Precedes::kYes}}));
  EXPECT_EQ(askers(2, unsure, Precedes::kMaybe), (Found{{outer.sequence, Precedes::kYes}}));
  EXPECT_EQ(askers(2, unsure, Precedes::kNo),
            (Found{{outer.sequence, Precedes::kYes}, {unsure.sequence, Precedes::kNo}}));
}

TEST(Timeline, ScopesWinAndUnwindByNumber) {
  Process process;
  process.arm(value(9));
  const TimelinePtr a = value(1);
  const TimelinePtr b = value(2);
  const Caller caller{{7}, {}};
  const ArmedReading armed{process.armed, true};
  const int64_t outer = process.timeline.enter_scope(process.clock.forward(), 7, a);
  const auto now = [&] {
    return number_of(process.timeline.resolve(process.clock.forward(), caller, armed));
  };
  EXPECT_EQ(now(), 1);
  const NodePlace before = process.clock.make_node();
  const int64_t inner = process.timeline.enter_scope(process.clock.forward(), 7, b);  // within its own
  EXPECT_EQ(now(), 2);
  const NodePlace within = process.clock.make_node();
  process.timeline.leave_scope(process.clock.forward(), inner);
  EXPECT_EQ(now(), 1);
  const NodePlace node = process.clock.make_node();
  const auto repeated = [&](const NodePlace& place) {
    return number_of(process.timeline.resolve(process.clock.backward(1, place, process.task), caller, armed));
  };
  process.timeline.enter_scope(process.clock.forward(), 7, b);  // ends with the outer one
  process.timeline.leave_scope(process.clock.forward(), outer);
  EXPECT_EQ(process.timeline.statistics().scopes, 0);
  EXPECT_EQ(number_of(process.timeline.resolve(process.clock.forward(), caller, armed)), 9);
  EXPECT_EQ(repeated(before), 1);
  EXPECT_EQ(repeated(within), 2);
  EXPECT_EQ(repeated(node), 1);
}

TEST(Timeline, RaisesWhereItCannotTell) {
  Process process;
  EXPECT_EQ(process.recompute({5, 3}), 0);  // nobody has ever armed
  process.arm(value(1));
  const NodePlace node = process.clock.make_node();
  expect_error(ran_no_hooked_attention(node), [&] { process.recompute(node); });  // hooked after the forward
  const NodePlace elsewhere{5, 3};  // a thread that never ran a hooked call
  expect_error(ran_no_hooked_attention(elsewhere), [&] { process.recompute(elsewhere); });
  process.call();
  process.arm(nullptr);  // the armed value is gone
  expect_error(
      kGone, [&] { process.recompute(node); },
      " Run that backward before so many forwards, or use a checkpoint that is given its context, as "
      "torch.utils.checkpoint is.");
  Moment no_node = process.clock.backward(1, node, process.task);
  no_node.node.reset();
  expect_error(
      "attention runs within a backward, but no autograd node is being evaluated (compiled autograd?), so "
      "its "
      "documents cannot be told.",
      [&] { process.timeline.resolve(no_node, {}, {}); });
  expect_error(
      "the forward of autograd node 0 of thread 1 ran before this attention was hooked, but its recompute is "
      "hooked.",
      [&] {
        process.timeline.resolve(process.clock.backward(1, node, process.task), {{}, {1, 50}}, {});
      });
}

// A node that may stand before its region or at its end: the calls on both sides must agree.
TEST(Timeline, ANodeBeforeOrBehindItsRegion) {
  const auto read = [](bool call_before, bool same_after) {
    Process process;
    process.arm(value(1));
    if (call_before) process.call();
    const NodePlace node = process.clock.make_node();
    if (!same_after) process.arm(value(2));
    process.call();
    Moment now = process.clock.backward(1, node, process.task);
    now.node_precedes_region = Precedes::kMaybe;
    return number_of(process.timeline.resolve(now, {}, {}));
  };
  EXPECT_EQ(read(true, true), 1);
  EXPECT_EQ(read(false, true), 1);
  for (const bool call_before : {true, false}) {
    expect_error(
        "cannot tell whether autograd node 0 of thread 1 was made before the region that is recomputed, or "
        "at "
        "its end, and other documents were armed between them.",
        [&] { read(call_before, false); });
  }
}

TEST(Timeline, DocumentsOfOneForwardThatDiffer) {
  Process process;
  const TimelinePtr a = value(1);
  const TimelinePtr b = value(2);
  process.arm(a);
  process.call();
  const NodePlace node = process.clock.make_node();
  const Moment in_backward = process.clock.backward(1, node, process.task);
  process.timeline.armed(in_backward, b, true);
  expect_error(
      "documents were armed within this backward that differ from those of the forward that is recomputed; "
      "run a "
      "fresh forward outside of backward, or disarm before it goes on.",
      [&] { process.recompute(node); });

  Process other;
  const int64_t scope = other.timeline.enter_scope(other.clock.forward(), 7, a);
  const NodePlace within = other.clock.make_node();
  other.timeline.leave_scope(other.clock.forward(), scope);
  const Moment recompute = other.clock.backward(1, within, other.task);
  other.timeline.enter_scope(recompute, 7, b);
  expect_error(
      "a forward that is recomputed found other documents than it ran under; was its doc_ids buffer "
      "overwritten, its handle switched on or off, or its model attached anew?",
      [&] {
        other.timeline.resolve(recompute, {{7}, {}}, {});
      },
      kLeaveTheModel);
}

TEST(Timeline, NestingIsBounded) {
  Process process;
  process.arm(value(1));
  process.call();
  const NodePlace node = process.clock.make_node();
  for (int64_t task = 1; task <= 50; ++task) EXPECT_EQ(process.recompute(node, task), 1);
  expect_error(
      "checkpoints are nested 50 deep; at most that many can be followed.",
      [&] { process.recompute(node, 51); }, " Nest fewer checkpoints.");
}

TEST(Timeline, WhatABackwardArmedOrEnteredEndsWithIt) {
  Process process;
  process.arm(value(1));
  process.call();
  const NodePlace node = process.clock.make_node();
  TimelinePtr armed = value(1);
  TimelinePtr scoped = value(2);
  const std::weak_ptr<const TimelineValue> armed_alive = armed;
  const std::weak_ptr<const TimelineValue> scoped_alive = scoped;
  const Moment in_backward = process.clock.backward(1, node, process.task);
  process.timeline.armed(in_backward, armed, true);
  const int64_t scope = process.timeline.enter_scope(in_backward, 7, scoped);
  armed.reset();
  scoped.reset();
  EXPECT_EQ(number_of(process.timeline.resolve(in_backward, {{7}, {}}, {})), 2);
  process.timeline.leave_scope(in_backward, scope);
  EXPECT_FALSE(armed_alive.expired());  // a deeper backward may ask
  EXPECT_FALSE(scoped_alive.expired());
  process.task.reset();
  EXPECT_TRUE(armed_alive.expired());
  EXPECT_TRUE(scoped_alive.expired());
}

TEST(Timeline, AFollowerKnowsWhatItsOwnCallsSaw) {
  Process process;
  const TimelinePtr a = value(1);
  const TimelinePtr b = value(2);
  process.timeline.armed({2, 0, kNoGraphTask, std::nullopt, Precedes::kNo, {}}, a, true);  // another thread
  const auto call = [&](const TimelinePtr& seen) {
    return number_of(process.timeline.resolve(process.clock.forward(), {}, {seen, false}));
  };
  const NodePlace first = process.clock.make_node();
  call(a);
  const NodePlace in_call = process.clock.make_node();
  call(a);
  process.clock.make_node();
  const NodePlace between = process.clock.make_node();
  call(b);
  const NodePlace last = process.clock.make_node();
  process.clock.make_node();
  EXPECT_EQ(process.recompute(first), 1);
  EXPECT_EQ(process.recompute(in_call), 1);
  EXPECT_EQ(process.recompute(last), 2);
  EXPECT_EQ(process.recompute(between, 1, Precedes::kYes), 2);  // its region's own call is the next
  expect_error(
      "the documents of autograd node 3 of thread 1 were armed by another thread at a place that cannot be "
      "told.",
      [&] { process.recompute(between); });
  expect_error(
      "cannot tell whether autograd node 3 of thread 1 was made before the region that is recomputed, or at "
      "its "
      "end, and other documents were armed between them.",
      [&] { process.recompute(between, 1, Precedes::kMaybe); });
}

TEST(Timeline, ANodeWithNoCallAfterItIsTheLastOfItsRegion) {
  Process process;
  process.arm(value(1));
  process.call();
  EXPECT_EQ(process.recompute(process.clock.make_node(), 1, Precedes::kMaybe), 1);
}

// A model that was attached again: its first scope is in a recompute of a forward under the earlier
// attachment.
TEST(Timeline, ARecomputeOfAForwardUnderAnEarlierAttachment) {
  const auto read = [](int documents) {
    Process process;
    const TimelinePtr a = value(1);
    const int64_t scope = process.timeline.enter_scope(process.clock.forward(), 7, a);
    const NodePlace node = process.clock.make_node();
    process.timeline.leave_scope(process.clock.forward(), scope);
    const Moment now = process.clock.backward(1, node, process.task);
    process.timeline.enter_scope(now, 8, value(documents));
    return number_of(process.timeline.resolve(now, {{8, 7}, {}}, {}));
  };
  EXPECT_EQ(read(1), 1);
  expect_error(
      "a forward that is recomputed found other documents than it ran under; was its doc_ids buffer "
      "overwritten, its handle switched on or off, or its model attached anew?",
      [&] { read(2); }, kLeaveTheModel);
}

TEST(Timeline, HistoryIsBounded) {
  Process process;
  const TimelinePtr a = value(1);
  const NodePlace first = process.clock.make_node();
  for (int i = 0; i < 10000; ++i) {
    process.arm(i % 2 == 0 ? a : nullptr);
    process.call();
    process.clock.make_node();
  }
  EXPECT_LE(process.timeline.statistics().intervals, 4096);
  const std::string too_old = "autograd node 0 of thread 1 is older than the last 2,000 forwards.";
  expect_error(too_old, [&] { process.recompute(first); });
  for (int i = 0; i < 5000; ++i) {
    const int64_t scope = process.timeline.enter_scope(process.clock.forward(), 7, a);
    process.clock.make_node();
    process.timeline.leave_scope(process.clock.forward(), scope);
  }
  expect_error(too_old, [&] {
    process.timeline.resolve(process.clock.backward(1, first, process.task), {{7}, {}}, {});
  });
}

TEST(Timeline, ThreadsDoNotDisturbEachOther) {
  Timeline timeline;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 1; t <= 6; ++t) {
    threads.emplace_back([&, t] {
      Clock clock{static_cast<uint64_t>(t), 0};
      const std::vector<TimelinePtr> values{value(t), value(100 + t), nullptr};
      for (int round = 0; round < 300; ++round) {
        const auto task = std::make_shared<BackwardTask>();
        std::vector<NodePlace> nodes;
        for (const TimelinePtr& armed : values) {
          timeline.armed(clock.forward(), armed, true);
          nodes.push_back(clock.make_node());
          timeline.resolve(clock.forward(), {}, {armed, true});
        }
        for (size_t i = 0; i < nodes.size(); ++i) {
          Clock other{static_cast<uint64_t>(t + 50), clock.sequence};  // backward runs in a thread of its own
          const TimelinePtr found = timeline.resolve(other.backward(round, nodes[i], task), {}, {});
          if (number_of(found) != number_of(values[i])) ++wrong;
        }
        const int64_t scope = timeline.enter_scope(clock.forward(), t, values[0]);
        timeline.leave_scope(clock.forward(), scope);
        timeline.statistics();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace packed_sdpa
