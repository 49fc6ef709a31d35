// SPDX-License-Identifier: Apache-2.0
// Threads that move transfers, in the order in which they were submitted, through a backend each.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backend.h"
#include "transfer.h"

namespace deepspeed::aio {

struct EngineSettings {
    std::string backend;
    size_t block_size;    // bytes of one request; direct ones are rounded up to whole pages
    unsigned queue_depth; // requests in flight per thread; with the backend "threads" there are so many more threads
    bool single_submit;   // one system call per request
    bool overlap_events;  // submit again as soon as one request is completed, not when all are
    unsigned threads;
};

class Engine {
public:
    // Throws std::system_error where the backend cannot be had.
    explicit Engine(const EngineSettings& settings);
    // Must not run in a forked child, which has the object without its threads: see made_elsewhere.
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Takes the file descriptors over, unless it throws std::runtime_error, which it does after close().
    std::shared_ptr<Transfer> submit(Transfer transfer);

    // Whether this process is a fork of the one that made the engine.
    bool made_elsewhere() const;

    // Whether `transfer` is over; waits for that for at most `seconds`.
    bool wait(const Transfer& transfer, double seconds);

    // A copy whose numbers belong together.
    Transfer look(const Transfer& transfer);

    // Finishes what was submitted and ends the threads.
    void close();

private:
    void run(Backend& backend);
    bool fill(std::vector<Block*>& idle, std::vector<Block*>& ready, bool wait_for_work);
    bool take(Block& block);
    bool settle(const Completion& completion);
    bool advance(Block& block, size_t moved);
    static void fail(Block& block, int error);
    void end_block(Transfer& transfer);
    void finish(Transfer& transfer);

    const EngineSettings settings_;
    const pid_t process_;
    std::vector<std::unique_ptr<Backend>> backends_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable work_;
    std::condition_variable finished_;
    std::deque<std::shared_ptr<Transfer>> queue_;    // not all cut into blocks yet
    std::vector<std::shared_ptr<Transfer>> moving_;  // not finished
    bool closing_ = false;
};

}  // namespace deepspeed::aio
