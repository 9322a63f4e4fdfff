// torch's memory-efficient varlen kernels: float32, and head dims that flash refuses.
//
// What their source asks for (read in torch 2.13 and 2.14):
// - operands [1, T, H, D], one count of heads: keys and values of grouped heads are repeated (O(tokens));
// - lse is [N, H, longest query, to whole 32]: documents go in chunks, so that it stays O(tokens);
// - a row that sees no key gets lse -inf and an undefined out, and gradients of documents without queries or
//   keys are undefined: these rows are set to zero here;
// - dropout's random state is on the host, and documents of different length share counters: refused;
// - window_size (kernel_forward.h, kernel_backward.h; the same in 2.11) is for causal masks only and counts
//   the row itself, key > place - window_size, so it is left + 1. Forward takes place = query + keys -
//   queries, backward place = query: equal only where documents have as many queries as keys, so others are
//   refused.
#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "backends.h"
#include "cuda/aten_op.h"
#include "cuda/varlen_rows.h"

namespace packed_sdpa {

namespace {

constexpr int64_t kNoMask = 0;
constexpr int64_t kCausalFromBottomRight = 2;
constexpr int64_t kLseMultiple = 32;
constexpr int64_t kHeadDimMultiple = 8;
constexpr int64_t kMaxDocuments = 65'535;  // the grid's axis of documents
constexpr int64_t kLseShare = 8;           // lse rows of a call: at most 8 times the rows of the batch
constexpr int64_t kMinLseRows = 65'536;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Arguments = std::vector<AtenOp::Argument>;

const AtenOp& forward_op() {
  static const AtenOp op("aten::_efficient_attention_forward");
  return op;
}

const AtenOp& backward_op() {
  static const AtenOp op("aten::_efficient_attention_backward");
  return op;
}

int64_t whole(int64_t rows, int64_t multiple) {
  return (rows + multiple - 1) / multiple * multiple;
}

FitsOneCall fits_one_call(int64_t rows_q) {
  const int64_t limit = std::max(kLseShare * rows_q, kMinLseRows);
  return [limit](int64_t documents, int64_t max_seqlen_q) {
    return documents == 1 ||
           (documents <= kMaxDocuments && documents * whole(max_seqlen_q, kLseMultiple) <= limit);
  };
}

KernelTraits traits_for(const AttentionCall& call) {
  return {fits_one_call(call.query.size(0) * call.query.size(2)), /*takes_rows_behind=*/false,
          kHeadDimMultiple};
}

// [T, Hkv, D] -> [1, T, Hq, D]
at::Tensor repeat_heads(const at::Tensor& rows, int64_t num_heads) {
  const int64_t repeats = num_heads / rows.size(1);
  if (repeats == 1) return rows.unsqueeze(0);
  return rows.unsqueeze(2).expand({-1, -1, repeats, -1}).flatten(1, 2).unsqueeze(0);
}

// [1, T, Hq, D] -> [T, Hkv, D]
at::Tensor sum_heads(const at::Tensor& rows, int64_t num_kv_heads) {
  const at::Tensor part = rows.squeeze(0);
  if (part.size(1) == num_kv_heads) return part;
  return part.unflatten(1, {num_kv_heads, part.size(1) / num_kv_heads}).sum(2);
}

Arguments common_arguments(const KernelCall& part, const MaskOptions& mask, double scale) {
  const bool has_rows = part.query.defined();
  Arguments arguments = {
      {"query", has_rows ? c10::IValue(part.query.unsqueeze(0)) : c10::IValue()},
      {"key", has_rows ? c10::IValue(repeat_heads(part.key, part.query.size(1))) : c10::IValue()},
      {"value", has_rows ? c10::IValue(repeat_heads(part.value, part.query.size(1))) : c10::IValue()},
      {"bias", c10::IValue()},
      {"cu_seqlens_q", part.cu_seqlens_q},
      {"cu_seqlens_k", part.cu_seqlens_k},
      {"max_seqlen_q", part.max_seqlen_q},
      {"max_seqlen_k", part.max_seqlen_k},
      {"dropout_p", 0.0},
      {"custom_mask_type", mask.is_causal ? kCausalFromBottomRight : kNoMask},
      {"scale", scale}};
  if (mask.window_left >= 0) {  // int32 in the kernel, which adds to it: no longer than a document
    const int64_t longest = std::max<int64_t>(part.max_seqlen_k, 1);
    arguments.emplace_back("window_size", std::min(mask.window_left, longest - 1) + 1);
  }
  return arguments;
}

std::vector<std::string> schema_reasons(const MaskOptions& mask) {
  const auto reasons_of = [&](const AtenOp& op, std::vector<std::string_view> names) {
    for (const AtenOp::Argument& argument : common_arguments({}, mask, 1.0)) names.push_back(argument.first);
    return op.schema_reasons(names);
  };
  std::vector<std::string> reasons = reasons_of(forward_op(), {"compute_log_sumexp"});
  for (std::string& reason : reasons_of(backward_op(), {"grad_out_", "out", "logsumexp", "philox_seed",
                                                        "philox_offset", "bias_requires_grad"})) {
    reasons.push_back(std::move(reason));
  }
  return reasons;
}

// Where a row stands: its document and its rank there. Documents cover all rows.
struct Places {
  at::Tensor document, rank;  // int64 [t]
};

Places places_of(const at::Tensor& cu_seqlens, int64_t rows) {
  const at::Tensor row = at::arange(rows, cu_seqlens.options());
  const at::Tensor document = at::bucketize(row, cu_seqlens.slice(0, 1), /*out_int32=*/false, /*right=*/true);
  return {document, (row - cu_seqlens.index_select(0, document)).to(at::kLong)};
}

// [t] places of an lse [N, Hq, longest], as an index of its first and last dimension.
c10::List<std::optional<at::Tensor>> index_of(const Places& places) {
  c10::List<std::optional<at::Tensor>> index;
  index.push_back(places.document);
  index.push_back(places.rank);
  return index;
}

// Rows of documents without queries.
at::Tensor unqueried_keys(const KernelCall& part) {
  const at::Tensor counts_q = part.cu_seqlens_q.slice(0, 1) - part.cu_seqlens_q.slice(0, 0, -1);
  return (counts_q == 0).index_select(0, places_of(part.cu_seqlens_k, part.key.size(0)).document);
}

at::Tensor zero_rows(const at::Tensor& rows, const at::Tensor& condition) {
  return rows.masked_fill(condition.view({-1, 1, 1}), 0.0);
}

class EfficientBackend final : public AttentionBackend {
 public:
  std::string_view name() const override { return "efficient"; }

