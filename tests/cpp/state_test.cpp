// Armed documents, scopes and the drop-in on libtorch.
#include "packed_sdpa/state.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "packed_sdpa/attention.h"

namespace packed_sdpa {
namespace {

at::Tensor ids(std::initializer_list<int64_t> values) {
  return at::tensor(at::ArrayRef<int64_t>(values));
}

at::Tensor operand(int64_t seed) {
  at::manual_seed(static_cast<uint64_t>(seed));
  return at::randn({1, 2, 6, 4}, at::kDouble);
}

at::Tensor packed(const at::Tensor& x, const at::Tensor& doc_ids) {
  return packed_attention(x, x, x, PackedLayout::from_doc_ids(doc_ids)).out;
}

at::Tensor stock(const at::Tensor& x) {
  return at::scaled_dot_product_attention(x, x, x);
}
at::Tensor drop_in(const at::Tensor& x) {
  return packed_sdpa::scaled_dot_product_attention(x, x, x);
}

class State : public testing::Test {
 protected:
  void SetUp() override { disarm(); }
  void TearDown() override { disarm(); }

  at::Tensor a_ = ids({1, 1, 1, 2, 2, 2});
  at::Tensor b_ = ids({1, 2, 2, 2, 2, 0});
};

TEST_F(State, ScopesNestAndPutBack) {
  const at::Tensor x = operand(1);
  EXPECT_TRUE(drop_in(x).equal(stock(x)));
  {
    const PackedAttentionScope outer(a_);
    EXPECT_TRUE(at::allclose(drop_in(x), packed(x, a_)));
    {
      const PackedAttentionScope inner(b_);
      EXPECT_TRUE(at::allclose(drop_in(x), packed(x, b_)));
      const PackedAttentionScope unarmed((DocumentsPtr()));
      EXPECT_TRUE(drop_in(x).equal(stock(x)));
    }
    EXPECT_EQ(armed_documents(), outer.documents());
  }
  EXPECT_EQ(armed_documents(), nullptr);
}

TEST_F(State, ScopesEndByExceptions) {
  try {
    const PackedAttentionScope scope(a_);
    throw std::runtime_error("out of it");
  } catch (const std::runtime_error&) {
    EXPECT_EQ(armed_documents(), nullptr);
  }
}

TEST_F(State, BadDocumentsChangeNothing) {
  arm(a_);
  const DocumentsPtr before = armed_documents();
  EXPECT_THROW(arm(ids({1, -1})), c10::ValueError);
  EXPECT_THROW(arm(at::ones({3})), c10::TypeError);
  EXPECT_THROW(arm(a_, "flsh"), c10::ValueError);
  EXPECT_THROW(PackedAttentionScope(at::ones({1, 2, 3}, at::kLong)), c10::ValueError);
  EXPECT_EQ(armed_documents(), before);
}

TEST_F(State, IdsAreCopied) {
  at::Tensor buffer = a_.clone();
  arm(buffer);
  buffer.fill_(7);
  EXPECT_TRUE(armed_documents()->doc_ids().equal(a_.unsqueeze(0)));
}

TEST_F(State, EveryThreadSeesTheLatestOrItsOwn) {
  arm(a_);
  const at::Tensor x = operand(2);
  std::thread([&] {
    EXPECT_TRUE(at::allclose(drop_in(x), packed(x, a_)));
    const PackedAttentionScope scope(b_);
    EXPECT_TRUE(at::allclose(drop_in(x), packed(x, b_)));
  }).join();
  EXPECT_TRUE(at::allclose(drop_in(x), packed(x, a_)));
}

TEST_F(State, OtherShapesArePassedThrough) {
  arm(a_);
  const at::Tensor longer = at::randn({1, 2, 7, 4});
  EXPECT_TRUE(drop_in(longer).equal(stock(longer)));
  const at::Tensor two_rows = at::randn({2, 2, 6, 4});
  EXPECT_TRUE(drop_in(two_rows).equal(stock(two_rows)));
}

TEST_F(State, HeadsAsStockTakesThem) {
  arm(a_);
  const at::Tensor query = at::randn({1, 4, 6, 8});
  const at::Tensor one = at::randn({1, 1, 6, 8});
  const at::Tensor two = at::randn({1, 2, 6, 8});
  EXPECT_TRUE(at::allclose(packed_sdpa::scaled_dot_product_attention(query, one, one),
                           packed_attention(query, one, one, armed_documents()->layout()).out));
  EXPECT_TRUE(at::allclose(
      packed_sdpa::scaled_dot_product_attention(query, two, two, {}, 0.0, false, {}, /*enable_gqa=*/true),
      packed_attention(query, two, two, armed_documents()->layout()).out));
  EXPECT_THROW(packed_sdpa::scaled_dot_product_attention(query, two, two), c10::Error);
}

// Against stock itself: what it refuses is refused, and what it takes is its own result under a dense mask.
TEST_F(State, AllHeadCountsAsStockTakesThem) {
  arm(a_);
  const at::Tensor row = at::arange(6).unsqueeze(1);
  const at::Tensor mask = a_.unsqueeze(1).eq(a_).logical_and(row.ge(row.t()));
  int taken = 0;
  for (const bool enable_gqa : {false, true}) {
    for (int64_t n = 0; n < 4 * 4 * 4; ++n) {
      const int64_t heads_q = 1 + n / 16, heads_k = 1 + n / 4 % 4, heads_v = 1 + n % 4;
      SCOPED_TRACE("Hq " + std::to_string(heads_q) + ", heads of key " + std::to_string(heads_k) +
                   ", of value " + std::to_string(heads_v) + (enable_gqa ? ", enable_gqa" : ""));
      const at::Tensor query = at::randn({1, heads_q, 6, 4}, at::kDouble);
      const at::Tensor key = at::randn({1, heads_k, 6, 4}, at::kDouble);
      const at::Tensor value = at::randn({1, heads_v, 6, 4}, at::kDouble);
      const auto ours = [&] {
        return packed_sdpa::scaled_dot_product_attention(query, key, value, {}, 0.0, false, {}, enable_gqa);
      };
      at::Tensor expected;
      try {
        expected = at::scaled_dot_product_attention(query, key, value, mask, 0.0, false, {}, enable_gqa);
      } catch (const c10::Error&) {
        EXPECT_THROW(ours(), c10::Error);
        continue;
      }
      ++taken;
      const at::Tensor out = ours();
      ASSERT_EQ(out.sizes(), expected.sizes());
      EXPECT_TRUE(at::allclose(out, expected, 1e-12, 1e-12));
    }
  }
  // Without enable_gqa each count is 1 or the largest: 1 + 3 * 7. With it: divisors of 1, 2, 3 and 4,
  // squared.
  EXPECT_EQ(taken, 22 + 18);
}

// A checkpoint as a libtorch program would write one.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    return drop_in(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const at::AutoGradMode enabled(true);
    const at::Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_();
    drop_in(x).backward(grads[0]);
    return {x.grad()};
  }
};

