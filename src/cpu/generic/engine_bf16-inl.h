// bfloat16 operands in pairs: what VDPBF16PS and the AMX tile product take. A word is two elements of
// neighbouring k.
//
// Gemm gives the product, the strips and paddings that it wants, and the tile sizes.
template <class Gemm>
struct EngineBf16 : Gemm {
  using Elem = BFloat16;
  static constexpr int64_t kPair = 2;

  static inline void negate(BFloat16* data, int64_t count) {
    for (int64_t i = 0; i < count; ++i) data[i].bits = static_cast<uint16_t>(data[i].bits ^ 0x8000u);
  }
  static inline void gemm(int64_t m, int64_t n_begin, int64_t n_end, int64_t k, const BFloat16* a,
                          int64_t lda, const float* b, BLayout layout, float* c, int64_t ldc, bool accumulate,
                          RowPrefetch* ahead) {
    Gemm::multiply(m, n_begin, n_end, k / kPair, reinterpret_cast<const float*>(a), lda / kPair, b, layout, c,
                   ldc, accumulate, ahead);
  }
  // Rows of a tensor as a B operand whose k runs over them, two rows to a word; zero rows up to `padded`.
  static PACKED_SDPA_PHASE void pack_b(const RowSource<BFloat16>& source, int64_t first, int64_t count,
                                       int64_t padded, int64_t width, float* target, BLayout layout,
                                       BFloat16* spare) {
    BFloat16* other_spare = spare + round_up(source.dim, 64);
    for (int64_t r = 0; r < padded; r += 2) {
      float* words = target + r / 2 * layout.row_stride;
      const auto place = [&](int64_t c) { return words + c / kPanel * layout.panel_stride + c % kPanel; };
      if (r >= count) {
        for (int64_t c = 0; c < width; c += kLanes) vec_store(place(c), vec_zero());
        continue;
      }
      const BFloat16* low = source.read(first + r, spare);
      const BFloat16* high = r + 1 < count ? source.read(first + r + 1, other_spare) : nullptr;
      for (int64_t c = 0; c < width; c += kLanes) {
        if (high != nullptr && c + kLanes <= source.dim) {
          interleave_words(low + c, high + c, place(c));
        } else {
          BFloat16 tails[2][kLanes] = {};
          for (int64_t i = 0; i < kLanes && c + i < source.dim; ++i) {
            tails[0][i] = low[c + i];
            if (high != nullptr) tails[1][i] = high[c + i];
          }
          interleave_words(tails[0], tails[1], place(c));
        }
      }
    }
  }
  static PACKED_SDPA_PHASE void interleave_rows(const BFloat16* rows, int64_t width, int64_t count,
                                                float* target, BLayout layout) {
    for (int64_t r = 0; r < count; r += 2) {
      float* words = target + r / 2 * layout.row_stride;
      for (int64_t c = 0; c < width; c += kLanes) {
        interleave_words(rows + r * width + c, rows + (r + 1) * width + c,
                         words + c / kPanel * layout.panel_stride + c % kPanel);
      }
    }
  }
  // [count][width] to [width][count], `target_stride` elements a row: pairs of rows to words, words
  // transposed.
  static PACKED_SDPA_PHASE void transpose_rows(const BFloat16* rows, int64_t count, int64_t width,
                                               BFloat16* target, int64_t target_stride, float* pairs) {
    for (int64_t r = 0; r < count; r += 2) {
      for (int64_t c = 0; c < width; c += kLanes) {
        interleave_words(rows + r * width + c, rows + (r + 1) * width + c, pairs + r / 2 * width + c);
      }
    }
    transpose_matrix(pairs, count / 2, width, width, reinterpret_cast<float*>(target), target_stride / 2);
  }
};
