// Plain kernels for every type: the path of machines without AVX2, of float64, and what the others are
// checked against besides the oracle.
//
// For one document and key/value head, with the keys and values of a block converted to the accumulation type
// `Acc` (float; double for float64), a query row at a time:
//   s_j = scale * q . k_j over the visible keys        m = max s        p_j = exp(s_j - m)        l = sum p
//   out = sum_j p_j v_j / l                            lse = m + log l
// Backward: p_j = exp(s_j - lse), dp_j = do . v_j, delta = do . out, ds_j = p_j (dp_j - delta),
//   dq = scale sum_j ds_j k_j    dk_j += scale ds_j q    dv_j += p_j do
// With dropout, out and dv take p_j keep_j / (1 - p), and dp_j is multiplied by the same factor.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "cpu/documents.h"
#include "cpu/dropout.h"
#include "cpu/half.h"
#include "cpu/kernel_table.h"
#include "cpu/work_items.h"

namespace packed_sdpa::cpu::scalar {
namespace {

// Forward converts the visible keys of a block of queries once, so blocks are large.
constexpr int64_t kQueriesPerItem = 1024;
// Backward: short documents share an item up to this size.
constexpr int64_t kKeysPerItem = 256;
// Partial sums of a dot product: enough to fill the units of a plain build.
constexpr int kPartialSums = 8;

template <typename T>
using AccOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

float load(float value) {
  return value;
}
double load(double value) {
  return value;
}
float load(BFloat16 value) {
  return to_float(value);
}
float load(Float16 value) {
  return to_float(value);
}

void store(float value, float* target) {
  *target = value;
}
void store(double value, double* target) {
  *target = value;
}
void store(float value, BFloat16* target) {
  *target = bfloat16_from_float(value);
}
void store(float value, Float16* target) {
  *target = float16_from_float(value);
}

// One (batch, head) of a strided tensor.
template <typename T>
struct Rows {
  Rows(const StridedTensor& tensor, int64_t batch, int64_t head)
      : data(static_cast<T*>(tensor.data) + batch * tensor.stride_batch + head * tensor.stride_head),
        stride_row(tensor.stride_row),
        stride_dim(tensor.stride_dim) {}

  template <typename Acc>
  void read(int64_t row, int64_t dim, Acc* target) const {
    const T* source = data + row * stride_row;
    for (int64_t d = 0; d < dim; ++d) target[d] = load(source[d * stride_dim]);
  }
  template <typename Acc>
  void write(int64_t row, int64_t dim, const Acc* source, Acc factor) const {
    T* target = data + row * stride_row;
    for (int64_t d = 0; d < dim; ++d) store(source[d] * factor, &target[d * stride_dim]);
  }

  T* data;
  int64_t stride_row;
  int64_t stride_dim;
};

template <typename Acc>
Acc dot(const Acc* a, const Acc* b, int64_t count) {
  Acc sums[kPartialSums] = {};
  int64_t i = 0;
  for (; i + kPartialSums <= count; i += kPartialSums) {
    for (int s = 0; s < kPartialSums; ++s) sums[s] += a[i + s] * b[i + s];
  }
  Acc sum = 0;
  for (; i < count; ++i) sum += a[i] * b[i];
  for (int s = 0; s < kPartialSums; ++s) sum += sums[s];
  return sum;
}

template <typename Acc>
void add_scaled(Acc* target, Acc factor, const Acc* source, int64_t count) {
  for (int64_t i = 0; i < count; ++i) target[i] += factor * source[i];
}

// What every row of a call needs to know.
template <typename Params>
struct Call {
  explicit Call(const Params& params_in) : params(params_in), dropout(params_in) {
    documents = read_documents(params);
    for (const Document& document : documents) {
      if (document.num_keys > max_keys) max_keys = document.num_keys;
    }
  }
  const Params& params;
  Dropout dropout;
  std::vector<Document> documents;
  std::vector<WorkItem> items;
  int64_t max_keys = 0;

