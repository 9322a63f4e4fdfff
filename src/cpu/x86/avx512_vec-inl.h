// Sixteen floats: the vector that the generic kernels are written in, for AVX-512 (F, BW, DQ, VL).
// Included once per instruction set, inside its namespace and target region.

using Vec = __m512;
constexpr int kLanes = 16;

PACKED_SDPA_INLINE Vec vec_zero() {
  return _mm512_setzero_ps();
}
PACKED_SDPA_INLINE Vec vec_set(float value) {
  return _mm512_set1_ps(value);
}
PACKED_SDPA_INLINE Vec vec_load(const float* p) {
  return _mm512_loadu_ps(p);
}
PACKED_SDPA_INLINE void vec_store(float* p, Vec v) {
  _mm512_storeu_ps(p, v);
}
PACKED_SDPA_INLINE Vec vec_add(Vec a, Vec b) {
  return _mm512_add_ps(a, b);
}
PACKED_SDPA_INLINE Vec vec_sub(Vec a, Vec b) {
  return _mm512_sub_ps(a, b);
}
PACKED_SDPA_INLINE Vec vec_mul(Vec a, Vec b) {
  return _mm512_mul_ps(a, b);
}
PACKED_SDPA_INLINE Vec vec_max(Vec a, Vec b) {
  return _mm512_max_ps(a, b);
}
PACKED_SDPA_INLINE Vec vec_fma(Vec a, Vec b, Vec c) {
  return _mm512_fmadd_ps(a, b, c);
}
PACKED_SDPA_INLINE Vec vec_fms(Vec a, Vec b, Vec c) {
  return _mm512_fmsub_ps(a, b, c);
}

// Lanes begin .. end of a vector (begin <= end, clipped to the vector).
using Mask = __mmask16;
PACKED_SDPA_INLINE uint32_t low_bits(int64_t count) {
  return count <= 0 ? 0u : count >= kLanes ? 0xffffu : (1u << count) - 1u;
}
PACKED_SDPA_INLINE Mask vec_mask(int64_t begin, int64_t end) {
  return static_cast<Mask>(low_bits(end) & ~low_bits(begin));
}
PACKED_SDPA_INLINE Vec vec_select(Mask mask, Vec yes, Vec no) {
  return _mm512_mask_blend_ps(mask, no, yes);
}

