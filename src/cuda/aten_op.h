// Calls of aten operators whose argument lists differ between torch releases: boxed, by argument name.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DeviceType.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace packed_sdpa {

class AtenOp {
 public:
  using Argument = std::pair<std::string_view, c10::IValue>;

  explicit AtenOp(std::string_view name);  // "aten::_flash_attention_forward"

  const std::string& name() const { return name_; }
  bool has_kernel(c10::DeviceType device) const;
  // Why it cannot be called with these arguments, in sentences. Arguments of the operator that are not among
  // `given` take their default (None where they are optional); one without a default is a reason, and so is a
  // given one that this torch does not have.
  std::vector<std::string> schema_reasons(const std::vector<std::string_view>& given) const;
  std::vector<c10::IValue> call(const std::vector<Argument>& given) const;

 private:
  std::string name_;
  std::optional<c10::OperatorHandle> handle_;  // not there: this torch lacks it
};

}  // namespace packed_sdpa
