// bfloat16 and float16 as bits, to and from float in plain integer code (round to nearest, ties to even).
#pragma once

#include <cstdint>
#include <cstring>

namespace packed_sdpa::cpu {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t bits_from_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float to_float(BFloat16 value) {
  return float_from_bits(static_cast<uint32_t>(value.bits) << 16);
}

inline BFloat16 bfloat16_from_float(float value) {
  const uint32_t bits = bits_from_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};  // quiet NaN
  const uint32_t rounding = 0x7fffu + ((bits >> 16) & 1u);
  return {static_cast<uint16_t>((bits + rounding) >> 16)};
}

inline float to_float(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const uint32_t mantissa = value.bits & 0x3ffu;
  if (exponent == 0x1fu) return float_from_bits(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in float
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return float_from_bits(sign | bits_from_float(magnitude));
  }
  return float_from_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

inline Float16 float16_from_float(float value) {
  const uint32_t bits = bits_from_float(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u)
    return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to infinity: >= 65520
  if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24; the addition to 0.5 rounds to that grid
    const uint32_t rounded = bits_from_float(float_from_bits(magnitude) + 0.5f) - bits_from_float(0.5f);
    return {static_cast<uint16_t>(sign | rounded)};
  }
  const uint32_t rounding = 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((magnitude + rounding - 0x38000000u) >> 13))};
}

}  // namespace packed_sdpa::cpu
