// Entry to the CPU kernels: one forward and one backward over all documents of a call. No torch in here.
#pragma once

#include <string_view>
#include <vector>

#include "cpu/params.h"

namespace packed_sdpa::cpu {

enum class CpuIsa { kScalar, kAvx2, kAvx512, kAvx512Bf16, kAmx };

// scalar, avx2, avx512, avx512_bf16, amx: ascending, each includes those before it.
std::string_view isa_name(CpuIsa isa);
// Sets that this processor and its operating system run; AMX only if the OS granted its tile registers.
const std::vector<CpuIsa>& available_cpu_isas();
// The fastest of these: the last, but for AVX512_BF16 on processors that run it slowly.
CpuIsa preferred_isa(const std::vector<CpuIsa>& isas, bool is_intel);
// The set in use: the preferred one of those available, or PACKED_SDPA_CPU_ISA, or the last set_cpu_isa. An
// unknown or unavailable name throws std::invalid_argument that lists the names that are available.
CpuIsa cpu_isa();
void set_cpu_isa(std::string_view name);

// What one work item cost, and what it has to wait for: at each of its tiles, for the item before it of the
// same sum.
struct ItemNote {
  double seconds = 0.0;
  int64_t sum = -1;  // a number for each sum whose items take turns; -1: this one waits for nobody
  int64_t first_tile = 0;
  int64_t num_tiles = 0;
};

// How a kernel gets threads: run(body) calls body(t) for t = 0 .. num_threads - 1, concurrently, and returns
// when all are done. The caller (torch's intra-op pool, a test's std::thread) decides what a thread is.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual int num_threads() const = 0;
  virtual void run(void (*body)(void* context, int thread), void* context) = 0;
  // Where the work items of the last pass are noted, in the order in which threads take them; null: not
  // asked.
  virtual std::vector<ItemNote>* item_notes() { return nullptr; }
};

// Both return the name of the kernel that ran, as "avx512::forward_f32_tile64x128" (static storage).
const char* forward(const ForwardParams& params, Executor& executor);
const char* backward(const BackwardParams& params, Executor& executor);

}  // namespace packed_sdpa::cpu
