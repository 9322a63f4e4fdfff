// The table of a set with float tiles only: float32, and half types converted when packed. PACKED_SDPA_SET is
// the set's name as a string.

const char* forward_f32(const ForwardParams& params, Executor& executor) {
  run_forward<EngineF32, float>(params, executor);
  return PACKED_SDPA_SET "::forward_f32_tile96x64";
}
const char* backward_f32(const BackwardParams& params, Executor& executor) {
  run_backward<EngineF32, float>(params, executor);
  return PACKED_SDPA_SET "::backward_f32_tile48x64";
}
const char* forward_bf16(const ForwardParams& params, Executor& executor) {
  run_forward<EngineF32, BFloat16>(params, executor);
  return PACKED_SDPA_SET "::forward_bf16_as_f32_tile96x64";
}
const char* backward_bf16(const BackwardParams& params, Executor& executor) {
  run_backward<EngineF32, BFloat16>(params, executor);
  return PACKED_SDPA_SET "::backward_bf16_as_f32_tile48x64";
}
const char* forward_f16(const ForwardParams& params, Executor& executor) {
  run_forward<EngineF32, Float16>(params, executor);
  return PACKED_SDPA_SET "::forward_f16_as_f32_tile96x64";
}
const char* backward_f16(const BackwardParams& params, Executor& executor) {
  run_backward<EngineF32, Float16>(params, executor);
  return PACKED_SDPA_SET "::backward_f16_as_f32_tile48x64";
}

CpuKernels float_kernels(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::kFloat32:
      return {&forward_f32, &backward_f32};
    case ScalarType::kBFloat16:
      return {&forward_bf16, &backward_bf16};
    case ScalarType::kFloat16:
      return {&forward_f16, &backward_f16};
    case ScalarType::kFloat64:
      break;
  }
  return {};
}
