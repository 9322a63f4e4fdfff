#include "cpu_testing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <sstream>
#include <thread>
#include <utility>

namespace packed_sdpa::cpu::testing {
namespace {

constexpr int64_t kGuard = 8;  // elements before and after
constexpr double kInfinity = std::numeric_limits<double>::infinity();

size_t size_of(ScalarType dtype) {
  if (dtype == ScalarType::kFloat64) return 8;
  return dtype == ScalarType::kFloat32 ? 4 : 2;
}

int mantissa_bits(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::kFloat32:
      return 24;
    case ScalarType::kFloat64:
      return 53;
    case ScalarType::kBFloat16:
      return 8;
    case ScalarType::kFloat16:
      return 11;
  }
  return 0;
}

// An independent generator of keep decisions: Philox 4x32-10 from its paper.
std::vector<uint32_t> philox_words(std::vector<uint32_t> counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(a)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

constexpr uint64_t kDropoutSeed = 0x123456789abcdefull;
constexpr uint64_t kDropoutOffset = 12;

double keep_factor(const Problem& problem, int64_t b, int64_t h, int64_t i, int64_t j) {
  const double p = problem.settings.dropout_p;
  if (p == 0.0) return 1.0;
  const std::vector<uint32_t> words = philox_words(
      {static_cast<uint32_t>(j / 4), static_cast<uint32_t>(i),
       static_cast<uint32_t>(b * problem.settings.num_heads + h), static_cast<uint32_t>(kDropoutOffset)},
      static_cast<uint32_t>(kDropoutSeed & 0xffffffffu), static_cast<uint32_t>(kDropoutSeed >> 32));
  return static_cast<double>(words[static_cast<size_t>(j % 4)]) >= std::floor(p * 4294967296.0)
             ? 1.0 / (1.0 - p)
             : 0.0;
}

struct Rounding {
  bool on;
  ScalarType dtype;
  double operator()(double value) const {
    if (!on) return value;
    return round_to(dtype,
                    dtype == ScalarType::kFloat64 ? value : static_cast<double>(static_cast<float>(value)));
  }
};

// [B, H, rows, dim] contiguous. Exact: Real is float for the types that it holds.
template <typename Real>
std::vector<Real> values_of(const Tensor& tensor) {
  std::vector<Real> values;
  for (int64_t b = 0; b < tensor.batch; ++b) {
    for (int64_t h = 0; h < tensor.heads; ++h) {
      for (int64_t i = 0; i < tensor.rows; ++i) {
        for (int64_t d = 0; d < tensor.dim; ++d) values.push_back(static_cast<Real>(tensor.get(b, h, i, d)));
      }
    }
  }
  return values;
}

template <typename Real>
Dense dense(const Problem& problem, bool backward, const Rounding& rounded) {
  const Settings& s = problem.settings;
  const int64_t batch = problem.packing.batch;
  const int64_t rows_q = problem.packing.rows_q();
  const int64_t rows_k = problem.packing.rows_k();
  const int64_t group = s.num_heads / s.num_kv_heads;
  Dense result;
  result.out.assign(static_cast<size_t>(batch * s.num_heads * rows_q * s.head_dim_v), 0.0);
  result.lse.assign(static_cast<size_t>(batch * s.num_heads * rows_q), -kInfinity);
  std::vector<Real> grad_query(static_cast<size_t>(batch * s.num_heads * rows_q * s.head_dim));
  std::vector<Real> grad_key(static_cast<size_t>(batch * s.num_kv_heads * rows_k * s.head_dim));
  std::vector<Real> grad_value(static_cast<size_t>(batch * s.num_kv_heads * rows_k * s.head_dim_v));
  const Real scale = static_cast<Real>(s.scale);
  const std::vector<Real> query = values_of<Real>(problem.query);
  const std::vector<Real> key = values_of<Real>(problem.key);
  const std::vector<Real> value = values_of<Real>(problem.value);
  const std::vector<Real> grad_out = values_of<Real>(problem.grad_out);
  std::vector<int64_t> keys;
  std::vector<Real> p(static_cast<size_t>(rows_k));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < s.num_heads; ++h) {
      const int64_t kv = h / group;
      for (int64_t i = 0; i < rows_q; ++i) {
        keys.clear();
        for (int64_t j = 0; j < rows_k; ++j) {
          if (problem.sees(b, i, j)) keys.push_back(j);
        }
        if (keys.empty()) continue;
        const size_t row = static_cast<size_t>((b * s.num_heads + h) * rows_q + i);
        const Real* const query_row = query.data() + row * static_cast<size_t>(s.head_dim);
        const Real* const grad_out_row = grad_out.data() + row * static_cast<size_t>(s.head_dim_v);
        const auto key_row = [&](int64_t j) {
          return key.data() + ((b * s.num_kv_heads + kv) * rows_k + j) * s.head_dim;
        };
        const auto value_row = [&](int64_t j) {
          return value.data() + ((b * s.num_kv_heads + kv) * rows_k + j) * s.head_dim_v;
        };
        Real maximum = -std::numeric_limits<Real>::infinity();
        for (size_t n = 0; n < keys.size(); ++n) {
          Real sum = 0;
          for (int64_t d = 0; d < s.head_dim; ++d) {
            sum += query_row[d] * key_row(keys[n])[d];
          }
          p[n] = static_cast<Real>(rounded(static_cast<double>(sum * scale)));
          maximum = std::max(maximum, p[n]);
        }
        Real total = 0;
        for (size_t n = 0; n < keys.size(); ++n) total += std::exp(p[n] - maximum);
        result.lse[row] = static_cast<double>(maximum + std::log(total));
        for (size_t n = 0; n < keys.size(); ++n) {
          p[n] = static_cast<Real>(rounded(static_cast<double>(std::exp(p[n] - maximum) / total)));
        }
        double delta = 0.0;
        for (int64_t e = 0; e < s.head_dim_v; ++e) {
          Real sum = 0;
          for (size_t n = 0; n < keys.size(); ++n) {
            sum += p[n] * static_cast<Real>(keep_factor(problem, b, h, i, keys[n])) * value_row(keys[n])[e];
          }
          const double out = rounded(static_cast<double>(sum));
          result.out[row * static_cast<size_t>(s.head_dim_v) + static_cast<size_t>(e)] = out;
          if (backward) delta += out * static_cast<double>(grad_out_row[e]);
        }
        if (!backward) continue;
        for (size_t n = 0; n < keys.size(); ++n) {
          const int64_t j = keys[n];
          const Real factor = static_cast<Real>(keep_factor(problem, b, h, i, j));
          Real grad_p = 0;
          for (int64_t e = 0; e < s.head_dim_v; ++e) {
            grad_p += grad_out_row[e] * value_row(j)[e];
            grad_value[static_cast<size_t>(((b * s.num_kv_heads + kv) * rows_k + j) * s.head_dim_v + e)] +=
                p[n] * factor * grad_out_row[e];
          }
          grad_p = static_cast<Real>(rounded(static_cast<double>(grad_p * factor)));
          const Real grad_s =
              static_cast<Real>(rounded(static_cast<double>(p[n] * (grad_p - static_cast<Real>(delta))))) *
              scale;
          for (int64_t d = 0; d < s.head_dim; ++d) {
            grad_query[row * static_cast<size_t>(s.head_dim) + static_cast<size_t>(d)] +=
                grad_s * key_row(j)[d];
            grad_key[static_cast<size_t>(((b * s.num_kv_heads + kv) * rows_k + j) * s.head_dim + d)] +=
                grad_s * query_row[d];
          }
        }
      }
    }
  }
  const auto finish = [&rounded](const std::vector<Real>& sums, std::vector<double>* target) {
    for (const Real sum : sums) target->push_back(rounded(static_cast<double>(sum)));
  };
  finish(grad_query, &result.grad_query);
  finish(grad_key, &result.grad_key);
  finish(grad_value, &result.grad_value);
  return result;
}

