// Stretches of equal ids: all that a layout needs of doc_ids, found where the ids are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "packed_sdpa/layout.h"

namespace packed_sdpa {

struct IdRuns {
  int64_t batch = 0;
  int64_t rows = 0;
  std::vector<int64_t> first;  // [runs + 1]: flat rows; ends with batch * rows
  std::vector<int64_t> id;     // [runs]: 0 is padding; a run ends with its batch row
  // int32 [runs + 1] on the device of the ids: first, again. Undefined where they were on the host.
  at::Tensor device_first;
};

// doc_ids as PackedLayout::from_doc_ids takes them; TypeError and ValueError as checks::given_ids and
// checks::not_negative. Ids on a CUDA device are searched there and the runs come back in one copy, the only
// wait for the device; a batch of more runs than max(2^15, tokens / 4) costs a second copy.
IdRuns find_id_runs(const at::Tensor& doc_ids);
// The same by tensor operations for ids [B, S] on any device, B * S > 0, from checks::given_ids; `capacity`
// runs in the first copy, 1 <= capacity <= B * S. ValueError: a negative id.
IdRuns find_id_runs_on_device(const at::Tensor& checked_ids, const char* argument, int64_t capacity);

// int64 [batch, rows] on the host.
at::Tensor ids_of(const IdRuns& runs);

// The layout of query rows row_offset .. row_offset + rows (the rest when not given) of each batch row;
// ValueError where those are not rows of it. Where the runs were found on a device, its copy of the tensors
// is made from them.
PackedLayout layout_of(const IdRuns& runs, int64_t row_offset = 0,
                       std::optional<int64_t> rows = std::nullopt);

}  // namespace packed_sdpa
