// SPDX-License-Identifier: Apache-2.0
// Lion over flat tensors in host memory, in one pass: scale the gradient, update, write low-precision weights.

#include "cpu_types.h"

namespace ds {
namespace {

struct Update {
    enum { kParam, kGradient, kMean, kLow };
    enum { kValues = 5 };

    Operand operands[4];
    float grad_scale, keep, minus_lr, direction_weight, direction_rest, mean_weight, mean_rest;
    bool direction_from_gradient, mean_from_gradient;

    // lr, beta1, beta2, weight decay, gradient scale: doubles, since differences from one would lose digits in fp32.
    void set(const double* v) {
        keep = static_cast<float>(1.0 - v[0] * v[3]);
        minus_lr = static_cast<float>(-v[0]);
        direction_weight = static_cast<float>(1.0 - v[1]);
        direction_rest = static_cast<float>(v[1]);
        direction_from_gradient = 1.0 - v[1] >= 0.5;
        mean_weight = static_cast<float>(1.0 - v[2]);
        mean_rest = static_cast<float>(v[2]);
        mean_from_gradient = 1.0 - v[2] >= 0.5;
        grad_scale = static_cast<float>(v[4]);
    }
};

}  // namespace
}  // namespace ds

#define DS_STEP "../lion/lion_step.inl"
#include "cpu_module.h"

DS_MODULE
