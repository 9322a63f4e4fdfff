#include "cpu/padding.h"

#include <cstring>
#include <limits>

#include "cpu/documents.h"

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
void zero_rows(const StridedTensor& tensor, size_t element, int64_t heads, int64_t rows_per_batch, int64_t dim,
               const RowRun& run) {
  char* data = static_cast<char*>(tensor.data);
  for (int64_t flat = run.begin; flat < run.end; ++flat) {
    const int64_t batch = flat / rows_per_batch;
    const int64_t row = flat % rows_per_batch;
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t offset = batch * tensor.stride_batch + head * tensor.stride_head + row * tensor.stride_row;
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

}  // namespace

void fill_forward_padding(const ForwardParams& params) {
  const AttentionShape& shape = params.shape;
  const size_t element = element_size(params.dtype);
  for (const RowRun& run : padding_query_rows(params)) {
    zero_rows(params.out, element, shape.num_heads, shape.rows_q, shape.head_dim_v, run);
    if (params.dtype == ScalarType::kFloat64) {
      fill_lse(static_cast<double*>(params.lse), shape.num_heads, shape.rows_q, run);
    } else {
      fill_lse(static_cast<float*>(params.lse), shape.num_heads, shape.rows_q, run);
    }
  }
}

void fill_backward_padding(const BackwardParams& params) {
  const AttentionShape& shape = params.shape;
  const size_t element = element_size(params.dtype);
  for (const RowRun& run : padding_query_rows(params)) {
    zero_rows(params.grad_query, element, shape.num_heads, shape.rows_q, shape.head_dim, run);
  }
  for (const Document& document : read_documents(params)) {
    const RowRun seeing = seeing_queries(document);
    const auto zero_query = [&](int64_t rank) {
      const int64_t flat = document.flat_query_base + document.query_row(rank);
      zero_rows(params.grad_query, element, shape.num_heads, shape.rows_q, shape.head_dim, {flat, flat + 1});
    };
    for (int64_t q = 0; q < seeing.begin; ++q) zero_query(q);
    for (int64_t q = seeing.end; q < document.num_queries; ++q) zero_query(q);
  }
  for (const RowRun& run : padding_key_rows(params)) {
    zero_rows(params.grad_key, element, shape.num_kv_heads, shape.rows_k, shape.head_dim, run);
    zero_rows(params.grad_value, element, shape.num_kv_heads, shape.rows_k, shape.head_dim_v, run);
  }
}

}  // namespace packed_sdpa::cpu
