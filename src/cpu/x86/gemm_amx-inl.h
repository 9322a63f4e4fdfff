// The product in AMX tiles: 32 x 32 of C in four tiles, per 16 words (32 elements) of k two tiles of A, two
// of B and four TDPBF16PS. A tile is 16 rows of 64 bytes; a product takes 16 cycles, a load from L1 8, so
// loads hide behind products.
//
// Rows of A and C are touched in sixteens: buffers are padded to kRowPadding, and rows past `m` hold garbage
// that nobody reads. k is a multiple of 16 words, columns of 16.
struct AmxBf16 {
  static constexpr int64_t kTileRows = 16;
  static constexpr int64_t kTileWords = 16;

  static constexpr bool kOverlap = true;
  static constexpr int64_t kStrip = 32;
  static constexpr int64_t kColumnStep = 16;
  static constexpr int64_t kDepthStep = 32;
  static constexpr int64_t kRowPadding = 32;
  static constexpr int64_t kKeyPadding = 32;
  static constexpr int64_t kForwardRows = 64;
  static constexpr int64_t kForwardKeys = 256;
  static constexpr int64_t kBackwardKeyPadding = 32;
  static constexpr int64_t kBackwardRowPadding = 32;
  static constexpr int64_t kBackwardItemKeys = 512;
  static constexpr int64_t kBackwardKeys = 64;
  static constexpr int64_t kBackwardRows = 128;

  struct alignas(64) TileConfig {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };

  // GCC's tile loads do not tell the compiler that they read memory: everything stored before must be in
  // place.
  static PACKED_SDPA_INLINE void compiler_fence(const void* pointer) {
    __asm__ volatile("" ::"r"(pointer) : "memory");
  }

