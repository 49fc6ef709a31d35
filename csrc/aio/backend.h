// SPDX-License-Identifier: Apache-2.0
// The ways to ask the kernel for reads and writes. A backend belongs to one thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transfer.h"

namespace deepspeed::aio {

class Backend {
public:
    virtual ~Backend() = default;

    // Hands `count` blocks to the kernel. Those that it refuses are reported at once; no more than `depth` blocks may be
    // in flight.
    virtual void submit(Block* const* blocks, size_t count, Completions& completions) = 0;

    // Waits until at least `count` blocks that are in flight are completed.
    virtual void wait(size_t count, Completions& completions) = 0;
};

// Each throws std::system_error where the kernel does not have it or does not let us.
std::unique_ptr<Backend> make_io_uring(unsigned depth);
std::unique_ptr<Backend> make_kernel_aio(unsigned depth);  // what libaio wraps
std::unique_ptr<Backend> make_blocking();                  // pread and pwrite in the calling thread

// "io_uring", "libaio" or "threads".
std::unique_ptr<Backend> make_backend(const std::string& name, unsigned depth);

// The names of those that work here, the fastest first.
std::vector<std::string> available_backends();

}  // namespace deepspeed::aio
