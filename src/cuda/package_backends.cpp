// Names of backends that live in Python packages (packed_sdpa.packages): known here, so that an order for
// them is refused with the reason instead of as an unknown name.
#include <c10/util/Exception.h>

#include <string>

#include "backends.h"

namespace packed_sdpa {

namespace {

class PackageBackend final : public AttentionBackend {
 public:
  PackageBackend(std::string_view name, std::string_view package) : name_(name), package_(package) {}

  std::string_view name() const override { return name_; }

  std::vector<std::string> unsupported_reasons(const AttentionRequest& /*request*/) const override {
    return {"it runs the Python package " + std::string(package_) +
            ", which only packed_sdpa's Python functions can reach"};
  }

  ForwardResult forward(const AttentionCall& /*call*/) const override { refuse(); }

  Gradients backward(const AttentionCall& /*call*/, const at::Tensor& /*grad_out*/,
                     const ForwardResult& /*saved*/) const override {
    refuse();
  }

 private:
  [[noreturn]] void refuse() const {
    TORCH_CHECK(false, "packed_sdpa: ", name_, " was run although it has reasons against it; this is a bug");
  }

  std::string_view name_;
  std::string_view package_;
};

}  // namespace

const AttentionBackend& te_backend() {
  static const PackageBackend backend("te", "transformer_engine");
  return backend;
}

const AttentionBackend& flash_attn_backend() {
  static const PackageBackend backend("flash_attn", "flash_attn");
  return backend;
}

}  // namespace packed_sdpa
