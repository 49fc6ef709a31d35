// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <errno.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace deepspeed::aio {
namespace {

constexpr size_t PAGE = 4096;
constexpr unsigned MOST_THREADS = 32;
constexpr unsigned MOST_REFUSALS = 10000;

unsigned depth_of(const EngineSettings& settings)
{
    return settings.backend == "threads" ? 1 : settings.queue_depth;
}

// A thread that blocks in pread has one request in flight, so a queue of several needs several threads.
unsigned threads_of(const EngineSettings& settings)
{
    if (settings.backend != "threads") return settings.threads;
    return std::max(settings.threads, std::min(settings.threads * settings.queue_depth, MOST_THREADS));
}

// The threads handle no signals: the program's handlers run where the program expects them.
class SignalsBlocked {
public:
    SignalsBlocked()
    {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

private:
    sigset_t before_;
};

void close_files(Transfer& transfer, int& error)
{
    if (transfer.direct_fd >= 0) close(transfer.direct_fd);
    if (transfer.buffered_fd >= 0 && close(transfer.buffered_fd) != 0 && transfer.writes && error == 0)
        error = errno;  // network file systems report a full disk here
    transfer.direct_fd = transfer.buffered_fd = -1;
}

}  // namespace

Engine::Engine(const EngineSettings& settings) : settings_(settings), process_(getpid())
{
    const unsigned count = threads_of(settings_);
    for (unsigned i = 0; i < count; ++i) backends_.push_back(make_backend(settings_.backend, depth_of(settings_)));
    const SignalsBlocked blocked;
    for (unsigned i = 0; i < count; ++i) threads_.emplace_back(&Engine::run, this, std::ref(*backends_[i]));
}

Engine::~Engine()
{
    close();
}

bool Engine::made_elsewhere() const
{
    return getpid() != process_;
}

std::shared_ptr<Transfer> Engine::submit(Transfer transfer)
{
    auto shared = std::make_shared<Transfer>(transfer);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (closing_) throw std::runtime_error("this handle of asynchronous I/O is closed");
        moving_.push_back(shared);
        if (shared->bytes == 0)
            finish(*shared);
        else
            queue_.push_back(shared);
    }
    work_.notify_all();
    return shared;
}

bool Engine::wait(const Transfer& transfer, double seconds)
{
    std::unique_lock<std::mutex> lock(mutex_);
    return finished_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return transfer.finished; });
}

Transfer Engine::look(const Transfer& transfer)
{
    const std::lock_guard<std::mutex> lock(mutex_);
    return transfer;
}

void Engine::close()
{
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_)
        if (thread.joinable()) thread.join();
}

void Engine::run(Backend& backend)
{
    const unsigned depth = depth_of(settings_);
    std::vector<Block> blocks(depth);
    std::vector<Block*> idle;   // free to be filled
    std::vector<Block*> ready;  // to be submitted
    for (Block& block : blocks) idle.push_back(&block);
    Completions completions;
    size_t in_flight = 0;
    for (;;) {
        const bool may_submit = settings_.overlap_events || in_flight == 0;
        if (may_submit && !fill(idle, ready, in_flight + ready.size() == 0)) return;
        const size_t at_once = settings_.single_submit ? 1 : std::max<size_t>(ready.size(), 1);
        for (size_t i = 0; i < ready.size(); i += at_once) {
            backend.submit(ready.data() + i, std::min(at_once, ready.size() - i), completions);
        }
        in_flight += ready.size();
        ready.clear();
        if (completions.empty() && in_flight > 0) backend.wait(settings_.overlap_events ? 1 : in_flight, completions);
        in_flight -= completions.size();
        for (const Completion& completion : completions)
            (settle(completion) ? ready : idle).push_back(completion.block);
        completions.clear();
    }
}

// Takes as many new blocks as there is room for; false when the engine closes and nothing is left.
bool Engine::fill(std::vector<Block*>& idle, std::vector<Block*>& ready, bool wait_for_work)
{
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        while (!idle.empty() && take(*idle.back())) {
            ready.push_back(idle.back());
            idle.pop_back();
        }
        if (!wait_for_work || !ready.empty()) return true;
        if (closing_) return false;  // what was in the queue is cut up
        work_.wait(lock);
    }
}

// Cuts the next block; the mutex is held.
bool Engine::take(Block& block)
{
    while (!queue_.empty() && queue_.front()->all_issued()) queue_.pop_front();
    if (queue_.empty()) return false;
    Transfer& transfer = *queue_.front();
    const size_t at = transfer.issued;
    const bool direct = at >= transfer.direct_begin && at < transfer.direct_end;
    const size_t end = at < transfer.direct_begin ? transfer.direct_begin : direct ? transfer.direct_end : transfer.bytes;
    const size_t whole_pages = (settings_.block_size + PAGE - 1) / PAGE * PAGE;
    const size_t length = std::min(direct ? whole_pages : settings_.block_size, end - at);
    block = Block{&transfer, at, length, direct};
    transfer.issued += length;
    transfer.in_flight += 1;
    return true;
}

// Accounts for an answer of the kernel; true where the rest of the block must be asked for again.
bool Engine::settle(const Completion& completion)
{
    Block& block = *completion.block;
    const ssize_t result = completion.result;
    const std::lock_guard<std::mutex> lock(mutex_);
    Transfer& transfer = *block.transfer;
    bool again = true;
    if ((result == -EINTR || result == -EAGAIN) && ++block.refused < MOST_REFUSALS) {
        if (block.refused > 1) std::this_thread::yield();
    } else if (result == -EINVAL && block.direct) {
        block.direct = false;  // the file system wants another alignment than it says
    } else if (result > 0) {
        again = advance(block, static_cast<size_t>(result));
    } else {
        fail(block, result < 0 ? static_cast<int>(-result) : transfer.writes ? EIO : END_OF_FILE);
        again = false;
    }
    if (!again) end_block(transfer);
    return again;
}

// Bytes were moved; true where some are missing. The mutex is held.
bool Engine::advance(Block& block, size_t moved)
{
    block.transfer->done += moved;
    block.at += moved;
    block.length -= moved;
    block.refused = 0;
    // A direct request that stopped early stopped at the end of the file or at an obstacle, and rarely at a page.
    block.direct = block.direct && block.at % PAGE == block.transfer->direct_begin % PAGE;
    return block.length != 0;
}

// The mutex is held. The first gap in the file is the one to report.
void Engine::fail(Block& block, int error)
{
    Transfer& transfer = *block.transfer;
    if (transfer.error != 0 && transfer.error_offset <= block.offset()) return;
    transfer.error = error;
    transfer.error_offset = block.offset();
}

// The mutex is held.
void Engine::end_block(Transfer& transfer)
{
    transfer.in_flight -= 1;
    if (transfer.in_flight == 0 && transfer.all_issued()) finish(transfer);
}

// The mutex is held.
void Engine::finish(Transfer& transfer)
{
    close_files(transfer, transfer.error);
    transfer.finished = true;
    // A transfer that failed early is still in the queue, and a block holds a plain pointer: the queue lets go first.
    const auto is_this = [&](const std::shared_ptr<Transfer>& other) { return other.get() == &transfer; };
    queue_.erase(std::remove_if(queue_.begin(), queue_.end(), is_this), queue_.end());
    const auto entry = std::find_if(moving_.begin(), moving_.end(), is_this);
    finished_.notify_all();
    if (entry != moving_.end()) moving_.erase(entry);
}

}  // namespace deepspeed::aio
