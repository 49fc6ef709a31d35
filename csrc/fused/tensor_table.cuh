// SPDX-License-Identifier: Apache-2.0
// Walking over the elements of many tensors with one launch, or of one tensor of any size.
//
// A launch gets the addresses of up to MAX_TENSORS tensors by value, so that nothing is copied to the device first and a
// CUDA graph can hold it. Every block works on one chunk of one tensor; which one it finds by a search over first_block.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "fused.h"

namespace fused {

constexpr int MAX_TENSORS = 48;  // kernel arguments are limited to 4 KiB
constexpr int STATES = 3;
constexpr int VECTOR = 4;  // elements that a thread loads at once

// How a kernel is spread over the device; chosen by measurement, see docs/optimizers.md.
constexpr int THREADS = 256;
constexpr int UNROLL = 1;  // vectors that a thread has in flight, of each tensor
constexpr int ROUNDS = 1;  // times a thread does that
constexpr int64_t CHUNK = int64_t(THREADS) * VECTOR * UNROLL * ROUNDS;

struct TensorTable {
    void* param[MAX_TENSORS];
    const void* grad[MAX_TENSORS];
    void* low[MAX_TENSORS];  // low-precision copy that is written beside the parameter
    void* state[STATES][MAX_TENSORS];
    const float* step[MAX_TENSORS];  // on the device; null: the launch's own number
    int64_t numel[MAX_TENSORS];
    uint32_t first_block[MAX_TENSORS + 1];
    uint64_t aligned, low_aligned;  // bit per tensor: its addresses, that of the copy, allow vector access
    int count;
};
static_assert(sizeof(TensorTable) < 3800, "a table and the scalars beside it must fit into kernel arguments");

// ---------------------------------------------------------------------------------------------- element types

struct Nothing {};  // type of a low-precision copy that nobody wants

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

template <typename T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) { return x; }
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ inline __half from_float<__half>(float x) { return __float2half_rn(x); }

template <typename T>
struct alignas(sizeof(T) * VECTOR) Pack {
    T of[VECTOR];
};

template <typename T>
__device__ inline Pack<T> load_pack(const void* base, int64_t index) {
    return *reinterpret_cast<const Pack<T>*>(static_cast<const T*>(base) + index);
}

template <typename T>
__device__ inline void store_pack(void* base, int64_t index, const float* values) {
    Pack<T> pack;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) pack.of[k] = from_float<T>(values[k]);
    *reinterpret_cast<Pack<T>*>(static_cast<T*>(base) + index) = pack;
}

template <typename T>
__device__ inline void store_each(void* base, int64_t index, const float* values) {
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) static_cast<T*>(base)[index + k] = from_float<T>(values[k]);
}

// ---------------------------------------------------------------------------------------------- which chunk

struct Chunk {
    int tensor;
    int64_t begin, end;
};

__device__ inline Chunk chunk_of_block(const TensorTable& table, uint32_t block) {
    int low = 0, high = table.count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (table.first_block[middle] <= block) low = middle; else high = middle;
    }
    Chunk chunk;
    chunk.tensor = low;
    chunk.begin = int64_t(block - table.first_block[low]) * CHUNK;
    chunk.end = min(chunk.begin + CHUNK, table.numel[low]);
    return chunk;
}

// ---------------------------------------------------------------------------------------------- the walk

// What an operation says of itself: how many states it has, whether it reads the gradient, what it writes; and
// element(param, grad, state), which changes its arguments.
template <typename Op, typename P, typename G, typename L>
__device__ inline void one_element(const TensorTable& table, int t, int64_t i, Op& op) {
    float p = to_float(static_cast<const P*>(table.param[t])[i]), g = 0.f, s[STATES];
    if constexpr (Op::READS_GRAD) g = to_float(static_cast<const G*>(table.grad[t])[i]);
#pragma unroll
    for (int k = 0; k < Op::STATE_COUNT; ++k) s[k] = to_float(static_cast<const P*>(table.state[k][t])[i]);
    op.element(p, g, s);
    if constexpr (Op::WRITES_PARAM) {
        static_cast<P*>(table.param[t])[i] = from_float<P>(p);
        if constexpr (!std::is_same<L, Nothing>::value) static_cast<L*>(table.low[t])[i] = from_float<L>(p);
    }
    if constexpr (Op::WRITES_STATE) {
#pragma unroll
        for (int k = 0; k < Op::STATE_COUNT; ++k) static_cast<P*>(table.state[k][t])[i] = from_float<P>(s[k]);
    }
}

