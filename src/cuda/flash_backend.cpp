// torch's own flash-attention varlen kernels, through the dispatcher: nothing to install beside torch.
//
// What their source asks for (read in torch 2.13 and 2.14, argument lists also in 2.11):
// - operands [T, H, D] of any row and head stride, last stride 1; D a multiple of 8 up to 256, equal for q, k
// and v;
// - cu_seqlens int32; the grid's axis of documents ends at 65,535;
// - a row that sees no key gets out 0 and lse +inf; a document without queries gets zero gradients of its
// keys;
// - max_q == 1 with grouped heads would take a decoding path that assumes one row a document, so max_q is at
// least 2;
// - backward allocates float32 [T + 128 N, Hq, D]: more documents than kAccumulatorShare allows go in chunks;
// - dropout's philox state comes back as uint64 [2] on the device.
#include <ATen/ATen.h>

#include <algorithm>
#include <string>
#include <vector>

#include "backends.h"
#include "cuda/aten_op.h"
#include "cuda/varlen_rows.h"

namespace packed_sdpa {

namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kHeadDimMultiple = 8;
constexpr int64_t kMaxDocuments = 65'535;
constexpr int64_t kMinDocuments = 1'024;   // so many go in one call whatever they cost
constexpr int64_t kRowsPerDocument = 128;  // accumulator rows that each document costs
constexpr int64_t kAccumulatorShare = 2;   // those of all documents: at most twice the rows of the batch
constexpr int64_t kMinSeqlen = 2;
constexpr int kMinComputeCapability = 80;

using Arguments = std::vector<AtenOp::Argument>;

const AtenOp& forward_op() {
  static const AtenOp op("aten::_flash_attention_forward");
  return op;
}

const AtenOp& backward_op() {
  static const AtenOp op("aten::_flash_attention_backward");
  return op;
}

bool has_window(const MaskOptions& mask) {
  return mask.window_left >= 0 || (!mask.is_causal && mask.window_right >= 0);
}

// What both operators are told. Windows only where there is one: that needs no more of a torch than it has.
Arguments common_arguments(const KernelCall& part, const MaskOptions& mask, double scale, double dropout_p) {
  Arguments arguments = {{"query", part.query},
                         {"key", part.key},
                         {"value", part.value},
                         {"cum_seq_q", part.cu_seqlens_q},
                         {"cum_seq_k", part.cu_seqlens_k},
                         {"max_q", std::max(part.max_seqlen_q, kMinSeqlen)},
                         {"max_k", std::max(part.max_seqlen_k, kMinSeqlen)},
                         {"dropout_p", dropout_p},
                         {"is_causal", mask.is_causal},
                         {"scale", scale}};
  if (has_window(mask)) {
    arguments.emplace_back("window_size_left", mask.window_left);
    arguments.emplace_back("window_size_right", mask.is_causal ? int64_t{0} : mask.window_right);
  }
  return arguments;
}

std::vector<std::string> schema_reasons(const MaskOptions& mask) {
  const auto reasons_of = [&](const AtenOp& op, std::vector<std::string_view> names) {
    for (const AtenOp::Argument& argument : common_arguments({}, mask, 1.0, 0.0))
      names.push_back(argument.first);
    return op.schema_reasons(names);
  };
  std::vector<std::string> reasons = reasons_of(forward_op(), {"return_debug_mask"});
  for (std::string& reason :
       reasons_of(backward_op(), {"grad_out", "out", "logsumexp", "rng_state", "unused"})) {
    reasons.push_back(std::move(reason));
  }
  return reasons;
}

int64_t documents_a_call(int64_t rows_q) {
  return std::clamp(kAccumulatorShare * rows_q / kRowsPerDocument, kMinDocuments, kMaxDocuments);
}

KernelTraits traits_for(const AttentionCall& call) {
  const int64_t limit = documents_a_call(call.query.size(0) * call.query.size(2));
  return {[limit](int64_t documents, int64_t) { return documents <= limit; }, /*takes_rows_behind=*/true,
          kHeadDimMultiple};
}

class FlashBackend final : public AttentionBackend {
 public:
  std::string_view name() const override { return "flash"; }