  int64_t group() const { return params.shape.num_heads / params.shape.num_kv_heads; }
  int64_t lse_index(const Document& document, int64_t head, int64_t row) const {
    return (document.batch * params.shape.num_heads + head) * params.shape.rows_q + row;
  }
  // keep_j / (1 - p) for the visible keys.
  template <typename Acc>
  void dropout_factors(const Document& document, int64_t head, int64_t query, KeyRange keys,
                       Acc* factors) const {
    if (!dropout.enabled()) return;
    Dropout::Row row(dropout, document.batch * params.shape.num_heads + head, document.query_row(query));
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      factors[j - keys.begin] =
          row.keeps(document.key_row(j)) ? static_cast<Acc>(dropout.keep_scale()) : Acc{0};
    }
  }
};

template <typename T, typename Acc>
void read_keys(const Document& document, const Rows<T>& rows, KeyRange keys, int64_t dim, Acc* target) {
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    rows.read(document.key_row(j), dim, target + (j - keys.begin) * dim);
  }
}

template <typename T>
void forward_item(void* context, int64_t index, Scratch& scratch) {
  using Acc = AccOf<T>;
  const Call<ForwardParams>& call = *static_cast<Call<ForwardParams>*>(context);
  const WorkItem& item = call.items[static_cast<size_t>(index)];
  const AttentionShape& shape = call.params.shape;
  const int64_t dim = shape.head_dim;
  const int64_t dim_v = shape.head_dim_v;
  const Acc scale = static_cast<Acc>(call.params.scale);
  Acc* k = scratch.take<Acc>(call.max_keys * dim);
  Acc* v = scratch.take<Acc>(call.max_keys * dim_v);
  Acc* q = scratch.take<Acc>(dim);
  Acc* out = scratch.take<Acc>(dim_v);
  Acc* p = scratch.take<Acc>(call.max_keys);
  Acc* factors = scratch.take<Acc>(call.max_keys);
  Acc* lse = static_cast<Acc*>(call.params.lse);

  const int32_t num_heads = item.last_kv_head - item.first_kv_head;
  for (int32_t n = item.first_document * num_heads; n < item.last_document * num_heads; ++n) {
    const int32_t kv_head = item.first_kv_head + n % num_heads;
    const Document& document = call.documents[static_cast<size_t>(n / num_heads)];
    const int64_t first_query = item.block * kQueriesPerItem;
    const int64_t last_query = std::min(document.num_queries, first_query + kQueriesPerItem);
    if (first_query >= last_query) continue;
    const KeyRange block_keys = {document.visible_keys(first_query).begin,
                                 document.visible_keys(last_query - 1).end};
    read_keys(document, Rows<const T>(call.params.key, document.batch, kv_head), block_keys, dim, k);
    read_keys(document, Rows<const T>(call.params.value, document.batch, kv_head), block_keys, dim_v, v);

    for (int64_t head = kv_head * call.group(); head < (kv_head + 1) * call.group(); ++head) {
      const Rows<const T> query_rows(call.params.query, document.batch, head);
      const Rows<T> out_rows(call.params.out, document.batch, head);
      for (int64_t query = first_query; query < last_query; ++query) {
        const int64_t row = document.query_row(query);
        const KeyRange keys = document.visible_keys(query);
        const int64_t count = keys.end - keys.begin;
        const int64_t offset = keys.begin - block_keys.begin;
        for (int64_t e = 0; e < dim_v; ++e) out[e] = 0;
        Acc maximum = -std::numeric_limits<Acc>::infinity();
        Acc sum = 0;
        query_rows.read(row, dim, q);
        for (int64_t j = 0; j < count; ++j) {
          p[j] = scale * dot(q, k + (offset + j) * dim, dim);
          if (p[j] > maximum) maximum = p[j];
        }
        call.dropout_factors(document, head, query, keys, factors);
        for (int64_t j = 0; j < count; ++j) {
          p[j] = std::exp(p[j] - maximum);
          sum += p[j];
          const Acc weight = call.dropout.enabled() ? p[j] * factors[j] : p[j];
          add_scaled(out, weight, v + (offset + j) * dim_v, dim_v);
        }
        out_rows.write(row, dim_v, out, count > 0 ? 1 / sum : Acc{0});
        lse[call.lse_index(document, head, row)] = maximum + std::log(sum);
      }
    }
  }
}

