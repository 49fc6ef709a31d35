// SPDX-License-Identifier: Apache-2.0
// Adagrad over flat tensors in host memory, in one pass: scale the gradient, update, write low-precision weights.

#include "cpu_types.h"

namespace ds {
namespace {

struct Update {
    enum { kParam, kGradient, kSum, kLow };
    enum { kValues = 4 };

    Operand operands[4];
    float grad_scale, decay, eps, minus_lr;

    // lr, eps, weight decay, gradient scale.
    void set(const double* v) {
        minus_lr = static_cast<float>(-v[0]);
        eps = static_cast<float>(v[1]);
        decay = static_cast<float>(v[2]);
        grad_scale = static_cast<float>(v[3]);
    }
};

}  // namespace
}  // namespace ds

#define DS_STEP "../adagrad/adagrad_step.inl"
#include "cpu_module.h"

DS_MODULE