// Worst error of `get` against the oracle must stay below twice the math path's worst error plus a floor of a
// few eps times the largest magnitude.
void expect_close(const char* what, const Problem& problem, const std::vector<double>& expected,
                  const std::vector<double>& math_path, const std::function<double(size_t)>& get) {
  double worst = 0.0;
  double worst_math = 0.0;
  double largest = 0.0;
  size_t worst_index = 0;
  for (size_t n = 0; n < expected.size(); ++n) {
    const double got = get(n);
    if (std::isinf(expected[n])) {
      ASSERT_EQ(got, expected[n]) << what << " element " << n << "; "
                                  << describe(problem.packing, problem.settings);
      continue;
    }
    ASSERT_FALSE(std::isnan(got)) << what << " element " << n << " is NaN, expected " << expected[n] << "; "
                                  << describe(problem.packing, problem.settings);
    const double error = std::abs(got - expected[n]);
    if (error > worst) {
      worst = error;
      worst_index = n;
    }
    worst_math = std::max(worst_math, std::abs(math_path[n] - expected[n]));
    largest = std::max(largest, std::abs(expected[n]));
  }
  // Floors: a half type's result is rounded once more; a float's weights are remade from a rounded lse; in
  // float64 the math path is the oracle itself.
  const ScalarType dtype = problem.settings.dtype;
  const double floor = dtype == ScalarType::kFloat64   ? 64.0 * epsilon(dtype) * (1.0 + largest)
                       : dtype == ScalarType::kFloat32 ? 8.0 * epsilon(dtype) * (1.0 + largest)
                                                       : 2.0 * epsilon(dtype) * largest;
  const double bound = 2.0 * worst_math + floor;
  EXPECT_LE(worst, bound) << what << ": worst at element " << worst_index << ": expected "
                          << (expected.empty() ? 0.0 : expected[worst_index]) << ", got "
                          << (expected.empty() ? 0.0 : get(worst_index)) << ", math path's error "
                          << worst_math << "; " << describe(problem.packing, problem.settings);
}

