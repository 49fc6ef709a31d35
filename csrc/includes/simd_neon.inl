// SPDX-License-Identifier: Apache-2.0
// Vectors of 4 with what every 64-bit Arm processor has.

using Vec = float32x4_t;
constexpr int kWidth = 4;

inline Vec set(float x) { return vdupq_n_f32(x); }
inline Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
inline Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
inline Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
inline Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline Vec sqrt(Vec a) { return vsqrtq_f32(a); }

// NaN if either is NaN, as the instruction has it.
inline Vec max(Vec a, Vec b) { return vmaxq_f32(a, b); }

// -1, 0, 1, or NaN.
inline Vec sign(Vec a) {
    const Vec positive = vbslq_f32(vcgtzq_f32(a), set(1.0f), a);
    return vbslq_f32(vcltzq_f32(a), set(-1.0f), positive);
}

inline Vec load_float32(const char* from) { return vld1q_f32(reinterpret_cast<const float*>(from)); }

inline Vec load_bfloat16(const char* from) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from)), 16));
}

inline Vec load_float16(const char* from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from))));
}

inline void store_float32(char* to, Vec a) { vst1q_f32(reinterpret_cast<float*>(to), a); }

inline void store_bfloat16(char* to, Vec a) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
    const uint32x4_t high = vbslq_u32(vceqq_f32(a, a), rounded, vdupq_n_u32(0x7fc0));
    vst1_u16(reinterpret_cast<uint16_t*>(to), vmovn_u32(high));
}

inline void store_float16(char* to, Vec a) {
    vst1_u16(reinterpret_cast<uint16_t*>(to), vreinterpret_u16_f16(vcvt_f16_f32(a)));
}
