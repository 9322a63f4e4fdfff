// The CPU backend: tensors become parameter structs, torch's intra-op threads run the kernels.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "backends.h"
#include "cpu/huge_pages.h"
#include "cpu/kernels.h"
#include "tensors.h"

namespace packed_sdpa {

namespace {

class TorchExecutor final : public cpu::Executor {
 public:
  int num_threads() const override { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

  void run(void (*body)(void* context, int thread), void* context) override {
    at::parallel_for(0, num_threads(), /*grain_size=*/1, [&](int64_t begin, int64_t end) {
      for (int64_t thread = begin; thread < end; ++thread) body(context, static_cast<int>(thread));
    });
  }
};

cpu::ScalarType scalar_type(c10::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return cpu::ScalarType::kFloat32;
    case at::kDouble:
      return cpu::ScalarType::kFloat64;
    case at::kBFloat16:
      return cpu::ScalarType::kBFloat16;
    case at::kHalf:
      return cpu::ScalarType::kFloat16;
    default:
      TORCH_CHECK_TYPE(false, "query must be float32, float64, bfloat16 or float16, got ", dtype);
  }
}

cpu::StridedTensor strided(const at::Tensor& tensor) {
  // Kernels never write through the operands; one struct serves both directions.
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1), tensor.stride(2),
          tensor.stride(3)};
}

const int32_t* data_or_null(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : tensor.const_data_ptr<int32_t>();
}

void fill_common(cpu::AttentionParams& params, const AttentionCall& call, const at::Tensor& rng_state) {
  params.dtype = scalar_type(call.query.scalar_type());
  params.shape = {call.query.size(0), call.query.size(1), call.key.size(1),  call.query.size(2),
                  call.key.size(2),   call.query.size(3), call.value.size(3)};
  params.documents = {call.layout.cu_seqlens_q.numel() - 1,
                      call.layout.cu_seqlens_q.const_data_ptr<int32_t>(),
                      call.layout.cu_seqlens_k.const_data_ptr<int32_t>(),
                      data_or_null(call.layout.token_index_q),
                      data_or_null(call.layout.token_index_k),
                      data_or_null(call.layout.diagonal_offsets)};
  params.is_causal = call.mask.is_causal;
  params.window_left = call.mask.window_left;
  params.window_right = call.mask.window_right;
  params.scale = call.scale;
  params.dropout_p = call.dropout_p;
  if (call.dropout_p > 0.0) {
    params.dropout_seed = static_cast<uint64_t>(rng_state.const_data_ptr<int64_t>()[0]);
    params.dropout_offset = static_cast<uint64_t>(rng_state.const_data_ptr<int64_t>()[1]);
  }
}

// Two draws of the default generator; a call without dropout draws none.
at::Tensor draw_rng_state() {
  auto* generator =
      at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  at::Tensor state = at::empty({2}, at::kLong);
  state.mutable_data_ptr<int64_t>()[0] = static_cast<int64_t>(generator->random64());
  state.mutable_data_ptr<int64_t>()[1] = static_cast<int64_t>(generator->random64());
  return state;
}

// One thread, each work item timed; work is cut as for so many threads.
class TimingExecutor final : public cpu::Executor {
 public:
  explicit TimingExecutor(int num_threads) : num_threads_(num_threads) {}
  int num_threads() const override { return num_threads_; }
  void run(void (*body)(void* context, int thread), void* context) override { body(context, 0); }
  std::vector<cpu::ItemNote>* item_notes() override { return &notes_; }

 private:
  int num_threads_;
  std::vector<cpu::ItemNote> notes_;
};

void run_forward(const AttentionCall& call, const ForwardResult& result, cpu::Executor& executor) {
  cpu::ForwardParams params;
  fill_common(params, call, result.rng_state);
  params.query = strided(call.query);
  params.key = strided(call.key);
  params.value = strided(call.value);
  cpu::advise_huge_pages(result.out.mutable_data_ptr(), result.out.nbytes());
  params.out = strided(result.out);
  params.lse = result.lse.mutable_data_ptr();
  cpu::forward(params, executor);
}

void run_backward(const AttentionCall& call, const at::Tensor& grad_out, const ForwardResult& saved,
                  const Gradients& gradients, cpu::Executor& executor) {
  const at::Tensor lse = saved.lse.contiguous();
  cpu::BackwardParams params;
  fill_common(params, call, saved.rng_state);
  params.query = strided(call.query);
  params.key = strided(call.key);
  params.value = strided(call.value);
  params.out = strided(saved.out);
  params.grad_out = strided(grad_out);
  params.lse = lse.const_data_ptr();
  params.grad_query = strided(gradients.grad_query);
  params.grad_key = strided(gradients.grad_key);
  params.grad_value = strided(gradients.grad_value);
  cpu::backward(params, executor);
}

class CpuBackend final : public AttentionBackend {
 public:
  std::string_view name() const override { return "cpu"; }

  std::vector<std::string> unsupported_reasons(const AttentionRequest& request) const override {
    if (!request.device.is_cpu()) return {"it takes CPU tensors, these are on " + request.device.str()};
    return {};
  }

  ForwardResult forward(const AttentionCall& call) const override {
    ForwardResult result = empty_forward_result(call);
    if (call.dropout_p > 0.0) result.rng_state = draw_rng_state();
    TorchExecutor executor;
    run_forward(call, result, executor);
    return result;
  }

  Gradients backward(const AttentionCall& call, const at::Tensor& grad_out,
                     const ForwardResult& saved) const override {
    const Gradients gradients = empty_gradients(call);
    TorchExecutor executor;
    run_backward(call, grad_out, saved, gradients, executor);
    return gradients;
  }
};

}  // namespace

const AttentionBackend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

int64_t cpu_parallel_threads() {
  TorchExecutor executor;
  std::set<std::thread::id> seen;
  std::mutex seen_mutex;
  struct Seen {
    std::set<std::thread::id>* ids;
    std::mutex* mutex;
  } context{&seen, &seen_mutex};
  executor.run(
      [](void* pointer, int /*thread*/) {
        const Seen& into = *static_cast<Seen*>(pointer);
        const std::lock_guard<std::mutex> lock(*into.mutex);
        into.ids->insert(std::this_thread::get_id());
      },
      &context);
  return static_cast<int64_t>(seen.size());
}

std::vector<cpu::ItemNote> cpu_item_notes(const AttentionCall& call, bool backward, int num_threads) {
  TimingExecutor executor(num_threads);
  const ForwardResult result = empty_forward_result(call);
  run_forward(call, result, executor);
  if (backward) run_backward(call, at::ones_like(result.out), result, empty_gradients(call), executor);
  return *executor.item_notes();
}

}  // namespace packed_sdpa
