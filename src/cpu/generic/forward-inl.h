// Forward, one work item: for a block of queries of one document and all heads of a key/value head's group
//   for each tile of keys:  pack K^T and V once
//     for each tile of stacked rows:  S = Q K^T;  P = softmax rows of S, O and l rescaled where needed;  O +=
//     P V
//   out = O / l,  lse = c r ln 2 + ln l.
//
// An engine E gives the operand type, the GEMM and the sizes. Strips of E::kStrip rows are computed only
// between the first key that its first row sees and the last key that its last row sees.

template <class E, typename T>
struct ForwardBuffers {
  using Elem = typename E::Elem;
  template <class Arena>
  ForwardBuffers(const TiledForward& call, Arena* arena) {
    const AttentionShape& shape = call.params.shape;
    const int64_t queries = call.block_size < call.max_queries ? call.block_size : call.max_queries;
    rows = round_up(queries * call.group, E::kRowPadding);
    keys = round_up(call.max_keys < E::kForwardKeys ? call.max_keys : E::kForwardKeys, E::kKeyPadding);
    depth = round_up(shape.head_dim, kLanes * E::kPair);
    width = round_up(shape.head_dim_v, E::kColumnStep);
    tile_rows = rows < E::kForwardRows ? rows : E::kForwardRows;
    q = arena->template take<Elem>(rows * depth);
    out = arena->template take<float>(rows * width);
    reference = arena->template take<float>(rows);
    sum = arena->template take<float>(rows);
    begin = arena->template take<int32_t>(queries);
    end = arena->template take<int32_t>(queries);
    k = arena->template take<float>(depth / E::kPair * round_up(keys, kPanel));
    v = arena->template take<float>(keys / E::kPair * round_up(width, kPanel));
    // Two of each where the product of one tile runs under the softmax of another.
    slots = E::kOverlap ? 2 : 1;
    s = arena->template take<float>(slots * tile_rows * keys);
    p = E::kPair == 1 ? reinterpret_cast<Elem*>(s) : arena->template take<Elem>(slots * tile_rows * keys);
    key_rows = arena->template take<Elem>(round_up(keys, kLanes) * depth);
    const int64_t dim = shape.head_dim > shape.head_dim_v ? shape.head_dim : shape.head_dim_v;
    spare = arena->template take<T>(2 * round_up(dim, 64));
    factors = arena->template take<float>(keys);
  }
  int64_t rows, keys, depth, width, tile_rows, slots;
  Elem* q;
  float* out;
  float* reference;
  float* sum;
  int32_t* begin;  // visible keys of each query of the block
  int32_t* end;
  float* k;
  float* v;
  float* s;
  Elem* p;
  Elem* key_rows;
  T* spare;
  float* factors;
};

// The part of a key tile that a strip of stacked rows computes, rounded out to the engine's steps; empty:
// begin == end.
struct Span {
  int64_t begin;
  int64_t end;
};

template <class E>
PACKED_SDPA_INLINE Span round_span(int64_t begin, int64_t end, int64_t limit) {
  if (begin < 0) begin = 0;
  if (end > limit) end = limit;
  if (begin >= end) return {0, 0};
  return {begin / E::kKeyPadding * E::kKeyPadding, round_up(end, E::kKeyPadding)};
}

// What the strip at `row` (of num_rows) of a block computes of a key tile.
template <class E, typename T>
PACKED_SDPA_INLINE Span strip_span(const TiledForward& call, const ForwardBuffers<E, T>& buffers, int64_t row,
                                   int64_t num_rows, int64_t first_key, int64_t num_keys) {
  const int32_t group = static_cast<int32_t>(call.group);
  const int64_t last = (row + E::kStrip < num_rows ? row + E::kStrip : num_rows) - 1;
  const int32_t query = static_cast<int32_t>(row) / group;
  const int32_t last_query = static_cast<int32_t>(last) / group;
  return round_span<E>(buffers.begin[query] - first_key, buffers.end[last_query] - first_key, num_keys);
}