  std::vector<std::string> unsupported_reasons(const AttentionRequest& request) const override {
    if (!forward_op().has_kernel(request.device.type()) || !backward_op().has_kernel(request.device.type())) {
      return {"this torch has no " + forward_op().name() + " for " +
              c10::DeviceTypeName(request.device.type(), /*lower_case=*/true)};
    }
    static const std::vector<std::string> without_window = schema_reasons({/*is_causal=*/true, -1, -1});
    static const std::vector<std::string> with_window = schema_reasons({/*is_causal=*/true, 0, 0});
    std::vector<std::string> reasons = has_window(request.mask) ? with_window : without_window;
    const auto refuse_if = [&](bool condition, const std::string& reason) {
      if (condition) reasons.push_back(reason);
    };
    refuse_if(request.dtype != at::kHalf && request.dtype != at::kBFloat16,
              std::string("it takes float16 and bfloat16, not ") + c10::toString(request.dtype));
    refuse_if(request.compute_capability != 0 && request.compute_capability < kMinComputeCapability,
              "it needs compute capability 8.0, this device has " +
                  std::to_string(request.compute_capability / 10) + "." +
                  std::to_string(request.compute_capability % 10));
    refuse_if(request.head_dim > kMaxHeadDim, "its head dim ends at " + std::to_string(kMaxHeadDim) +
                                                  ", not " + std::to_string(request.head_dim));
    refuse_if(request.head_dim != request.head_dim_v, "query and value must have one head dim, not " +
                                                          std::to_string(request.head_dim) + " and " +
                                                          std::to_string(request.head_dim_v));
    refuse_if(!request.bottom_right && !request.mask.is_causal,
              "queries that do not end with their document's keys need is_causal");
    refuse_if(request.has_gaps && has_window(request.mask), kWindowOverGaps);
    const int64_t limit = documents_a_call(request.batch * request.rows_q);
    const int64_t documents = documents_for_kernel(request);
    refuse_if(documents > limit && !request.host_offsets,
              std::to_string(documents) + " documents need several calls (at most " + std::to_string(limit) +
                  " in one), and this layout (GraphLayout) does not have its offsets on the host");
    refuse_if(documents > limit && request.dropout_p > 0.0,
              std::to_string(documents) + " documents need several calls (at most " + std::to_string(limit) +
                  " in one), and dropout has one random state a call");
    return reasons;
  }

  ForwardResult forward(const AttentionCall& call) const override {
    return varlen_forward(call, traits_for(call), [&](const KernelCall& part) {
      Arguments arguments = common_arguments(part, call.mask, call.scale, call.dropout_p);
      arguments.emplace_back("return_debug_mask", false);
      const std::vector<c10::IValue> outputs = forward_op().call(arguments);
      KernelResult result{outputs[0].toTensor(), outputs[1].toTensor(), {}};
      result.rng_state = call.dropout_p > 0.0 ? outputs[2].toTensor().view(at::kLong)
                                              : at::empty({0}, part.query.options().dtype(at::kLong));
      return result;
    });
  }

  Gradients backward(const AttentionCall& call, const at::Tensor& grad_out,
                     const ForwardResult& saved) const override {
    return varlen_backward(
        call, grad_out, saved, traits_for(call),
        [&](const KernelCall& part, const at::Tensor& grad_part, const KernelResult& saved_part) {
          const at::TensorOptions state_options = part.query.options().dtype(at::kUInt64);
          Arguments arguments = common_arguments(part, call.mask, call.scale, call.dropout_p);
          arguments.emplace_back("grad_out", grad_part);
          arguments.emplace_back("out", saved_part.out);
          arguments.emplace_back("logsumexp", saved_part.lse);
          arguments.emplace_back("rng_state", call.dropout_p > 0.0 ? saved_part.rng_state.view(at::kUInt64)
                                                                   : at::empty({2}, state_options));
          arguments.emplace_back("unused", at::empty({}, state_options));
          const std::vector<c10::IValue> outputs = backward_op().call(arguments);
          return KernelGradients{outputs[0].toTensor(), outputs[1].toTensor(), outputs[2].toTensor()};
        });
  }
};

}  // namespace

const AttentionBackend& flash_backend() {
  static const FlashBackend backend;
  return backend;
}

}  // namespace packed_sdpa
