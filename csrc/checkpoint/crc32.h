// SPDX-License-Identifier: Apache-2.0
// CRC-32 of zip files (polynomial 0x04C11DB7, bits reflected), of memory alone or of memory that is copied meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ds {

struct SumLevel {
    const char* name;
    // The register after `count` more bytes. They go to `target` as well, unless that is null.
    uint32_t (*run)(uint32_t sum, const char* source, char* target, size_t count);
};

// What the processor that runs this has, the fastest first. Returns how many.
int sum_levels(SumLevel (&found)[3]);

// CRC-32 of what is added, given the one before it, as zlib counts it.
inline uint32_t crc32(const SumLevel& level, uint32_t before, const char* source, char* target, size_t count) {
    return ~level.run(~before, source, target, count);
}

// CRC-32 of two pieces end to end, from that of each and the bytes of the second one.
uint32_t combined(uint32_t first, uint32_t second, uint64_t length);

}  // namespace ds
