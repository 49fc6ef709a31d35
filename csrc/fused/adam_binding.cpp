// SPDX-License-Identifier: Apache-2.0
#include "binding.h"

using namespace fused;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("adam", [](const Integers& tensors, int param, int grad, int low, const Reals& values,
                          bool bias_correction, const Integers& addresses, bool decoupled, bool amsgrad) {
        adam(TensorList(tensors, param, grad, low).get(), numbers_of(values, bias_correction, addresses), decoupled,
             amsgrad);
    });
}
