// SPDX-License-Identifier: Apache-2.0
// What is moved between a file and memory, and the blocks it is moved in.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <vector>

namespace deepspeed::aio {

// One read or write of a range of a file. The numbers below the line are guarded by the mutex of the engine.
struct Transfer {
    int direct_fd;    // opened with O_DIRECT, -1 without; closed when the transfer is over
    int buffered_fd;  // opened without; closed when the transfer is over
    bool writes;
    char* memory;
    size_t bytes;
    off_t offset;         // in the file, of the first byte
    size_t direct_begin;  // bytes [direct_begin, direct_end) may go through direct_fd, the others must not
    size_t direct_end;

    // ----
    size_t issued = 0;     // bytes that were cut into blocks
    size_t in_flight = 0;  // blocks that are not settled
    size_t done = 0;       // bytes moved
    int error = 0;         // errno of the first failure, END_OF_FILE where the file was too short
    off_t error_offset = 0;
    bool finished = false;

    bool all_issued() const { return issued == bytes || error != 0; }
};

constexpr int END_OF_FILE = -1;

// What one request of the kernel moves.
struct Block {
    Transfer* transfer = nullptr;
    size_t at = 0;  // bytes from the beginning of the transfer
    size_t length = 0;
    bool direct = false;
    unsigned refused = 0;  // answers "try again" since the last byte

    int fd() const { return direct ? transfer->direct_fd : transfer->buffered_fd; }
    char* memory() const { return transfer->memory + at; }
    off_t offset() const { return transfer->offset + static_cast<off_t>(at); }
};

// How a request ended: bytes moved, or a negative errno.
struct Completion {
    Block* block;
    ssize_t result;
};

using Completions = std::vector<Completion>;

}  // namespace deepspeed::aio
