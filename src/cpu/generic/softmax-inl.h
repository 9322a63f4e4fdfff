// The rows of the score tile between the two GEMMs.
//
// Forward, online: with c = scale * log2(e) folded into one multiply,
//   p_j = 2^(c s_j - c r),  l = sum p_j,  r the row's reference: a score of the row that is not much below
//   its largest.
// out = O / l and lse = c r ln 2 + ln l do not depend on r, so it moves only when p, l and O could grow
// large, and no rescaling is paid for until then. It moves to the running maximum, when that passes it by
// kReferenceSlack (in powers of two).

constexpr float kReferenceSlack = 8.0f;

// kExact, of kernels whose operands are floats: subtracts before it multiplies, so that a one-token document
// gives its value back bit for bit. One instruction more, which operands in pairs (bfloat16) round away.
// Those also do not look for the maximum first: a row starts from the maximum of the vectors at its ends and
// keeps its reference as long as the sum of a tile's weights shows that none of them is large. A sum over
// kWeightSumLimit (or NaN) does the row again, from its maximum; the scores are still there, because weights
// in pairs have a buffer of their own.
constexpr float kWeightSumLimit = 65536.0f;

// c r from which on its rounding (2^-24 of it) could be seen beside a bfloat16's: there too, subtraction
// comes first.
constexpr float kLargeShift = 4096.0f;

// Two vectors side by side; of bfloat16 where the set has such a store.
PACKED_SDPA_INLINE void vec_store_as(float* p, Vec first, Vec second) {
  vec_store(p, first);
  vec_store(p + kLanes, second);
}

// Scores [begin, end) of a row are visible, within the computed part [low, high) of the tile (multiples of
// kLanes). Leaves the weights in `p` (zeros in the invisible rest of [low, high)), updates the row's
// reference, sum and O.
template <bool kExact, bool kDropout, typename Elem>
PACKED_SDPA_INLINE void softmax_row(const float* s, Elem* p, int64_t low, int64_t high, int64_t begin,
                                    int64_t end, float c, const float* factors, float* reference, float* sum,
                                    float* out, int64_t out_width) {
  if (begin >= end) {
    for (int64_t at = low; at < high; at += kLanes) vec_store_as(p + at, vec_zero());
    return;
  }
  const Vec minus_infinity = vec_set(-__builtin_inff());
  const int64_t first = begin / kLanes * kLanes;
  const int64_t last =
      (end - 1) / kLanes * kLanes;  // the vectors that hold the first and the last visible score
  const Mask first_mask = vec_mask(begin - first, end - first);
  const Mask last_mask = vec_mask(begin - last, end - last);

  const Vec first_scores = vec_select(first_mask, vec_load(s + first), minus_infinity);
  const Vec last_scores = vec_select(last_mask, vec_load(s + last), minus_infinity);

  // Weights by the reference as it is, and their sum.
  const auto weigh = [&]<bool kSubtractFirst>() PACKED_SDPA_LAMBDA_INLINE {
    const Vec scale = vec_set(c);
    const Vec shift = vec_set(kSubtractFirst ? *reference : c * *reference);
    const auto weight = [&](Vec score) PACKED_SDPA_LAMBDA_INLINE {
      return vec_exp2(kSubtractFirst ? vec_mul(vec_sub(score, shift), scale) : vec_fms(score, scale, shift));
    };
    const auto keep = [&](int64_t at, Vec weights) PACKED_SDPA_LAMBDA_INLINE {
      return kDropout ? vec_mul(weights, vec_load(factors + at)) : weights;
    };
    for (int64_t j = low; j < first; j += kLanes) vec_store_as(p + j, vec_zero());
    Vec weights[2];
    // Two chains of sums: one would wait four cycles for each of its steps.
    Vec sums[2] = {vec_select(first_mask, weight(vec_load(s + first)), vec_zero()), vec_zero()};
    vec_store_as(p + first, keep(first, sums[0]));
    int64_t j = first + kLanes;
    for (; j + kLanes < last; j += 2 * kLanes) {
#pragma GCC unroll 2
      for (int64_t i = 0; i < 2; ++i) {
        weights[i] = weight(vec_load(s + j + i * kLanes));
        sums[i] = vec_add(sums[i], weights[i]);
      }
      vec_store_as(p + j, keep(j, weights[0]), keep(j + kLanes, weights[1]));
    }
    if (j < last) {
      weights[0] = weight(vec_load(s + j));
      sums[0] = vec_add(sums[0], weights[0]);
      vec_store_as(p + j, keep(j, weights[0]));
    }
    if (last > first) {
      weights[1] = vec_select(last_mask, weight(vec_load(s + last)), vec_zero());
      sums[1] = vec_add(sums[1], weights[1]);
      vec_store_as(p + last, keep(last, weights[1]));
    }
    for (j = last + kLanes; j < high; j += kLanes) vec_store_as(p + j, vec_zero());
    return vec_reduce_add(vec_add(sums[0], sums[1]));
  };
  const auto weigh_row = [&]() PACKED_SDPA_LAMBDA_INLINE {
    if constexpr (!kExact) {
      const float shift = c * *reference;
      if (-kLargeShift < shift && shift < kLargeShift) return weigh.template operator()<false>();
    }
    return weigh.template operator()<true>();
  };
  if constexpr (!kExact) {
    const float before = *reference;
    if (before == -__builtin_inff()) *reference = vec_reduce_max(vec_max(first_scores, last_scores));
    const float total = weigh_row();
    if (total <= kWeightSumLimit) {
      *sum += total;
      return;
    }
    *reference = before;
  }

  // Independent chains, as in the sums.
  Vec maxima[4] = {first_scores, last_scores, minus_infinity, minus_infinity};
  int64_t j = first + kLanes;
  for (; j + 3 * kLanes < last; j += 4 * kLanes) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; ++i) maxima[i] = vec_max(maxima[i], vec_load(s + j + i * kLanes));
  }
  for (; j < last; j += kLanes) maxima[0] = vec_max(maxima[0], vec_load(s + j));
  const float maximum = vec_reduce_max(vec_max(vec_max(maxima[0], maxima[1]), vec_max(maxima[2], maxima[3])));
  if (!(c * maximum <= c * *reference + kReferenceSlack)) {
    if (*reference != -__builtin_inff()) {  // else O and l are still zero
      const Vec shrink = vec_exp2(vec_set(c * *reference - c * maximum));
      for (int64_t d = 0; d < out_width; d += kLanes) vec_store(out + d, vec_mul(vec_load(out + d), shrink));
      *sum *= vec_first(shrink);
    }
    *reference = maximum;
  }
  *sum += weigh_row();
}

