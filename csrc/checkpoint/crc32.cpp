// SPDX-License-Identifier: Apache-2.0
// Polynomials over GF(2) modulo P, that of CRC-32. A word of 32 bits holds the coefficient of x^(31-b) in bit b. The
// register after a message M is M * x^32 mod P, where the register before it counts as added to M's first four bytes.
//
// The wide levels fold, as in Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction", Intel 2009: 128 bits A in front of D further bits may be replaced by A * x^D mod P, of 128 bits or fewer,
// added to what stands there. All of a message so becomes as many bytes as the vectors in use have; table steps, which
// know nothing of folding, reduce these few.

#include "crc32.h"
#include "targets.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#endif

namespace ds {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;  // P without x^32
constexpr uint32_t kOne = 0x80000000;
// From this on a copy goes past the processor's caches: the disk reads it next.
constexpr size_t kStreamed = 256 << 10;

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ (a & 1 ? kPolynomial : 0); }

// x^n mod P.
constexpr uint32_t power_of_x(int n) {
    uint32_t a = kOne;
    for (int k = 0; k < n; ++k) a = times_x(a);
    return a;
}

uint32_t product(uint32_t a, uint32_t b) {
    uint32_t sum = 0;
    for (int bit = 31; bit >= 0; --bit, b = times_x(b))
        if (a >> bit & 1) sum ^= b;
    return sum;
}

// ------------------------------------------------------------------------------------------------ by tables

// entry[k][v]: what a byte v does to the register when k more bytes follow it.
struct Tables {
    uint32_t entry[8][256];

    constexpr Tables() : entry() {
        for (uint32_t value = 0; value < 256; ++value) {
            uint32_t a = value;
            for (int bit = 0; bit < 8; ++bit) a = times_x(a);
            entry[0][value] = a;
        }
        for (int k = 1; k < 8; ++k)
            for (uint32_t value = 0; value < 256; ++value) {
                const uint32_t before = entry[k - 1][value];
                entry[k][value] = (before >> 8) ^ entry[0][before & 0xff];
            }
    }
};

constexpr Tables kTables;

uint32_t sum_by_tables(uint32_t sum, const char* source, size_t count) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(source);
    const auto& t = kTables.entry;
    for (; count >= 8; bytes += 8, count -= 8) {
        const uint32_t low = sum ^ (bytes[0] | bytes[1] << 8 | bytes[2] << 16 | uint32_t{bytes[3]} << 24);
        sum = t[7][low & 0xff] ^ t[6][low >> 8 & 0xff] ^ t[5][low >> 16 & 0xff] ^ t[4][low >> 24] ^ t[3][bytes[4]] ^
              t[2][bytes[5]] ^ t[1][bytes[6]] ^ t[0][bytes[7]];
    }
    for (; count > 0; ++bytes, --count) sum = (sum >> 8) ^ t[0][(sum ^ *bytes) & 0xff];
    return sum;
}

uint32_t portable(uint32_t sum, const char* source, char* target, size_t count) {
    constexpr size_t kInCache = 16 << 10;
    while (count > 0) {
        const size_t part = count < kInCache ? count : kInCache;
        sum = sum_by_tables(sum, source, part);
        if (target != nullptr) {
            std::memcpy(target, source, part);
            target += part;
        }
        source += part;
        count -= part;
    }
    return sum;
}

// ------------------------------------------------------------------------------------------------ by folding

#if defined(__x86_64__)

// What the two halves of 128 bits are multiplied with to be moved by D bits. The first half of memory has the higher
// powers. The product of two reflected numbers of 64 bits, read as one of 128, is once more multiplied by x: hence one less.
constexpr uint64_t first_half(int distance) { return uint64_t{power_of_x(distance + 63)} << 32; }
constexpr uint64_t second_half(int distance) { return uint64_t{power_of_x(distance - 1)} << 32; }

enum class Copies { kNot, kPlainly, kStreaming };

using Run = uint32_t (*)(uint32_t sum, const char* source, char* target, size_t count);

inline Copies how_to_copy(const char* target, size_t count, size_t width) {
    if (target == nullptr) return Copies::kNot;
    return count >= kStreamed && reinterpret_cast<uintptr_t>(target) % width == 0 ? Copies::kStreaming
                                                                                   : Copies::kPlainly;
}

// The rest of a message, in front of which stand `vectors`: what everything before it has become.
template <size_t kBytes>
uint32_t finish(const char (&vectors)[kBytes], const char* source, char* target, size_t count) {
    return portable(sum_by_tables(0, vectors, kBytes), source, target, count);
}

DS_BEGIN_TARGET("pclmul,sse4.1")
namespace pclmul {

constexpr size_t kVector = 16, kStep = 4 * kVector;

inline __m128i folded(__m128i a, __m128i by, __m128i next) {
    const __m128i first = _mm_clmulepi64_si128(a, by, 0x00), second = _mm_clmulepi64_si128(a, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(first, second), next);
}

template <Copies copies>
inline __m128i read(const char* source, char* target, size_t at) {
    const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at));
    if (copies == Copies::kPlainly) _mm_storeu_si128(reinterpret_cast<__m128i*>(target + at), value);
    if (copies == Copies::kStreaming) _mm_stream_si128(reinterpret_cast<__m128i*>(target + at), value);
    return value;
}