PACKED_SDPA_INLINE float vec_first(Vec v) {
  return _mm512_cvtss_f32(v);
}
PACKED_SDPA_INLINE float vec_reduce_add(Vec v) {
  const __m256 high = _mm512_extractf32x8_ps(v, 1);
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
PACKED_SDPA_INLINE float vec_reduce_max(Vec v) {
  const __m256 high = _mm512_extractf32x8_ps(v, 1);
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v), high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// x - floor(x) (0 for an infinity), and p * 2^floor(x).
PACKED_SDPA_INLINE Vec vec_fraction(Vec x) {
  return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
PACKED_SDPA_INLINE Vec vec_scale_by_power(Vec p, Vec x) {
  return _mm512_scalef_ps(p, x);
}

// Elements in memory <-> floats; `count` of them for the partial forms, the rest 0 or untouched.
PACKED_SDPA_INLINE Vec vec_load_as(const float* p) {
  return _mm512_loadu_ps(p);
}
PACKED_SDPA_INLINE Vec vec_load_as(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
PACKED_SDPA_INLINE Vec vec_load_as(const Float16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
PACKED_SDPA_INLINE Vec vec_load_as(const float* p, int64_t count) {
  return _mm512_maskz_loadu_ps(vec_mask(0, count), p);
}
PACKED_SDPA_INLINE Vec vec_load_as(const BFloat16* p, int64_t count) {
  const __m256i bits = _mm256_maskz_loadu_epi16(vec_mask(0, count), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
PACKED_SDPA_INLINE Vec vec_load_as(const Float16* p, int64_t count) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(vec_mask(0, count), p));
}

// Round to nearest even, NaN stays (quiet).
PACKED_SDPA_INLINE __m256i vec_to_bfloat16(Vec v) {
#if PACKED_SDPA_HAS_BF16
  return (__m256i)_mm512_cvtneps_pbh(v);
#else
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16));
#endif
}
PACKED_SDPA_INLINE void vec_store_as(float* p, Vec v) {
  _mm512_storeu_ps(p, v);
}
PACKED_SDPA_INLINE void vec_store_as(BFloat16* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), vec_to_bfloat16(v));
}
PACKED_SDPA_INLINE void vec_store_as(Float16* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
PACKED_SDPA_INLINE void vec_store_as(float* p, Vec v, int64_t count) {
  _mm512_mask_storeu_ps(p, vec_mask(0, count), v);
}
PACKED_SDPA_INLINE void vec_store_as(BFloat16* p, Vec v, int64_t count) {
  _mm256_mask_storeu_epi16(p, vec_mask(0, count), vec_to_bfloat16(v));
}
PACKED_SDPA_INLINE void vec_store_as(Float16* p, Vec v, int64_t count) {
  _mm256_mask_storeu_epi16(p, vec_mask(0, count), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

// 16 x 16 words of 32 bits: dst[j][i] = src[i][j]; strides in words.
PACKED_SDPA_INLINE void transpose_words(const float* src, int64_t src_stride, float* dst,
                                        int64_t dst_stride) {
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(src + i * src_stride);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {  // pairs of rows: words
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {  // quads of rows: pairs of words; r[i + c] holds column c of each lane
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 16
  for (int c = 0; c < 4; ++c) {  // lanes: a 4 x 4 transpose of 128-bit blocks
    const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);       // rows 0-3, 4-7 of lanes 0, 2
    const __m512i b = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);  // rows 8-11, 12-15 of lanes 0, 2
    const __m512i d = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);       // lanes 1, 3
    const __m512i e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(a, b, 0x88);       // lane 0: columns c
    t[8 + c] = _mm512_shuffle_i32x4(a, b, 0xdd);   // lane 2: columns 8 + c
    t[4 + c] = _mm512_shuffle_i32x4(d, e, 0x88);   // lane 1: columns 4 + c
    t[12 + c] = _mm512_shuffle_i32x4(d, e, 0xdd);  // lane 3: columns 12 + c
  }
#pragma GCC unroll 16
  for (int j = 0; j < 16; ++j) _mm512_storeu_si512(dst + j * dst_stride, t[j]);
}

// Thirty-two elements as sixteen words: the lower half's elements in the words' lower halves, the upper's in
// their upper.
PACKED_SDPA_INLINE __m512i interleave_halves(__m512i elements) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, elements);
}

// Sixteen words with `low` in their lower and `high` in their upper halves.
PACKED_SDPA_INLINE void interleave_words(const BFloat16* low, const BFloat16* high, float* words) {
  const __m512i lower = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low)));
  const __m256i upper = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high));
  _mm512_storeu_si512(words, interleave_halves(_mm512_inserti64x4(lower, upper, 1)));
}

#if PACKED_SDPA_HAS_BF16
// One VCVTNE2PS2BF16 takes as long as one VCVTNEPS2BF16, four multiply-adds on Sapphire Rapids.
PACKED_SDPA_INLINE __m512i vec_to_bfloat16(Vec first, Vec second) {
  return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}
PACKED_SDPA_INLINE void vec_store_as(BFloat16* p, Vec first, Vec second) {
  _mm512_storeu_si512(p, vec_to_bfloat16(first, second));
}
// Two vectors in two rows; the second form also as words with `low` in their lower and `high` in their upper
// halves.
PACKED_SDPA_INLINE __m512i vec_store_rows(BFloat16* low_row, BFloat16* high_row, Vec low, Vec high) {
  const __m512i elements = vec_to_bfloat16(low, high);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(low_row), _mm512_castsi512_si256(elements));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(high_row), _mm512_extracti64x4_epi64(elements, 1));
  return elements;
}
PACKED_SDPA_INLINE void vec_store_rows(BFloat16* low_row, BFloat16* high_row, float* words, Vec low,
                                       Vec high) {
  _mm512_storeu_si512(words, interleave_halves(vec_store_rows(low_row, high_row, low, high)));
}

// acc + a0 b0 + a1 b1 of the two elements of each word.
PACKED_SDPA_INLINE Vec vec_dot_bf16(Vec acc, Vec a, Vec b) {
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
#endif
