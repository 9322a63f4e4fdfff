// From tensors of any strides into the operands of the tile GEMMs, a tile at a time. Elem is the operand type
// (float, or BFloat16 in pairs), T the tensor's. Everything past the real rows and columns is written as
// zeros, because a padded element meets a real one in a product.

// How many rows ahead packing asks for: far enough for a miss to memory, few enough for the core's miss
// buffers.
constexpr int64_t kPrefetchRows = 12;

// The rows of one document: keys of a head (group 1), or queries stacked with the heads of their group.
template <typename T>
struct RowSource {
  const T* data;
  int64_t stride_row;
  int64_t stride_head;
  int64_t stride_dim;
  int64_t dim;
  int32_t group;
  const int32_t* rows;  // flat rows by rank, or null
  int64_t first_row;    // row of rank 0, or what to take off a flat row (negated)

  PACKED_SDPA_INLINE int64_t offset(int64_t stacked) const {
    const int32_t rank = static_cast<int32_t>(stacked) / group;
    const int64_t head = static_cast<int32_t>(stacked) - rank * group;
    const int64_t row = (rows != nullptr ? int64_t{rows[rank]} : int64_t{rank}) + first_row;
    return row * stride_row + head * stride_head;
  }
  // Asks for a row that will be read soon. Rows of one head lie a page or so apart in the usual [B, S, H, D]
  // layout, which the hardware does not foresee.
  PACKED_SDPA_INLINE void prefetch(int64_t stacked) const {
    const char* source = reinterpret_cast<const char*>(data + offset(stacked));
    const int64_t bytes = stride_dim == 1 ? dim * static_cast<int64_t>(sizeof(T)) : 1;
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(source + b);
  }
  // The `part`-th of `parts` shares of rows [first, first + count), into the second-level cache: called
  // between the tiles of one block, so that the next block's rows come in under the arithmetic of this one.
  PACKED_SDPA_INLINE void prefetch_share(int64_t first, int64_t count, int64_t part, int64_t parts) const {
    const int64_t bytes = stride_dim == 1 ? dim * static_cast<int64_t>(sizeof(T)) : 1;
    for (int64_t r = count * part / parts; r < count * (part + 1) / parts; ++r) {
      const char* source = reinterpret_cast<const char*>(data + offset(first + r));
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(source + b, 0, 2);
    }
  }
  // The row as `dim` neighbouring elements: in place, or gathered into `spare`.
  PACKED_SDPA_INLINE const T* read(int64_t stacked, T* spare) const {
    const T* source = data + offset(stacked);
    if (stride_dim == 1) return source;
    for (int64_t d = 0; d < dim; ++d) spare[d] = source[d * stride_dim];
    return spare;
  }
};

template <typename T>
inline RowSource<T> query_source(const StridedTensor& tensor, const Document& document, int64_t kv_head,
                                 int64_t group, int64_t dim) {
  const bool gathered = document.query_rows != nullptr;
  return {static_cast<const T*>(tensor.data) + document.batch * tensor.stride_batch +
              kv_head * group * tensor.stride_head,
          tensor.stride_row,
          tensor.stride_head,
          tensor.stride_dim,
          dim,
          static_cast<int32_t>(group),
          document.query_rows,
          gathered ? -document.flat_query_base : document.first_query_row};
}

template <typename T>
inline RowSource<T> key_source(const StridedTensor& tensor, const Document& document, int64_t kv_head,
                               int64_t dim) {
  const bool gathered = document.key_rows != nullptr;
  return {static_cast<const T*>(tensor.data) + document.batch * tensor.stride_batch +
              kv_head * tensor.stride_head,
          tensor.stride_row,
          0,
          tensor.stride_dim,
          dim,
          1,
          document.key_rows,
          gathered ? -document.flat_key_base : document.first_key_row};
}

// One row to operand elements, zeros up to `width` (a multiple of kLanes).
template <typename T>
PACKED_SDPA_INLINE void convert_row(const T* source, int64_t dim, float* target, int64_t width) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) vec_store(target + d, vec_load_as(source + d));
  if (d < dim) {
    vec_store(target + d, vec_load_as(source + d, dim - d));
    d += kLanes;
  }
  for (; d < width; d += kLanes) vec_store(target + d, vec_zero());
}

