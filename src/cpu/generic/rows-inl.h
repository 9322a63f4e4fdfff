// Where the rows of a tensor lie in memory, and how they are asked for before they are packed.

// How many rows ahead packing asks for: far enough for a miss to memory, few enough for the core's miss
// buffers.
constexpr int64_t kPrefetchRows = 12;

// The rows of one document: keys of a head (group 1), or queries stacked with the heads of their group.
template <typename T>
struct RowSource {
  const T* data;
  int64_t stride_row;
  int64_t stride_head;
  int64_t stride_dim;
  int64_t dim;
  int32_t group;
  const int32_t* rows;  // flat rows by rank, or null
  int64_t first_row;    // row of rank 0, or what to take off a flat row (negated)

  PACKED_SDPA_INLINE int64_t offset(int64_t stacked) const {
    const int32_t rank = static_cast<int32_t>(stacked) / group;
    const int64_t head = static_cast<int32_t>(stacked) - rank * group;
    const int64_t row = (rows != nullptr ? int64_t{rows[rank]} : int64_t{rank}) + first_row;
    return row * stride_row + head * stride_head;
  }
  // Asks for a row that will be read soon. Rows of one head lie a page or so apart in the usual [B, S, H, D]
  // layout, which the hardware does not foresee.
  PACKED_SDPA_INLINE void prefetch(int64_t stacked) const {
    const char* source = reinterpret_cast<const char*>(data + offset(stacked));
    const int64_t bytes = stride_dim == 1 ? dim * static_cast<int64_t>(sizeof(T)) : 1;
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(source + b);
  }
  // The same rows in bytes; of rows whose elements do not stand side by side only the first of each.
  RowSource<char> bytes() const {
    constexpr int64_t kSize = static_cast<int64_t>(sizeof(T));
    return {reinterpret_cast<const char*>(data),
            stride_row * kSize,
            stride_head * kSize,
            1,
            stride_dim == 1 ? dim * kSize : 1,
            group,
            rows,
            first_row};
  }
  // The row as `dim` neighbouring elements: in place, or gathered into `spare`.
  PACKED_SDPA_INLINE const T* read(int64_t stacked, T* spare) const {
    const T* source = data + offset(stacked);
    if (stride_dim == 1) return source;
    for (int64_t d = 0; d < dim; ++d) spare[d] = source[d * stride_dim];
    return spare;
  }
};

template <typename T>
inline RowSource<T> query_source(const StridedTensor& tensor, const Document& document, int64_t kv_head,
                                 int64_t group, int64_t dim) {
  const bool gathered = document.query_rows != nullptr;
  return {static_cast<const T*>(tensor.data) + document.batch * tensor.stride_batch +
              kv_head * group * tensor.stride_head,
          tensor.stride_row,
          tensor.stride_head,
          tensor.stride_dim,
          dim,
          static_cast<int32_t>(group),
          document.query_rows,
          gathered ? -document.flat_query_base : document.first_query_row};
}

template <typename T>
inline RowSource<T> key_source(const StridedTensor& tensor, const Document& document, int64_t kv_head,
                               int64_t dim) {
  const bool gathered = document.key_rows != nullptr;
  return {static_cast<const T*>(tensor.data) + document.batch * tensor.stride_batch +
              kv_head * tensor.stride_head,
          tensor.stride_row,
          0,
          tensor.stride_dim,
          dim,
          1,
          document.key_rows,
          gathered ? -document.flat_key_base : document.first_key_row};
}

// The rows that will be packed next, brought into the second-level cache a few lines at a time while products
// run: products take a step after each block of theirs. All at once between two tiles they fill the core's
// miss buffers, and the core waits.
class RowPrefetch {
 public:
  template <typename T>
  void add(const RowSource<T>& source, int64_t first, int64_t count) {
    if (count <= 0) return;
    parts_[num_parts_] = {source.bytes(), first, first + count};
    lines_ += count * ((parts_[num_parts_].source.dim + kLine - 1) / kLine);
    ++num_parts_;
  }
  // What was added is asked for in so many steps.
  void spread(int64_t steps) { lines_per_step_ = steps > 0 ? (lines_ + steps - 1) / steps : 0; }

  PACKED_SDPA_INLINE void step() {
    for (int64_t n = 0; n < lines_per_step_; ++n) {
      if (line_ >= row_end_ && !next_row()) return;
      __builtin_prefetch(line_, 0, 2);
      line_ += kLine;
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  static constexpr int kMaxParts = 3;
  struct Part {
    RowSource<char> source;
    int64_t next;  // row
    int64_t end;
  };

  inline bool next_row() {
    while (part_ < num_parts_ && parts_[part_].next == parts_[part_].end) ++part_;
    if (part_ == num_parts_) {
      lines_per_step_ = 0;
      return false;
    }
    Part& part = parts_[part_];
    line_ = part.source.data + part.source.offset(part.next++);
    row_end_ = line_ + part.source.dim;
    return true;
  }

  Part parts_[kMaxParts];
  int part_ = 0;
  int num_parts_ = 0;
  int64_t lines_ = 0;
  int64_t lines_per_step_ = 0;
  const char* line_ = nullptr;
  const char* row_end_ = nullptr;
};
