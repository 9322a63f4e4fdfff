// Choice of a backend: an ordered list, reasons in sentences, no trial runs.
#include <c10/util/Exception.h>

#include <sstream>

#include "backends.h"
#include "cuda/capability.h"
#include "packed_sdpa/backend.h"
#include "rows.h"

namespace packed_sdpa {

namespace {

constexpr std::string_view kAuto = "auto";
constexpr std::string_view kAutoPrefix = "auto:";

bool taken_by_auto(const AttentionBackend& backend) {
  return backend.name() != "reference";
}

std::string known_names() {
  std::string names(kAuto);
  for (const AttentionBackend* backend : available_backends()) names.append(", ").append(backend->name());
  return names;
}

const AttentionBackend& backend_named(std::string_view name) {
  for (const AttentionBackend* backend : available_backends()) {
    if (backend->name() == name) return *backend;
  }
  TORCH_CHECK_VALUE(false, "backend must be one of ", known_names(), ", got '", std::string(name), "'");
}

std::string join(const std::vector<std::string>& sentences) {
  std::string text;
  for (const std::string& sentence : sentences) text.append(text.empty() ? "" : "; ").append(sentence);
  return text;
}

std::string describe(const AttentionRequest& request) {
  std::ostringstream text;
  text << request.dtype << " on " << request.device << ", B " << request.batch << ", Hq " << request.num_heads
       << ", Hkv " << request.num_kv_heads << ", L " << request.rows_q << ", S " << request.rows_k << ", D "
       << request.head_dim << ", Dv " << request.head_dim_v << ", is_causal " << request.mask.is_causal
       << ", window_size (" << request.mask.window_left << ", " << request.mask.window_right
       << "), dropout_p " << request.dropout_p;
  return text.str();
}

}  // namespace

const std::vector<const AttentionBackend*>& available_backends() {
  static const std::vector<const AttentionBackend*> backends = {
      &cpu_backend(),        &flash_backend(),        &efficient_backend(), &te_backend(),
      &flash_attn_backend(), &per_document_backend(), &reference_backend()};
  return backends;
}

AttentionRequest make_request(const AttentionCall& call) {
  AttentionRequest request;
  request.device = call.query.device();
  request.dtype = call.query.scalar_type();
  request.batch = call.query.size(0);
  request.num_heads = call.query.size(1);
  request.num_kv_heads = call.key.size(1);
  request.rows_q = call.query.size(2);
  request.rows_k = call.key.size(2);
  request.head_dim = call.query.size(3);
  request.head_dim_v = call.value.size(3);
  request.mask = call.mask;
  request.dropout_p = call.dropout_p;
  request.bottom_right = call.layout.diagonal_offsets.numel() == 0;
  request.num_documents = call.layout.cu_seqlens_q.numel() - 1;
  request.max_seqlen_q = call.layout.max_seqlens.const_data_ptr<int64_t>()[0];
  request.max_seqlen_k = call.layout.max_seqlens.const_data_ptr<int64_t>()[1];
  request.host_offsets = has_host_offsets(call.layout);
  request.has_gaps = has_gaps(call.layout);
  request.has_unequal_counts = call.mask.window_left >= 0 && has_unequal_counts(call.layout);
  request.compute_capability = compute_capability(request.device);
  return request;
}

namespace {

// A backend in the order in which a preference tries them; `eligible`: it may be chosen.
struct Candidate {
  const AttentionBackend* backend;
  bool eligible;
};

std::vector<Candidate> candidates(std::string_view preference) {
  const bool is_auto = preference == kAuto;
  const bool is_preference = preference.substr(0, kAutoPrefix.size()) == kAutoPrefix;
  const AttentionBackend* named = nullptr;
  if (is_preference) named = &backend_named(preference.substr(kAutoPrefix.size()));
  if (!is_auto && !is_preference) named = &backend_named(preference);
  const bool is_order = named != nullptr && !is_preference;

  std::vector<Candidate> order;
  if (named != nullptr) order.push_back({named, true});
  for (const AttentionBackend* backend : available_backends()) {
    if (backend != named) order.push_back({backend, !is_order && taken_by_auto(*backend)});
  }
  return order;
}

}  // namespace

std::vector<BackendReport> explain(const AttentionRequest& request, std::string_view preference) {
  std::vector<BackendReport> reports;
  bool found = false;
  for (const auto& [backend, eligible] : candidates(preference)) {
    BackendReport report{std::string(backend->name()), backend->unsupported_reasons(request), false};
    report.chosen = !found && eligible && report.reasons.empty();
    found |= report.chosen;
    reports.push_back(std::move(report));
  }
  return reports;
}

const AttentionBackend& select_backend(const AttentionRequest& request, std::string_view preference) {
  for (const auto& [backend, eligible] : candidates(preference)) {
    if (eligible && backend->unsupported_reasons(request).empty()) return *backend;
  }
  const std::vector<BackendReport> reports = explain(request, preference);
  if (preference == reports.front().name) {
    TORCH_CHECK(false, "backend '", reports.front().name, "' cannot take this call (", describe(request),
                "): ", join(reports.front().reasons), ". backend='auto' takes the first that can");
  }
  std::string all;
  for (const BackendReport& report : reports) all += "\n  " + report.name + ": " + join(report.reasons);
  TORCH_CHECK(false, "no backend can take this call (", describe(request), "):", all);
}

}  // namespace packed_sdpa
