// SPDX-License-Identifier: Apache-2.0
// Compiles the arithmetic of an op, the file DS_STEP, once for each instruction set that the architecture may have, and
// chooses among them when it runs. Included once by each op, after DS_STEP was defined and its Update declared.
#pragma once

#include "cpu_types.h"
#include "targets.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ds {
namespace {

#if defined(__x86_64__)

DS_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace avx512 {
#include "simd_avx512.inl"
#include "range.inl"
#include DS_STEP
}  // namespace avx512
DS_END_TARGET

DS_BEGIN_TARGET("avx2,fma,f16c")
namespace avx2 {
#include "simd_avx2.inl"
#include "range.inl"
#include DS_STEP
}  // namespace avx2
DS_END_TARGET

#elif defined(__aarch64__)

namespace neon {
#include "simd_neon.inl"
#include "range.inl"
#include DS_STEP
}  // namespace neon

#endif

namespace portable {
#include "simd_portable.inl"
#include "range.inl"
#include DS_STEP
}  // namespace portable

template <class Update>
struct Level {
    const char* name;
    void (*walk)(const Update&, int64_t begin, int64_t end);
};

#if defined(__x86_64__)
inline bool has_f16c() {
    unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & (1u << 29));
}
inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }
inline bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

// What the processor that runs this has, the widest first.
template <class Update>
int levels(Level<Update> (&found)[3]) {
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (has_avx512()) found[count++] = {"avx512", avx512::walk<Update>};
    if (has_avx2()) found[count++] = {"avx2", avx2::walk<Update>};
#elif defined(__aarch64__)
    found[count++] = {"neon", neon::walk<Update>};
#endif
    found[count++] = {"portable", portable::walk<Update>};
    return count;
}

}  // namespace
}  // namespace ds
