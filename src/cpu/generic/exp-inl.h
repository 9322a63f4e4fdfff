// 2^x for a vector: x = n + f with n = floor(x), f in [0, 1); 2^f by a polynomial of degree 5 whose constant
// is exactly 1 (so 2^0 is exactly 1), fitted for the least relative error: 8.2e-8. 2^-inf is 0, NaN stays
// NaN.

PACKED_SDPA_INLINE Vec vec_exp2(Vec x) {
  const Vec f = vec_fraction(x);
  Vec p = vec_fma(vec_set(0x1.e974fep-10f), f, vec_set(0x1.277854p-7f));
  p = vec_fma(p, f, vec_set(0x1.c91ce6p-5f));
  p = vec_fma(p, f, vec_set(0x1.ebdb56p-3f));
  p = vec_fma(p, f, vec_set(0x1.62e4bap-1f));
  p = vec_fma(p, f, vec_set(1.0f));
  return vec_scale_by_power(p, x);
}
