// Backward, one work item: for a block of keys of one document, all heads of a key/value head's group
//   pack K, K^T and V once
//   for each tile of stacked query rows that sees the block, last to first:  pack Q^T, Q, dO^T, dO; delta =
//   rowsum(dO O)
//     for each strip of keys:  S^T = K Q^T;  dP^T = V dO^T;  P^T = exp(scale S^T - lse);  dS^T = P^T (dP^T -
//     delta)
//                              dV += P^T dO;  dK += dS^T Q
//     for each term of keys:  dQ^T = K^T dS^T, added to the document's dQ when the tile's turn has come
//   dK *= scale.
// Transposed scores (keys x queries) need no operand transposed but Q and dO; lse and delta lie along
// columns.
//
// All key blocks of a document walk the query tiles in the same direction (last to first), so neighbours that
// run at the same time want a tile's dQ one after another without waiting long.

template <class E, typename T>
struct BackwardBuffers {
  using Elem = typename E::Elem;
  template <class Arena>
  BackwardBuffers(const TiledBackward& call, Arena* arena) {
    const AttentionShape& shape = call.params.shape;
    keys =
        round_up(call.max_keys < call.block_size ? call.max_keys : call.block_size, E::kBackwardKeyPadding);
    const int64_t queries =
        call.max_queries < call.queries_per_tile ? call.max_queries : call.queries_per_tile;
    rows = round_up(queries * call.group, E::kBackwardRowPadding);
    strip_keys = keys < E::kBackwardKeys ? keys : E::kBackwardKeys;
    depth = round_up(shape.head_dim, kLanes * E::kPair);
    depth_v = round_up(shape.head_dim_v, kLanes * E::kPair);
    k = arena->template take<Elem>(keys * depth);
    v = arena->template take<Elem>(keys * depth_v);
    k_transposed = arena->template take<Elem>(round_up(depth, E::kRowPadding) * keys);
    grad_k = arena->template take<float>(keys * depth);
    grad_v = arena->template take<float>(keys * depth_v);
    reaching = arena->template take<int32_t>(keys);
    past = arena->template take<int32_t>(keys);
    const int64_t wide = depth > depth_v ? depth : depth_v;
    q_rows = arena->template take<Elem>(rows * wide);
    q = arena->template take<float>(rows / E::kPair * round_up(depth, kPanel));
    q_transposed = arena->template take<float>(depth / E::kPair * round_up(rows, kPanel));
    grad_out = arena->template take<float>(rows / E::kPair * round_up(depth_v, kPanel));
    grad_out_transposed = arena->template take<float>(depth_v / E::kPair * round_up(rows, kPanel));
    lse = arena->template take<float>(rows);
    delta = arena->template take<float>(rows);
    s = arena->template take<float>(strip_keys * rows);
    grad_p = arena->template take<float>(strip_keys * rows);
    p = E::kPair == 1 ? reinterpret_cast<Elem*>(s) : arena->template take<Elem>(strip_keys * rows);
    grad_s = arena->template take<Elem>(keys * rows);
    grad_s_b = E::kPair == 1 ? reinterpret_cast<float*>(grad_s)
                             : arena->template take<float>(keys / E::kPair * round_up(rows, kPanel));
    grad_q_transposed = arena->template take<float>(round_up(depth, E::kRowPadding) * rows);
    grad_q = arena->template take<float>(rows * depth);
    // Scratch for the pairs of K on the way to K^T, and the dropout factors of a strip.
    pairs = E::kPair == 1 ? nullptr : arena->template take<float>(keys / E::kPair * depth);
    factors = call.dropout.enabled() ? arena->template take<float>(strip_keys * rows) : nullptr;
    factor_row = call.dropout.enabled() ? arena->template take<float>(strip_keys) : nullptr;
    spare = arena->template take<T>(2 * round_up(wide, 64));
  }
  int64_t keys, rows, strip_keys, depth, depth_v;
  Elem* k;
  Elem* v;
  Elem* k_transposed;
  float* grad_k;
  float* grad_v;
  int32_t* reaching;  // first query that reaches each key of the block, and first that is past it
  int32_t* past;
  Elem* q_rows;
  float* q;
  float* q_transposed;
  float* grad_out;
  float* grad_out_transposed;
  float* lse;
  float* delta;
  float* s;
  float* grad_p;
  Elem* p;
  Elem* grad_s;
  float* grad_s_b;
  float* grad_q_transposed;
  float* grad_q;
  float* pairs;
  float* factors;
  float* factor_row;
  T* spare;

