// Which instruction sets this processor and its operating system run, and which one is in use.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace packed_sdpa::cpu {
namespace {

constexpr int kNumIsas = 5;
constexpr std::string_view kIsaNames[kNumIsas] = {"scalar", "avx2", "avx512", "avx512_bf16", "amx"};

#if defined(__x86_64__)

struct CpuidLeaf {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidLeaf cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuidLeaf result;
  if (__get_cpuid_count(leaf, subleaf, &result.eax, &result.ebx, &result.ecx, &result.edx) == 0) return {};
  return result;
}

bool bit(uint32_t word, int position) {
  return ((word >> position) & 1u) != 0;
}

// Register states that the operating system saves (XCR0).
uint64_t saved_states() {
  uint32_t low;
  uint32_t high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Linux hands out the 8 kB of AMX tile registers only on request, and may refuse.
bool request_amx_permission() {
#if defined(__linux__)
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kXfeatureTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0;
#else
  return false;
#endif
}

std::vector<CpuIsa> detect() {
  std::vector<CpuIsa> isas = {CpuIsa::kScalar};
  const CpuidLeaf features = cpuid(1, 0);
  const CpuidLeaf extended = cpuid(7, 0);
  const CpuidLeaf extended1 = cpuid(7, 1);
  const bool osxsave = bit(features.ecx, 27);
  if (!osxsave) return isas;
  const uint64_t states = saved_states();

  constexpr uint64_t kYmmStates = 0x6;       // SSE, AVX
  constexpr uint64_t kZmmStates = 0xe6;      // and opmask, upper halves, upper 16 registers
  constexpr uint64_t kTileStates = 0x60000;  // tile configuration, tile data
  const bool fma = bit(features.ecx, 12);
  const bool f16c = bit(features.ecx, 29);
  const bool avx2 = bit(extended.ebx, 5);
  if ((states & kYmmStates) != kYmmStates || !fma || !f16c || !avx2) return isas;
  isas.push_back(CpuIsa::kAvx2);

  const bool avx512 =  // F, DQ, BW, VL
      bit(extended.ebx, 16) && bit(extended.ebx, 17) && bit(extended.ebx, 30) && bit(extended.ebx, 31);
  if ((states & kZmmStates) != kZmmStates || !avx512) return isas;
  isas.push_back(CpuIsa::kAvx512);

  if (!bit(extended1.eax, 5)) return isas;  // AVX512_BF16
  isas.push_back(CpuIsa::kAvx512Bf16);

  const bool amx = bit(extended.edx, 24) && bit(extended.edx, 22);  // AMX-TILE, AMX-BF16
  if ((states & kTileStates) != kTileStates || !amx || !request_amx_permission()) return isas;
  isas.push_back(CpuIsa::kAmx);
  return isas;
}

bool made_by_intel() {
  const CpuidLeaf vendor = cpuid(0, 0);  // "Genu" "ineI" "ntel"
  return vendor.ebx == 0x756e6547 && vendor.edx == 0x49656e69 && vendor.ecx == 0x6c65746e;
}

#else

std::vector<CpuIsa> detect() {
  return {CpuIsa::kScalar};
}

bool made_by_intel() {
  return false;
}

#endif

CpuIsa parse_isa(std::string_view name, const char* source) {
  std::string available;
  for (const CpuIsa isa : available_cpu_isas()) {
    if (isa_name(isa) == name) return isa;
    if (!available.empty()) available += ", ";
    available += isa_name(isa);
  }
  throw std::invalid_argument(
      std::string(source) + ": got instruction set '" + std::string(name) +
      "', which is unknown or not available on this machine; use one of: " + available);
}

// The one place that reads PACKED_SDPA_CPU_ISA: once, at the first question.
CpuIsa initial_isa() {
  const char* name = std::getenv("PACKED_SDPA_CPU_ISA");
  if (name == nullptr || *name == '\0') return preferred_isa(available_cpu_isas(), made_by_intel());
  return parse_isa(name, "PACKED_SDPA_CPU_ISA");
}

constexpr int kUnset = -1;
std::atomic<int> current_isa{kUnset};

}  // namespace

std::string_view isa_name(CpuIsa isa) {
  return kIsaNames[static_cast<int>(isa)];
}

CpuIsa preferred_isa(const std::vector<CpuIsa>& isas, bool is_intel) {
  // Sapphire Rapids runs bfloat16 1.5 times as fast on float tiles as with VDPBF16PS (docs/cpu-kernels.md).
  if (isas.back() == CpuIsa::kAvx512Bf16 && is_intel) return CpuIsa::kAvx512;
  return isas.back();
}

const std::vector<CpuIsa>& available_cpu_isas() {
  static const std::vector<CpuIsa> isas = detect();
  return isas;
}

CpuIsa cpu_isa() {
  int isa = current_isa.load(std::memory_order_acquire);
  if (isa == kUnset) {
    const int initial = static_cast<int>(initial_isa());
    if (current_isa.compare_exchange_strong(isa, initial, std::memory_order_acq_rel)) isa = initial;
  }
  return static_cast<CpuIsa>(isa);
}

void set_cpu_isa(std::string_view name) {
  current_isa.store(static_cast<int>(parse_isa(name, "set_cpu_isa")), std::memory_order_release);
}

}  // namespace packed_sdpa::cpu