// Backward, along `kKeys` neighbouring rows of the transposed tile (a row is one key, all stacked rows of
// queries, `stride` floats apart):
//   p = exp(scale s - lse),  ds = p (dp - delta)
// as 2^((scale s - lse) * log2(e)), which rounds once; with log2(e) in scale and lse it would round three
// numbers as large as lse. In [low, high) columns outside a key's visible [begin, end) get zeros. `factors`
// is the dropout factor of each element: it multiplies dp, and the p that goes into dV. `store` gets a column
// and what each key has there.
struct GradScore {
  Vec p;
  Vec ds;
};
template <bool kDropout, int kKeys, typename Store>
PACKED_SDPA_INLINE void grad_score_rows(const float* s, const float* dp, int64_t stride, const float* lse,
                                        const float* delta, const float* factors, int64_t low, int64_t high,
                                        const int64_t* begin, const int64_t* end, float scale,
                                        const Store& store) {
  const Vec scale_of_all = vec_set(scale);
  for (int64_t j = low; j < high; j += kLanes) {
    const Vec row_lse = vec_load(lse + j);
    const Vec row_delta = vec_load(delta + j);
    const auto grad_score = [&](int key) PACKED_SDPA_LAMBDA_INLINE -> GradScore {
      if (j + kLanes <= begin[key] || j >= end[key]) return {vec_zero(), vec_zero()};
      const int64_t at = key * stride + j;
      const Vec x = vec_fms(vec_load(s + at), scale_of_all, row_lse);
      Vec p = vec_exp2(vec_mul(x, vec_set(static_cast<float>(kLog2E))));
      Vec grad_p = vec_load(dp + at);
      if constexpr (kDropout) grad_p = vec_mul(grad_p, vec_load(factors + at));
      Vec ds = vec_mul(p, vec_sub(grad_p, row_delta));
      if constexpr (kDropout) p = vec_mul(p, vec_load(factors + at));
      if (j < begin[key] || j + kLanes > end[key]) {
        const Mask mask = vec_mask(begin[key] - j, end[key] - j);
        p = vec_select(mask, p, vec_zero());
        ds = vec_select(mask, ds, vec_zero());
      }
      return {p, ds};
    };
    if constexpr (kKeys == 1) {
      store(j, grad_score(0));
    } else {
      store(j, grad_score(0), grad_score(1));
    }
  }
}
