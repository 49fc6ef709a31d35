// SPDX-License-Identifier: Apache-2.0
#include "binding.h"

using namespace fused;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("partials", [](const Integers& tensors, int param, int grad, int low) {
        return lamb_partials(TensorList(tensors, param, grad, low).get());
    });
    module.def("moments", [](const Integers& tensors, int param, int grad, int low, const Reals& values,
                             bool bias_correction, const Integers& addresses, bool eps_inside_sqrt,
                             const std::vector<int>& slots, int64_t partials, int64_t squares) {
        lamb_moments(TensorList(tensors, param, grad, low).get(), numbers_of(values, bias_correction, addresses),
                     eps_inside_sqrt, slots.data(), pointer<double>(partials), pointer<double>(squares));
    });
    module.def("apply", [](const Integers& tensors, int param, int grad, int low, const Reals& values,
                           bool bias_correction, const Integers& addresses, bool eps_inside_sqrt,
                           const std::vector<int>& slots, int64_t ratios) {
        lamb_apply(TensorList(tensors, param, grad, low).get(), numbers_of(values, bias_correction, addresses),
                   eps_inside_sqrt, slots.data(), pointer<const float>(ratios));
    });
}
