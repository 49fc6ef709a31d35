// SPDX-License-Identifier: Apache-2.0
// io_uring by its system calls: two rings in memory that is shared with the kernel (man 7 io_uring).
#include <errno.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <system_error>

#include "backend.h"
#include "patience.h"

namespace deepspeed::aio {
namespace {

constexpr size_t LARGEST_REQUEST = size_t{1} << 30;  // the length field has 32 bits, and results are int

[[noreturn]] void fail(const char* what)
{
    throw std::system_error(errno, std::generic_category(), what);
}

class Mapping {
public:
    Mapping(int fd, size_t length, off_t what) : length_(length)
    {
        memory_ = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
        if (memory_ == MAP_FAILED) fail("mmap of an io_uring");
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping() { munmap(memory_, length_); }

    template <typename T>
    T* at(size_t offset) const
    {
        return reinterpret_cast<T*>(static_cast<char*>(memory_) + offset);
    }

private:
    void* memory_;
    size_t length_;
};

class Descriptor {
public:
    explicit Descriptor(int fd) : fd(fd) {}
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() { close(fd); }
    const int fd;
};

int setup(unsigned depth, io_uring_params& params)
{
    std::memset(&params, 0, sizeof(params));
    const int fd = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
    if (fd < 0) fail("io_uring_setup");
    return fd;
}

class IoUring : public Backend {
public:
    explicit IoUring(unsigned depth)
        : ring_(setup(depth, params_)),
          submission_(ring_.fd, params_.sq_off.array + params_.sq_entries * sizeof(uint32_t), IORING_OFF_SQ_RING),
          completion_(ring_.fd, params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING),
          entries_(ring_.fd, params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES)
    {
        require_reads_and_writes();
    }

    void submit(Block* const* blocks, size_t count, Completions& completions) override
    {
        auto* tail = submission_.at<uint32_t>(params_.sq_off.tail);
        for (size_t i = 0; i < count; ++i) prepare(*blocks[i], *tail + static_cast<uint32_t>(i));
        __atomic_store_n(tail, *tail + static_cast<uint32_t>(count), __ATOMIC_RELEASE);
        Patience patience;
        size_t taken = 0;
        while (taken < count) {
            const long result = enter(count - taken, 0, 0);
            if (result > 0) {
                taken += static_cast<size_t>(result);
                patience = Patience();
            } else if (result < 0 && errno == EINTR) {
                continue;
            } else if ((result == 0 || errno == EAGAIN || errno == EBUSY) && patience.left()) {
                collect(completions);  // makes room; the kernel is short of memory or the ring of space
            } else {
                const int error = result == 0 ? EAGAIN : errno;
                // The kernel reads the tail in io_uring_enter alone, so what it did not take can be taken back.
                __atomic_store_n(tail, *tail - static_cast<uint32_t>(count - taken), __ATOMIC_RELEASE);
                for (; taken < count; ++taken) completions.push_back({blocks[taken], -error});
            }
        }
    }

    void wait(size_t count, Completions& completions) override
    {
        const size_t before = completions.size();
        collect(completions);
        while (completions.size() - before < count) {
            const size_t missing = count - (completions.size() - before);
            // Memory that the kernel may still write to cannot be given up, so there is no error but only patience.
            if (enter(0, missing, IORING_ENTER_GETEVENTS) < 0 && errno != EINTR) Patience::pause();
            collect(completions);
        }
    }

private:
    long enter(size_t to_submit, size_t to_complete, unsigned flags)
    {
        return syscall(__NR_io_uring_enter, ring_.fd, static_cast<unsigned>(to_submit),
                       static_cast<unsigned>(to_complete), flags, nullptr, 0);
    }

    void prepare(const Block& block, uint32_t position)
    {
        const uint32_t index = position & *submission_.at<uint32_t>(params_.sq_off.ring_mask);
        io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[index];
        std::memset(&entry, 0, sizeof(entry));
        entry.opcode = block.transfer->writes ? IORING_OP_WRITE : IORING_OP_READ;
        entry.fd = block.fd();
        entry.addr = reinterpret_cast<uint64_t>(block.memory());
        entry.len = static_cast<uint32_t>(std::min(block.length, LARGEST_REQUEST));
        entry.off = static_cast<uint64_t>(block.offset());
        entry.user_data = reinterpret_cast<uint64_t>(&block);
        submission_.at<uint32_t>(params_.sq_off.array)[index] = index;
    }

    void collect(Completions& completions)
    {
        auto* head = completion_.at<uint32_t>(params_.cq_off.head);
        const uint32_t mask = *completion_.at<uint32_t>(params_.cq_off.ring_mask);
        const auto* events = completion_.at<io_uring_cqe>(params_.cq_off.cqes);
        const uint32_t end = __atomic_load_n(completion_.at<uint32_t>(params_.cq_off.tail), __ATOMIC_ACQUIRE);
        uint32_t position = *head;
        for (; position != end; ++position) {
            const io_uring_cqe& event = events[position & mask];
            completions.push_back({reinterpret_cast<Block*>(event.user_data), event.res});
        }
        __atomic_store_n(head, position, __ATOMIC_RELEASE);
    }

    // READ and WRITE came with 5.6, after io_uring itself; the same release brought the question for them.
    void require_reads_and_writes() const
    {
        constexpr unsigned operations = 256;
        std::vector<char> memory(sizeof(io_uring_probe) + operations * sizeof(io_uring_probe_op));
        auto* probe = reinterpret_cast<io_uring_probe*>(memory.data());
        if (syscall(__NR_io_uring_register, ring_.fd, IORING_REGISTER_PROBE, probe, operations) < 0)
            fail("io_uring_register");
        for (const unsigned operation : {unsigned{IORING_OP_READ}, unsigned{IORING_OP_WRITE}}) {
            if (operation <= probe->last_op && (probe->ops[operation].flags & IO_URING_OP_SUPPORTED)) continue;
            errno = EOPNOTSUPP;
            fail("io_uring without IORING_OP_READ and IORING_OP_WRITE");
        }
    }

    io_uring_params params_;
    Descriptor ring_;
    Mapping submission_;
    Mapping completion_;
    Mapping entries_;
};

}  // namespace

std::unique_ptr<Backend> make_io_uring(unsigned depth)
{
    return std::make_unique<IoUring>(depth);
}

}  // namespace deepspeed::aio
