// SPDX-License-Identifier: Apache-2.0
// From Python's lists of numbers to the arguments of the kernels. Python passes addresses, so that nothing here depends
// on the version of torch; it has checked devices, sizes and that the memory is contiguous.

#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "fused.h"

namespace fused {

// Of each tensor: parameter, gradient, low-precision copy, three states, step count, number of elements.
constexpr size_t NUMBERS_PER_TENSOR = 8;
constexpr int64_t VECTOR_ELEMENTS = 4;

template <typename T>
T* pointer(int64_t address) {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

inline int64_t bytes_of(Type type) { return type == Type::FLOAT32 ? 4 : 2; }

class TensorList {
   public:
    TensorList(const std::vector<int64_t>& numbers, int param_type, int grad_type, int low_type)
        : tensors_{nullptr, 0, Type(param_type), Type(grad_type), Type(low_type)} {
        if (numbers.size() % NUMBERS_PER_TENSOR != 0) throw std::invalid_argument("eight numbers per tensor");
        for (size_t i = 0; i < numbers.size(); i += NUMBERS_PER_TENSOR) {
            const int64_t* n = &numbers[i];
            addresses_.push_back({pointer<void>(n[0]), pointer<const void>(n[1]), pointer<void>(n[2]),
                                  {pointer<void>(n[3]), pointer<void>(n[4]), pointer<void>(n[5])},
                                  pointer<const float>(n[6]), n[7], is_aligned(n), low_is_aligned(n)});
        }
        tensors_.addresses = addresses_.data();
        tensors_.count = int(addresses_.size());
    }

    const Tensors& get() const { return tensors_; }

   private:
    bool is_aligned(const int64_t* n) const {
        const int64_t param = VECTOR_ELEMENTS * bytes_of(tensors_.param_type);
        return (n[0] | n[3] | n[4] | n[5]) % param == 0 && n[1] % (VECTOR_ELEMENTS * bytes_of(tensors_.grad_type)) == 0;
    }

    bool low_is_aligned(const int64_t* n) const { return n[2] % (VECTOR_ELEMENTS * bytes_of(tensors_.low_type)) == 0; }

    std::vector<TensorAddresses> addresses_;
    Tensors tensors_;
};

// `values`: lr, beta1, beta2, eps, weight_decay, step, grad_scale; `addresses`: of the rate, of the scale, the stream.
inline Numbers numbers_of(const std::vector<double>& values, bool bias_correction,
                          const std::vector<int64_t>& addresses) {
    if (values.size() != 7 || addresses.size() != 3) throw std::invalid_argument("seven values and three addresses");
    Numbers numbers;
    numbers.lr = values[0];
    numbers.beta1 = values[1];
    numbers.beta2 = values[2];
    numbers.eps = values[3];
    numbers.weight_decay = values[4];
    numbers.step = values[5];
    numbers.grad_scale = values[6];
    numbers.bias_correction = bias_correction;
    numbers.lr_tensor = pointer<const float>(addresses[0]);
    numbers.grad_scale_tensor = pointer<const float>(addresses[1]);
    numbers.stream = pointer<void>(addresses[2]);
    return numbers;
}

using Integers = std::vector<int64_t>;
using Reals = std::vector<double>;

}  // namespace fused
