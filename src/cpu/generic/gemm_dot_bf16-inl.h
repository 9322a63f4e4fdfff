// The register-blocked product with VDPBF16PS: two multiply-adds a lane and word of k.
struct DotBf16 {
  static PACKED_SDPA_INLINE Vec multiply_add(Vec acc, Vec a, Vec b) { return vec_dot_bf16(acc, a, b); }

  static constexpr bool kOverlap = false;
  static constexpr int64_t kStrip = kMicroRows;
  static constexpr int64_t kColumnStep = kLanes;
  static constexpr int64_t kDepthStep = 2;
  static constexpr int64_t kRowPadding = 1;
  static constexpr int64_t kKeyPadding = kLanes;
  static constexpr int64_t kForwardRows = 96;
  static constexpr int64_t kForwardKeys = 128;
  static constexpr int64_t kBackwardKeyPadding = 32;
  static constexpr int64_t kBackwardRowPadding = 16;
  static constexpr int64_t kBackwardItemKeys = 512;
  static constexpr int64_t kBackwardKeys = 96;
  static constexpr int64_t kBackwardRows = 64;

  static PACKED_SDPA_INLINE void begin() {}
  static PACKED_SDPA_INLINE void end() {}
  static constexpr int64_t steps(int64_t m, int64_t n) { return broadcast_steps(m, n); }
  static inline void multiply(int64_t m, int64_t n_begin, int64_t n_end, int64_t words, const float* a,
                              int64_t lda, const float* b, BLayout layout, float* c, int64_t ldc,
                              bool accumulate, RowPrefetch* ahead) {
    gemm_broadcast<DotBf16>(m, n_begin, n_end, words, a, lda, b, layout, c, ldc, accumulate, ahead);
  }
};