  BLayout q_layout(int64_t) const { return {kPanel, rows / E::kPair * kPanel}; }
  BLayout transposed_layout(int64_t depth_in) const { return {kPanel, depth_in / E::kPair * kPanel}; }
  BLayout grad_s_layout() const {
    return E::kPair == 1 ? BLayout{rows, kPanel} : BLayout{kPanel, keys / E::kPair * kPanel};
  }
};

// The tile of queries, and the block of keys it meets.
struct GradTile {
  int64_t first_query;
  int64_t num_queries;
  int64_t num_rows;   // stacked
  int64_t first_key;  // of the block
  int64_t key_begin;  // the block's keys that the tile sees, counted from the block's first
  int64_t key_end;
};

// Rows of queries that come after this tile.
template <typename T>
struct NextTile {
  RowSource<T> query;
  RowSource<T> out;
  RowSource<T> grad_out;
  int64_t first_row;
  int64_t num_rows;
};

template <typename T>
inline NextTile<T> next_tile(const TiledBackward& call, const Document& document, int64_t kv_head,
                             int64_t tile) {
  const AttentionShape& shape = call.params.shape;
  const int64_t first_query = tile * call.queries_per_tile;
  int64_t queries = document.num_queries - first_query;
  if (queries > call.queries_per_tile) queries = call.queries_per_tile;
  return {query_source<T>(call.params.query, document, kv_head, call.group, shape.head_dim),
          query_source<T>(call.params.out, document, kv_head, call.group, shape.head_dim_v),
          query_source<T>(call.params.grad_out, document, kv_head, call.group, shape.head_dim_v),
          first_query * call.group, queries * call.group};
}

template <typename T>
PACKED_SDPA_INLINE float dot_rows(const T* a, const T* b, int64_t dim) {
  Vec sums = vec_zero();
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) sums = vec_fma(vec_load_as(a + d), vec_load_as(b + d), sums);
  if (d < dim) sums = vec_fma(vec_load_as(a + d, dim - d), vec_load_as(b + d, dim - d), sums);
  return vec_reduce_add(sums);
}

template <class E, typename T>
PACKED_SDPA_PHASE void pack_query_tile(const TiledBackward& call, const Document& document, int64_t kv_head,
                                       const BackwardBuffers<E, T>& buffers, const GradTile& tile) {
  const AttentionShape& shape = call.params.shape;
  const int64_t first_row = tile.first_query * call.group;
  const int64_t words = buffers.depth / E::kPair;
  const int64_t words_v = buffers.depth_v / E::kPair;
  const RowSource<T> query =
      query_source<T>(call.params.query, document, kv_head, call.group, shape.head_dim);
  const RowSource<T> out = query_source<T>(call.params.out, document, kv_head, call.group, shape.head_dim_v);
  const RowSource<T> grad_out =
      query_source<T>(call.params.grad_out, document, kv_head, call.group, shape.head_dim_v);
  // Stacked rows as packed below; padded with zero rows, whose weights are masked to zero too.
  const int64_t padded = round_up(tile.num_rows, E::kBackwardRowPadding);
  pack_rows(query, first_row, tile.num_rows, padded, buffers.q_rows, buffers.depth, buffers.spare);
  if (call.params.scale < 0) E::negate(buffers.q_rows, tile.num_rows * buffers.depth);
  transpose_to_b(reinterpret_cast<const float*>(buffers.q_rows), words, words, padded, buffers.q_transposed,
                 buffers.transposed_layout(buffers.depth));
  E::interleave_rows(buffers.q_rows, buffers.depth, padded, buffers.q, buffers.q_layout(0));
  pack_rows(grad_out, first_row, tile.num_rows, padded, buffers.q_rows, buffers.depth_v, buffers.spare);
  transpose_to_b(reinterpret_cast<const float*>(buffers.q_rows), words_v, words_v, padded,
                 buffers.grad_out_transposed, buffers.transposed_layout(buffers.depth_v));
  E::interleave_rows(buffers.q_rows, buffers.depth_v, padded, buffers.grad_out, buffers.q_layout(0));

  const float* lse = static_cast<const float*>(call.params.lse);
  T* spare =
      buffers.spare + round_up(shape.head_dim > shape.head_dim_v ? shape.head_dim : shape.head_dim_v, 64);
  for (int64_t r = 0; r < kPrefetchRows && r < tile.num_rows; ++r) out.prefetch(first_row + r);
  for (int64_t q = 0; q < tile.num_queries; ++q) {
    const int64_t row = document.query_row(tile.first_query + q);
    for (int64_t g = 0; g < call.group; ++g) {
      const int64_t r = q * call.group + g;
      if (r + kPrefetchRows < tile.num_rows) out.prefetch(first_row + r + kPrefetchRows);
      buffers.delta[r] = dot_rows(out.read(first_row + r, buffers.spare), grad_out.read(first_row + r, spare),
                                  shape.head_dim_v);
      buffers.lse[r] =
          lse[(document.batch * shape.num_heads + kv_head * call.group + g) * shape.rows_q + row];
    }
  }
  for (int64_t r = tile.num_rows; r < padded; ++r) {
    buffers.delta[r] = 0.0f;
    buffers.lse[r] = 0.0f;
  }
}

