// SPDX-License-Identifier: Apache-2.0
// The kernel's older asynchronous I/O, by the system calls that libaio wraps. Truly asynchronous with O_DIRECT alone.
#include <errno.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <system_error>

#include "backend.h"
#include "patience.h"

namespace deepspeed::aio {
namespace {

class KernelAio : public Backend {
public:
    explicit KernelAio(unsigned depth) : controls_(depth), pointers_(depth), events_(depth)
    {
        if (syscall(__NR_io_setup, depth, &context_) < 0)
            throw std::system_error(errno, std::generic_category(), "io_setup");
        for (iocb& control : controls_) free_.push_back(&control);
    }
    KernelAio(const KernelAio&) = delete;
    KernelAio& operator=(const KernelAio&) = delete;
    ~KernelAio() override { syscall(__NR_io_destroy, context_); }

    void submit(Block* const* blocks, size_t count, Completions& completions) override
    {
        for (size_t i = 0; i < count; ++i) pointers_[i] = prepare(*blocks[i]);
        Patience patience;
        size_t taken = 0;
        while (taken < count) {
            const long result = syscall(__NR_io_submit, context_, count - taken, pointers_.data() + taken);
            if (result > 0) {
                taken += static_cast<size_t>(result);
                patience = Patience();
            } else if (result < 0 && errno == EINTR) {
                continue;
            } else if ((result == 0 || errno == EAGAIN) && patience.left()) {
                collect(0, completions);
            } else {
                // The first one is at fault; those behind it get their own verdict.
                completions.push_back({blocks[taken], result == 0 ? -EAGAIN : -errno});
                free_.push_back(pointers_[taken]);
                ++taken;
            }
        }
    }

    void wait(size_t count, Completions& completions) override
    {
        const size_t before = completions.size();
        while (completions.size() - before < count) collect(count - (completions.size() - before), completions);
    }

private:
    iocb* prepare(const Block& block)
    {
        iocb* control = free_.back();
        free_.pop_back();
        std::memset(control, 0, sizeof(*control));
        control->aio_lio_opcode = block.transfer->writes ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
        control->aio_fildes = static_cast<uint32_t>(block.fd());
        control->aio_buf = reinterpret_cast<uint64_t>(block.memory());
        control->aio_nbytes = block.length;
        control->aio_offset = block.offset();
        control->aio_data = reinterpret_cast<uint64_t>(&block);
        return control;
    }

    void collect(size_t at_least, Completions& completions)
    {
        timespec none{0, 0};
        const long result = syscall(__NR_io_getevents, context_, at_least, events_.size(), events_.data(),
                                    at_least == 0 ? &none : nullptr);
        // Memory that the kernel may still write to cannot be given up, so there is no error but only patience.
        if (result < 0 && errno != EINTR) Patience::pause();
        for (long i = 0; i < result; ++i) {
            const io_event& event = events_[static_cast<size_t>(i)];
            completions.push_back({reinterpret_cast<Block*>(event.data), static_cast<ssize_t>(event.res)});
            free_.push_back(reinterpret_cast<iocb*>(event.obj));
        }
    }

    aio_context_t context_ = 0;
    std::vector<iocb> controls_;
    std::vector<iocb*> free_;
    std::vector<iocb*> pointers_;
    std::vector<io_event> events_;
};

}  // namespace

std::unique_ptr<Backend> make_kernel_aio(unsigned depth)
{
    return std::make_unique<KernelAio>(depth);
}

}  // namespace deepspeed::aio
