# SPDX-License-Identifier: Apache-2.0
"""Builders of the CUDA kernels of optimizers."""

from .builder import CUDAOpBuilder

FIRST_CAPABILITY = 7  # major


class _FusedOptimizerBuilder(CUDAOpBuilder):
    """A kernel of ``csrc/fused`` and its binding."""

    FAMILY = ""

    def __init__(self) -> None:
        super().__init__(self.NAME)

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.FAMILY}.{self.NAME}_op"

    def sources(self) -> list[str]:
        return [f"csrc/fused/{self.FAMILY}_binding.cpp", f"csrc/fused/{self.FAMILY}.cu"]

    def filter_ccs(self, ccs: list[str]) -> list[str]:
        """Volta and later: kernel arguments are read in place."""
        return [entry for entry in ccs if int(entry.partition(".")[0]) >= FIRST_CAPABILITY]

    def include_paths(self) -> list[str]:
        return ["csrc/fused"]


class FusedAdamBuilder(_FusedOptimizerBuilder):
    """Adam over many tensors in one kernel."""

    BUILD_VAR, NAME, FAMILY = "DS_BUILD_FUSED_ADAM", "fused_adam", "adam"


class FusedLambBuilder(_FusedOptimizerBuilder):
    """LAMB over many tensors in two kernels."""

    BUILD_VAR, NAME, FAMILY = "DS_BUILD_FUSED_LAMB", "fused_lamb", "lamb"


class FusedLionBuilder(_FusedOptimizerBuilder):
    """Lion over many tensors in one kernel."""

    BUILD_VAR, NAME, FAMILY = "DS_BUILD_FUSED_LION", "fused_lion", "lion"