// Dropout factors of keys [first, first + count) of the block, [key][stacked row].
template <class E, typename T>
inline void strip_factors(const TiledBackward& call, const Document& document, int64_t kv_head,
                          const BackwardBuffers<E, T>& buffers, const GradTile& tile, int64_t first,
                          int64_t count) {
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    const int64_t head = kv_head * call.group + r % call.group;
    const int64_t key = tile.first_key + first;
    call.dropout_factors(document, head, tile.first_query + r / call.group, {key, key + count},
                         buffers.factor_row);
    for (int64_t j = 0; j < count; ++j) buffers.factors[j * buffers.rows + r] = buffers.factor_row[j];
  }
}

// P^T and dS^T of `count` keys from `strip` on, from S^T and dP^T. dS^T gets zeros in every column of the
// tile that the strip did not compute, because dQ^T sums over all of them.
template <class E, typename T, class ColumnSpan>
PACKED_SDPA_PHASE void grad_scores(const TiledBackward& call, const BackwardBuffers<E, T>& buffers,
                                   float scale, int64_t strip, int64_t chunk, int64_t count, Span span,
                                   int64_t padded_rows, int64_t block_keys, const ColumnSpan& column_span) {
  using Elem = typename E::Elem;
  const int64_t rows = buffers.rows;
  const BLayout layout = buffers.grad_s_layout();
  const auto key_rows = [&](int64_t key, const auto& store) {
    int64_t begin[E::kPair] = {};
    int64_t end[E::kPair] = {};
    for (int i = 0; i < E::kPair && key + i < block_keys; ++i) {
      column_span(key + i, key + i, &begin[i], &end[i]);
    }
    const int64_t local = (key - chunk) * rows;
    if (call.dropout.enabled()) {
      grad_score_rows<true, E::kPair>(buffers.s + local, buffers.grad_p + local, rows, buffers.lse,
                                      buffers.delta, buffers.factors + local, span.begin, span.end, begin,
                                      end, scale, store);
    } else {
      grad_score_rows<false, E::kPair>(buffers.s + local, buffers.grad_p + local, rows, buffers.lse,
                                       buffers.delta, nullptr, span.begin, span.end, begin, end, scale,
                                       store);
    }
  };
  for (int64_t key = strip; key < strip + count; key += E::kPair) {
    Elem* p = buffers.p + (key - chunk) * rows;
    Elem* grad_s = buffers.grad_s + key * rows;
    if constexpr (E::kPair == 1) {
      for (int64_t j = 0; j < span.begin; j += kLanes) vec_store(grad_s + j, vec_zero());
      for (int64_t j = span.end; j < padded_rows; j += kLanes) vec_store(grad_s + j, vec_zero());
      key_rows(key, [&](int64_t j, GradScore score) PACKED_SDPA_LAMBDA_INLINE {
        vec_store(p + j, score.p);
        vec_store(grad_s + j, score.ds);
      });
    } else {
      // The pair of keys is interleaved for dQ^T: word (key pair, column) at its place in the B operand.
      float* words = buffers.grad_s_b + key / E::kPair * layout.row_stride;
      const auto place = [&](int64_t j) { return words + j / kPanel * layout.panel_stride + j % kPanel; };
      for (int64_t j = 0; j < span.begin; j += kLanes) vec_store(place(j), vec_zero());
      for (int64_t j = span.end; j < padded_rows; j += kLanes) vec_store(place(j), vec_zero());
      key_rows(key, [&](int64_t j, GradScore low, GradScore high) PACKED_SDPA_LAMBDA_INLINE {
        vec_store_rows(p + j, p + rows + j, low.p, high.p);
        vec_store_rows(grad_s + j, grad_s + rows + j, place(j), low.ds, high.ds);
      });
    }
  }
}