  static inline void begin() {
    TileConfig config = {};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = 16;
    }
    compiler_fence(&config);
    _tile_loadconfig(&config);
  }
  static inline void end() { _tile_release(); }

  // One block of C: kTwoRows * 16 rows by kTwoColumns * 16 columns.
  template <bool kTwoRows, bool kTwoColumns>
  static PACKED_SDPA_INLINE void block(int64_t words, const float* a, int64_t lda, const float* b,
                                       int64_t row_stride, float* c, int64_t ldc, bool accumulate) {
    const int64_t c_bytes = ldc * 4;
    const int64_t a_bytes = lda * 4;
    const int64_t b_bytes = row_stride * 4;
    float* c_low = c + kTileRows * ldc;
    if (accumulate) {
      _tile_loadd(0, c, c_bytes);
      if constexpr (kTwoColumns) _tile_loadd(1, c + 16, c_bytes);
      if constexpr (kTwoRows) _tile_loadd(2, c_low, c_bytes);
      if constexpr (kTwoRows && kTwoColumns) _tile_loadd(3, c_low + 16, c_bytes);
    } else {
      _tile_zero(0);
      if constexpr (kTwoColumns) _tile_zero(1);
      if constexpr (kTwoRows) _tile_zero(2);
      if constexpr (kTwoRows && kTwoColumns) _tile_zero(3);
    }
    for (int64_t k = 0; k < words; k += kTileWords) {
      _tile_loadd(6, b + k * row_stride, b_bytes);
      _tile_loadd(4, a + k, a_bytes);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kTwoColumns) {
        _tile_loadd(7, b + k * row_stride + 16, b_bytes);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (kTwoRows) {
        _tile_loadd(5, a + kTileRows * lda + k, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
      }
      if constexpr (kTwoRows && kTwoColumns) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_bytes);
    if constexpr (kTwoColumns) _tile_stored(1, c + 16, c_bytes);
    if constexpr (kTwoRows) _tile_stored(2, c_low, c_bytes);
    if constexpr (kTwoRows && kTwoColumns) _tile_stored(3, c_low + 16, c_bytes);
  }

  template <bool kTwoColumns>
  static PACKED_SDPA_INLINE void columns(int64_t m, int64_t words, const float* a, int64_t lda,
                                         const float* b, int64_t row_stride, float* c, int64_t ldc,
                                         bool accumulate, RowPrefetch* ahead) {
    int64_t row = 0;
    for (; row + kTileRows < m; row += 2 * kTileRows) {
      block<true, kTwoColumns>(words, a + row * lda, lda, b, row_stride, c + row * ldc, ldc, accumulate);
      ahead->step();
    }
    if (row < m)
      block<false, kTwoColumns>(words, a + row * lda, lda, b, row_stride, c + row * ldc, ldc, accumulate);
  }

  static constexpr int64_t steps(int64_t m, int64_t n) {
    return (m + 2 * kTileRows - 1) / (2 * kTileRows) * ((n + 31) / 32);
  }
  static inline void multiply(int64_t m, int64_t n_begin, int64_t n_end, int64_t words, const float* a,
                              int64_t lda, const float* b, BLayout layout, float* c, int64_t ldc,
                              bool accumulate, RowPrefetch* ahead) {
    compiler_fence(a);
    for (int64_t n = n_begin; n < n_end;) {
      const int64_t in_panel = n % kPanel;
      const float* panel = b + n / kPanel * layout.panel_stride + in_panel;
      if (in_panel == 0 && n_end - n >= 32) {
        columns<true>(m, words, a, lda, panel, layout.row_stride, c + n, ldc, accumulate, ahead);
        n += 32;
      } else {
        columns<false>(m, words, a, lda, panel, layout.row_stride, c + n, ldc, accumulate, ahead);
        n += 16;
      }
    }
  }

  // Products that are done a block at a time between other work. The tile unit works on a block for some
  // hundred cycles while the core goes on with the vector instructions behind it.
  class Background {
   public:
    explicit Background(RowPrefetch* ahead) : ahead_(ahead) {}
    inline void add(int64_t m, int64_t n_begin, int64_t n_end, int64_t k, const BFloat16* a, int64_t lda,
                    const float* b, BLayout layout, float* c, int64_t ldc, bool accumulate) {
      const int64_t row_blocks = steps(m, 1);
      const int64_t blocks = steps(m, n_end - n_begin);
      jobs_[num_jobs_++] = {m,          n_begin,    n_end,  k / 2, reinterpret_cast<const float*>(a),
                            lda / 2,    b,          layout, c,     ldc,
                            accumulate, row_blocks, blocks};
      total_ += blocks;
      compiler_fence(a);
    }
    // Before row r of `count` rows of the other work.
    PACKED_SDPA_INLINE void advance(int64_t r, int64_t count) {
      while (done_ * count < total_ * (r + 1)) run_block();
    }
    inline void finish() {
      while (done_ < total_) run_block();
      compiler_fence(this);
      num_jobs_ = 0;
      job_ = 0;
      block_ = 0;
      total_ = 0;
      done_ = 0;
    }

   private:
    struct Job {
      int64_t m, n_begin, n_end, words;
      const float* a;
      int64_t lda;
      const float* b;
      BLayout layout;
      float* c;
      int64_t ldc;
      bool accumulate;
      int64_t row_blocks, blocks;
    };
    inline void run_block() {
      const Job& job = jobs_[job_];
      const int64_t n = job.n_begin + block_ / job.row_blocks * 32;
      const int64_t row = block_ % job.row_blocks * 2 * kTileRows;
      const float* panel = job.b + n / kPanel * job.layout.panel_stride + n % kPanel;
      const float* a = job.a + row * job.lda;
      float* c = job.c + row * job.ldc + n;
      const bool two_rows = job.m - row > kTileRows;
      const int64_t stride = job.layout.row_stride;
      if (job.n_end - n >= 32) {
        if (two_rows) {
          block<true, true>(job.words, a, job.lda, panel, stride, c, job.ldc, job.accumulate);
        } else {
          block<false, true>(job.words, a, job.lda, panel, stride, c, job.ldc, job.accumulate);
        }
      } else if (two_rows) {
        block<true, false>(job.words, a, job.lda, panel, stride, c, job.ldc, job.accumulate);
      } else {
        block<false, false>(job.words, a, job.lda, panel, stride, c, job.ldc, job.accumulate);
      }
      ahead_->step();
      ++done_;
      if (++block_ == job.blocks) {
        block_ = 0;
        ++job_;
      }
    }
    RowPrefetch* ahead_;
    Job jobs_[2];
    int64_t num_jobs_ = 0;
    int64_t job_ = 0;
    int64_t block_ = 0;
    int64_t total_ = 0;
    int64_t done_ = 0;
  };
};
