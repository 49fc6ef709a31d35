// SPDX-License-Identifier: Apache-2.0
// kWidth elements of an Adagrad step. The branches are the same for all elements, and all loads come before
// all stores (see adam_step.inl).

template <>
inline void step(const Update& update, int64_t index) {
    const Operand* operands = update.operands;
    Vec param = load(operands[Update::kParam], index);
    Vec gradient = mul(load(operands[Update::kGradient], index), set(update.grad_scale));
    const Vec old_sum = load(operands[Update::kSum], index);
    if (update.decay != 0) gradient = fma(set(update.decay), param, gradient);
    const Vec sum = fma(gradient, gradient, old_sum);
    param = fma(set(update.minus_lr), div(gradient, add(sqrt(sum), set(update.eps))), param);
    store(operands[Update::kSum], index, sum);
    store(operands[Update::kParam], index, param);
    store(operands[Update::kLow], index, param);
}
