// SPDX-License-Identifier: Apache-2.0
// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023), with decoupled weight decay.

#include <type_traits>

#include "tensor_table.cuh"

namespace fused {
namespace {

struct Lion {
    static constexpr int STATE_COUNT = 1;
    static constexpr bool READS_GRAD = true, WRITES_PARAM = true, WRITES_STATE = true;

    float lr, keep, gain1, gain2, scale;

    __device__ void element(float& p, float g, float* s) const {
        g *= scale;
        const float direction = fmaf(gain1, g - s[0], s[0]);
        const float sign = direction > 0.f ? 1.f : direction < 0.f ? -1.f : direction;  // NaN stays NaN
        p = fmaf(-lr, sign, p * keep);
        s[0] = fmaf(gain2, g - s[0], s[0]);
    }
};

struct LionNumbers {
    float lr, decay, gain1, gain2;
    const float* lr_tensor;
    Scale scale;
};

template <typename P, typename G, typename L>
__global__ void __launch_bounds__(THREADS)
lion_kernel(const __grid_constant__ TensorTable table, const __grid_constant__ LionNumbers numbers) {
    Lion op;
    op.lr = numbers.lr_tensor == nullptr ? numbers.lr : *numbers.lr_tensor;
    op.keep = 1.f - op.lr * numbers.decay;
    op.gain1 = numbers.gain1;
    op.gain2 = numbers.gain2;
    op.scale = numbers.scale.get();
    walk<Lion, P, G, L>(table, chunk_of_block(table, blockIdx.x), op);
}

}  // namespace

void lion(const Tensors& tensors, const Numbers& n) {
    LionNumbers numbers;
    numbers.lr = float(n.lr);
    numbers.decay = float(n.weight_decay);
    numbers.gain1 = float(1.0 - n.beta1);
    numbers.gain2 = float(1.0 - n.beta2);
    numbers.lr_tensor = n.lr_tensor;
    numbers.scale = {float(n.grad_scale), n.grad_scale_tensor};
    const auto stream = static_cast<cudaStream_t>(n.stream);
    with_types(tensors, [&](auto p, auto g, auto l) {
        for_each_table(tensors, [&](const TensorTable& table, uint32_t blocks, int) {
            lion_kernel<decltype(p), decltype(g), decltype(l)><<<blocks, THREADS, 0, stream>>>(table, numbers);
            check_launch();
        });
    });
}

}  // namespace fused
