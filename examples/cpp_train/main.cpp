// Trains a tiny byte-level transformer on packed documents, in C++ alone, and checks that packing changed
// nothing.
//
//   cpp_train FILE... [--steps N]
//
// Each paragraph of the files is a document. Documents are packed into rows; attention stays inside a
// document.
#include <packed_sdpa/attention.h>
#include <packed_sdpa/layout.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int64_t kRowTokens = 512;
constexpr int64_t kVocabulary = 256;  // bytes
constexpr int64_t kWidth = 64;
constexpr int64_t kHeads = 4;
constexpr int64_t kKeyValueHeads = 2;
constexpr int64_t kHeadDim = kWidth / kHeads;
constexpr int64_t kLayers = 2;

struct Row {
  torch::Tensor tokens;     // int64 [1, S]
  torch::Tensor doc_ids;    // int64 [1, S], 0 is padding
  torch::Tensor positions;  // int64 [1, S], restart at each document
};

std::vector<std::string> read_paragraphs(const std::vector<std::string>& paths) {
  std::vector<std::string> paragraphs;
  for (const std::string& path : paths) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot read " + path);
    std::string paragraph;
    for (std::string line; std::getline(file, line);) {
      if (line.empty()) {
        if (paragraph.size() > 1) paragraphs.push_back(paragraph.substr(0, kRowTokens));
        paragraph.clear();
      } else {
        paragraph += line + "\n";
      }
    }
    if (paragraph.size() > 1) paragraphs.push_back(paragraph.substr(0, kRowTokens));
  }
  return paragraphs;
}

// First fit in reading order: a document goes into the open row, or a new row begins.
std::vector<Row> pack(const std::vector<std::string>& documents) {
  std::vector<Row> rows;
  int64_t used = kRowTokens;
  int64_t document_in_row = 0;
  for (const std::string& document : documents) {
    const auto length = static_cast<int64_t>(document.size());
    if (used + length > kRowTokens) {
      const auto zeros = [] { return torch::zeros({1, kRowTokens}, torch::kLong); };
      rows.push_back({zeros(), zeros(), zeros()});
      used = 0;
      document_in_row = 0;
    }
    ++document_in_row;
    for (int64_t t = 0; t < length; ++t) {
      rows.back().tokens[0][used + t] = static_cast<int64_t>(static_cast<unsigned char>(document[t]));
    }
    rows.back().doc_ids.slice(1, used, used + length).fill_(document_in_row);
    rows.back().positions.slice(1, used, used + length).copy_(torch::arange(length));
    used += length;
  }
  return rows;
}

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : norm_attention(register_module("norm_attention", torch::nn::LayerNorm(std::vector<int64_t>{kWidth}))),
        norm_mlp(register_module("norm_mlp", torch::nn::LayerNorm(std::vector<int64_t>{kWidth}))),
        qkv(register_module("qkv", torch::nn::Linear(kWidth, (kHeads + 2 * kKeyValueHeads) * kHeadDim))),
        out(register_module("out", torch::nn::Linear(kWidth, kWidth))),
        up(register_module("up", torch::nn::Linear(kWidth, 4 * kWidth))),
        down(register_module("down", torch::nn::Linear(4 * kWidth, kWidth))) {}

  torch::Tensor forward(torch::Tensor x, const packed_sdpa::PackedLayout& layout) {
    const int64_t batch = x.size(0), rows = x.size(1);
    const auto parts =
        qkv->forward(norm_attention->forward(x))
            .split({kHeads * kHeadDim, kKeyValueHeads * kHeadDim, kKeyValueHeads * kHeadDim}, -1);
    const auto heads = [&](const torch::Tensor& part) {
      return part.view({batch, rows, -1, kHeadDim}).transpose(1, 2);  // a view: nothing is copied
    };
    const torch::Tensor attended =
        packed_sdpa::packed_attention(heads(parts[0]), heads(parts[1]), heads(parts[2]), layout).out;
    x = x + out->forward(attended.transpose(1, 2).reshape({batch, rows, kWidth}));
    return x + down->forward(torch::gelu(up->forward(norm_mlp->forward(x))));
  }

  torch::nn::LayerNorm norm_attention, norm_mlp;
  torch::nn::Linear qkv, out, up, down;
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  ModelImpl()
      : tokens(register_module("tokens", torch::nn::Embedding(kVocabulary, kWidth))),
        positions(register_module("positions", torch::nn::Embedding(kRowTokens, kWidth))),
        head(register_module("head", torch::nn::Linear(kWidth, kVocabulary))) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      blocks.push_back(register_module("block" + std::to_string(layer), Block()));
    }
  }

  torch::Tensor forward(const Row& row) {
    const auto layout = packed_sdpa::PackedLayout::from_doc_ids(row.doc_ids);  // once for all layers
    torch::Tensor x = tokens->forward(row.tokens) + positions->forward(row.positions);
    for (Block& block : blocks) x = block->forward(x, layout);
    return head->forward(x);
  }

  torch::nn::Embedding tokens, positions;
  torch::nn::Linear head;
  std::vector<Block> blocks;
};
TORCH_MODULE(Model);

// Cross entropy of each token's successor in the same document.
torch::Tensor loss_of(Model& model, const Row& row) {
  const torch::Tensor logits = model->forward(row);
  const torch::Tensor same =
      (row.doc_ids.slice(1, 1) == row.doc_ids.slice(1, 0, -1)) & (row.doc_ids.slice(1, 1) != 0);
  const torch::Tensor targets = row.tokens.slice(1, 1).masked_fill(~same, -100);
  return torch::cross_entropy_loss(logits.slice(1, 0, -1).reshape({-1, kVocabulary}), targets.reshape({-1}));
}

// Largest difference between a packed row's logits and those of each of its documents alone.
double isolation_error(Model& model, const Row& row) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor packed = model->forward(row);
  double worst = 0.0;
  for (int64_t document = 1; document <= row.doc_ids.max().item<int64_t>(); ++document) {
    const torch::Tensor mine = (row.doc_ids[0] == document).nonzero().squeeze(1);
    const Row alone{row.tokens.index_select(1, mine), torch::ones({1, mine.size(0)}, torch::kLong),
                    row.positions.index_select(1, mine)};
    worst =
        std::max(worst, (model->forward(alone) - packed.index_select(1, mine)).abs().max().item<double>());
  }
  return worst;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> paths;
  int64_t steps = 30;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--steps" && i + 1 < argc) {
      steps = std::stoll(argv[++i]);
    } else {
      paths.emplace_back(argv[i]);
    }
  }
  const std::vector<std::string> documents = read_paragraphs(paths);
  if (documents.empty()) {
    std::cerr << "usage: cpp_train FILE... [--steps N]; the files must hold text\n";
    return 2;
  }
  torch::manual_seed(0);
  const std::vector<Row> rows = pack(documents);
  std::cout << documents.size() << " documents in " << rows.size() << " rows of " << kRowTokens
            << " tokens\n";

  Model model;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));
  double first = 0.0, last = 0.0;
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss = loss_of(model, rows[static_cast<size_t>(step) % rows.size()]);
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
    if (step % 10 == 0 || step + 1 == steps) std::cout << "step " << step << " loss " << last << "\n";
  }
  const double error = isolation_error(model, rows.front());
  std::cout << "packed logits against each document alone: max abs difference " << error << "\n";
  const bool learnt = last < first;
  const bool isolated = error < 1e-4;
  std::cout << (learnt && isolated ? "ok" : "FAILED") << "\n";
  return learnt && isolated ? 0 : 1;
}
