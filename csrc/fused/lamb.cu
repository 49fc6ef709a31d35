// SPDX-License-Identifier: Apache-2.0
// LAMB (You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020).
//
// The update is computed twice from the moments instead of being kept: that reads as much as keeping it would and needs
// no memory. Sums are made in a fixed order, block by block and then over blocks, so that a run can be repeated bit for
// bit.

#include <type_traits>

#include "tensor_table.cuh"

namespace fused {
namespace {

struct LambNumbers : MomentNumbers {
    bool eps_inside_sqrt;
};

// The direction of an update before the trust ratio.
struct Direction {
    float decay, eps, first, root;
    bool eps_inside_sqrt;

    __device__ Direction(const LambNumbers& numbers, const float* step)
        : decay(numbers.decay), eps(numbers.eps), eps_inside_sqrt(numbers.eps_inside_sqrt) {
        Correction correction = numbers.correction;
        correction.follow(step);
        first = 1.f / correction.first;
        root = 1.f / correction.second_root;
    }

    __device__ float of(float p, float exp_avg, float exp_avg_sq) const {
        const float denominator =
            eps_inside_sqrt ? sqrtf(fmaf(exp_avg_sq, root * root, eps)) : fmaf(sqrtf(exp_avg_sq), root, eps);
        return fmaf(decay, p, exp_avg * first / denominator);
    }
};

template <typename P>
struct Moments {
    static constexpr int STATE_COUNT = 2;
    static constexpr bool READS_GRAD = true, WRITES_PARAM = false, WRITES_STATE = true;

    Direction direction;
    float gain1, beta2, gain2, scale;
    float param_square, update_square;

    __device__ void element(float& p, float g, float* s) {
        g *= scale;
        // As they are kept: the norm is that of the update which the second pass makes of them.
        s[0] = to_float(from_float<P>(fmaf(gain1, g - s[0], s[0])));
        s[1] = to_float(from_float<P>(fmaf(gain2 * g, g, beta2 * s[1])));
        const float update = direction.of(p, s[0], s[1]);
        param_square = fmaf(p, p, param_square);
        update_square = fmaf(update, update, update_square);
    }
};

struct Apply {
    static constexpr int STATE_COUNT = 2;
    static constexpr bool READS_GRAD = false, WRITES_PARAM = true, WRITES_STATE = false;

    Direction direction;
    float step_size;

    __device__ void element(float& p, float, float* s) const { p = fmaf(-step_size, direction.of(p, s[0], s[1]), p); }
};

// The sum over a block, in the first thread; every thread calls it, and the order of additions is fixed.
__device__ double block_sum(double value) {
    __shared__ double of_warp[THREADS / 32];
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(0xffffffffu, value, distance);
    __syncthreads();  // an earlier sum may still be read
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    double sum = 0;
    if (threadIdx.x == 0)
        for (int warp = 0; warp < THREADS / 32; ++warp) sum += of_warp[warp];
    return sum;
}

template <typename P, typename G>
__global__ void __launch_bounds__(THREADS)
moments_kernel(const __grid_constant__ TensorTable table, const __grid_constant__ LambNumbers numbers,
               double* partials) {
    const Chunk chunk = chunk_of_block(table, blockIdx.x);
    Moments<P> op{Direction(numbers, table.step[chunk.tensor]), numbers.gain1, numbers.beta2, numbers.gain2,
                  numbers.scale.get(), 0.f, 0.f};
    walk<Moments<P>, P, G, Nothing>(table, chunk, op);
    const double param_square = block_sum(op.param_square), update_square = block_sum(op.update_square);
    if (threadIdx.x == 0) {
        partials[2 * int64_t(blockIdx.x)] = param_square;
        partials[2 * int64_t(blockIdx.x) + 1] = update_square;
    }
}

struct Slots {
    int of[MAX_TENSORS];
};

// One block per tensor.
__global__ void __launch_bounds__(THREADS)
sum_kernel(const __grid_constant__ TensorTable table, const __grid_constant__ Slots slots, const double* partials,
           double* squares) {
    const int t = blockIdx.x;
    double param_square = 0, update_square = 0;
    for (int64_t block = table.first_block[t] + threadIdx.x; block < table.first_block[t + 1]; block += THREADS) {
        param_square += partials[2 * block];
        update_square += partials[2 * block + 1];
    }
    param_square = block_sum(param_square);
    update_square = block_sum(update_square);
    if (threadIdx.x == 0) {
        squares[2 * int64_t(slots.of[t])] = param_square;
        squares[2 * int64_t(slots.of[t]) + 1] = update_square;
    }
}

template <typename P, typename G, typename L>
__global__ void __launch_bounds__(THREADS)
apply_kernel(const __grid_constant__ TensorTable table, const __grid_constant__ LambNumbers numbers,
             const __grid_constant__ Slots slots, const float* ratios) {
    const Chunk chunk = chunk_of_block(table, blockIdx.x);
    const float lr = numbers.lr_tensor == nullptr ? numbers.lr : *numbers.lr_tensor;
    Apply op{Direction(numbers, table.step[chunk.tensor]), lr * ratios[slots.of[chunk.tensor]]};
    walk<Apply, P, G, L>(table, chunk, op);
}

LambNumbers lamb_numbers(const Numbers& n, bool eps_inside_sqrt) {
    LambNumbers numbers;
    static_cast<MomentNumbers&>(numbers) = moment_numbers(n);
    numbers.eps_inside_sqrt = eps_inside_sqrt;
    return numbers;
}

Slots slots_of(const TensorTable& table, const int* slots, int first) {
    Slots own;
    for (int t = 0; t < table.count; ++t) own.of[t] = slots[first + t];
    return own;
}

}  // namespace

int64_t lamb_partials(const Tensors& tensors) {
    int64_t most = 0;
    for_each_table(tensors, [&](const TensorTable&, uint32_t blocks, int) {
        most = blocks > most ? int64_t(blocks) : most;
    });
    return 2 * most;
}

void lamb_moments(const Tensors& tensors, const Numbers& n, bool eps_inside_sqrt, const int* slots, double* partials,
                  double* squares) {
    const LambNumbers numbers = lamb_numbers(n, eps_inside_sqrt);
    const auto stream = static_cast<cudaStream_t>(n.stream);
    with_types(tensors, [&](auto p, auto g, auto) {
        for_each_table(tensors, [&](const TensorTable& table, uint32_t blocks, int first) {
            moments_kernel<decltype(p), decltype(g)><<<blocks, THREADS, 0, stream>>>(table, numbers, partials);
            check_launch();
            sum_kernel<<<table.count, THREADS, 0, stream>>>(table, slots_of(table, slots, first), partials, squares);
            check_launch();
        });
    });
}

void lamb_apply(const Tensors& tensors, const Numbers& n, bool eps_inside_sqrt, const int* slots,
                const float* ratios) {
    const LambNumbers numbers = lamb_numbers(n, eps_inside_sqrt);
    const auto stream = static_cast<cudaStream_t>(n.stream);
    with_types(tensors, [&](auto p, auto g, auto l) {
        for_each_table(tensors, [&](const TensorTable& table, uint32_t blocks, int first) {
            apply_kernel<decltype(p), decltype(g), decltype(l)>
                <<<blocks, THREADS, 0, stream>>>(table, numbers, slots_of(table, slots, first), ratios);
            check_launch();
        });
    });
}

}  // namespace fused
