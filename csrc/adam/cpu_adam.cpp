// SPDX-License-Identifier: Apache-2.0
// Adam and AdamW over flat tensors in host memory, in one pass: scale the gradient, update, write low-precision weights.

#include "cpu_types.h"

namespace ds {
namespace {

struct Update {
    enum { kParam, kGradient, kMean, kSquare, kLargest, kLow };  // kLargest: AMSGrad only
    enum { kValues = 9 };

    Operand operands[6];
    float grad_scale, keep, decay, mean_weight, mean_rest, square_keep, square_weight, inverse_root, eps, minus_step_size;
    bool mean_from_gradient;

    // lr, beta1, beta2, eps, weight decay, whether it is decoupled, 1 - beta1^step, sqrt(1 - beta2^step), gradient scale:
    // doubles, since differences from one would lose digits in fp32.
    void set(const double* v) {
        const double lr = v[0], beta1 = v[1], beta2 = v[2];
        const bool decoupled = v[5] != 0;
        grad_scale = static_cast<float>(v[8]);
        keep = static_cast<float>(decoupled ? 1.0 - lr * v[4] : 1.0);
        decay = static_cast<float>(decoupled ? 0.0 : v[4]);
        mean_weight = static_cast<float>(1.0 - beta1);
        mean_rest = static_cast<float>(beta1);
        mean_from_gradient = 1.0 - beta1 >= 0.5;
        square_keep = static_cast<float>(beta2);
        square_weight = static_cast<float>(1.0 - beta2);
        inverse_root = static_cast<float>(1.0 / v[7]);
        eps = static_cast<float>(v[3]);
        minus_step_size = static_cast<float>(-lr / v[6]);
    }
};

}  // namespace
}  // namespace ds

#define DS_STEP "../adam/adam_step.inl"
#include "cpu_module.h"

DS_MODULE
