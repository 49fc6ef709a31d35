// SPDX-License-Identifier: Apache-2.0
// Vectors of 8 with AVX2, FMA and F16C.

using Vec = __m256;
constexpr int kWidth = 8;

inline Vec set(float x) { return _mm256_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec sqrt(Vec a) { return _mm256_sqrt_ps(a); }

// NaN if either is NaN. The instruction gives its second operand if one of the two is NaN.
inline Vec max(Vec a, Vec b) { return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }

// -1, 0, 1, or NaN.
inline Vec sign(Vec a) {
    const Vec zero = _mm256_setzero_ps();
    const Vec positive = _mm256_blendv_ps(a, set(1.0f), _mm256_cmp_ps(a, zero, _CMP_GT_OQ));
    return _mm256_blendv_ps(positive, set(-1.0f), _mm256_cmp_ps(a, zero, _CMP_LT_OQ));
}

inline Vec load_float32(const char* from) { return _mm256_loadu_ps(reinterpret_cast<const float*>(from)); }

inline Vec load_bfloat16(const char* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline Vec load_float16(const char* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline void store_float32(char* to, Vec a) { _mm256_storeu_ps(reinterpret_cast<float*>(to), a); }

inline void store_bfloat16(char* to, Vec a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const __m256i high = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7fc0), nan);
    const __m128i low_half = _mm256_castsi256_si128(high);
    const __m128i high_half = _mm256_extracti128_si256(high, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(low_half, high_half));
}

inline void store_float16(char* to, Vec a) {
    const __m128i bits = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bits);
}
