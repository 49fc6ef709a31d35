# SPDX-License-Identifier: Apache-2.0
"""Builders of the optimizer kernels that run on the host's processor."""

from .builder import OpBuilder


class CPUOptimizerBuilder(OpBuilder):
    """A kernel that is compiled once for several instruction sets and chooses among them when it runs.

    Hence no flag names the processor: the build is the same on every host of an architecture, and a cache or a wheel
    can be shared between hosts that differ. Needs Python's headers, none of torch.
    """

    def uses_torch(self) -> bool:
        return False

    def include_paths(self) -> list[str]:
        return ["csrc/includes"]

    def cxx_args(self) -> list[str]:
        # Contraction is off, since a product and a sum are fused where the source says so and nowhere else: results
        # are the same bits with every instruction set.
        return ["-O3", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]

    def extra_ldflags(self) -> list[str]:
        return ["-fopenmp"]


class CPUAdamBuilder(CPUOptimizerBuilder):
    """Adam and AdamW on the host."""

    BUILD_VAR = "DS_BUILD_CPU_ADAM"
    NAME = "cpu_adam"

    def absolute_name(self) -> str:
        return "deepspeed.ops.adam.cpu_adam_op"

    def sources(self) -> list[str]:
        return ["csrc/adam/cpu_adam.cpp"]


class CPUAdagradBuilder(CPUOptimizerBuilder):
    """Adagrad on the host."""

    BUILD_VAR = "DS_BUILD_CPU_ADAGRAD"
    NAME = "cpu_adagrad"

    def absolute_name(self) -> str:
        return "deepspeed.ops.adagrad.cpu_adagrad_op"

    def sources(self) -> list[str]:
        return ["csrc/adagrad/cpu_adagrad.cpp"]


class CPULionBuilder(CPUOptimizerBuilder):
    """Lion on the host."""

    BUILD_VAR = "DS_BUILD_CPU_LION"
    NAME = "cpu_lion"

    def absolute_name(self) -> str:
        return "deepspeed.ops.lion.cpu_lion_op"

    def sources(self) -> list[str]:
        return ["csrc/lion/cpu_lion.cpp"]
