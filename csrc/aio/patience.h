// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <thread>

namespace deepspeed::aio {

// How long the kernel may answer "try again" before that counts as a failure.
class Patience {
public:
    // Sleeps a little; false when the time is over.
    bool left()
    {
        pause();
        return std::chrono::steady_clock::now() < end_;
    }

    static void pause() { std::this_thread::sleep_for(std::chrono::microseconds(200)); }

private:
    std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::now() + std::chrono::seconds(10);
};

}  // namespace deepspeed::aio
