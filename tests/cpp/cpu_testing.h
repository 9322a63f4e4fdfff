// What the kernel tests share: named packings, tensors with odd strides, a dense oracle, executors.
//
// The oracle knows documents only as ids (0 is padding) and compares every query row with every key row; it
// shares no code with the kernels.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/params.h"

namespace packed_sdpa::cpu::testing {

// Ids of every query row [B, L] and key row [B, S].
struct Packing {
  std::string name;
  int64_t batch = 1;
  std::vector<int64_t> query_ids;
  std::vector<int64_t> key_ids;
  std::vector<int32_t> diagonal_offsets;  // per document in order of (batch, first row); empty: bottom-right

  int64_t rows_q() const { return static_cast<int64_t>(query_ids.size()) / batch; }
  int64_t rows_k() const { return static_cast<int64_t>(key_ids.size()) / batch; }
};

Packing packing_from_ids(const std::string& name, const std::vector<int64_t>& ids, int64_t batch = 1);
Packing packing_from_lengths(const std::string& name, const std::vector<int64_t>& lengths);

struct Settings {
  int64_t num_heads = 4;
  int64_t num_kv_heads = 2;
  int64_t head_dim = 16;
  int64_t head_dim_v = 16;
  bool is_causal = true;
  int64_t window_left = -1;
  int64_t window_right = -1;
  double scale = 0.25;
  double dropout_p = 0.0;
  ScalarType dtype = ScalarType::kFloat32;
  // 0 [B, H, S, D] contiguous; 1 [B, S, H, D]; 2 innermost stride 2; 3 one row of keys expanded over the
  // heads (stride 0) and rows padded by 3 elements.
  int layout = 1;
  uint64_t data_seed = 1;
};

std::string describe(const Packing& packing, const Settings& settings);

// A tensor in the storage type with guard elements around and between, poisoned with NaN.
class Tensor {
 public:
  Tensor() = default;
  Tensor(ScalarType dtype, int64_t batch, int64_t heads, int64_t rows, int64_t dim, int layout,
         bool expand_heads);
  StridedTensor view() const;
  double get(int64_t b, int64_t h, int64_t i, int64_t d) const;
  void set(int64_t b, int64_t h, int64_t i, int64_t d, double value);  // rounds to the storage type
  const std::vector<unsigned char>& bytes() const { return bytes_; }

  int64_t batch = 0, heads = 0, rows = 0, dim = 0;
  bool expanded = false;

 private:
  int64_t offset(int64_t b, int64_t h, int64_t i, int64_t d) const;
  ScalarType dtype_ = ScalarType::kFloat32;
  StridedTensor strides_;
  int64_t origin_ = 0;
  std::vector<unsigned char> bytes_;
};

double round_to(ScalarType dtype, double value);
double epsilon(ScalarType dtype);

struct Problem {
  Problem(const Packing& packing, const Settings& settings);
  ForwardParams forward_params();
  BackwardParams backward_params();
  void run_forward(Executor& executor);
  void run_backward(Executor& executor);

  Packing packing;
  Settings settings;
  std::vector<int32_t> cu_seqlens_q, cu_seqlens_k, token_index_q, token_index_k;
  std::vector<int64_t> query_document, key_document, query_rank, key_rank;  // -1 for padding
  std::vector<int64_t> document_queries, document_keys;
  Tensor query, key, value, out, grad_out, grad_query, grad_key, grad_value;
  std::vector<double> lse_double;
  std::vector<float> lse_float;
  std::string forward_kernel, backward_kernel;

  double lse(int64_t index) const;
  // The mask, from ids and row numbers; place_queries() first.
  void place_queries();
  bool sees(int64_t b, int64_t i, int64_t j) const;
  std::vector<int64_t> query_place;
};

// Dense results, [B, H, rows, dim] contiguous.
struct Dense {
  std::vector<double> out, lse, grad_query, grad_key, grad_value;
};
// In double without any rounding: the oracle. In float with every intermediate rounded to the problem's type:
// what torch's math path does, whose error is the measure of ours.
Dense dense_oracle(const Problem& problem, bool backward);
Dense dense_math_path(const Problem& problem, bool backward);

// Compares what the problem holds with the oracle; a failure names the worst element and both errors.
void expect_forward_matches(const Problem& problem);
void expect_backward_matches(const Problem& problem);

// Runs bodies on this many std::threads (1: on the calling thread), or one after another.
class ThreadExecutor final : public Executor {
 public:
  explicit ThreadExecutor(int num_threads, bool serial = false)
      : num_threads_(num_threads), serial_(serial) {}
  int num_threads() const override { return num_threads_; }
  void run(void (*body)(void* context, int thread), void* context) override;

 private:
  int num_threads_;
  bool serial_;
};

std::vector<std::string> isa_names();
std::string dtype_name(ScalarType dtype);

}  // namespace packed_sdpa::cpu::testing
