#include "id_runs.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "checks.h"

namespace packed_sdpa {

namespace {

constexpr int64_t kMinCapacity = int64_t{1} << 15;
constexpr int64_t kTokensPerRun = 4;

IdRuns find_on_host(const at::Tensor& ids) {
  IdRuns runs;
  runs.batch = ids.size(0);
  runs.rows = ids.size(1);
  const int64_t* values = ids.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < runs.batch; ++b) {
    const int64_t end_of_row = (b + 1) * runs.rows;
    for (int64_t begin = b * runs.rows; begin < end_of_row;) {
      const int64_t id = values[begin];
      runs.first.push_back(begin);
      runs.id.push_back(id);
      do {
        ++begin;
      } while (begin < end_of_row && values[begin] == id);
    }
  }
  runs.first.push_back(runs.batch * runs.rows);
  return runs;
}

}  // namespace

// Sizes do not depend on the values, so nothing waits before the one copy to the host:
//   begins[t] = t is the first row of a batch row, or its id is not its left neighbour's
//   run[t]    = begins[0] + .. + begins[t] - 1
//   first[r]  = the first t with run[t] >= r, which is the number of tokens from the last run on
IdRuns find_id_runs_on_device(const at::Tensor& checked_ids, const char* argument, int64_t capacity) {
  const at::Tensor ids = checked_ids.to(at::kLong);
  IdRuns runs;
  runs.batch = ids.size(0);
  runs.rows = ids.size(1);
  const int64_t tokens = runs.batch * runs.rows;
  const at::Tensor begins = at::cat(
      {at::ones({runs.batch, 1}, ids.options().dtype(at::kBool)), ids.slice(1, 1) != ids.slice(1, 0, -1)}, 1);
  const at::Tensor run = begins.flatten().cumsum(0) - 1;
  const at::Tensor first = at::searchsorted(run, at::arange(capacity + 1, run.options()), /*out_int32=*/true);
  const at::Tensor values = ids.flatten();
  const at::Tensor id = values.index_select(0, first.slice(0, 0, -1).clamp_max(tokens - 1));
  const at::Tensor last_and_smallest = at::stack({run[tokens - 1], values.min()});
  const at::Tensor copied = at::cat({last_and_smallest, first.to(at::kLong), id}).cpu();

  const int64_t* found = copied.const_data_ptr<int64_t>();
  const int64_t count = found[0] + 1;
  if (checked_ids.scalar_type() != at::kUInt64) checks::not_negative(found[1], argument);
  if (count > capacity) return find_id_runs_on_device(checked_ids, argument, count);
  found += 2;
  runs.first.assign(found, found + count + 1);
  found += capacity + 1;
  runs.id.assign(found, found + count);
  runs.device_first = first.slice(0, 0, count + 1);
  return runs;
}

IdRuns find_id_runs(const at::Tensor& doc_ids) {
  const c10::InferenceMode normal_tensors(false);  // a layout outlives the mode it was made in
  const at::Tensor ids = checks::given_ids(doc_ids, "doc_ids");
  if (ids.is_cuda() && ids.numel() > 0) {
    const int64_t capacity = std::min(ids.numel(), std::max(kMinCapacity, ids.numel() / kTokensPerRun));
    return find_id_runs_on_device(ids, "doc_ids", capacity);
  }
  return find_on_host(checks::host_ids(doc_ids, "doc_ids"));
}

at::Tensor ids_of(const IdRuns& runs) {
  at::Tensor ids = at::empty({runs.batch, runs.rows}, at::kLong);
  int64_t* values = ids.mutable_data_ptr<int64_t>();
  for (size_t r = 0; r < runs.id.size(); ++r) {
    std::fill(values + runs.first[r], values + runs.first[r + 1], runs.id[r]);
  }
  return ids;
}

}  // namespace packed_sdpa