template <typename T>
void backward_item(void* context, int64_t index, Scratch& scratch) {
  using Acc = AccOf<T>;
  const Call<BackwardParams>& call = *static_cast<Call<BackwardParams>*>(context);
  const WorkItem& item = call.items[static_cast<size_t>(index)];
  const AttentionShape& shape = call.params.shape;
  const int64_t dim = shape.head_dim;
  const int64_t dim_v = shape.head_dim_v;
  const Acc scale = static_cast<Acc>(call.params.scale);
  Acc* k = scratch.take<Acc>(call.max_keys * dim);
  Acc* v = scratch.take<Acc>(call.max_keys * dim_v);
  Acc* grad_k = scratch.take<Acc>(call.max_keys * dim);
  Acc* grad_v = scratch.take<Acc>(call.max_keys * dim_v);
  Acc* q = scratch.take<Acc>(dim);
  Acc* grad_q = scratch.take<Acc>(dim);
  Acc* out = scratch.take<Acc>(dim_v);
  Acc* grad_out = scratch.take<Acc>(dim_v);
  Acc* factors = scratch.take<Acc>(call.max_keys);
  const Acc* lse = static_cast<const Acc*>(call.params.lse);

  const int32_t num_heads = item.last_kv_head - item.first_kv_head;
  for (int32_t n = item.first_document * num_heads; n < item.last_document * num_heads; ++n) {
    const int32_t kv_head = item.first_kv_head + n % num_heads;
    const Document& document = call.documents[static_cast<size_t>(n / num_heads)];
    const KeyRange all_keys = {0, document.num_keys};
    read_keys(document, Rows<const T>(call.params.key, document.batch, kv_head), all_keys, dim, k);
    read_keys(document, Rows<const T>(call.params.value, document.batch, kv_head), all_keys, dim_v, v);
    for (int64_t i = 0; i < document.num_keys * dim; ++i) grad_k[i] = 0;
    for (int64_t i = 0; i < document.num_keys * dim_v; ++i) grad_v[i] = 0;

    for (int64_t head = kv_head * call.group(); head < (kv_head + 1) * call.group(); ++head) {
      const Rows<const T> query_rows(call.params.query, document.batch, head);
      const Rows<const T> out_rows(call.params.out, document.batch, head);
      const Rows<const T> grad_out_rows(call.params.grad_out, document.batch, head);
      const Rows<T> grad_query_rows(call.params.grad_query, document.batch, head);
      for (int64_t query = 0; query < document.num_queries; ++query) {
        const int64_t row = document.query_row(query);
        const KeyRange keys = document.visible_keys(query);
        for (int64_t e = 0; e < dim; ++e) grad_q[e] = 0;
        if (keys.begin < keys.end) {
          query_rows.read(row, dim, q);
          out_rows.read(row, dim_v, out);
          grad_out_rows.read(row, dim_v, grad_out);
          call.dropout_factors(document, head, query, keys, factors);
        }
        const Acc row_lse = lse[call.lse_index(document, head, row)];
        const Acc delta = keys.begin < keys.end ? dot(grad_out, out, dim_v) : Acc{0};
        for (int64_t j = keys.begin; j < keys.end; ++j) {
          const Acc p = std::exp(scale * dot(q, k + j * dim, dim) - row_lse);
          const Acc factor = call.dropout.enabled() ? factors[j - keys.begin] : Acc{1};
          const Acc grad_p = factor * dot(grad_out, v + j * dim_v, dim_v);
          const Acc grad_s = scale * p * (grad_p - delta);
          add_scaled(grad_q, grad_s, k + j * dim, dim);
          add_scaled(grad_k + j * dim, grad_s, q, dim);
          add_scaled(grad_v + j * dim_v, p * factor, grad_out, dim_v);
        }
        grad_query_rows.write(row, dim, grad_q, Acc{1});
      }
    }
    const Rows<T> grad_key_rows(call.params.grad_key, document.batch, kv_head);
    const Rows<T> grad_value_rows(call.params.grad_value, document.batch, kv_head);
    for (int64_t j = 0; j < document.num_keys; ++j) {
      grad_key_rows.write(document.key_row(j), dim, grad_k + j * dim, Acc{1});
      grad_value_rows.write(document.key_row(j), dim_v, grad_v + j * dim_v, Acc{1});
    }
  }
}