// How many steps of a prefetch the products of a tile take, at most.
template <class E>
inline int64_t grad_tile_steps(const TiledBackward& call, const GradTile& tile) {
  const AttentionShape& shape = call.params.shape;
  const int64_t keys = tile.key_end - tile.key_begin;
  return 2 * E::steps(keys, tile.num_rows) + E::steps(keys, shape.head_dim_v) +
         E::steps(keys, shape.head_dim) +
         E::steps(shape.head_dim, tile.num_rows) * ((keys + kKeysPerTerm - 1) / kKeysPerTerm);
}

template <class E, typename T>
inline void grad_tile(const TiledBackward& call, const Document& document, int64_t kv_head,
                      const BackwardBuffers<E, T>& buffers, const GradTile& tile, int64_t block_keys,
                      RowPrefetch* ahead) {
  const AttentionShape& shape = call.params.shape;
  const float scale = static_cast<float>(call.params.scale < 0 ? -call.params.scale : call.params.scale);
  const int64_t rows = buffers.rows;
  const int64_t padded_rows = round_up(tile.num_rows, E::kBackwardRowPadding);
  const int64_t depth = round_up(shape.head_dim, E::kDepthStep);
  const int64_t depth_v = round_up(shape.head_dim_v, E::kDepthStep);
  const int64_t columns = round_up(shape.head_dim, E::kColumnStep);
  const int64_t columns_v = round_up(shape.head_dim_v, E::kColumnStep);
  // Columns of a key: the tile's stacked rows that see it.
  const auto column_span = [&](int64_t key, int64_t last_key, int64_t* begin, int64_t* end) {
    int64_t first = buffers.reaching[key] - tile.first_query;
    int64_t last = buffers.past[last_key] - tile.first_query;
    if (first < 0) first = 0;
    if (last > tile.num_queries) last = tile.num_queries;
    *begin = first * call.group;
    *end = last > first ? last * call.group : *begin;
  };

  const int64_t strips_begin = tile.key_begin / E::kBackwardKeyPadding * E::kBackwardKeyPadding;
  const int64_t strips_end = round_up(tile.key_end, E::kBackwardKeyPadding);
  for (int64_t chunk = strips_begin; chunk < strips_end; chunk += buffers.strip_keys) {
    const int64_t chunk_end =
        strips_end - chunk < buffers.strip_keys ? strips_end : chunk + buffers.strip_keys;
    if (call.dropout.enabled()) {
      const int64_t real = block_keys < chunk_end ? block_keys : chunk_end;
      strip_factors<E, T>(call, document, kv_head, buffers, tile, chunk, real - chunk);
    }
    for (int64_t strip = chunk; strip < chunk_end;) {
      // Strips that compute the same columns go together.
      const auto span_of = [&](int64_t key) {
        int64_t begin;
        int64_t end;
        int64_t last = (key + E::kStrip < block_keys ? key + E::kStrip : block_keys) - 1;
        if (last < key) return Span{0, 0};
        column_span(key, last, &begin, &end);
        if (begin >= end) return Span{0, 0};
        return Span{begin / E::kBackwardRowPadding * E::kBackwardRowPadding,
                    round_up(end, E::kBackwardRowPadding)};
      };
      const Span span = span_of(strip);
      int64_t next = strip + E::kStrip;
      while (next < chunk_end) {
        const Span other = span_of(next);
        if (other.begin != span.begin || other.end != span.end) break;
        next += E::kStrip;
      }
      if (next > chunk_end) next = chunk_end;
      const int64_t count = next - strip;
      float* s = buffers.s + (strip - chunk) * rows;
      float* grad_p = buffers.grad_p + (strip - chunk) * rows;
      typename E::Elem* p = buffers.p + (strip - chunk) * rows;
      typename E::Elem* grad_s = buffers.grad_s + strip * rows;
      if (span.begin < span.end) {
        E::gemm(count, span.begin, span.end, depth, buffers.k + strip * buffers.depth, buffers.depth,
                buffers.q_transposed, buffers.transposed_layout(buffers.depth), s, rows, false, ahead);
        E::gemm(count, span.begin, span.end, depth_v, buffers.v + strip * buffers.depth_v, buffers.depth_v,
                buffers.grad_out_transposed, buffers.transposed_layout(buffers.depth_v), grad_p, rows, false,
                ahead);
      }
      grad_scores<E, T>(call, buffers, scale, strip, chunk, count, span, padded_rows, block_keys,
                        column_span);
      if (span.begin < span.end) {
        E::gemm(count, 0, columns_v, span.end - span.begin, p + span.begin, rows,
                buffers.grad_out + span.begin / E::kPair * kPanel, buffers.q_layout(0),
                buffers.grad_v + strip * buffers.depth_v, buffers.depth_v, true, ahead);
        E::gemm(count, 0, columns, span.end - span.begin, grad_s + span.begin, rows,
                buffers.q + span.begin / E::kPair * kPanel, buffers.q_layout(0),
                buffers.grad_k + strip * buffers.depth, buffers.depth, true, ahead);
      }
      strip = next;
    }
  }
}