  std::vector<std::string> unsupported_reasons(const AttentionRequest& request) const override {
    if (!forward_op().has_kernel(request.device.type()) || !backward_op().has_kernel(request.device.type())) {
      return {"this torch has no " + forward_op().name() + " for " +
              c10::DeviceTypeName(request.device.type(), /*lower_case=*/true)};
    }
    static const std::vector<std::string> without_window = schema_reasons({/*is_causal=*/true, -1, -1});
    static const std::vector<std::string> with_window = schema_reasons({/*is_causal=*/true, 0, 0});
    std::vector<std::string> reasons = request.mask.window_left >= 0 ? with_window : without_window;
    const auto refuse_if = [&](bool condition, const std::string& reason) {
      if (condition) reasons.push_back(reason);
    };
    refuse_if(request.dtype != at::kFloat && request.dtype != at::kHalf && request.dtype != at::kBFloat16,
              std::string("it takes float32, float16 and bfloat16, not ") + c10::toString(request.dtype));
    refuse_if(request.dropout_p > 0.0,
              "its dropout keeps random state on the host and shares it between documents (dropout_p " +
                  std::to_string(request.dropout_p) + ")");
    const bool has_window = request.mask.window_left >= 0;
    const std::string window = " (" + std::to_string(request.mask.window_left) + ", " +
                               std::to_string(request.mask.window_right) + ")";
    refuse_if(!request.mask.is_causal && (has_window || request.mask.window_right >= 0),
              "it takes windows with is_causal only" + window);
    refuse_if(has_window && (request.has_unequal_counts || !request.bottom_right),
              "it takes windows of documents with as many queries as keys only" + window);
    refuse_if(has_window && request.has_gaps, kWindowOverGaps + window);
    refuse_if(!request.bottom_right && !request.mask.is_causal,
              "queries that do not end with their document's keys need is_causal");
    const int64_t documents = documents_for_kernel(request);
    refuse_if(
        !request.host_offsets &&
            !fits_one_call(request.batch * request.rows_q)(documents, request.max_seqlen_q),
        std::to_string(documents) + " documents of up to " + std::to_string(request.max_seqlen_q) +
            " rows need several calls, and this layout (GraphLayout) does not have its offsets on the host");
    return reasons;
  }