template <Copies copies>
uint32_t run(uint32_t sum, const char* source, char* target, size_t count) {
    constexpr uint64_t kFirst = first_half(8 * kStep), kSecond = second_half(8 * kStep);
    const __m128i by = _mm_set_epi64x(int64_t(kSecond), int64_t(kFirst));
    __m128i a[4];
    for (size_t k = 0; k < 4; ++k) a[k] = read<copies>(source, target, k * kVector);
    a[0] = _mm_xor_si128(a[0], _mm_cvtsi32_si128(int(sum)));
    size_t done = kStep;
    for (; done + kStep <= count; done += kStep)
        for (size_t k = 0; k < 4; ++k) a[k] = folded(a[k], by, read<copies>(source, target, done + k * kVector));
    if (copies == Copies::kStreaming) _mm_sfence();
    char vectors[kStep];
    for (size_t k = 0; k < 4; ++k) _mm_storeu_si128(reinterpret_cast<__m128i*>(vectors + k * kVector), a[k]);
    return finish(vectors, source + done, copies == Copies::kNot ? nullptr : target + done, count - done);
}

uint32_t sum(uint32_t sum, const char* source, char* target, size_t count) {
    if (count < kStep) return portable(sum, source, target, count);
    constexpr Run kRuns[] = {run<Copies::kNot>, run<Copies::kPlainly>, run<Copies::kStreaming>};
    return kRuns[int(how_to_copy(target, count, kVector))](sum, source, target, count);
}

}  // namespace pclmul
DS_END_TARGET

DS_BEGIN_TARGET("avx512f,vpclmulqdq,pclmul,sse4.1")
namespace vpclmul {

constexpr size_t kVector = 64, kStep = 4 * kVector;

inline __m512i folded(__m512i a, __m512i by, __m512i next) {
    constexpr int kXorOfThree = 0x96;
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(a, by, 0x00), _mm512_clmulepi64_epi128(a, by, 0x11), next,
                                     kXorOfThree);
}

template <Copies copies>
inline __m512i read(const char* source, char* target, size_t at) {
    const __m512i value = _mm512_loadu_si512(source + at);
    if (copies == Copies::kPlainly) _mm512_storeu_si512(target + at, value);
    if (copies == Copies::kStreaming) _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at), value);
    return value;
}

template <Copies copies>
uint32_t run(uint32_t sum, const char* source, char* target, size_t count) {
    constexpr uint64_t kFirst = first_half(8 * kStep), kSecond = second_half(8 * kStep);
    const __m512i by = _mm512_set4_epi64(int64_t(kSecond), int64_t(kFirst), int64_t(kSecond), int64_t(kFirst));
    __m512i a[4];
    for (size_t k = 0; k < 4; ++k) a[k] = read<copies>(source, target, k * kVector);
    a[0] = _mm512_xor_si512(a[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(sum))));
    size_t done = kStep;
    for (; done + kStep <= count; done += kStep)
        for (size_t k = 0; k < 4; ++k) a[k] = folded(a[k], by, read<copies>(source, target, done + k * kVector));
    if (copies == Copies::kStreaming) _mm_sfence();
    char vectors[kStep];
    for (size_t k = 0; k < 4; ++k) _mm512_storeu_si512(vectors + k * kVector, a[k]);
    return finish(vectors, source + done, copies == Copies::kNot ? nullptr : target + done, count - done);
}

uint32_t sum(uint32_t sum, const char* source, char* target, size_t count) {
    if (count < 4 * kStep) return pclmul::sum(sum, source, target, count);
    constexpr Run kRuns[] = {run<Copies::kNot>, run<Copies::kPlainly>, run<Copies::kStreaming>};
    return kRuns[int(how_to_copy(target, count, kVector))](sum, source, target, count);
}

}  // namespace vpclmul
DS_END_TARGET

#elif defined(__aarch64__)

DS_BEGIN_TARGET("+crc")
uint32_t crc_instructions(uint32_t sum, const char* source, char* target, size_t count) {
    while (count >= 8) {
        uint64_t value;
        std::memcpy(&value, source, 8);
        sum = __crc32d(sum, value);
        if (target != nullptr) {
            std::memcpy(target, &value, 8);
            target += 8;
        }
        source += 8;
        count -= 8;
    }
    return portable(sum, source, target, count);
}
DS_END_TARGET

inline bool has_crc_instructions() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_CRC32;
#else
    return true;  // every processor of Apple's has them
#endif
}

#endif

}  // namespace

int sum_levels(SumLevel (&found)[3]) {
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq"))
            found[count++] = {"vpclmul", vpclmul::sum};
        found[count++] = {"pclmul", pclmul::sum};
    }
#elif defined(__aarch64__)
    if (has_crc_instructions()) found[count++] = {"crc", crc_instructions};
#endif
    found[count++] = {"portable", portable};
    return count;
}

uint32_t combined(uint32_t first, uint32_t second, uint64_t length) {
    uint32_t power = kOne, square = product(power_of_x(4), power_of_x(4));  // x^8
    for (; length > 0; length >>= 1, square = product(square, square))
        if (length & 1) power = product(power, square);
    return product(power, first) ^ second;
}

}  // namespace ds
