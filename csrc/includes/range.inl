// SPDX-License-Identifier: Apache-2.0
// What every instruction set shares, on top of its vectors: access by element type, and the walk over a range.

inline Vec load(const Operand& operand, int64_t index) {
    switch (operand.type) {
        case kFloat32:
            return load_float32(operand.data + 4 * index);
        case kBFloat16:
            return load_bfloat16(operand.data + 2 * index);
        default:
            return load_float16(operand.data + 2 * index);
    }
}

inline void store(const Operand& operand, int64_t index, const Vec& value) {
    switch (operand.type) {
        case kNone:
            return;
        case kFloat32:
            return store_float32(operand.data + 4 * index, value);
        case kBFloat16:
            return store_bfloat16(operand.data + 2 * index, value);
        default:
            return store_float16(operand.data + 2 * index, value);
    }
}

template <class Update>
void step(const Update& update, int64_t index);  // of kWidth elements; what the op defines

// Elements that do not fill a vector go through one on the stack, so that they get the same arithmetic as all others.
template <class Update>
void step_rest(const Update& update, int64_t index, int64_t count) {
    constexpr int kOperands = sizeof update.operands / sizeof update.operands[0];
    alignas(64) char room[kOperands][4 * kWidth] = {};
    Update moved = update;
    for (int k = 0; k < kOperands; ++k) {
        const Operand& operand = update.operands[k];
        const int64_t size = size_of(operand.type);
        if (size) std::memcpy(room[k], operand.data + size * index, size * count);
        moved.operands[k].data = room[k];
    }
    step(moved, 0);
    for (int k = 0; k < kOperands; ++k) {
        const Operand& operand = update.operands[k];
        const int64_t size = size_of(operand.type);
        if (size && k != Update::kGradient) std::memcpy(operand.data + size * index, room[k], size * count);
    }
}

template <class Update>
void walk(const Update& update, int64_t begin, int64_t end) {
    // A copy that nobody else can point to: the compiler need not read it again after each store.
    const Update own = update;
    int64_t index = begin;
    for (; index + kWidth <= end; index += kWidth) step(own, index);
    if (index < end) step_rest(update, index, end - index);
}