// Rows of dQ^T out to the tensor: written, or added (float only, where dQ itself holds the running sum).
template <class E, typename T>
PACKED_SDPA_PHASE void write_grad_query(const TiledBackward& call, const Document& document, int64_t kv_head,
                                        const BackwardBuffers<E, T>& buffers, const GradTile& tile,
                                        const float* transposed, bool add) {
  const StridedTensor& target = call.params.grad_query;
  const int64_t padded_rows = round_up(tile.num_rows, E::kBackwardRowPadding);
  transpose_matrix(transposed, buffers.depth, padded_rows, buffers.rows, buffers.grad_q, buffers.depth);
  const Vec scale = vec_set(static_cast<float>(call.params.scale));
  for (int64_t q = 0; q < tile.num_queries; ++q) {
    const int64_t row = document.query_row(tile.first_query + q);
    for (int64_t g = 0; g < call.group; ++g) {
      T* data = static_cast<T*>(target.data) + document.batch * target.stride_batch +
                (kv_head * call.group + g) * target.stride_head + row * target.stride_row;
      const float* source = buffers.grad_q + (q * call.group + g) * buffers.depth;
      if constexpr (sizeof(T) == sizeof(float)) {
        if (add) {
          add_row(source, scale, call.params.shape.head_dim, data, target.stride_dim);
          continue;
        }
      }
      write_row(source, scale, call.params.shape.head_dim, data, target.stride_dim);
    }
  }
}

