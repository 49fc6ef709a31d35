# SPDX-License-Identifier: Apache-2.0
"""Lion whose step is one pass over all parameters.

Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023).
"""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from deepspeed.ops import torch_updates
from deepspeed.ops.fused_kernels import StepNumbers, TensorUpdate, kernel_arguments
from deepspeed.ops.fused_optimizer import FusedOptimizer
from deepspeed.ops.optimizer_arguments import check_betas, check_numbers


class FusedLion(FusedOptimizer):
    """Lion: the sign of an interpolation between momentum and gradient, with decoupled weight decay.

    Args:
        params: parameters or parameter groups.
        lr: learning rate; a 0-dim tensor on the device for capturable steps whose rate changes.
        betas: of the interpolation whose sign is taken, and of the momentum.
        weight_decay: what the weights shrink by, times ``lr``.
        set_grad_none: what ``zero_grad()`` does.
        capturable: see ``FusedOptimizer``.

    Raises:
        ValueError: a number out of its range.
    """

    BUILDER = "FusedLionBuilder"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        capturable: bool = False,
    ) -> None:
        check_numbers("FusedLion", lr=lr, weight_decay=weight_decay)
        check_betas("FusedLion", betas)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "capturable": capturable}
        super().__init__(params, defaults, set_grad_none)

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def _run_torch(self, update: TensorUpdate, numbers: StepNumbers, group: dict[str, Any]) -> None:
        torch_updates.lion(update, numbers)

    def _run_kernels(
        self, kernels: ModuleType, updates: list[TensorUpdate], numbers: StepNumbers, group: dict[str, Any]
    ) -> None:
        kernels.lion(*kernel_arguments(updates, numbers, group["capturable"]).positional())
