// SPDX-License-Identifier: Apache-2.0
#include "backend.h"

#include <errno.h>
#include <unistd.h>

#include <stdexcept>
#include <system_error>

namespace deepspeed::aio {
namespace {

class Blocking : public Backend {
public:
    void submit(Block* const* blocks, size_t count, Completions& completions) override
    {
        for (size_t i = 0; i < count; ++i) {
            Block& block = *blocks[i];
            const ssize_t result = block.transfer->writes
                                       ? pwrite(block.fd(), block.memory(), block.length, block.offset())
                                       : pread(block.fd(), block.memory(), block.length, block.offset());
            completions.push_back({&block, result < 0 ? -errno : result});
        }
    }

    void wait(size_t, Completions&) override {}  // nothing is ever in flight
};

}  // namespace

std::unique_ptr<Backend> make_blocking()
{
    return std::make_unique<Blocking>();
}

std::unique_ptr<Backend> make_backend(const std::string& name, unsigned depth)
{
    if (name == "io_uring") return make_io_uring(depth);
    if (name == "libaio") return make_kernel_aio(depth);
    if (name == "threads") return make_blocking();
    throw std::invalid_argument("no engine of asynchronous I/O is called " + name);
}

std::vector<std::string> available_backends()
{
    std::vector<std::string> found;
    for (const char* name : {"io_uring", "libaio", "threads"}) {
        try {
            make_backend(name, 1);
            found.emplace_back(name);
        } catch (const std::system_error&) {
            // the kernel says no, which is the answer to the question
        }
    }
    return found;
}

}  // namespace deepspeed::aio
