// Float operands: every element type is converted to float when it is packed.
//
// Tile sizes, in stacked rows and keys, at D 128 in floats: forward keeps 64 keys of K^T and V (2 x 32 kB)
// under 96 rows of scores (24 kB), an item's Q and O (512 rows, 2 x 256 kB) in L2. Backward keeps a block of
// keys (K, K^T, V, dK, dV: 5 x 128 kB at 256 keys) in L2 while query tiles of 64 rows (4 x 32 kB) pass.
struct EngineF32 {
  using Elem = float;
  static constexpr int64_t kPair = 1;
  static constexpr bool kOverlap = false;
  static constexpr int64_t kStrip = kMicroRows;
  static constexpr int64_t kColumnStep = kLanes;
  static constexpr int64_t kDepthStep = 1;
  static constexpr int64_t kRowPadding = 1;
  static constexpr int64_t kKeyPadding = kLanes;
  static constexpr int64_t kForwardRows = 96;
  static constexpr int64_t kForwardKeys = 64;
  static constexpr int64_t kBackwardKeyPadding = 16;
  static constexpr int64_t kBackwardRowPadding = 16;
  static constexpr int64_t kBackwardItemKeys = 512;
  static constexpr int64_t kBackwardKeys = 48;
  static constexpr int64_t kBackwardRows = 64;

  static PACKED_SDPA_INLINE void begin() {}
  static PACKED_SDPA_INLINE void end() {}
  static inline void negate(float* data, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) vec_store(data + i, vec_sub(vec_zero(), vec_load(data + i)));
  }
  static constexpr int64_t steps(int64_t m, int64_t n) { return broadcast_steps(m, n); }
  static inline void gemm(int64_t m, int64_t n_begin, int64_t n_end, int64_t k, const float* a, int64_t lda,
                          const float* b, BLayout layout, float* c, int64_t ldc, bool accumulate,
                          RowPrefetch* ahead) {
    gemm_broadcast<MultiplyAddFloat>(m, n_begin, n_end, k, a, lda, b, layout, c, ldc, accumulate, ahead);
  }
  // Rows of a tensor as a B operand whose k runs over them; zero rows up to `padded`.
  template <typename T>
  static PACKED_SDPA_PHASE void pack_b(const RowSource<T>& source, int64_t first, int64_t count,
                                       int64_t padded, int64_t width, float* target, BLayout layout,
                                       T* spare) {
    for (int64_t r = 0; r < padded; ++r) {
      const T* row = r < count ? source.read(first + r, spare) : nullptr;
      for (int64_t c = 0; c < width; c += kLanes) {
        Vec v = vec_zero();
        if (row != nullptr && c + kLanes <= source.dim) {
          v = vec_load_as(row + c);
        } else if (row != nullptr && c < source.dim) {
          v = vec_load_as(row + c, source.dim - c);
        }
        vec_store(target + c / kPanel * layout.panel_stride + r * layout.row_stride + c % kPanel, v);
      }
    }
  }
  static inline void interleave_rows(const float* rows, int64_t width, int64_t count, float* target,
                                     BLayout layout) {
    rows_to_b(rows, width, count, width, target, layout);
  }
  static inline void transpose_rows(const float* rows, int64_t count, int64_t width, float* target,
                                    int64_t target_stride, float*) {
    transpose_matrix(rows, count, width, width, target, target_stride);
  }
};
