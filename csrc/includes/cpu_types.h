// SPDX-License-Identifier: Apache-2.0
// Element types of the tensors that an optimizer kernel walks over, and what a kernel knows of one tensor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace ds {

// The numbers are those that Python passes (deepspeed/ops/cpu_optimizer.py). A tensor that is not there has kNone.
enum Type : int { kNone = 0, kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3 };

constexpr int64_t size_of(int type) { return type == kFloat32 ? 4 : type == kNone ? 0 : 2; }

struct Operand {
    char* data;
    int type;
};

// Conversions of single elements: what the vector instructions do, for hosts without them. They round to nearest, ties
// to even; any NaN becomes one quiet NaN.

inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of_bfloat16(uint16_t bits) { return float_of_bits(uint32_t{bits} << 16); }

inline uint16_t bfloat16_of_float(float value) {
    if (value != value) return 0x7fc0;
    const uint32_t bits = bits_of_float(value);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float float_of_float16(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16;
    const uint32_t exponent = (half >> 10) & 0x1f;
    const uint32_t fraction = half & 0x3ff;
    if (exponent == 0x1f) return float_of_bits(sign | 0x7f800000 | (fraction << 13) | (fraction ? 0x400000 : 0));
    if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact in fp32
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
        return float_of_bits(sign | bits_of_float(magnitude));
    }
    return float_of_bits(sign | ((exponent + 112) << 23) | (fraction << 13));
}

inline uint16_t float16_of_float(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);  // 65536 and above, infinity
    if (magnitude < 0x38800000) {  // below 2^-14: subnormal. Adding 0.5 leaves the fraction, rounded, in the low bits.
        const float shifted = float_of_bits(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (bits_of_float(shifted) - 0x3f000000));
    }
    const uint32_t rounded = magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1);
    return static_cast<uint16_t>(sign | (rounded >> 13));  // may carry into infinity, as it should
}

}  // namespace ds
