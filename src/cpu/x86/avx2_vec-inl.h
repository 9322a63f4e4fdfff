// Eight floats: the vector that the generic kernels are written in, for AVX2 with FMA and F16C.
// Included once, inside the set's namespace and target region.

using Vec = __m256;
constexpr int kLanes = 8;

PACKED_SDPA_INLINE Vec vec_zero() {
  return _mm256_setzero_ps();
}
PACKED_SDPA_INLINE Vec vec_set(float value) {
  return _mm256_set1_ps(value);
}
PACKED_SDPA_INLINE Vec vec_load(const float* p) {
  return _mm256_loadu_ps(p);
}
PACKED_SDPA_INLINE void vec_store(float* p, Vec v) {
  _mm256_storeu_ps(p, v);
}
PACKED_SDPA_INLINE Vec vec_add(Vec a, Vec b) {
  return _mm256_add_ps(a, b);
}
PACKED_SDPA_INLINE Vec vec_sub(Vec a, Vec b) {
  return _mm256_sub_ps(a, b);
}
PACKED_SDPA_INLINE Vec vec_mul(Vec a, Vec b) {
  return _mm256_mul_ps(a, b);
}
PACKED_SDPA_INLINE Vec vec_max(Vec a, Vec b) {
  return _mm256_max_ps(a, b);
}
PACKED_SDPA_INLINE Vec vec_fma(Vec a, Vec b, Vec c) {
  return _mm256_fmadd_ps(a, b, c);
}
PACKED_SDPA_INLINE Vec vec_fms(Vec a, Vec b, Vec c) {
  return _mm256_fmsub_ps(a, b, c);
}

// Lanes begin .. end of a vector (begin <= end, clipped to the vector): all ones in a lane that is in.
using Mask = __m256i;
PACKED_SDPA_INLINE Mask vec_mask(int64_t begin, int64_t end) {
  const int first = begin < 0 ? 0 : begin > kLanes ? kLanes : static_cast<int>(begin);
  const int last = end < 0 ? 0 : end > kLanes ? kLanes : static_cast<int>(end);
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane),
                             _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane));
}
PACKED_SDPA_INLINE Vec vec_select(Mask mask, Vec yes, Vec no) {
  return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(mask));
}

PACKED_SDPA_INLINE float vec_first(Vec v) {
  return _mm256_cvtss_f32(v);
}
PACKED_SDPA_INLINE float vec_reduce_add(Vec v) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
PACKED_SDPA_INLINE float vec_reduce_max(Vec v) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// x is held above the smallest normal power; MAXPS gives its second operand when either is NaN, so a NaN
// stays.
PACKED_SDPA_INLINE Vec clamp_power(Vec x) {
  return _mm256_max_ps(_mm256_set1_ps(-126.0f), x);
}
// x - floor(x), and p * 2^floor(x).
PACKED_SDPA_INLINE Vec vec_fraction(Vec x) {
  const Vec clamped = clamp_power(x);
  return _mm256_sub_ps(clamped, _mm256_floor_ps(clamped));
}
PACKED_SDPA_INLINE Vec vec_scale_by_power(Vec p, Vec x) {
  const __m256i exponent = _mm256_cvtps_epi32(_mm256_floor_ps(clamp_power(x)));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

// Elements in memory <-> floats; `count` of them for the partial forms, the rest 0 or untouched.
PACKED_SDPA_INLINE Vec vec_load_as(const float* p) {
  return _mm256_loadu_ps(p);
}
PACKED_SDPA_INLINE Vec vec_load_as(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
PACKED_SDPA_INLINE Vec vec_load_as(const Float16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
PACKED_SDPA_INLINE __m128i vec_to_bfloat16(Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i words = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
PACKED_SDPA_INLINE void vec_store_as(float* p, Vec v) {
  _mm256_storeu_ps(p, v);
}
PACKED_SDPA_INLINE void vec_store_as(BFloat16* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), vec_to_bfloat16(v));
}
PACKED_SDPA_INLINE void vec_store_as(Float16* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
template <typename T>
PACKED_SDPA_INLINE Vec vec_load_as(const T* p, int64_t count) {
  if (count >= kLanes) return vec_load_as(p);
  T padded[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = p[i];
  return vec_load_as(padded);
}
template <typename T>
PACKED_SDPA_INLINE void vec_store_as(T* p, Vec v, int64_t count) {
  if (count >= kLanes) {
    vec_store_as(p, v);
    return;
  }
  T padded[kLanes];
  vec_store_as(padded, v);
  for (int64_t i = 0; i < count; ++i) p[i] = padded[i];
}

// 8 x 8 words of 32 bits: dst[j][i] = src[i][j]; strides in words.
PACKED_SDPA_INLINE void transpose_words(const float* src, int64_t src_stride, float* dst,
                                        int64_t dst_stride) {
  __m256 r[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(src + i * src_stride);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 8
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(dst + c * dst_stride, _mm256_permute2f128_ps(r[c], r[4 + c], 0x20));
    _mm256_storeu_ps(dst + (4 + c) * dst_stride, _mm256_permute2f128_ps(r[c], r[4 + c], 0x31));
  }
}
