// SPDX-License-Identifier: Apache-2.0
// What the bindings know of the kernels: no CUDA, no Python, no torch.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace fused {

enum class Type : int { NONE = 0, FLOAT32 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

struct TensorAddresses {
    void* param;
    const void* grad;
    void* low;
    void* state[3];
    const float* step;
    int64_t numel;
    // Whether addresses are multiples of four elements: those of all but the copy, and that of the copy, which may be a
    // rank's slice of a larger tensor.
    bool aligned, low_aligned;
};

struct Tensors {
    const TensorAddresses* addresses;
    int count;
    Type param_type, grad_type, low_type;  // states have the parameter's
};

// The numbers of one step. Pointers are to one float on the device; null where the host knows the number.
struct Numbers {
    double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
    double step = 0;
    bool bias_correction = true;
    double grad_scale = 1;
    const float* lr_tensor = nullptr;
    const float* grad_scale_tensor = nullptr;
    void* stream = nullptr;
};

struct UnsupportedTypes : std::invalid_argument {
    UnsupportedTypes() : std::invalid_argument("no kernel for these types of parameter, gradient and copy") {}
};

struct LaunchError : std::runtime_error {
    explicit LaunchError(const std::string& what) : std::runtime_error("CUDA: " + what) {}
};

void adam(const Tensors& tensors, const Numbers& numbers, bool decoupled, bool amsgrad);
void lion(const Tensors& tensors, const Numbers& numbers);

// LAMB in two passes. The first updates the moments and leaves the sums of squares of parameter and update of tensor i
// in squares[2 * slots[i]] and the next; `partials` has room for lamb_partials(tensors) numbers. The second applies the
// update with ratios[slots[i]].
int64_t lamb_partials(const Tensors& tensors);
void lamb_moments(const Tensors& tensors, const Numbers& numbers, bool eps_inside_sqrt, const int* slots,
                  double* partials, double* squares);
void lamb_apply(const Tensors& tensors, const Numbers& numbers, bool eps_inside_sqrt, const int* slots,
                const float* ratios);

}  // namespace fused
