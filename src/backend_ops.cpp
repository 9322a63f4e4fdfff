// explain() and build facts for Python.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "checks.h"
#include "packed_sdpa/backend.h"

namespace packed_sdpa {

namespace {

// The dtype in which a call is computed: under autocast the operands are cast first.
at::Tensor as_computed(const at::Tensor& operand) {
  const at::DeviceType device = operand.device().type();
  const bool is_cast = at::autocast::is_autocast_available(device) &&
                       at::autocast::is_autocast_enabled(device) && operand.is_floating_point() &&
                       operand.scalar_type() != at::kDouble;
  if (!is_cast || operand.scalar_type() == at::autocast::get_autocast_dtype(device)) return operand;
  return at::empty_like(operand, operand.options().dtype(at::autocast::get_autocast_dtype(device)));
}

// Rows of [name, "1" when chosen, reason, reason, ...]; no data is read, meta tensors will do.
std::vector<std::vector<std::string>> explain_op(const at::Tensor& query, const at::Tensor& key,
                                                 const at::Tensor& value, at::TensorList layout,
                                                 bool is_causal, int64_t window_left, int64_t window_right,
                                                 double dropout_p, std::string_view backend) {
  AttentionCall call;
  call.query = as_computed(query);
  call.key = as_computed(key);
  call.value = as_computed(value);
  checks::attention_inputs(call.query, call.key, call.value);
  call.layout = checks::layout_list(layout);
  call.mask = checks::mask({is_causal, window_left, window_right});
  call.dropout_p = dropout_p;
  checks::dropout(dropout_p);
  std::vector<std::vector<std::string>> rows;
  for (const BackendReport& report : explain(make_request(call), backend)) {
    std::vector<std::string> row{report.name, report.chosen ? "1" : "0"};
    row.insert(row.end(), report.reasons.begin(), report.reasons.end());
    rows.push_back(std::move(row));
  }
  return rows;
}

std::vector<std::string> backend_names() {
  std::vector<std::string> names;
  for (const AttentionBackend* backend : available_backends()) names.emplace_back(backend->name());
  return names;
}

std::string built_with_torch() {
  return TORCH_VERSION;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(packed_sdpa, library) {
  library.def(
      "explain(Tensor query, Tensor key, Tensor value, Tensor[] layout, bool is_causal, int window_left, "
      "int window_right, float dropout_p, str backend) -> str[][]",
      explain_op);
  library.def("backend_names() -> str[]", backend_names);
  library.def("built_with_torch() -> str", built_with_torch);
}

}  // namespace packed_sdpa