template <typename Op, typename P, typename G, typename L>
__device__ inline void vectors(const TensorTable& table, int t, int64_t first, Op& op) {
    constexpr int STRIDE = THREADS * VECTOR;
    Pack<P> p[UNROLL], s[Op::STATE_COUNT][UNROLL];
    Pack<G> g[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int64_t i = first + u * STRIDE;
        p[u] = load_pack<P>(table.param[t], i);
        if constexpr (Op::READS_GRAD) g[u] = load_pack<G>(table.grad[t], i);
#pragma unroll
        for (int k = 0; k < Op::STATE_COUNT; ++k) s[k][u] = load_pack<P>(table.state[k][t], i);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int64_t i = first + u * STRIDE;
        float values[VECTOR], states[STATES][VECTOR];
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            float x = to_float(p[u].of[j]), y = 0.f, z[STATES];
            if constexpr (Op::READS_GRAD) y = to_float(g[u].of[j]);
#pragma unroll
            for (int k = 0; k < Op::STATE_COUNT; ++k) z[k] = to_float(s[k][u].of[j]);
            op.element(x, y, z);
            values[j] = x;
#pragma unroll
            for (int k = 0; k < Op::STATE_COUNT; ++k) states[k][j] = z[k];
        }
        if constexpr (Op::WRITES_PARAM) {
            store_pack<P>(table.param[t], i, values);
            if constexpr (!std::is_same<L, Nothing>::value) {
                if (table.low_aligned >> t & 1) store_pack<L>(table.low[t], i, values);
                else store_each<L>(table.low[t], i, values);
            }
        }
        if constexpr (Op::WRITES_STATE) {
#pragma unroll
            for (int k = 0; k < Op::STATE_COUNT; ++k) store_pack<P>(table.state[k][t], i, states[k]);
        }
    }
}

template <typename Op, typename P, typename G, typename L>
__device__ inline void walk(const TensorTable& table, const Chunk& chunk, Op& op) {
    const int t = chunk.tensor;
    if ((table.aligned >> t & 1) && chunk.end - chunk.begin == CHUNK) {
        for (int round = 0; round < ROUNDS; ++round) {
            const int64_t first = chunk.begin + int64_t(round) * THREADS * VECTOR * UNROLL + threadIdx.x * VECTOR;
            vectors<Op, P, G, L>(table, t, first, op);
        }
        return;
    }
#pragma unroll 4
    for (int64_t i = chunk.begin + threadIdx.x; i < chunk.end; i += THREADS) one_element<Op, P, G, L>(table, t, i, op);
}

// ---------------------------------------------------------------------------------------------- numbers of a step

// By what a gradient is multiplied; `tensor` is on the device, so that the host need not wait for a norm.
struct Scale {
    float value;
    const float* tensor;

    __device__ float get() const { return tensor == nullptr ? value : value * *tensor; }
};

// Steps and bias corrections: known to the host, or computed from a step count on the device.
struct Correction {
    float first, second_root;  // 1 - beta1^step, sqrt(1 - beta2^step)
    float log_beta1, log_beta2;
    bool enabled;

    __device__ void follow(const float* step) {
        if (step == nullptr || !enabled) return;
        first = -expm1f(*step * log_beta1);
        second_root = sqrtf(-expm1f(*step * log_beta2));
    }
};

// What updates with two moments (Adam, LAMB) are given.
struct MomentNumbers {
    float lr, decay, gain1, beta2, gain2, eps;
    const float* lr_tensor;
    Scale scale;
    Correction correction;
};

