// SPDX-License-Identifier: Apache-2.0
// kWidth elements of a Lion step. The branches are the same for all elements.

template <>
inline void step(const Update& update, int64_t index) {
    const Operand* operands = update.operands;
    Vec param = load(operands[Update::kParam], index);
    const Vec gradient = mul(load(operands[Update::kGradient], index), set(update.grad_scale));
    const Vec mean = load(operands[Update::kMean], index);
    const Vec distance = sub(gradient, mean);

    // A NaN goes on into the weight: with no direction the element would stand still from then on, unnoticed.
    const Vec direction = update.direction_from_gradient ? fma(set(-update.direction_rest), distance, gradient)
                                                         : fma(set(update.direction_weight), distance, mean);
    if (update.keep != 1) param = mul(param, set(update.keep));
    param = fma(set(update.minus_lr), sign(direction), param);
    store(operands[Update::kParam], index, param);
    store(operands[Update::kLow], index, param);
    store(operands[Update::kMean], index,
          update.mean_from_gradient ? fma(set(-update.mean_rest), distance, gradient)
                                    : fma(set(update.mean_weight), distance, mean));
}