template <typename T>
void run_forward(const ForwardParams& params, Executor& executor) {
  using Acc = AccOf<T>;
  Call<ForwardParams> call(params);
  call.items = make_work_items(call.documents, params.shape.num_kv_heads, SplitBy::kQueries, kQueriesPerItem);
  const size_t bytes = Scratch::array_bytes<Acc>(call.max_keys * params.shape.head_dim) +
                       Scratch::array_bytes<Acc>(call.max_keys * params.shape.head_dim_v) +
                       Scratch::array_bytes<Acc>(params.shape.head_dim) +
                       Scratch::array_bytes<Acc>(params.shape.head_dim_v) +
                       2 * Scratch::array_bytes<Acc>(call.max_keys);
  run_work_items(executor, static_cast<int64_t>(call.items.size()), bytes, &forward_item<T>, &call);
}

template <typename T>
void run_backward(const BackwardParams& params, Executor& executor) {
  using Acc = AccOf<T>;
  Call<BackwardParams> call(params);
  // dK and dV are summed over all queries of the document, so a document stays whole: only its first block
  // counts.
  for (const WorkItem& item :
       make_work_items(call.documents, params.shape.num_kv_heads, SplitBy::kKeys, kKeysPerItem)) {
    if (item.block == 0) call.items.push_back(item);
  }
  const size_t bytes = 2 * Scratch::array_bytes<Acc>(call.max_keys * params.shape.head_dim) +
                       2 * Scratch::array_bytes<Acc>(call.max_keys * params.shape.head_dim_v) +
                       2 * Scratch::array_bytes<Acc>(params.shape.head_dim) +
                       2 * Scratch::array_bytes<Acc>(params.shape.head_dim_v) +
                       Scratch::array_bytes<Acc>(call.max_keys);
  run_work_items(executor, static_cast<int64_t>(call.items.size()), bytes, &backward_item<T>, &call);
}

template <typename T, typename Name>
CpuKernels make_kernels() {
  return {[](const ForwardParams& params, Executor& executor) {
            run_forward<T>(params, executor);
            return Name::kForward;
          },
          [](const BackwardParams& params, Executor& executor) {
            run_backward<T>(params, executor);
            return Name::kBackward;
          }};
}

struct NameF32 {
  static constexpr const char* kForward = "scalar::forward_f32_row";
  static constexpr const char* kBackward = "scalar::backward_f32_row";
};
struct NameF64 {
  static constexpr const char* kForward = "scalar::forward_f64_row";
  static constexpr const char* kBackward = "scalar::backward_f64_row";
};
struct NameBf16 {
  static constexpr const char* kForward = "scalar::forward_bf16_row";
  static constexpr const char* kBackward = "scalar::backward_bf16_row";
};
struct NameF16 {
  static constexpr const char* kForward = "scalar::forward_f16_row";
  static constexpr const char* kBackward = "scalar::backward_f16_row";
};

}  // namespace

CpuKernels kernels(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::kFloat32:
      return make_kernels<float, NameF32>();
    case ScalarType::kFloat64:
      return make_kernels<double, NameF64>();
    case ScalarType::kBFloat16:
      return make_kernels<BFloat16, NameBf16>();
    case ScalarType::kFloat16:
      return make_kernels<Float16, NameF16>();
  }
  return {};
}

}  // namespace packed_sdpa::cpu::scalar
