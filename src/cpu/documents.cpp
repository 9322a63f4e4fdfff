#include "cpu/documents.h"

#include <algorithm>
#include <cassert>

namespace packed_sdpa::cpu {
namespace {

// First rank whose key row is > row.
int64_t rank_after_row(const int32_t* rows, int64_t count, int64_t row) {
  return std::upper_bound(rows, rows + count, row, [](int64_t a, int32_t b) { return a < b; }) - rows;
}

std::vector<RowRun> padding_rows(int64_t num_rows, int64_t num_tokens, const int32_t* token_index) {
  std::vector<RowRun> runs;
  if (token_index == nullptr) {
    if (num_tokens < num_rows) runs.push_back({num_tokens, num_rows});
    return runs;
  }
  const bool ascending = std::adjacent_find(token_index, token_index + num_tokens,
                                            std::greater_equal<int32_t>()) == token_index + num_tokens;
  if (ascending) {
    int64_t next = 0;
    for (int64_t t = 0; t < num_tokens; ++t) {
      if (token_index[t] > next) runs.push_back({next, token_index[t]});
      next = int64_t{token_index[t]} + 1;
    }
    if (next < num_rows) runs.push_back({next, num_rows});
    return runs;
  }
  std::vector<uint8_t> taken(static_cast<size_t>(num_rows), 0);
  for (int64_t t = 0; t < num_tokens; ++t) taken[static_cast<size_t>(token_index[t])] = 1;
  for (int64_t row = 0; row < num_rows;) {
    if (taken[static_cast<size_t>(row)] != 0) {
      ++row;
      continue;
    }
    const int64_t begin = row;
    while (row < num_rows && taken[static_cast<size_t>(row)] == 0) ++row;
    runs.push_back({begin, row});
  }
  return runs;
}

// The rows of one document on one side: contiguous documents need only their first row.
struct Side {
  int64_t count;
  int64_t first_flat;
  const int32_t* rows;  // null when contiguous
};

Side read_side(const int32_t* cu_seqlens, const int32_t* token_index, int64_t document) {
  const int64_t begin = cu_seqlens[document];
  const int64_t count = cu_seqlens[document + 1] - begin;
  assert(count >= 0);
  if (count == 0) return {0, 0, nullptr};
  if (token_index == nullptr) return {count, begin, nullptr};
  const int32_t* rows = token_index + begin;
  const bool contiguous = int64_t{rows[count - 1]} - rows[0] == count - 1;
  return {count, rows[0], contiguous ? nullptr : rows};
}

}  // namespace

KeyRange Document::visible_keys(int64_t query) const {
  if (num_keys == 0) return {};
  const int64_t place = diagonal + query;
  int64_t begin = 0;
  int64_t end = num_keys;
  if (key_rows == nullptr) {
    if (window_left >= 0) begin = std::max<int64_t>(0, place - window_left);
    if (window_right >= 0) end = std::min(num_keys, place + window_right + 1);
  } else {
    // The row at which a rank stands; ranks outside the document go on in steps of one row.
    int64_t row;
    if (place < 0) {
      row = key_rows[0] + place;
    } else if (place >= num_keys) {
      row = key_rows[num_keys - 1] + (place - num_keys + 1);
    } else {
      row = key_rows[place];
    }
    if (window_left >= 0) begin = rank_after_row(key_rows, num_keys, row - window_left - 1);
    if (window_right >= 0) end = rank_after_row(key_rows, num_keys, row + window_right);
  }
  begin = std::min(begin, num_keys);
  end = std::max(end, begin);
  return {begin, end};
}

int64_t Document::first_query_reaching(int64_t key) const {
  if (key_rows == nullptr) {  // end = min(num_keys, diagonal + r + right + 1) > key
    if (window_right < 0) return 0;
    return std::clamp<int64_t>(key - window_right - diagonal, 0, num_queries);
  }
  int64_t low = 0;
  int64_t high = num_queries;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (visible_keys(middle).end > key) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

int64_t Document::first_query_past(int64_t key) const {
  if (key_rows == nullptr) {  // begin = max(0, diagonal + r - left) > key
    if (window_left < 0) return num_queries;
    return std::clamp<int64_t>(key + window_left - diagonal + 1, 0, num_queries);
  }
  int64_t low = 0;
  int64_t high = num_queries;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (visible_keys(middle).begin > key) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

std::vector<Document> read_documents(const AttentionParams& params) {
  const DocumentTable& table = params.documents;
  std::vector<Document> documents;
  documents.reserve(static_cast<size_t>(table.num_documents));
  for (int64_t d = 0; d < table.num_documents; ++d) {
    const Side queries = read_side(table.cu_seqlens_q, table.token_index_q, d);
    const Side keys = read_side(table.cu_seqlens_k, table.token_index_k, d);
    if (queries.count == 0 && keys.count == 0) continue;
    Document document;
    document.batch =
        queries.count > 0 ? queries.first_flat / params.shape.rows_q : keys.first_flat / params.shape.rows_k;
    document.num_queries = queries.count;
    document.num_keys = keys.count;
    document.flat_query_base = document.batch * params.shape.rows_q;
    document.flat_key_base = document.batch * params.shape.rows_k;
    document.first_query_row = queries.count > 0 ? queries.first_flat - document.flat_query_base : 0;
    document.first_key_row = keys.count > 0 ? keys.first_flat - document.flat_key_base : 0;
    document.query_rows = queries.rows;
    document.key_rows = keys.rows;
    document.diagonal =
        table.diagonal_offsets != nullptr ? table.diagonal_offsets[d] : keys.count - queries.count;
    document.window_left = params.window_left;
    document.window_right = params.is_causal ? 0 : params.window_right;
    documents.push_back(document);
  }
  return documents;
}

// Before the run a query stands too far ahead of the first key, after it too far behind the last.
RowRun seeing_queries(const Document& document) {
  if (document.num_keys == 0) return {0, 0};
  const int64_t begin = document.first_query_reaching(0);
  return {begin, std::max(begin, document.first_query_past(document.num_keys - 1))};
}

std::vector<RowRun> padding_query_rows(const AttentionParams& params) {
  const DocumentTable& table = params.documents;
  return padding_rows(params.shape.batch * params.shape.rows_q, table.cu_seqlens_q[table.num_documents],
                      table.token_index_q);
}

std::vector<RowRun> padding_key_rows(const AttentionParams& params) {
  const DocumentTable& table = params.documents;
  return padding_rows(params.shape.batch * params.shape.rows_k, table.cu_seqlens_k[table.num_documents],
                      table.token_index_k);
}

}  // namespace packed_sdpa::cpu