// Scores to weights for `count` rows from `row` on, which lie `strip` rows into the tile. `background` does
// its share of products between the rows.
template <class E, typename T, class Background>
PACKED_SDPA_PHASE void softmax_rows(const TiledForward& call, const Document& document, int64_t kv_head,
                                    const ForwardBuffers<E, T>& buffers, int64_t first_query, int64_t row,
                                    int64_t strip, int64_t count, Span span, int64_t first_key,
                                    int64_t num_keys, Background* background) {
  const int32_t group = static_cast<int32_t>(call.group);
  const float c =
      static_cast<float>((call.params.scale < 0 ? -call.params.scale : call.params.scale) * kLog2E);
  float* s = buffers.s + strip * buffers.keys;
  typename E::Elem* p = buffers.p + strip * buffers.keys;
  for (int64_t r = 0; r < count; ++r) {
    background->advance(r, count);
    const int32_t query = static_cast<int32_t>(row + r) / group;
    int64_t begin = buffers.begin[query] - first_key;
    int64_t end = buffers.end[query] - first_key;
    if (begin < 0) begin = 0;
    if (end > num_keys) end = num_keys;
    float* out = buffers.out + (row + r) * buffers.width;
    if (call.dropout.enabled() && begin < end) {
      const int64_t head = kv_head * call.group + (row + r - int64_t{query} * group);
      for (int64_t j = 0; j < buffers.keys; ++j) buffers.factors[j] = 0.0f;
      call.dropout_factors(document, head, first_query + query, {first_key + begin, first_key + end},
                           buffers.factors + begin);
      softmax_row<E::kPair == 1, true>(s + r * buffers.keys, p + r * buffers.keys, span.begin, span.end,
                                       begin, end, c, buffers.factors, buffers.reference + row + r,
                                       buffers.sum + row + r, out, buffers.width);
    } else {
      softmax_row<E::kPair == 1, false>(s + r * buffers.keys, p + r * buffers.keys, span.begin, span.end,
                                        begin, end, c, nullptr, buffers.reference + row + r,
                                        buffers.sum + row + r, out, buffers.width);
    }
  }
}

struct NoBackground {
  PACKED_SDPA_INLINE void advance(int64_t, int64_t) {}
};

template <class E, typename T>
inline void forward_tile(const TiledForward& call, const Document& document, int64_t kv_head,
                         const ForwardBuffers<E, T>& buffers, int64_t first_query, int64_t first_row,
                         int64_t num_rows, int64_t first_key, int64_t num_keys, RowPrefetch* ahead) {
  using Elem = typename E::Elem;
  const int64_t depth = round_up(call.params.shape.head_dim, E::kDepthStep);
  const BLayout k_layout = {kPanel, buffers.depth / E::kPair * kPanel};
  const BLayout v_layout = {kPanel, buffers.keys / E::kPair * kPanel};

  NoBackground none;
  const int64_t rows_end = first_row + num_rows;
  for (int64_t strip = 0; strip < num_rows;) {
    // Strips that compute the same span go together.
    const Span span = strip_span<E, T>(call, buffers, first_row + strip, rows_end, first_key, num_keys);
    int64_t next = strip + E::kStrip;
    while (next < num_rows) {
      const Span other = strip_span<E, T>(call, buffers, first_row + next, rows_end, first_key, num_keys);
      if (other.begin != span.begin || other.end != span.end) break;
      next += E::kStrip;
    }
    if (next > num_rows) next = num_rows;
    if (span.begin < span.end) {
      const int64_t count = next - strip;
      const int64_t row = first_row + strip;
      float* s = buffers.s + strip * buffers.keys;
      Elem* p = buffers.p + strip * buffers.keys;
      E::gemm(count, span.begin, span.end, depth, buffers.q + row * buffers.depth, buffers.depth, buffers.k,
              k_layout, s, buffers.keys, false, ahead);
      softmax_rows<E, T>(call, document, kv_head, buffers, first_query, row, strip, count, span, first_key,
                         num_keys, &none);
      E::gemm(count, 0, buffers.width, span.end - span.begin, p + span.begin, buffers.keys,
              buffers.v + span.begin / E::kPair * kPanel, v_layout, buffers.out + row * buffers.width,
              buffers.width, true, ahead);
    }
    strip = next;
  }
}

