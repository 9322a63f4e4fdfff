// Which instruction set the CPU kernels use, for Python: info, tests and forced sets.
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <stdexcept>
#include <string>
#include <vector>

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

}  // namespace

TORCH_LIBRARY_FRAGMENT(packed_sdpa, library) {
  library.def("available_cpu_isas() -> str[]", available_cpu_isas);
  library.def("cpu_isa() -> str", cpu_isa);
  library.def("set_cpu_isa(str name) -> ()", set_cpu_isa);
}

}  // namespace packed_sdpa
