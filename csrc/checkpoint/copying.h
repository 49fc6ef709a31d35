// SPDX-License-Identifier: Apache-2.0
// Copies of memory with the CRC-32 of each, made beside other work.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "crc32.h"

namespace ds {

struct Span {
    char* target;
    const char* source;
    size_t bytes;
};

// Spans are cut into pieces, which threads take in their order: some that give way to all other work of the host, and
// whoever comes to wait. Nobody takes a priority back that it gave up, so the former are threads that do nothing else;
// they never hold Python's lock.
class Copying {
public:
    Copying(std::vector<Span> spans, SumLevel level);

    // Threads of the lowest priority that work on `self` until all pieces are taken.
    static void begin(const std::shared_ptr<Copying>& self, int threads);

    // Until everything is copied; works too, with so many threads. 0: only waits, unless nobody else works.
    void finish(int threads);

    // Of each span. After `finish`.
    std::vector<uint32_t> sums() const;

    // In a forked child the threads do not exist.
    bool made_elsewhere() const { return maker_ != getpid(); }

private:
    struct Piece {
        Span span;
        uint32_t sum;
    };

    void work();

    const SumLevel level_;
    const pid_t maker_ = getpid();
    std::vector<size_t> pieces_of_;  // by span
    std::vector<Piece> pieces_;
    std::atomic<size_t> taken_{0};
    std::mutex mutex_;
    std::condition_variable done_;
    size_t copied_ = 0;
    int begun_ = 0;  // threads, all of them before anybody else sees this
};

}  // namespace ds
