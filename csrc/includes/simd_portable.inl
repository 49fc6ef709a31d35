// SPDX-License-Identifier: Apache-2.0
// Vectors of 8 as arrays, for processors without a file of their own. The compiler uses what the architecture always has.

struct Vec {
    float lane[8];
};
constexpr int kWidth = 8;

#define DS_LANES(expression)                  \
    Vec result;                               \
    for (int k = 0; k < kWidth; ++k) {        \
        result.lane[k] = expression;          \
    }                                         \
    return result

inline Vec set(float x) { DS_LANES(x); }
inline Vec add(const Vec& a, const Vec& b) { DS_LANES(a.lane[k] + b.lane[k]); }
inline Vec sub(const Vec& a, const Vec& b) { DS_LANES(a.lane[k] - b.lane[k]); }
inline Vec mul(const Vec& a, const Vec& b) { DS_LANES(a.lane[k] * b.lane[k]); }
inline Vec div(const Vec& a, const Vec& b) { DS_LANES(a.lane[k] / b.lane[k]); }
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) { DS_LANES(std::fmaf(a.lane[k], b.lane[k], c.lane[k])); }
inline Vec sqrt(const Vec& a) { DS_LANES(std::sqrt(a.lane[k])); }

// NaN if either is NaN.
inline Vec max(const Vec& a, const Vec& b) {
    DS_LANES(a.lane[k] != a.lane[k] || a.lane[k] > b.lane[k] ? a.lane[k] : b.lane[k]);
}

// -1, 0, 1, or NaN.
inline Vec sign(const Vec& a) { DS_LANES(a.lane[k] > 0 ? 1.0f : a.lane[k] < 0 ? -1.0f : a.lane[k]); }

template <class Element>
inline Element element_at(const char* from, int k) {
    Element value;
    std::memcpy(&value, from + k * sizeof value, sizeof value);
    return value;
}

inline Vec load_float32(const char* from) { DS_LANES(element_at<float>(from, k)); }
inline Vec load_bfloat16(const char* from) { DS_LANES(float_of_bfloat16(element_at<uint16_t>(from, k))); }
inline Vec load_float16(const char* from) { DS_LANES(float_of_float16(element_at<uint16_t>(from, k))); }

inline void store_float32(char* to, const Vec& a) { std::memcpy(to, a.lane, sizeof a.lane); }

inline void store_bfloat16(char* to, const Vec& a) {
    uint16_t bits[kWidth];
    for (int k = 0; k < kWidth; ++k) bits[k] = bfloat16_of_float(a.lane[k]);
    std::memcpy(to, bits, sizeof bits);
}

inline void store_float16(char* to, const Vec& a) {
    uint16_t bits[kWidth];
    for (int k = 0; k < kWidth; ++k) bits[k] = float16_of_float(a.lane[k]);
    std::memcpy(to, bits, sizeof bits);
}

#undef DS_LANES