std::function<double(size_t)> reader(const Tensor& tensor) {
  return [&tensor](size_t n) {
    const int64_t index = static_cast<int64_t>(n);
    const int64_t d = index % tensor.dim;
    const int64_t i = index / tensor.dim % tensor.rows;
    const int64_t h = index / tensor.dim / tensor.rows % tensor.heads;
    return tensor.get(index / tensor.dim / tensor.rows / tensor.heads, h, i, d);
  };
}

// Documents of one side in the order of the common table: token lists per document.
void gather(const std::vector<int64_t>& document_of_row, size_t num_documents,
            std::vector<int32_t>* cu_seqlens, std::vector<int32_t>* token_index, std::vector<int64_t>* rank,
            std::vector<int64_t>* counts) {
  std::vector<std::vector<int32_t>> rows(num_documents);
  rank->assign(document_of_row.size(), -1);
  for (size_t row = 0; row < document_of_row.size(); ++row) {
    if (document_of_row[row] < 0) continue;
    std::vector<int32_t>& list = rows[static_cast<size_t>(document_of_row[row])];
    (*rank)[row] = static_cast<int64_t>(list.size());
    list.push_back(static_cast<int32_t>(row));
  }
  cu_seqlens->assign(1, 0);
  for (const std::vector<int32_t>& list : rows) {
    token_index->insert(token_index->end(), list.begin(), list.end());
    cu_seqlens->push_back(static_cast<int32_t>(token_index->size()));
    counts->push_back(static_cast<int64_t>(list.size()));
  }
}

}  // namespace

Packing packing_from_ids(const std::string& name, const std::vector<int64_t>& ids, int64_t batch) {
  Packing packing;
  packing.name = name;
  packing.batch = batch;
  packing.query_ids = ids;
  packing.key_ids = ids;
  return packing;
}

Packing packing_from_lengths(const std::string& name, const std::vector<int64_t>& lengths) {
  std::vector<int64_t> ids;
  for (size_t d = 0; d < lengths.size(); ++d) {
    ids.insert(ids.end(), static_cast<size_t>(lengths[d]), static_cast<int64_t>(d) + 1);
  }
  return packing_from_ids(name, ids);
}

std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::kFloat32:
      return "float32";
    case ScalarType::kFloat64:
      return "float64";
    case ScalarType::kBFloat16:
      return "bfloat16";
    case ScalarType::kFloat16:
      return "float16";
  }
  return "?";
}