PACKED_SDPA_INLINE void convert_row(const BFloat16* source, int64_t dim, BFloat16* target, int64_t width) {
  constexpr int64_t kStep = 16;
  int64_t d = 0;
  for (; d + kStep <= dim; d += kStep) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + d),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + d)));
  }
  for (; d < dim; ++d) target[d] = source[d];
  for (; d < width; ++d) target[d] = {};
}

// Rows [first, first + count) as an A operand [rows][width], zero rows up to `padded`.
template <typename T, typename Elem>
PACKED_SDPA_PHASE void pack_rows(const RowSource<T>& source, int64_t first, int64_t count, int64_t padded,
                                 Elem* target, int64_t width, T* spare) {
  for (int64_t r = 0; r < kPrefetchRows && r < count; ++r) source.prefetch(first + r);
  for (int64_t r = 0; r < count; ++r) {
    if (r + kPrefetchRows < count) source.prefetch(first + r + kPrefetchRows);
    convert_row(source.read(first + r, spare), source.dim, target + r * width, width);
  }
  for (int64_t i = count * width; i < padded * width; ++i) target[i] = Elem{};
}

// Transposed B operand from rows [n][words] (`n` and `words` multiples of kLanes): word (k, n) = rows[n][k].
PACKED_SDPA_PHASE void transpose_to_b(const float* rows, int64_t words, int64_t row_words, int64_t n,
                                      float* target, BLayout layout) {
  for (int64_t column = 0; column < n; column += kLanes) {
    float* panel = target + column / kPanel * layout.panel_stride + column % kPanel;
    for (int64_t word = 0; word < words; word += kLanes) {
      transpose_words(rows + column * row_words + word, row_words, panel + word * layout.row_stride,
                      layout.row_stride);
    }
  }
}

// Plain transpose of words, [rows][columns] to [columns][rows]; sizes multiples of kLanes.
PACKED_SDPA_PHASE void transpose_matrix(const float* source, int64_t rows, int64_t columns,
                                        int64_t source_stride, float* target, int64_t target_stride) {
  for (int64_t r = 0; r < rows; r += kLanes) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      transpose_words(source + r * source_stride + c, source_stride, target + c * target_stride + r,
                      target_stride);
    }
  }
}

// B operand whose k runs over rows of [rows][width] floats already packed: word (k, n) = rows[k][n].
PACKED_SDPA_PHASE void rows_to_b(const float* rows, int64_t row_width, int64_t count, int64_t columns,
                                 float* target, BLayout layout) {
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      vec_store(target + c / kPanel * layout.panel_stride + r * layout.row_stride + c % kPanel,
                vec_load(rows + r * row_width + c));
    }
  }
}

// A row of floats times a factor, to a row of the tensor.
template <typename T>
inline void write_row(const float* source, Vec factor, int64_t dim, T* target, int64_t stride_dim) {
  if (stride_dim == 1) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) vec_store_as(target + d, vec_mul(vec_load(source + d), factor));
    if (d < dim) vec_store_as(target + d, vec_mul(vec_load(source + d), factor), dim - d);
    return;
  }
  for (int64_t d = 0; d < dim; d += kLanes) {
    T part[kLanes];
    vec_store_as(part, vec_mul(vec_load(source + d), factor));
    for (int64_t i = 0; i < kLanes && d + i < dim; ++i) target[(d + i) * stride_dim] = part[i];
  }
}

// The same, added to what the row holds.
inline void add_row(const float* source, Vec factor, int64_t dim, float* target, int64_t stride_dim) {
  if (stride_dim == 1) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      vec_store(target + d, vec_fma(vec_load(source + d), factor, vec_load(target + d)));
    }
    if (d < dim) {
      const Vec sum = vec_fma(vec_load(source + d), factor, vec_load_as(target + d, dim - d));
      vec_store_as(target + d, sum, dim - d);
    }
    return;
  }
  for (int64_t d = 0; d < dim; d += kLanes) {
    float part[kLanes];
    vec_store(part, vec_mul(vec_load(source + d), factor));
    for (int64_t i = 0; i < kLanes && d + i < dim; ++i) target[(d + i) * stride_dim] += part[i];
  }
}