// out = O / l and lse of a block's rows.
template <class E, typename T>
PACKED_SDPA_PHASE void write_block(const TiledForward& call, const Document& document, int64_t kv_head,
                                   const ForwardBuffers<E, T>& buffers, int64_t first_query,
                                   int64_t num_queries) {
  const AttentionShape& shape = call.params.shape;
  const StridedTensor& target = call.params.out;
  const float abs_scale = static_cast<float>(call.params.scale < 0 ? -call.params.scale : call.params.scale);
  float* lse = static_cast<float*>(call.params.lse);
  for (int64_t q = 0; q < num_queries; ++q) {
    const int64_t row = document.query_row(first_query + q);
    for (int64_t g = 0; g < call.group; ++g) {
      const int64_t r = q * call.group + g;
      const int64_t head = kv_head * call.group + g;
      T* out = static_cast<T*>(target.data) + document.batch * target.stride_batch +
               head * target.stride_head + row * target.stride_row;
      const bool sees = buffers.begin[q] < buffers.end[q];
      write_row(buffers.out + r * buffers.width, vec_set(sees ? 1.0f / buffers.sum[r] : 0.0f),
                shape.head_dim_v, out, target.stride_dim);
      lse[(document.batch * shape.num_heads + head) * shape.rows_q + row] =
          sees ? abs_scale * buffers.reference[r] + __builtin_logf(buffers.sum[r]) : -__builtin_inff();
    }
  }
}

// All rows of a block against a key tile, with the products in the background: while the softmax of one group
// of rows runs on the vector unit, the scores of the next group and the O += P V of the last one run on the
// tile unit. A group is at most a tile of rows with one span.
template <class E, typename T>
inline void forward_overlapped(const TiledForward& call, const Document& document, int64_t kv_head,
                               const ForwardBuffers<E, T>& buffers, int64_t first_query, int64_t num_rows,
                               int64_t first_key, int64_t num_keys, RowPrefetch* ahead) {
  const int64_t depth = round_up(call.params.shape.head_dim, E::kDepthStep);
  const BLayout k_layout = {kPanel, buffers.depth / E::kPair * kPanel};
  const BLayout v_layout = {kPanel, buffers.keys / E::kPair * kPanel};
  const int64_t slot_size = buffers.tile_rows * buffers.keys;
  struct Group {
    int64_t row;
    int64_t count;  // 0: no more
    Span span;
  };
  const auto find_group = [&](int64_t row) {
    Group group = {row, 0, {0, 0}};
    for (; group.row < num_rows; group.row += E::kStrip) {
      group.span = strip_span<E, T>(call, buffers, group.row, num_rows, first_key, num_keys);
      if (group.span.begin < group.span.end) break;
    }
    int64_t end = group.row;
    while (end < num_rows && end - group.row < buffers.tile_rows) {
      const Span span = strip_span<E, T>(call, buffers, end, num_rows, first_key, num_keys);
      if (span.begin != group.span.begin || span.end != group.span.end) break;
      end += E::kStrip;
    }
    if (group.row < num_rows) group.count = (end < num_rows ? end : num_rows) - group.row;
    return group;
  };
  typename E::Background background(ahead);
  const auto add_scores = [&](const Group& group, int64_t slot) {
    background.add(group.count, group.span.begin, group.span.end, depth,
                   buffers.q + group.row * buffers.depth, buffers.depth, buffers.k, k_layout,
                   buffers.s + slot * slot_size, buffers.keys, false);
  };
  const auto add_output = [&](const Group& group, int64_t slot) {
    background.add(group.count, 0, buffers.width, group.span.end - group.span.begin,
                   buffers.p + slot * slot_size + group.span.begin, buffers.keys,
                   buffers.v + group.span.begin / E::kPair * kPanel, v_layout,
                   buffers.out + group.row * buffers.width, buffers.width, true);
  };

  Group group = find_group(0);
  Group last = {0, 0, {0, 0}};
  int64_t slot = 0;
  if (group.count == 0) return;
  add_scores(group, slot);
  background.finish();
  while (group.count > 0) {
    const Group next = find_group(group.row + group.count);
    if (last.count > 0) add_output(last, 1 - slot);
    if (next.count > 0) add_scores(next, 1 - slot);
    softmax_rows<E, T>(call, document, kv_head, buffers, first_query, group.row, slot * buffers.tile_rows,
                       group.count, group.span, first_key, num_keys, &background);
    background.finish();
    last = group;
    group = next;
    slot = 1 - slot;
  }
  add_output(last, 1 - slot);
  background.finish();
}