// ---------------------------------------------------------------------------------------------- host side

inline MomentNumbers moment_numbers(const Numbers& n) {
    MomentNumbers numbers;
    numbers.lr = float(n.lr);
    numbers.decay = float(n.weight_decay);
    numbers.gain1 = float(1.0 - n.beta1);
    numbers.beta2 = float(n.beta2);
    numbers.gain2 = float(1.0 - n.beta2);
    numbers.eps = float(n.eps);
    numbers.lr_tensor = n.lr_tensor;
    numbers.scale = {float(n.grad_scale), n.grad_scale_tensor};
    const bool corrected = n.bias_correction;
    numbers.correction = {corrected ? float(1.0 - std::pow(n.beta1, n.step)) : 1.f,
                          corrected ? float(std::sqrt(1.0 - std::pow(n.beta2, n.step))) : 1.f,
                          float(std::log(n.beta1)), float(std::log(n.beta2)), corrected};
    return numbers;
}

// Calls launch(table, blocks, first) for each table full of tensors; `first` is the number of its first tensor.
template <typename Launch>
void for_each_table(const Tensors& tensors, Launch launch) {
    for (int first = 0; first < tensors.count; first += MAX_TENSORS) {
        TensorTable table;
        table.count = 0;
        table.aligned = table.low_aligned = 0;
        uint32_t blocks = 0;
        for (int i = first; i < tensors.count && table.count < MAX_TENSORS; ++i) {
            const TensorAddresses& from = tensors.addresses[i];
            const int t = table.count++;
            table.param[t] = from.param;
            table.grad[t] = from.grad;
            table.low[t] = from.low;
            for (int k = 0; k < STATES; ++k) table.state[k][t] = from.state[k];
            table.step[t] = from.step;
            table.numel[t] = from.numel;
            table.first_block[t] = blocks;
            blocks += uint32_t((from.numel + CHUNK - 1) / CHUNK);
            if (from.aligned) table.aligned |= uint64_t(1) << t;
            if (from.low_aligned) table.low_aligned |= uint64_t(1) << t;
        }
        table.first_block[table.count] = blocks;
        if (blocks > 0) launch(table, blocks, first);
    }
}

// Calls run with the types of parameter, gradient and low-precision copy as template arguments: run(P{}, G{}, L{}).
template <typename Run>
void with_types(const Tensors& tensors, Run run) {
    const auto low_of_float = [&](auto grad) {
        if (tensors.low_type == Type::NONE) run(float{}, grad, Nothing{});
        else if (tensors.low_type == Type::BFLOAT16) run(float{}, grad, __nv_bfloat16{});
        else if (tensors.low_type == Type::FLOAT16) run(float{}, grad, __half{});
        else throw UnsupportedTypes();
    };
    if (tensors.param_type == Type::FLOAT32) {
        if (tensors.grad_type == Type::FLOAT32) low_of_float(float{});
        else if (tensors.grad_type == Type::BFLOAT16) low_of_float(__nv_bfloat16{});
        else if (tensors.grad_type == Type::FLOAT16) low_of_float(__half{});
        else throw UnsupportedTypes();
        return;
    }
    if (tensors.low_type != Type::NONE) throw UnsupportedTypes();
    if (tensors.param_type == Type::BFLOAT16 && tensors.grad_type == Type::BFLOAT16)
        run(__nv_bfloat16{}, __nv_bfloat16{}, Nothing{});
    else if (tensors.param_type == Type::BFLOAT16 && tensors.grad_type == Type::FLOAT32)
        run(__nv_bfloat16{}, float{}, Nothing{});
    else if (tensors.param_type == Type::FLOAT16 && tensors.grad_type == Type::FLOAT16)
        run(__half{}, __half{}, Nothing{});
    else if (tensors.param_type == Type::FLOAT16 && tensors.grad_type == Type::FLOAT32)
        run(__half{}, float{}, Nothing{});
    else
        throw UnsupportedTypes();
}

inline void check_launch() {
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) throw LaunchError(cudaGetErrorString(error));
}

}  // namespace fused