TEST_F(State, RecomputeReadsTheDocumentsOfItsForward) {
  const auto gradient = [](const at::Tensor& x, const at::Tensor& doc_ids) {
    const at::Tensor leaf = x.detach().clone().requires_grad_();
    packed(leaf, doc_ids).square().sum().backward();
    return leaf.grad();
  };
  const at::Tensor x = operand(3).requires_grad_();
  const at::Tensor y = operand(4).requires_grad_();
  at::Tensor loss_x;
  at::Tensor loss_y;
  {
    const PackedAttentionScope scope(a_);
    loss_x = Checkpoint::apply(x).square().sum();
  }
  {
    const PackedAttentionScope scope(b_);
    loss_y = Checkpoint::apply(y).square().sum();
  }
  loss_x.backward();
  std::thread([&] { loss_y.backward(); }).join();
  EXPECT_TRUE(at::allclose(x.grad(), gradient(x, a_)));
  EXPECT_TRUE(at::allclose(y.grad(), gradient(y, b_)));
}

// What is kept alive.

at::Tensor checkpointed_loss(const at::Tensor& x, const DocumentsPtr& documents) {
  const PackedAttentionScope scope(documents);
  return Checkpoint::apply(x).square().sum();
}

TEST_F(State, DocumentsLiveAsLongAsTheGraph) {
  const at::Tensor x = operand(5).requires_grad_();
  std::weak_ptr<const ArmedDocuments> alive;
  at::Tensor loss;
  {
    const PackedAttentionScope scope(a_);
    alive = scope.documents();
    loss = drop_in(x).sum();
  }
  EXPECT_FALSE(alive.expired());
  loss.backward();
  loss.reset();
  EXPECT_TRUE(alive.expired());
}

TEST_F(State, AnEvaluationInInferenceModeKeepsNothing) {
  const at::Tensor x = operand(5);
  std::weak_ptr<const ArmedDocuments> alive;
  {
    const c10::InferenceMode inference;
    const PackedAttentionScope scope(a_);
    alive = scope.documents();
    drop_in(x);
  }
  EXPECT_TRUE(alive.expired());
}

TEST_F(State, TheLast16DocumentsWithoutAGraphAreKept) {
  const at::Tensor x = operand(6).requires_grad_();
  std::vector<std::weak_ptr<const ArmedDocuments>> alive;
  std::vector<at::Tensor> losses;
  for (int i = 0; i < 17; ++i) {
    const DocumentsPtr documents = ArmedDocuments::make(i % 2 == 0 ? a_ : b_);
    alive.push_back(documents);
    losses.push_back(checkpointed_loss(x, documents));
  }
  EXPECT_TRUE(alive[0].expired());
  for (size_t i = 1; i < alive.size(); ++i) EXPECT_FALSE(alive[i].expired()) << i;
  losses[1].backward();
  const at::Tensor leaf = x.detach().clone().requires_grad_();
  packed(leaf, b_).square().sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), leaf.grad()));
  try {
    losses[0].backward();
    FAIL() << "its documents are gone";
  } catch (const c10::Error& error) {
    EXPECT_NE(error.msg().find("the documents of the forward that is recomputed are gone"), std::string::npos)
        << error.msg();
    EXPECT_NE(error.msg().find("Run that backward before so many forwards"), std::string::npos)
        << error.msg();
  }
}

// Called in a backward, where nothing of ours ran before.
struct CallsInBackward : torch::autograd::Function<CallsInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& /*grads*/) {
    return {drop_in(ctx->get_saved_variables()[0])};
  }
};

TEST_F(State, ARecomputeWhoseDocumentsCannotBeToldIsAnErrorOfC10) {
  at::Tensor loss;
  std::thread([&] { loss = CallsInBackward::apply(operand(7).requires_grad_()).sum(); }).join();
  arm(a_);
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST_F(State, AScopeThatEndsInAnotherThreadEndsTheProgram) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(
      {
        auto scope = std::make_unique<PackedAttentionScope>(a_);
        std::thread([&] { scope.reset(); }).join();
      },
      "token was made in another thread; reset\\(\\) belongs to the thread that called set\\(\\)");
}

}  // namespace
}  // namespace packed_sdpa
