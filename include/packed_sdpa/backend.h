// Backends: each says in sentences why it cannot take a call; auto takes the first that has nothing to say.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "packed_sdpa/attention.h"
#include "packed_sdpa/layout.h"

namespace packed_sdpa {

// What a backend judges: numbers only, no data, so that choosing is a pure function of it.
struct AttentionRequest {
  c10::Device device = c10::kCPU;
  c10::ScalarType dtype = c10::kFloat;
  int64_t batch = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t rows_q = 0;
  int64_t rows_k = 0;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;
  MaskOptions mask;
  double dropout_p = 0.0;
  bool bottom_right = true;  // no diagonal offsets
  int64_t num_documents = 0;
  int64_t max_seqlen_q = 0;
  int64_t max_seqlen_k = 0;
  bool host_offsets = true;  // the offsets are on the host too, so a backend may plan with them
  bool has_gaps = false;     // some document has other rows between its own
  // Some document has queries and keys, but not as many of one as of the other; looked at where there is a
  // window.
  bool has_unequal_counts = false;
  int compute_capability = 0;  // of a CUDA device: 80 for 8.0; 0 when not known
};

// A checked call: shapes, dtypes, devices and layout values agree (checks.cpp saw to it).
struct AttentionCall {
  at::Tensor query, key, value;  // [B, Hq, L, D], [B, Hkv, S, D], [B, Hkv, S, Dv]
  LayoutTensors layout;
  MaskOptions mask;
  double scale = 1.0;
  double dropout_p = 0.0;
};

struct ForwardResult {
  at::Tensor out;
  at::Tensor lse;        // [B, Hq, L]
  at::Tensor rng_state;  // what backward needs to draw the same dropout; empty without dropout
};

struct Gradients {
  at::Tensor grad_query, grad_key, grad_value;
};

class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;
  virtual std::string_view name() const = 0;
  virtual std::vector<std::string> unsupported_reasons(const AttentionRequest& request) const = 0;
  virtual ForwardResult forward(const AttentionCall& call) const = 0;
  virtual Gradients backward(const AttentionCall& call, const at::Tensor& grad_out,
                             const ForwardResult& saved) const = 0;
};

// In the order in which auto tries them. "reference" is never taken by auto.
const std::vector<const AttentionBackend*>& available_backends();

struct BackendReport {
  std::string name;
  std::vector<std::string> reasons;  // empty: it can
  bool chosen = false;
};

AttentionRequest make_request(const AttentionCall& call);
// preference: auto, auto:NAME, or NAME. Raises c10::ValueError for an unknown name, c10::Error with every
// reason when none (or not the ordered one) can take the request.
const AttentionBackend& select_backend(const AttentionRequest& request, std::string_view preference);
std::vector<BackendReport> explain(const AttentionRequest& request, std::string_view preference = "auto");

}  // namespace packed_sdpa
