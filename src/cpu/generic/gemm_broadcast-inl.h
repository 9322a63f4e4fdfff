// C[m x n] (+)= A[m x k] B[k x n] with C in registers: a block of kMicroRows x (kMicroVecs * kLanes) of C,
// per step of k one word of A broadcast per row, kMicroVecs vectors of B, kMicroRows * kMicroVecs
// multiply-adds.
//
// Words are 32 bits: one float, or two bfloat16 of neighbouring k (for VDPBF16PS). A is row-major with `lda`
// words a row. B holds word (k, n) at b + (n / kPanel) * panel_stride + k * row_stride + n % kPanel: panels
// of kPanel columns, so that a block streams through memory in order. C is row-major float.
//
// AVX-512: 6 x 64 is 24 accumulators + 4 of B + 1 of A of 32 registers, 10 loads for 24 multiply-adds (12
// cycles on two ports). AVX2: 6 x 16 is 12 + 2 + 1 of 16. One vector wide, which documents of a few tokens
// are, six multiply-adds would wait for the six before them: such blocks have more rows.

// Where a packed B operand lies; strides in words.
struct BLayout {
  int64_t row_stride;
  int64_t panel_stride;
};

template <class Op, int64_t kRows, int64_t kVecs>
PACKED_SDPA_INLINE void micro_kernel(int64_t words, const float* a, int64_t lda, const float* b,
                                     int64_t row_stride, float* c, int64_t ldc, bool accumulate) {
  Vec acc[kRows][kVecs];
#pragma GCC unroll 16
  for (int64_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int64_t v = 0; v < kVecs; ++v)
      acc[i][v] = accumulate ? vec_load(c + i * ldc + v * kLanes) : vec_zero();
  }
  for (int64_t k = 0; k < words; ++k) {
    Vec row[kVecs];
#pragma GCC unroll 8
    for (int64_t v = 0; v < kVecs; ++v) row[v] = vec_load(b + k * row_stride + v * kLanes);
#pragma GCC unroll 16
    for (int64_t i = 0; i < kRows; ++i) {
      const Vec word = vec_set(a[i * lda + k]);
#pragma GCC unroll 8
      for (int64_t v = 0; v < kVecs; ++v) acc[i][v] = Op::multiply_add(acc[i][v], word, row[v]);
    }
  }
#pragma GCC unroll 16
  for (int64_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int64_t v = 0; v < kVecs; ++v) vec_store(c + i * ldc + v * kLanes, acc[i][v]);
  }
}

template <int64_t kVecs>
constexpr int64_t kBlockRows = kVecs == 1 ? 4 * kMicroVecs : kMicroRows;

// Rows left over after the blocks of kBlockRows.
template <class Op, int64_t kRows, int64_t kVecs>
inline void micro_rows(int64_t m, int64_t words, const float* a, int64_t lda, const float* b,
                       int64_t row_stride, float* c, int64_t ldc, bool accumulate) {
  if (m == kRows) {
    micro_kernel<Op, kRows, kVecs>(words, a, lda, b, row_stride, c, ldc, accumulate);
  } else if constexpr (kRows > 1) {
    micro_rows<Op, kRows - 1, kVecs>(m, words, a, lda, b, row_stride, c, ldc, accumulate);
  }
}

template <class Op, int64_t kVecs>
inline void micro_columns(int64_t m, int64_t words, const float* a, int64_t lda, const float* b,
                          int64_t row_stride, float* c, int64_t ldc, bool accumulate, RowPrefetch* ahead) {
  constexpr int64_t kRows = kBlockRows<kVecs>;
  while (m >= kRows) {
    micro_kernel<Op, kRows, kVecs>(words, a, lda, b, row_stride, c, ldc, accumulate);
    a += kRows * lda;
    c += kRows * ldc;
    m -= kRows;
    ahead->step();
  }
  if constexpr (kRows > 1) {
    if (m > 0) micro_rows<Op, kRows - 1, kVecs>(m, words, a, lda, b, row_stride, c, ldc, accumulate);
  }
}

// How many steps of `ahead` a product takes, at most.
constexpr int64_t broadcast_steps(int64_t m, int64_t n) {
  return m / kMicroRows * ((n + kMicroVecs * kLanes - 1) / (kMicroVecs * kLanes));
}

// Columns [n_begin, n_end) of C; both multiples of kLanes. `c` points at column 0.
template <class Op>
inline void gemm_broadcast(int64_t m, int64_t n_begin, int64_t n_end, int64_t words, const float* a,
                           int64_t lda, const float* b, BLayout layout, float* c, int64_t ldc,
                           bool accumulate, RowPrefetch* ahead) {
  for (int64_t n = n_begin; n < n_end;) {
    const int64_t in_panel = n % kPanel;
    int64_t width = kPanel - in_panel;
    if (width > n_end - n) width = n_end - n;
    if (width > kMicroVecs * kLanes) width = kMicroVecs * kLanes;
    const float* panel = b + (n / kPanel) * layout.panel_stride + in_panel;
    switch (width / kLanes) {
      case 1:
        micro_columns<Op, 1>(m, words, a, lda, panel, layout.row_stride, c + n, ldc, accumulate, ahead);
        break;
      case 2:
        micro_columns<Op, 2>(m, words, a, lda, panel, layout.row_stride, c + n, ldc, accumulate, ahead);
        break;
      case 3:
        if constexpr (kMicroVecs >= 3) {
          micro_columns<Op, 3>(m, words, a, lda, panel, layout.row_stride, c + n, ldc, accumulate, ahead);
        }
        break;
      default:
        if constexpr (kMicroVecs >= 4) {
          micro_columns<Op, 4>(m, words, a, lda, panel, layout.row_stride, c + n, ldc, accumulate, ahead);
        }
        break;
    }
    n += width;
  }
}

struct MultiplyAddFloat {
  static PACKED_SDPA_INLINE Vec multiply_add(Vec acc, Vec a, Vec b) { return vec_fma(a, b, acc); }
};
