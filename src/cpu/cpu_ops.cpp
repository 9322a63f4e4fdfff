// The CPU kernels' instruction set and work items, for Python: info, tests, forced sets, schedules.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "backends.h"
#include "checks.h"
#include "cpu/kernels.h"

namespace packed_sdpa {

namespace {

std::vector<std::string> available_cpu_isas() {
  std::vector<std::string> names;
  for (const cpu::CpuIsa isa : cpu::available_cpu_isas()) names.emplace_back(cpu::isa_name(isa));
  return names;
}

std::string cpu_isa() {
  try {
    return std::string(cpu::isa_name(cpu::cpu_isa()));
  } catch (const std::invalid_argument& error) {  // a bad PACKED_SDPA_CPU_ISA
    TORCH_CHECK_VALUE(false, error.what());
  }
}

void set_cpu_isa(const std::string& name) {
  try {
    cpu::set_cpu_isa(name);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

// For schedules on more cores than there are: of each work item of a call the seconds on one thread, the sum
// at which it takes turns (-1: none), the first of its tiles there, and how many they are.
using WorkItemNotes =
    std::tuple<std::vector<double>, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>;

WorkItemNotes cpu_work_items(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                             at::TensorList layout, bool is_causal, int64_t window_left, int64_t window_right,
                             bool backward, int64_t num_threads) {
  checks::attention_inputs(query, key, value);
  TORCH_CHECK_VALUE(query.is_cpu(), "query must be on the CPU, got ", query.device());
  AttentionCall call;
  call.query = query;
  call.key = key;
  call.value = value;
  call.layout = checks::layout_list(layout);
  call.mask = checks::mask({is_causal, window_left, window_right});
  call.scale = 1.0 / std::sqrt(static_cast<double>(query.size(3)));
  TORCH_CHECK_VALUE(num_threads >= 1 && num_threads <= 1 << 16, "num_threads must be in [1, 65536], got ",
                    num_threads);
  checks::layout_tensors(call.layout, query.size(0), query.size(2), key.size(2));
  WorkItemNotes columns;
  auto& [seconds, sums, first_tiles, num_tiles] = columns;
  for (const cpu::ItemNote& note : cpu_item_notes(call, backward, static_cast<int>(num_threads))) {
    seconds.push_back(note.seconds);
    sums.push_back(note.sum);
    first_tiles.push_back(note.first_tile);
    num_tiles.push_back(note.num_tiles);
  }
  return columns;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(packed_sdpa, library) {
  library.def("available_cpu_isas() -> str[]", available_cpu_isas);
  library.def("cpu_isa() -> str", cpu_isa);
  library.def("set_cpu_isa(str name) -> ()", set_cpu_isa);
  library.def("cpu_parallel_threads() -> int", cpu_parallel_threads);
  library.def(
      "cpu_work_items(Tensor query, Tensor key, Tensor value, Tensor[] layout, bool is_causal, "
      "int window_left, int window_right, bool backward, int num_threads) -> "
      "(float[] seconds, int[] sums, int[] first_tiles, int[] num_tiles)",
      cpu_work_items);
}

}  // namespace packed_sdpa
