// From tensors of any strides into the operands of the tile GEMMs, a tile at a time. Elem is the operand type
// (float, or BFloat16 in pairs), T the tensor's. Everything past the real rows and columns is written as
// zeros, because a padded element meets a real one in a product.

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
