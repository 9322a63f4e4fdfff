// Documents that are in force for attention calls which do not name them: armed state, scope, and a drop-in
// for at::scaled_dot_product_attention that reads it.
//
//   packed_sdpa::PackedAttentionScope scope(doc_ids);   // int64 [B, S]; until the end of the block
//   at::Tensor loss = model->forward(tokens);           // calls packed_sdpa::scaled_dot_product_attention
//
// The armed state is one for C++ and Python. Every thread sees it: a thread that armed sees its own
// documents, one that never did the latest. A call in a recompute during backward gets the documents of the
// forward that it repeats.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "packed_sdpa/layout.h"

namespace packed_sdpa {

// A copy of doc_ids, the layout that was built from them (once), and the wished-for backend.
class ArmedDocuments {
 public:
  // doc_ids: integer or bool [B, S] or [S] (meaning [1, S]), any device; 0 is padding. backend: as
  // AttentionOptions::backend. Raises c10::ValueError / c10::TypeError before anything changes.
  static std::shared_ptr<const ArmedDocuments> make(const at::Tensor& doc_ids,
                                                    const std::string& backend = "auto");

  virtual ~ArmedDocuments() = default;
  virtual int64_t id() const = 0;                 // a positive number, never used again
  virtual const at::Tensor& doc_ids() const = 0;  // int64 [B, S] on the host
  virtual const PackedLayout& layout() const = 0;
  virtual const std::string& backend() const = 0;
};
using DocumentsPtr = std::shared_ptr<const ArmedDocuments>;  // null: unarmed

// The documents armed for the calling thread; null when none are.
DocumentsPtr armed_documents();
void arm(const DocumentsPtr& documents);
void arm(const at::Tensor& doc_ids, const std::string& backend = "auto");
void disarm();

// Arms for its own lifetime in its own thread, then puts back what was in force before. Nests; ends by
// exceptions too. A scope that is ended in another thread than it was made in ends the program, with a
// message.
class PackedAttentionScope {
 public:
  explicit PackedAttentionScope(const at::Tensor& doc_ids, const std::string& backend = "auto");
  explicit PackedAttentionScope(const DocumentsPtr& documents);  // null: unarmed within
  ~PackedAttentionScope();
  PackedAttentionScope(const PackedAttentionScope&) = delete;
  PackedAttentionScope& operator=(const PackedAttentionScope&) = delete;

  const DocumentsPtr& documents() const { return documents_; }

 private:
  struct Undo;
  DocumentsPtr documents_;
  std::unique_ptr<Undo> undo_;
};

// at::scaled_dot_product_attention, but when documents are armed and query [B, Hq, S, D], key and value [B,
// Hkv, S, *] have their B and S: causal attention within each document. attn_mask and is_causal are not used
// then. Documents live as long as the graph of the output. A call without a graph (in the forward of a
// checkpoint written in C++) cannot say how long it needs them, so the last 16 that had such a call are kept;
// an evaluation under NoGradGuard looks the same (one in InferenceMode keeps nothing).
//
// Raises c10::Error in a recompute whose documents cannot be told. Call it by its full name: argument
// lookup also finds that of at::.
at::Tensor scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value,
                                        const std::optional<at::Tensor>& attn_mask = std::nullopt,
                                        double dropout_p = 0.0, bool is_causal = false,
                                        std::optional<double> scale = std::nullopt, bool enable_gqa = false);

}  // namespace packed_sdpa
