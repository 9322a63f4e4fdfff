// Which attention weights dropout keeps: a counter-based generator (Philox 4x32, 10 rounds; Salmon, Moraes,
// Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
//
// The four 32-bit words of one Philox call decide four neighbouring key rows. The counter holds the key row /
// 4, the query row, the (batch, head) pair and the offset; the key holds the seed. So the decision for an
// element depends on nothing else: no tile size, thread count or instruction set.
#pragma once

#include <cstdint>

#include "cpu/params.h"

namespace packed_sdpa::cpu {

class Dropout {
 public:
  explicit Dropout(const AttentionParams& params)
      : enabled_(params.dropout_p > 0.0),
        threshold_(static_cast<uint64_t>(params.dropout_p * 4294967296.0)),
        keep_scale_(1.0 / (1.0 - params.dropout_p)),
        seed_low_(static_cast<uint32_t>(params.dropout_seed)),
        seed_high_(static_cast<uint32_t>(params.dropout_seed >> 32) ^
                   (static_cast<uint32_t>(params.dropout_offset >> 32) * 0x9e3779b9u)),
        offset_low_(static_cast<uint32_t>(params.dropout_offset)) {}

  bool enabled() const { return enabled_; }
  double keep_scale() const { return keep_scale_; }

  // Keep decisions of one row of weights, a key row at a time; consecutive key rows share Philox calls.
  class Row {
   public:
    Row(const Dropout& dropout, int64_t batch_head, int64_t query_row)
        : dropout_(dropout),
          batch_head_(static_cast<uint32_t>(batch_head)),
          query_row_(static_cast<uint32_t>(query_row)) {}

    bool keeps(int64_t key_row) {
      const int64_t group = key_row >> 2;
      if (group != group_) {
        group_ = group;
        dropout_.philox(static_cast<uint32_t>(group), query_row_, batch_head_, words_);
      }
      return words_[key_row & 3] >= dropout_.threshold_;
    }

   private:
    const Dropout& dropout_;
    uint32_t batch_head_;
    uint32_t query_row_;
    int64_t group_ = -1;
    uint32_t words_[4] = {};
  };

 private:
  void philox(uint32_t group, uint32_t query_row, uint32_t batch_head, uint32_t words[4]) const {
    uint32_t counter[4] = {group, query_row, batch_head, offset_low_};
    uint32_t key[2] = {seed_low_, seed_high_};
    for (int round = 0; round < 10; ++round) {
      const uint64_t product0 = uint64_t{0xd2511f53u} * counter[0];
      const uint64_t product1 = uint64_t{0xcd9e8d57u} * counter[2];
      const uint32_t next0 = static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0];
      const uint32_t next2 = static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1];
      counter[0] = next0;
      counter[1] = static_cast<uint32_t>(product1);
      counter[2] = next2;
      counter[3] = static_cast<uint32_t>(product0);
      key[0] += 0x9e3779b9u;
      key[1] += 0xbb67ae85u;
    }
    for (int i = 0; i < 4; ++i) words[i] = counter[i];
  }

  bool enabled_;
  uint64_t threshold_;
  double keep_scale_;
  uint32_t seed_low_;
  uint32_t seed_high_;
  uint32_t offset_low_;
};

}  // namespace packed_sdpa::cpu