// dQ^T = K^T dS^T of a tile, term by term; each is added to the tile's sum by itself, so that the result is
// the same however the document's keys are cut into blocks.
template <class E, typename T>
PACKED_SDPA_PHASE void add_grad_query(const TiledBackward& call, const Document& document, int64_t kv_head,
                                      const BackwardBuffers<E, T>& buffers, const GradTile& tile,
                                      GradQuerySum* sum, int64_t block, RowPrefetch* ahead) {
  const int64_t index = tile.first_query / call.queries_per_tile;
  const GradQuerySum::Blocks blocks =
      sum == nullptr ? GradQuerySum::Blocks{block, block} : sum->blocks(index);
  const bool is_alone = blocks.first == blocks.last;
  const int64_t head_dim = call.params.shape.head_dim;
  const int64_t padded_rows = round_up(tile.num_rows, E::kBackwardRowPadding);
  const int64_t count = buffers.depth * buffers.rows;
  float* total = nullptr;  // of types whose dQ cannot hold the running sum
  bool is_first = block == blocks.first;
  bool has_turn = sum == nullptr;
  const int64_t keys_begin = tile.key_begin / E::kBackwardKeyPadding * E::kBackwardKeyPadding;
  const int64_t keys_end = round_up(tile.key_end, E::kBackwardKeyPadding);
  for (int64_t begin = keys_begin; begin < keys_end;) {
    int64_t end = (begin / kKeysPerTerm + 1) * kKeysPerTerm;
    if (end > keys_end) end = keys_end;
    const bool in_place = sizeof(T) == sizeof(float) || (is_alone && is_first);
    float* term = in_place ? buffers.grad_q_transposed : buffers.grad_q;
    E::gemm(head_dim, 0, padded_rows, end - begin, buffers.k_transposed + begin, buffers.keys,
            buffers.grad_s_b + begin / E::kPair * buffers.grad_s_layout().row_stride, buffers.grad_s_layout(),
            term, buffers.rows, false, ahead);
    if (!has_turn) {
      sum->wait_turn(index, block);
      has_turn = true;
    }
    if constexpr (sizeof(T) == sizeof(float)) {
      write_grad_query<E, T>(call, document, kv_head, buffers, tile, term, !is_first);
    } else {
      if (total == nullptr) total = is_alone ? buffers.grad_q_transposed : sum->sums(index);
      if (!is_first) {
        for (int64_t i = 0; i < count; i += kLanes)
          vec_store(total + i, vec_add(vec_load(total + i), vec_load(term + i)));
      } else if (!in_place) {
        for (int64_t i = 0; i < count; i += kLanes) vec_store(total + i, vec_load(term + i));
      }
    }
    is_first = false;
    begin = end;
  }
  if constexpr (sizeof(T) != sizeof(float)) {
    if (block == blocks.last) write_grad_query<E, T>(call, document, kv_head, buffers, tile, total, false);
  }
  if (sum != nullptr) sum->finish_turn(index, block);
}

template <class E, typename T>
PACKED_SDPA_PHASE void pack_key_block(const TiledBackward& call, const Document& document, int64_t kv_head,
                                      const BackwardBuffers<E, T>& buffers, int64_t first_key,
                                      int64_t num_keys) {
  const AttentionShape& shape = call.params.shape;
  const RowSource<T> key = key_source<T>(call.params.key, document, kv_head, shape.head_dim);
  const RowSource<T> value = key_source<T>(call.params.value, document, kv_head, shape.head_dim_v);
  const int64_t padded = round_up(num_keys, E::kBackwardKeyPadding);
  pack_rows(key, first_key, num_keys, padded, buffers.k, buffers.depth, buffers.spare);
  pack_rows(value, first_key, num_keys, padded, buffers.v, buffers.depth_v, buffers.spare);
  E::transpose_rows(buffers.k, padded, buffers.depth, buffers.k_transposed, buffers.keys, buffers.pairs);
  for (int64_t i = 0; i < padded * buffers.depth; i += kLanes) vec_store(buffers.grad_k + i, vec_zero());
  for (int64_t i = 0; i < padded * buffers.depth_v; i += kLanes) vec_store(buffers.grad_v + i, vec_zero());
  for (int64_t j = 0; j < num_keys; ++j) {
    buffers.reaching[j] = static_cast<int32_t>(document.first_query_reaching(first_key + j));
    buffers.past[j] = static_cast<int32_t>(document.first_query_past(first_key + j));
  }
}

