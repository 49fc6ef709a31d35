// SPDX-License-Identifier: Apache-2.0
#include "copying.h"

#include <algorithm>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <sys/resource.h>
#include <sys/syscall.h>
#endif

namespace ds {
namespace {

// Copied in some ten microseconds: what a waiting thread waits for at most, if the one that has it gets to run.
constexpr size_t kPiece = 256 << 10;
constexpr int kLowest = 19;

// Of the calling thread alone, as Linux has it; elsewhere priorities are those of processes.
void give_way() {
#if defined(__linux__)
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kLowest);
#endif
}

}  // namespace

Copying::Copying(std::vector<Span> spans, SumLevel level) : level_(level) {
    for (Span span : spans) {
        const size_t before = pieces_.size();
        while (span.bytes > 0) {
            const size_t bytes = std::min(span.bytes, kPiece);
            pieces_.push_back({{span.target, span.source, bytes}, 0});
            span = {span.target + bytes, span.source + bytes, span.bytes - bytes};
        }
        pieces_of_.push_back(pieces_.size() - before);
    }
}

void Copying::begin(const std::shared_ptr<Copying>& self, int threads) {
    for (int k = 0; k < threads; ++k) {
        try {
            std::thread([self] {
                give_way();
                self->work();
            }).detach();
        } catch (const std::system_error&) {
            return;  // no more threads to be had: who waits does it
        }
        ++self->begun_;
    }
}

void Copying::finish(int threads) {
    std::vector<std::thread> others;
    for (int k = 1; k < threads && taken_.load() + k < pieces_.size(); ++k) {
        try {
            others.emplace_back([this] { work(); });
        } catch (const std::system_error&) {
            break;
        }
    }
    if (threads > 0 || begun_ == 0) work();
    for (std::thread& other : others) other.join();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return copied_ == pieces_.size(); });
}

void Copying::work() {
    size_t copied = 0;
    for (size_t index; (index = taken_.fetch_add(1)) < pieces_.size(); ++copied) {
        Piece& piece = pieces_[index];
        piece.sum = crc32(level_, 0, piece.span.source, piece.span.target, piece.span.bytes);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    copied_ += copied;
    if (copied_ == pieces_.size()) done_.notify_all();
}

std::vector<uint32_t> Copying::sums() const {
    std::vector<uint32_t> found;
    size_t index = 0;
    for (const size_t count : pieces_of_) {
        uint32_t sum = 0;
        for (const size_t end = index + count; index < end; ++index)
            sum = combined(sum, pieces_[index].sum, pieces_[index].span.bytes);
        found.push_back(sum);
    }
    return found;
}

}  // namespace ds
