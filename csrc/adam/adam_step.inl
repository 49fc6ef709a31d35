// SPDX-License-Identifier: Apache-2.0
// kWidth elements of an Adam step. The branches are the same for all elements.

template <>
inline void step(const Update& update, int64_t index) {
    const Operand* operands = update.operands;
    Vec param = load(operands[Update::kParam], index);
    Vec gradient = mul(load(operands[Update::kGradient], index), set(update.grad_scale));
    // Left out where the factor is neutral: 0 * infinity is NaN.
    if (update.decay != 0) gradient = fma(set(update.decay), param, gradient);
    if (update.keep != 1) param = mul(param, set(update.keep));

    // As torch interpolates: from the nearer end, which decides what infinities become.
    const Vec old_mean = load(operands[Update::kMean], index);
    const Vec distance = sub(gradient, old_mean);
    const Vec mean = update.mean_from_gradient ? fma(set(-update.mean_rest), distance, gradient)
                                               : fma(set(update.mean_weight), distance, old_mean);
    store(operands[Update::kMean], index, mean);

    const Vec old_square = mul(load(operands[Update::kSquare], index), set(update.square_keep));
    Vec square = fma(mul(set(update.square_weight), gradient), gradient, old_square);
    store(operands[Update::kSquare], index, square);
    if (operands[Update::kLargest].type != kNone) {
        square = max(load(operands[Update::kLargest], index), square);
        store(operands[Update::kLargest], index, square);
    }

    const Vec denominator = fma(sqrt(square), set(update.inverse_root), set(update.eps));
    param = fma(set(update.minus_step_size), div(mean, denominator), param);
    store(operands[Update::kParam], index, param);
    store(operands[Update::kLow], index, param);
}
