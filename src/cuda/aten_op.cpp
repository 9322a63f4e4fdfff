#include "cuda/aten_op.h"

#include <ATen/core/jit_type.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace packed_sdpa {

namespace {

bool has_default(const c10::Argument& argument) {
  return argument.default_value().has_value() || argument.type()->kind() == c10::TypeKind::OptionalType;
}

c10::IValue default_of(const c10::Argument& argument) {
  return argument.default_value().has_value() ? *argument.default_value() : c10::IValue();
}

}  // namespace

AtenOp::AtenOp(std::string_view name)
    : name_(name), handle_(c10::Dispatcher::singleton().findSchema({std::string(name), ""})) {}

bool AtenOp::has_kernel(c10::DeviceType device) const {
  const c10::DispatchKey key = c10::computeDispatchKey(std::nullopt, std::nullopt, c10::Device(device));
  return handle_ && handle_->hasKernelForDispatchKey(key);
}

std::vector<std::string> AtenOp::schema_reasons(const std::vector<std::string_view>& given) const {
  if (!handle_) return {"this torch has no " + name_};
  std::vector<std::string> reasons;
  const auto is_given = [&](const std::string& name) {
    return std::find(given.begin(), given.end(), name) != given.end();
  };
  const std::vector<c10::Argument>& arguments = handle_->schema().arguments();
  for (const c10::Argument& argument : arguments) {
    if (!is_given(argument.name()) && !has_default(argument)) {
      reasons.push_back(name_ + " of this torch asks for '" + argument.name() + "', which is not known here");
    }
  }
  for (const std::string_view name : given) {
    const bool known = std::any_of(arguments.begin(), arguments.end(),
                                   [&](const c10::Argument& argument) { return argument.name() == name; });
    if (!known) reasons.push_back(name_ + " of this torch has no argument '" + std::string(name) + "'");
  }
  return reasons;
}

std::vector<c10::IValue> AtenOp::call(const std::vector<Argument>& given) const {
  TORCH_CHECK(handle_.has_value(), "packed_sdpa: this torch has no ", name_);
  std::vector<c10::IValue> stack;
  for (const c10::Argument& argument : handle_->schema().arguments()) {
    const auto entry = std::find_if(given.begin(), given.end(), [&](const Argument& candidate) {
      return candidate.first == argument.name();
    });
    stack.push_back(entry != given.end() ? entry->second : default_of(argument));
  }
  handle_->callBoxed(&stack);
  return stack;
}

}  // namespace packed_sdpa