// What the item's next block (a whole short document and head) reads first.
template <typename T>
struct NextRows {
  RowSource<T> query;
  RowSource<T> key;
  RowSource<T> value;
  int64_t num_rows;
  int64_t num_keys;
};

template <class E, typename T>
inline NextRows<T> next_rows(const TiledForward& call, int64_t document_index, int64_t kv_head) {
  const AttentionShape& shape = call.params.shape;
  const Document& document = call.documents[static_cast<size_t>(document_index)];
  return {query_source<T>(call.params.query, document, kv_head, call.group, shape.head_dim),
          key_source<T>(call.params.key, document, kv_head, shape.head_dim),
          key_source<T>(call.params.value, document, kv_head, shape.head_dim_v),
          document.num_queries * call.group,
          document.num_keys < E::kForwardKeys ? document.num_keys : E::kForwardKeys};
}

template <class E, typename T>
inline void forward_block(const TiledForward& call, const Document& document, int64_t kv_head, int64_t block,
                          const ForwardBuffers<E, T>& buffers, const NextRows<T>& next) {
  const AttentionShape& shape = call.params.shape;
  const int64_t first_query = block * call.block_size;
  int64_t num_queries = document.num_queries - first_query;
  if (num_queries > call.block_size) num_queries = call.block_size;
  if (num_queries <= 0) return;
  const int64_t num_rows = num_queries * call.group;

  for (int64_t q = 0; q < num_queries; ++q) {
    const KeyRange range = document.visible_keys(first_query + q);
    buffers.begin[q] = static_cast<int32_t>(range.begin);
    buffers.end[q] = static_cast<int32_t>(range.end);
  }
  const RowSource<T> query =
      query_source<T>(call.params.query, document, kv_head, call.group, shape.head_dim);
  const RowSource<T> key = key_source<T>(call.params.key, document, kv_head, shape.head_dim);
  const RowSource<T> value = key_source<T>(call.params.value, document, kv_head, shape.head_dim_v);
  pack_rows(query, first_query * call.group, num_rows, num_rows, buffers.q, buffers.depth, buffers.spare);
  if (call.params.scale < 0) E::negate(buffers.q, num_rows * buffers.depth);
  for (int64_t r = 0; r < num_rows; ++r) {
    buffers.reference[r] = -__builtin_inff();
    buffers.sum[r] = 0.0f;
  }
  for (int64_t i = 0; i < num_rows * buffers.width; i += kLanes) vec_store(buffers.out + i, vec_zero());

  const BLayout k_layout = {kPanel, buffers.depth / E::kPair * kPanel};
  const BLayout v_layout = {kPanel, buffers.keys / E::kPair * kPanel};
  const int64_t keys_begin = buffers.begin[0];
  const int64_t keys_end = buffers.end[num_queries - 1];
  for (int64_t first_key = keys_begin; first_key < keys_end; first_key += buffers.keys) {
    const int64_t num_keys = keys_end - first_key < buffers.keys ? keys_end - first_key : buffers.keys;
    const int64_t padded = round_up(num_keys, E::kKeyPadding);
    pack_rows(key, first_key, num_keys, round_up(padded, kLanes), buffers.key_rows, buffers.depth,
              buffers.spare);
    transpose_to_b(reinterpret_cast<const float*>(buffers.key_rows), buffers.depth / E::kPair,
                   buffers.depth / E::kPair, round_up(padded, kLanes), buffers.k, k_layout);
    E::pack_b(value, first_key, num_keys, padded, buffers.width, buffers.v, v_layout, buffers.spare);
    const int64_t next_key = first_key + num_keys;
    const int64_t next_count = keys_end - next_key < buffers.keys ? keys_end - next_key : buffers.keys;
    RowPrefetch ahead;
    if (next_count > 0) {
      ahead.add(key, next_key, next_count);
      ahead.add(value, next_key, next_count);
    } else {
      ahead.add(next.query, 0, next.num_rows);
      ahead.add(next.key, 0, next.num_keys);
      ahead.add(next.value, 0, next.num_keys);
    }
    ahead.spread(E::steps(num_rows, padded) + E::steps(num_rows, buffers.width));
    if constexpr (E::kOverlap) {
      forward_overlapped<E, T>(call, document, kv_head, buffers, first_query, num_rows, first_key, num_keys,
                               &ahead);
      continue;
    }
    for (int64_t row = 0; row < num_rows; row += buffers.tile_rows) {
      const int64_t count = num_rows - row < buffers.tile_rows ? num_rows - row : buffers.tile_rows;
      const int64_t query_begin = row / call.group;
      const int64_t query_last = (row + count - 1) / call.group;
      if (buffers.begin[query_begin] >= first_key + num_keys || buffers.end[query_last] <= first_key)
        continue;
      forward_tile<E, T>(call, document, kv_head, buffers, first_query, row, count, first_key, num_keys,
                         &ahead);
    }
  }
  write_block<E, T>(call, document, kv_head, buffers, first_query, num_queries);
}