std::string describe(const Packing& packing, const Settings& s) {
  std::ostringstream text;
  text << "repro: packing=" << packing.name << " isa=" << isa_name(cpu_isa())
       << " dtype=" << dtype_name(s.dtype) << " Hq=" << s.num_heads << " Hkv=" << s.num_kv_heads
       << " D=" << s.head_dim << " Dv=" << s.head_dim_v << " causal=" << s.is_causal << " window=("
       << s.window_left << "," << s.window_right << ") scale=" << s.scale << " dropout=" << s.dropout_p
       << " layout=" << s.layout << " data_seed=" << s.data_seed;
  return text.str();
}

double round_to(ScalarType dtype, double value) {
  if (!std::isfinite(value) || value == 0.0) return value;
  int exponent;
  std::frexp(value, &exponent);
  int bits = mantissa_bits(dtype);
  if (dtype == ScalarType::kFloat16) bits = std::min(bits, exponent + 24);  // subnormals
  if (bits < 0) return 0.0;
  return std::ldexp(std::nearbyint(std::ldexp(value, bits - exponent)), exponent - bits);
}

double epsilon(ScalarType dtype) {
  return std::ldexp(1.0, 1 - mantissa_bits(dtype));
}

Tensor::Tensor(ScalarType dtype, int64_t batch_in, int64_t heads_in, int64_t rows_in, int64_t dim_in,
               int layout, bool expand_heads)
    : batch(batch_in), heads(heads_in), rows(rows_in), dim(dim_in), expanded(expand_heads), dtype_(dtype) {
  const int64_t stride_dim = layout == 2 ? 2 : 1;
  const int64_t width = dim * stride_dim + (layout == 3 ? 3 : 0);
  strides_.stride_dim = stride_dim;
  if (layout == 1) {
    strides_.stride_head = width;
    strides_.stride_row = heads * width;
    strides_.stride_batch = rows * heads * width;
  } else {
    strides_.stride_row = width;
    strides_.stride_head = expand_heads ? 0 : rows * width;
    strides_.stride_batch = heads * rows * width;
  }
  origin_ = kGuard;
  bytes_.assign(static_cast<size_t>(batch * heads * rows * width + 2 * kGuard) * size_of(dtype),
                0xff);  // NaN
}

StridedTensor Tensor::view() const {
  StridedTensor view = strides_;
  view.data = const_cast<unsigned char*>(bytes_.data()) + static_cast<size_t>(origin_) * size_of(dtype_);
  return view;
}

int64_t Tensor::offset(int64_t b, int64_t h, int64_t i, int64_t d) const {
  return origin_ + b * strides_.stride_batch + h * strides_.stride_head + i * strides_.stride_row +
         d * strides_.stride_dim;
}

