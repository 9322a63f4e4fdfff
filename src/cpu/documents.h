// The documents of a call as kernels read them, and which keys a query sees.
//
// Within a document, queries and keys are numbered by rank. The keys that query r sees are always one range
// of ranks [begin, end), and both ends do not decrease with r (causal, windows, gaps: all of them). Tiles are
// skipped, cut and masked by these two numbers alone.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/params.h"

namespace packed_sdpa::cpu {

struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;  // begin <= end
};

struct Document {
  int64_t batch = 0;
  int64_t num_queries = 0;
  int64_t num_keys = 0;
  int64_t first_query_row = 0;  // row within the batch row, of rank 0
  int64_t first_key_row = 0;
  const int32_t* query_rows = nullptr;  // flat rows by rank, or null: rows are first_query_row + rank
  const int32_t* key_rows = nullptr;
  int64_t flat_query_base = 0;  // batch * L and batch * S: flat row to row within the batch row
  int64_t flat_key_base = 0;
  int64_t diagonal = 0;       // query r stands at key rank diagonal + r
  int64_t window_left = -1;   // of rows, -1 unlimited
  int64_t window_right = -1;  // 0 when causal

  int64_t query_row(int64_t rank) const {
    return query_rows != nullptr ? query_rows[rank] - flat_query_base : first_query_row + rank;
  }
  int64_t key_row(int64_t rank) const {
    return key_rows != nullptr ? key_rows[rank] - flat_key_base : first_key_row + rank;
  }
  KeyRange visible_keys(int64_t query) const;
  // For a key of the document: the first query in [0, num_queries] whose range ends beyond it, and the first
  // whose range begins beyond it. The queries that see the key are [first_query_reaching(key),
  // first_query_past(key)).
  int64_t first_query_reaching(int64_t key) const;
  int64_t first_query_past(int64_t key) const;
};

std::vector<Document> read_documents(const AttentionParams& params);

// Rows within [0, batch * rows) that belong to no document, as half-open runs of flat rows.
struct RowRun {
  int64_t begin = 0;
  int64_t end = 0;
};
std::vector<RowRun> padding_query_rows(const AttentionParams& params);
std::vector<RowRun> padding_key_rows(const AttentionParams& params);

// The queries of a document that see at least one key: a half-open run of ranks.
RowRun seeing_queries(const Document& document);

}  // namespace packed_sdpa::cpu
