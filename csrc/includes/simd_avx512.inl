// SPDX-License-Identifier: Apache-2.0
// Vectors of 16 with AVX-512 F, BW, VL and DQ. bf16 is rounded with integer instructions: the one of AVX512_BF16 would flush
// subnormal numbers to zero.

using Vec = __m512;
constexpr int kWidth = 16;

inline Vec set(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }

// NaN if either is NaN. The instruction gives its second operand if one of the two is NaN.
inline Vec max(Vec a, Vec b) {
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    return _mm512_mask_mov_ps(_mm512_max_ps(a, b), nan, a);
}

// -1, 0, 1, or NaN.
inline Vec sign(Vec a) {
    const Vec zero = _mm512_setzero_ps();
    const Vec positive = _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(a, zero, _CMP_GT_OQ), set(1.0f));
    return _mm512_mask_mov_ps(positive, _mm512_cmp_ps_mask(a, zero, _CMP_LT_OQ), set(-1.0f));
}

inline Vec load_float32(const char* from) { return _mm512_loadu_ps(from); }

inline Vec load_bfloat16(const char* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline Vec load_float16(const char* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline void store_float32(char* to, Vec a) { _mm512_storeu_ps(to, a); }

inline void store_bfloat16(char* to, Vec a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i high = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(high));
}

inline void store_float16(char* to, Vec a) {
    const __m256i bits = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
}