double Tensor::get(int64_t b, int64_t h, int64_t i, int64_t d) const {
  const unsigned char* source = bytes_.data() + static_cast<size_t>(offset(b, h, i, d)) * size_of(dtype_);
  if (dtype_ == ScalarType::kFloat64) {
    double value;
    std::memcpy(&value, source, 8);
    return value;
  }
  if (dtype_ == ScalarType::kFloat32) {
    float value;
    std::memcpy(&value, source, 4);
    return static_cast<double>(value);
  }
  uint16_t bits;
  std::memcpy(&bits, source, 2);
  const double sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
  const int exponent_bits = dtype_ == ScalarType::kBFloat16 ? 8 : 5;
  const int fraction_bits = 15 - exponent_bits;
  const int exponent = (bits & 0x7fff) >> fraction_bits;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  if (exponent == (1 << exponent_bits) - 1) return fraction != 0 ? std::nan("") : sign * kInfinity;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

void Tensor::set(int64_t b, int64_t h, int64_t i, int64_t d, double value) {
  unsigned char* target = bytes_.data() + static_cast<size_t>(offset(b, h, i, d)) * size_of(dtype_);
  if (dtype_ == ScalarType::kFloat64) {
    std::memcpy(target, &value, 8);
    return;
  }
  if (dtype_ == ScalarType::kFloat32) {
    const float single = static_cast<float>(value);
    std::memcpy(target, &single, 4);
    return;
  }
  const int exponent_bits = dtype_ == ScalarType::kBFloat16 ? 8 : 5;
  const int fraction_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t all_ones = (1u << exponent_bits) - 1u;
  uint32_t bits = std::signbit(value) ? 0x8000u : 0u;
  const double magnitude = std::abs(round_to(dtype_, value));
  if (std::isnan(value)) {
    bits |= (all_ones << fraction_bits) | 1u;
  } else if (std::isinf(magnitude)) {
    bits |= all_ones << fraction_bits;
  } else if (magnitude != 0.0) {
    int exponent;
    std::frexp(magnitude, &exponent);
    exponent = std::max(exponent - 1, 1 - bias);
    const uint32_t fraction = static_cast<uint32_t>(std::ldexp(magnitude, fraction_bits - exponent));
    bits |= (static_cast<uint32_t>(exponent + bias - 1) << fraction_bits) + fraction;
  }
  const uint16_t half = static_cast<uint16_t>(bits);
  std::memcpy(target, &half, 2);
}

Problem::Problem(const Packing& packing_in, const Settings& settings_in)
    : packing(packing_in), settings(settings_in) {
  const Settings& s = settings;
  const int64_t rows_q = packing.rows_q();
  const int64_t rows_k = packing.rows_k();
  std::map<std::pair<int64_t, int64_t>, int64_t> documents;  // (batch, id) -> number
  const auto number = [&documents](int64_t b, int64_t id) {
    if (id == 0) return int64_t{-1};
    return documents.emplace(std::make_pair(b, id), static_cast<int64_t>(documents.size())).first->second;
  };
  for (int64_t b = 0; b < packing.batch; ++b) {
    for (int64_t i = 0; i < rows_q; ++i) {
      query_document.push_back(number(b, packing.query_ids[static_cast<size_t>(b * rows_q + i)]));
    }
    for (int64_t j = 0; j < rows_k; ++j) {
      key_document.push_back(number(b, packing.key_ids[static_cast<size_t>(b * rows_k + j)]));
    }
  }
  gather(query_document, documents.size(), &cu_seqlens_q, &token_index_q, &query_rank, &document_queries);
  gather(key_document, documents.size(), &cu_seqlens_k, &token_index_k, &key_rank, &document_keys);

  query = Tensor(s.dtype, packing.batch, s.num_heads, rows_q, s.head_dim, s.layout, false);
  key = Tensor(s.dtype, packing.batch, s.num_kv_heads, rows_k, s.head_dim, s.layout, s.layout == 3);
  value = Tensor(s.dtype, packing.batch, s.num_kv_heads, rows_k, s.head_dim_v, s.layout, s.layout == 3);
  out = Tensor(s.dtype, packing.batch, s.num_heads, rows_q, s.head_dim_v, s.layout, false);
  grad_out = Tensor(s.dtype, packing.batch, s.num_heads, rows_q, s.head_dim_v, s.layout, false);
  grad_query = Tensor(s.dtype, packing.batch, s.num_heads, rows_q, s.head_dim, s.layout, false);
  grad_key = Tensor(s.dtype, packing.batch, s.num_kv_heads, rows_k, s.head_dim, s.layout, false);
  grad_value = Tensor(s.dtype, packing.batch, s.num_kv_heads, rows_k, s.head_dim_v, s.layout, false);
  lse_float.assign(static_cast<size_t>(packing.batch * s.num_heads * rows_q),
                   std::numeric_limits<float>::quiet_NaN());
  lse_double.assign(lse_float.size(), std::nan(""));

  // Real rows are drawn; padding rows stay NaN.
  std::mt19937_64 generator(settings.data_seed);
  std::normal_distribution<double> normal;
  const auto fill = [&](Tensor* tensor, const std::vector<int64_t>& document_of_row) {
    for (int64_t b = 0; b < tensor->batch; ++b) {
      for (int64_t h = 0; h < (tensor->expanded ? 1 : tensor->heads); ++h) {
        for (int64_t i = 0; i < tensor->rows; ++i) {
          if (document_of_row[static_cast<size_t>(b * tensor->rows + i)] < 0) continue;
          for (int64_t d = 0; d < tensor->dim; ++d) tensor->set(b, h, i, d, normal(generator));
        }
      }
    }
  };
  fill(&query, query_document);
  fill(&key, key_document);
  fill(&value, key_document);
  fill(&grad_out, query_document);
}

ForwardParams Problem::forward_params() {
  ForwardParams params;
  params.dtype = settings.dtype;
  params.shape = {packing.batch,    settings.num_heads, settings.num_kv_heads, packing.rows_q(),
                  packing.rows_k(), settings.head_dim,  settings.head_dim_v};
  params.documents.num_documents = static_cast<int64_t>(document_queries.size());
  params.documents.cu_seqlens_q = cu_seqlens_q.data();
  params.documents.cu_seqlens_k = cu_seqlens_k.data();
  params.documents.token_index_q = token_index_q.data();
  params.documents.token_index_k = token_index_k.data();
  // Rows in gathered order need no index; hand none over, so that this case is tested too.
  const auto in_order = [](const std::vector<int32_t>& index, int64_t rows) {
    for (size_t t = 0; t < index.size(); ++t) {
      if (index[t] != static_cast<int32_t>(t)) return false;
    }
    return static_cast<int64_t>(index.size()) == rows;
  };
  if (in_order(token_index_q, packing.batch * packing.rows_q())) params.documents.token_index_q = nullptr;
  if (in_order(token_index_k, packing.batch * packing.rows_k())) params.documents.token_index_k = nullptr;
  if (!packing.diagonal_offsets.empty()) params.documents.diagonal_offsets = packing.diagonal_offsets.data();
  params.is_causal = settings.is_causal;
  params.window_left = settings.window_left;
  params.window_right = settings.window_right;
  params.scale = settings.scale;
  params.dropout_p = settings.dropout_p;
  params.dropout_seed = kDropoutSeed;
  params.dropout_offset = kDropoutOffset;
  params.query = query.view();
  params.key = key.view();
  params.value = value.view();
  params.out = out.view();
  params.lse = settings.dtype == ScalarType::kFloat64 ? static_cast<void*>(lse_double.data())
                                                      : static_cast<void*>(lse_float.data());
  return params;
}

BackwardParams Problem::backward_params() {
  const ForwardParams forward = forward_params();
  BackwardParams params;
  static_cast<AttentionParams&>(params) = forward;
  params.query = forward.query;
  params.key = forward.key;
  params.value = forward.value;
  params.out = forward.out;
  params.lse = forward.lse;
  params.grad_out = grad_out.view();
  params.grad_query = grad_query.view();
  params.grad_key = grad_key.view();
  params.grad_value = grad_value.view();
  return params;
}

void Problem::run_forward(Executor& executor) {
  forward_kernel = cpu::forward(forward_params(), executor);
}
void Problem::run_backward(Executor& executor) {
  backward_kernel = cpu::backward(backward_params(), executor);
}

double Problem::lse(int64_t index) const {
  const size_t n = static_cast<size_t>(index);
  return settings.dtype == ScalarType::kFloat64 ? lse_double[n] : static_cast<double>(lse_float[n]);
}

// The key row at which each query stands: that of the document's key of its rank, or counted on from the
// first or last.
void Problem::place_queries() {
  const int64_t rows_q = packing.rows_q();
  const int64_t rows_k = packing.rows_k();
  for (int64_t b = 0; b < packing.batch; ++b) {
    for (int64_t i = 0; i < rows_q; ++i) {
      const size_t query_row = static_cast<size_t>(b * rows_q + i);
      const int64_t document = query_document[query_row];
      query_place.push_back(0);
      if (document < 0) continue;
      const size_t d = static_cast<size_t>(document);
      const int64_t diagonal = packing.diagonal_offsets.empty() ? document_keys[d] - document_queries[d]
                                                                : int64_t{packing.diagonal_offsets[d]};
      const int64_t place = diagonal + query_rank[query_row];
      int64_t first = -1, last = -1;
      for (int64_t row = 0; row < rows_k; ++row) {
        const size_t flat = static_cast<size_t>(b * rows_k + row);
        if (key_document[flat] != document) continue;
        if (first < 0) first = row;
        last = row;
        if (key_rank[flat] == place) query_place.back() = row;
      }
      if (place < 0) query_place.back() = first + place;
      if (place >= document_keys[d]) query_place.back() = last + place - document_keys[d] + 1;
    }
  }
}

bool Problem::sees(int64_t b, int64_t i, int64_t j) const {
  const size_t query_row = static_cast<size_t>(b * packing.rows_q() + i);
  const int64_t document = query_document[query_row];
  if (document < 0 || document != key_document[static_cast<size_t>(b * packing.rows_k() + j)]) return false;
  const int64_t place = query_place[query_row];
  const int64_t right = settings.is_causal ? 0 : settings.window_right;
  if (right >= 0 && j > place + right) return false;
  return settings.window_left < 0 || j >= place - settings.window_left;
}

Dense dense_oracle(const Problem& problem, bool backward) {
  return dense<double>(problem, backward, {false, problem.settings.dtype});
}

Dense dense_math_path(const Problem& problem, bool backward) {
  if (problem.settings.dtype == ScalarType::kFloat64) {
    return dense<double>(problem, backward, {true, problem.settings.dtype});
  }
  return dense<float>(problem, backward, {true, problem.settings.dtype});
}

namespace {

struct References {
  Dense oracle, math_path;
};

// The same problem, down to the bits of its tensors, comes once per instruction set; its references are
// computed once.
const References& references(const Problem& problem) {
  static std::map<std::string, References> known;
  std::string key = describe(problem.packing, problem.settings);
  const size_t isa = key.find(" isa=");
  key.erase(isa, key.find(' ', isa + 1) - isa);
  for (const Tensor* tensor : {&problem.query, &problem.key, &problem.value, &problem.grad_out}) {
    const std::vector<unsigned char>& bytes = tensor->bytes();
    key.append(" ").append(std::to_string(std::hash<std::string_view>()(
        std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()))));
  }
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  Problem placed = problem;
  placed.place_queries();
  return known.emplace(key, References{dense_oracle(placed, true), dense_math_path(placed, true)})
      .first->second;
}

}  // namespace