template <class E, typename T>
inline void backward_block(const TiledBackward& call, int32_t document_index, int32_t kv_head, int64_t block,
                           const BackwardBuffers<E, T>& buffers, const NextTile<T>& next_block) {
  const AttentionShape& shape = call.params.shape;
  const Document& document = call.documents[static_cast<size_t>(document_index)];
  const int64_t first_key = block * call.block_size;
  int64_t num_keys = document.num_keys - first_key;
  if (num_keys > call.block_size) num_keys = call.block_size;
  if (num_keys <= 0) return;
  GradQuerySum* sum = call.grad_query_sum(document_index, kv_head);
  pack_key_block<E, T>(call, document, kv_head, buffers, first_key, num_keys);

  const int64_t queries_begin = document.first_query_reaching(first_key);
  const int64_t queries_end = document.first_query_past(first_key + num_keys - 1);
  const int64_t tiles_begin = queries_begin / call.queries_per_tile;
  const int64_t tiles_end = (queries_end + call.queries_per_tile - 1) / call.queries_per_tile;
  for (int64_t t = tiles_end - 1; t >= tiles_begin; --t) {
    GradTile tile;
    tile.first_query = t * call.queries_per_tile;
    tile.num_queries = document.num_queries - tile.first_query;
    if (tile.num_queries > call.queries_per_tile) tile.num_queries = call.queries_per_tile;
    tile.num_rows = tile.num_queries * call.group;
    tile.first_key = first_key;
    tile.key_begin = document.visible_keys(tile.first_query).begin - first_key;
    tile.key_end = document.visible_keys(tile.first_query + tile.num_queries - 1).end - first_key;
    if (tile.key_begin < 0) tile.key_begin = 0;
    if (tile.key_end > num_keys) tile.key_end = num_keys;
    if (tile.key_begin >= tile.key_end) continue;
    pack_query_tile<E, T>(call, document, kv_head, buffers, tile);
    NextTile<T> next = next_block;
    if (t > tiles_begin) {
      next = next_tile<T>(call, document, kv_head, t - 1);
    }
    RowPrefetch ahead;
    ahead.add(next.query, next.first_row, next.num_rows);
    ahead.add(next.out, next.first_row, next.num_rows);
    ahead.add(next.grad_out, next.first_row, next.num_rows);
    ahead.spread(grad_tile_steps<E>(call, tile));
    grad_tile<E, T>(call, document, kv_head, buffers, tile, num_keys, &ahead);
    add_grad_query<E, T>(call, document, kv_head, buffers, tile, sum, block, &ahead);
  }
  if (sum != nullptr) sum->finish_block();

  const StridedTensor& target_k = call.params.grad_key;
  const StridedTensor& target_v = call.params.grad_value;
  const Vec scale =
      vec_set(static_cast<float>(call.params.scale < 0 ? -call.params.scale : call.params.scale));
  T* data_k = static_cast<T*>(target_k.data) + document.batch * target_k.stride_batch +
              kv_head * target_k.stride_head;
  T* data_v = static_cast<T*>(target_v.data) + document.batch * target_v.stride_batch +
              kv_head * target_v.stride_head;
  for (int64_t j = 0; j < num_keys; ++j) {
    const int64_t row = document.key_row(first_key + j);
    write_row(buffers.grad_k + j * buffers.depth, scale, shape.head_dim, data_k + row * target_k.stride_row,
              target_k.stride_dim);
    write_row(buffers.grad_v + j * buffers.depth_v, vec_set(1.0f), shape.head_dim_v,
              data_v + row * target_v.stride_row, target_v.stride_dim);
  }
}

template <class E, typename T>
void backward_item(void* context, int64_t index, Scratch& scratch) {
  const TiledBackward& call = *static_cast<const TiledBackward*>(context);
  const WorkItem& item = call.items[static_cast<size_t>(index)];
  const BackwardBuffers<E, T> buffers(call, &scratch);
  E::begin();
  const int32_t heads = item.last_kv_head - item.first_kv_head;
  const int32_t blocks = (item.last_document - item.first_document) * heads;
  for (int32_t n = 0; n < blocks; ++n) {
    NextTile<T> next = {};
    if (n + 1 < blocks) {  // the last query tile of the item's next block (a whole short document and head)
      const Document& document = call.documents[static_cast<size_t>(item.first_document + (n + 1) / heads)];
      const int64_t tiles = (document.num_queries + call.queries_per_tile - 1) / call.queries_per_tile;
      if (tiles > 0) next = next_tile<T>(call, document, item.first_kv_head + (n + 1) % heads, tiles - 1);
    }
    backward_block<E, T>(call, item.first_document + n / heads, item.first_kv_head + n % heads, item.block,
                         buffers, next);
  }
  E::end();
}

template <class E, typename T>
size_t backward_scratch(const TiledBackward& call) {
  ScratchSize size;
  const BackwardBuffers<E, T> sized(call, &size);
  return size.bytes();
}

template <class E, typename T>
void run_backward(const BackwardParams& params, Executor& executor) {
  run_tiled_backward(params, executor, E::kBackwardItemKeys, E::kBackwardRows, sizeof(T) != sizeof(float),
                     &backward_scratch<E, T>, &backward_item<E, T>);
}
