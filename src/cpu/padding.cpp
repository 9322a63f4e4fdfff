#include "cpu/padding.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/documents.h"
#include "cpu/work_items.h"

namespace packed_sdpa::cpu {
namespace {

size_t element_size(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::kFloat32:
      return 4;
    case ScalarType::kFloat64:
      return 8;
    case ScalarType::kBFloat16:
    case ScalarType::kFloat16:
      return 2;
  }
  return 0;
}

// All bits zero is +0 in every type here.
void zero_rows(const StridedTensor& tensor, size_t element, int64_t heads, int64_t rows_per_batch,
               int64_t dim, const RowRun& run) {
  char* data = static_cast<char*>(tensor.data);
  for (int64_t flat = run.begin; flat < run.end; ++flat) {
    const int64_t batch = flat / rows_per_batch;
    const int64_t row = flat % rows_per_batch;
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t offset =
          batch * tensor.stride_batch + head * tensor.stride_head + row * tensor.stride_row;
      if (tensor.stride_dim == 1) {
        std::memset(data + offset * static_cast<int64_t>(element), 0, static_cast<size_t>(dim) * element);
        continue;
      }
      for (int64_t d = 0; d < dim; ++d) {
        std::memset(data + (offset + d * tensor.stride_dim) * static_cast<int64_t>(element), 0, element);
      }
    }
  }
}

template <typename Lse>
void fill_lse(Lse* lse, int64_t heads, int64_t rows_per_batch, const RowRun& run) {
  for (int64_t flat = run.begin; flat < run.end; ++flat) {
    const int64_t batch = flat / rows_per_batch;
    const int64_t row = flat % rows_per_batch;
    for (int64_t head = 0; head < heads; ++head) {
      lse[(batch * heads + head) * rows_per_batch + row] = -std::numeric_limits<Lse>::infinity();
    }
  }
}

// Padding may be most of a row, so it is shared out among the threads in pieces of this many rows.
constexpr int64_t kRowsPerItem = 256;

template <typename Params>
struct Fill {
  const Params& params;
  size_t element;
  std::vector<RowRun> queries;
  std::vector<RowRun> keys;
};

void add_pieces(const std::vector<RowRun>& runs, std::vector<RowRun>* pieces) {
  for (const RowRun& run : runs) {
    for (int64_t begin = run.begin; begin < run.end; begin += kRowsPerItem) {
      pieces->push_back({begin, std::min(run.end, begin + kRowsPerItem)});
    }
  }
}

void fill_forward_item(void* context, int64_t index, Scratch&) {
  const Fill<ForwardParams>& fill = *static_cast<Fill<ForwardParams>*>(context);
  const ForwardParams& params = fill.params;
  const AttentionShape& shape = params.shape;
  const RowRun& run = fill.queries[static_cast<size_t>(index)];
  zero_rows(params.out, fill.element, shape.num_heads, shape.rows_q, shape.head_dim_v, run);
  if (params.dtype == ScalarType::kFloat64) {
    fill_lse(static_cast<double*>(params.lse), shape.num_heads, shape.rows_q, run);
  } else {
    fill_lse(static_cast<float*>(params.lse), shape.num_heads, shape.rows_q, run);
  }
}

void fill_backward_item(void* context, int64_t index, Scratch&) {
  const Fill<BackwardParams>& fill = *static_cast<Fill<BackwardParams>*>(context);
  const BackwardParams& params = fill.params;
  const AttentionShape& shape = params.shape;
  const int64_t num_query_runs = static_cast<int64_t>(fill.queries.size());
  if (index < num_query_runs) {
    zero_rows(params.grad_query, fill.element, shape.num_heads, shape.rows_q, shape.head_dim,
              fill.queries[static_cast<size_t>(index)]);
    return;
  }
  const RowRun& run = fill.keys[static_cast<size_t>(index - num_query_runs)];
  zero_rows(params.grad_key, fill.element, shape.num_kv_heads, shape.rows_k, shape.head_dim, run);
  zero_rows(params.grad_value, fill.element, shape.num_kv_heads, shape.rows_k, shape.head_dim_v, run);
}

// Flat query rows of documents whose queries see no key.
void add_unseeing_queries(const BackwardParams& params, std::vector<RowRun>* runs) {
  for (const Document& document : read_documents(params)) {
    const RowRun seeing = seeing_queries(document);
    for (int64_t q = 0; q < document.num_queries; ++q) {
      if (q == seeing.begin) q = seeing.end;
      if (q >= document.num_queries) break;
      const int64_t flat = document.flat_query_base + document.query_row(q);
      runs->push_back({flat, flat + 1});
    }
  }
}

}  // namespace

void fill_forward_padding(const ForwardParams& params, Executor& executor) {
  Fill<ForwardParams> fill{params, element_size(params.dtype), {}, {}};
  add_pieces(padding_query_rows(params), &fill.queries);
  run_work_items(executor, static_cast<int64_t>(fill.queries.size()), 0, &fill_forward_item, &fill);
}

void fill_backward_padding(const BackwardParams& params, Executor& executor) {
  Fill<BackwardParams> fill{params, element_size(params.dtype), {}, {}};
  add_pieces(padding_query_rows(params), &fill.queries);
  add_unseeing_queries(params, &fill.queries);
  add_pieces(padding_key_rows(params), &fill.keys);
  run_work_items(executor, static_cast<int64_t>(fill.queries.size() + fill.keys.size()), 0,
                 &fill_backward_item, &fill);
}

}  // namespace packed_sdpa::cpu