template <class E, typename T>
void forward_item(void* context, int64_t index, Scratch& scratch) {
  const TiledForward& call = *static_cast<const TiledForward*>(context);
  const WorkItem& item = call.items[static_cast<size_t>(index)];
  const ForwardBuffers<E, T> buffers(call, &scratch);
  E::begin();
  const int32_t heads = item.last_kv_head - item.first_kv_head;
  const int32_t blocks = (item.last_document - item.first_document) * heads;
  for (int32_t n = 0; n < blocks; ++n) {
    const Document& document = call.documents[static_cast<size_t>(item.first_document + n / heads)];
    const NextRows<T> next = n + 1 < blocks ? next_rows<E, T>(call, item.first_document + (n + 1) / heads,
                                                              item.first_kv_head + (n + 1) % heads)
                                            : NextRows<T>{};
    forward_block<E, T>(call, document, item.first_kv_head + n % heads, item.block, buffers, next);
  }
  E::end();
}

template <class E, typename T>
size_t forward_scratch(const TiledForward& call) {
  ScratchSize size;
  const ForwardBuffers<E, T> sized(call, &size);
  return size.bytes();
}

// Stacked rows of an item, at most: more of them share a packed tile of keys, as long as their Q and O stay
// in L2.
template <class E>
inline int64_t forward_item_rows(const AttentionShape& shape) {
  constexpr int64_t kBytes = 768 << 10;
  constexpr int64_t kMaxRows = 2048;
  const int64_t row_bytes = shape.head_dim * static_cast<int64_t>(sizeof(typename E::Elem)) +
                            shape.head_dim_v * static_cast<int64_t>(sizeof(float));
  int64_t rows = kMaxRows;
  while (rows > kFinestRows && rows * row_bytes > kBytes) rows /= 2;
  return rows;
}

template <class E, typename T>
void run_forward(const ForwardParams& params, Executor& executor) {
  run_tiled_forward(params, executor, forward_item_rows<E>(params.shape), &forward_scratch<E, T>,
                    &forward_item<E, T>);
}
