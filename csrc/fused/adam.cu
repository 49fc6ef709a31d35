// SPDX-License-Identifier: Apache-2.0
// Adam and AdamW: unscale and clip the gradient, update the moments and the parameter, write its low-precision copy.

#include <type_traits>

#include "tensor_table.cuh"

namespace fused {
namespace {

template <bool AMSGRAD>
struct Adam {
    static constexpr int STATE_COUNT = AMSGRAD ? 3 : 2;
    static constexpr bool READS_GRAD = true, WRITES_PARAM = true, WRITES_STATE = true;

    float lr, keep, decay, gain1, beta2, gain2, eps, scale, step_size, inverse_root;
    bool decoupled;

    __device__ void element(float& p, float g, float* s) const {
        g *= scale;
        if (decoupled) p *= keep; else g = fmaf(decay, p, g);
        s[0] = fmaf(gain1, g - s[0], s[0]);
        s[1] = fmaf(gain2 * g, g, beta2 * s[1]);
        float second = s[1];
        if constexpr (AMSGRAD) second = s[2] = fmaxf(s[2], s[1]);
        p -= step_size * (s[0] / fmaf(sqrtf(second), inverse_root, eps));
    }
};

struct AdamNumbers : MomentNumbers {
    bool decoupled;
};

template <bool AMSGRAD, typename P, typename G, typename L>
__global__ void __launch_bounds__(THREADS)
adam_kernel(const __grid_constant__ TensorTable table, const __grid_constant__ AdamNumbers numbers) {
    const Chunk chunk = chunk_of_block(table, blockIdx.x);
    Correction correction = numbers.correction;
    correction.follow(table.step[chunk.tensor]);
    Adam<AMSGRAD> op;
    op.lr = numbers.lr_tensor == nullptr ? numbers.lr : *numbers.lr_tensor;
    op.decay = numbers.decay;
    op.keep = 1.f - op.lr * numbers.decay;
    op.gain1 = numbers.gain1;
    op.beta2 = numbers.beta2;
    op.gain2 = numbers.gain2;
    op.eps = numbers.eps;
    op.scale = numbers.scale.get();
    op.step_size = op.lr / correction.first;
    op.inverse_root = 1.f / correction.second_root;
    op.decoupled = numbers.decoupled;
    walk<Adam<AMSGRAD>, P, G, L>(table, chunk, op);
}

}  // namespace

void adam(const Tensors& tensors, const Numbers& n, bool decoupled, bool amsgrad) {
    AdamNumbers numbers;
    static_cast<MomentNumbers&>(numbers) = moment_numbers(n);
    numbers.decoupled = decoupled;
    const auto stream = static_cast<cudaStream_t>(n.stream);
    with_types(tensors, [&](auto p, auto g, auto l) {
        using P = decltype(p);
        using G = decltype(g);
        using L = decltype(l);
        for_each_table(tensors, [&](const TensorTable& table, uint32_t blocks, int) {
            if (amsgrad) adam_kernel<true, P, G, L><<<blocks, THREADS, 0, stream>>>(table, numbers);
            else adam_kernel<false, P, G, L><<<blocks, THREADS, 0, stream>>>(table, numbers);
            check_launch();
        });
    });
}

}  // namespace fused
