// SPDX-License-Identifier: Apache-2.0
// kWidth elements of an Adam step. The branches are the same for all elements. All loads come before all stores: large
// tensors begin at the same place within a page, and a load that follows a store to the same place of another page waits.

template <>
inline void step(const Update& update, int64_t index) {
    const Operand* operands = update.operands;
    Vec param = load(operands[Update::kParam], index);
    Vec gradient = mul(load(operands[Update::kGradient], index), set(update.grad_scale));
    const Vec old_mean = load(operands[Update::kMean], index);
    const Vec old_square = load(operands[Update::kSquare], index);
    const bool amsgrad = operands[Update::kLargest].type != kNone;
    const Vec old_largest = amsgrad ? load(operands[Update::kLargest], index) : old_square;

    // Left out where the factor is neutral: 0 * infinity is NaN.
    if (update.decay != 0) gradient = fma(set(update.decay), param, gradient);
    if (update.keep != 1) param = mul(param, set(update.keep));

    // As torch interpolates: from the nearer end, which decides what infinities become.
    const Vec distance = sub(gradient, old_mean);
    const Vec mean = update.mean_from_gradient ? fma(set(-update.mean_rest), distance, gradient)
                                               : fma(set(update.mean_weight), distance, old_mean);
    const Vec kept = mul(old_square, set(update.square_keep));
    const Vec square = fma(mul(set(update.square_weight), gradient), gradient, kept);
    const Vec used = amsgrad ? max(old_largest, square) : square;
    const Vec denominator = fma(sqrt(used), set(update.inverse_root), set(update.eps));
    param = fma(set(update.minus_step_size), div(mean, denominator), param);

    store(operands[Update::kMean], index, mean);
    store(operands[Update::kSquare], index, square);
    if (amsgrad) store(operands[Update::kLargest], index, used);
    store(operands[Update::kParam], index, param);
    store(operands[Update::kLow], index, param);
}