  ForwardResult forward(const AttentionCall& call) const override {
    return varlen_forward(call, traits_for(call), [&](const KernelCall& part) {
      Arguments arguments = common_arguments(part, call.mask, call.scale);
      arguments.emplace_back("compute_log_sumexp", true);
      const std::vector<c10::IValue> outputs = forward_op().call(arguments);
      const Places places = places_of(part.cu_seqlens_q, part.query.size(0));
      const at::Tensor lse =  // [t, Hq]
          at::index(outputs[1].toTensor().transpose(1, 2), index_of(places));
      const at::Tensor sees_nothing = (lse == -kInfinity).unsqueeze(2);
      return KernelResult{outputs[0].toTensor().squeeze(0).masked_fill(sees_nothing, 0.0), lse.t(),
                          at::empty({0}, part.query.options().dtype(at::kLong))};
    });
  }

  Gradients backward(const AttentionCall& call, const at::Tensor& grad_out,
                     const ForwardResult& saved) const override {
    return varlen_backward(
        call, grad_out, saved, traits_for(call),
        [&](const KernelCall& part, const at::Tensor& grad_part, const KernelResult& saved_part) {
          const Places places = places_of(part.cu_seqlens_q, part.query.size(0));
          at::Tensor lse =  // [N, Hq, longest to whole 32], +inf where there is no row
              at::full(
                  {part.cu_seqlens_q.numel() - 1, part.query.size(1), whole(part.max_seqlen_q, kLseMultiple)},
                  kInfinity, saved_part.lse.options());
          at::Tensor lse_by_row = lse.transpose(1, 2);
          lse_by_row.index_put_(index_of(places), saved_part.lse.t());
          const at::Tensor no_state = at::empty({}, at::TensorOptions(at::kLong));
          Arguments arguments = common_arguments(part, call.mask, call.scale);
          arguments.emplace_back("grad_out_", grad_part.unsqueeze(0));
          arguments.emplace_back("out", saved_part.out.unsqueeze(0));
          arguments.emplace_back("logsumexp", lse);
          arguments.emplace_back("philox_seed", no_state);
          arguments.emplace_back("philox_offset", no_state);
          arguments.emplace_back("bias_requires_grad", false);
          const std::vector<c10::IValue> outputs = backward_op().call(arguments);
          const int64_t num_kv_heads = part.key.size(1);
          const at::Tensor sees_nothing = (saved_part.lse.t() == kInfinity).unsqueeze(2);
          const at::Tensor unqueried = unqueried_keys(part);
          return KernelGradients{outputs[0].toTensor().squeeze(0).masked_fill(sees_nothing, 0.0),
                                 zero_rows(sum_heads(outputs[1].toTensor(), num_kv_heads), unqueried),
                                 zero_rows(sum_heads(outputs[2].toTensor(), num_kv_heads), unqueried)};
        });
  }
};

}  // namespace

const AttentionBackend& efficient_backend() {
  static const EfficientBackend backend;
  return backend;
}

}  // namespace packed_sdpa