void expect_forward_matches(const Problem& problem) {
  const Dense& oracle = references(problem).oracle;
  const Dense& math = references(problem).math_path;
  expect_close("out", problem, oracle.out, math.out, reader(problem.out));
  // The lse is float32 for the half types, so it is held to float32's measure of itself.
  for (size_t n = 0; n < oracle.lse.size(); ++n) {
    const double got = problem.lse(static_cast<int64_t>(n));
    if (std::isinf(oracle.lse[n])) {
      ASSERT_EQ(got, oracle.lse[n]) << "lse element " << n << "; "
                                    << describe(problem.packing, problem.settings);
    } else {
      const double eps = problem.settings.dtype == ScalarType::kFloat64 ? 1e-14 : 4e-6;
      ASSERT_NEAR(got, oracle.lse[n], eps * (1.0 + std::abs(oracle.lse[n])))
          << "lse element " << n << "; " << describe(problem.packing, problem.settings);
    }
  }
}

void expect_backward_matches(const Problem& problem) {
  const Dense& oracle = references(problem).oracle;
  const Dense& math = references(problem).math_path;
  expect_close("grad_query", problem, oracle.grad_query, math.grad_query, reader(problem.grad_query));
  expect_close("grad_key", problem, oracle.grad_key, math.grad_key, reader(problem.grad_key));
  expect_close("grad_value", problem, oracle.grad_value, math.grad_value, reader(problem.grad_value));
}

void ThreadExecutor::run(void (*body)(void* context, int thread), void* context) {
  if (serial_ || num_threads_ == 1) {
    for (int t = 0; t < num_threads_; ++t) body(context, t);
    return;
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < num_threads_; ++t) threads.emplace_back(body, context, t);
  for (std::thread& thread : threads) thread.join();
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const CpuIsa isa : available_cpu_isas()) names.emplace_back(isa_name(isa));
  return names;
}

}  // namespace packed_sdpa::cpu::testing
