# SPDX-License-Identifier: Apache-2.0
"""Lion for parameters in host memory."""

from collections.abc import Iterable
from typing import Any

from deepspeed.ops.cpu_optimizer import CPUOptimizer
from deepspeed.ops.fused_kernels import StepNumbers, TensorUpdate
from deepspeed.ops.optimizer_arguments import check_betas, check_numbers
from deepspeed.ops.torch_updates import lion


class DeepSpeedCPULion(CPUOptimizer):
    """Lion (the sign of an interpolated momentum) with decoupled weight decay, in one pass over host memory.

    Args:
        model_params: parameters, or groups of them, on the CPU; fp32, bf16 or fp16 (others by torch's operations).
        lr: learning rate.
        betas: weight of the momentum in the direction, and decay of the momentum; each in [0, 1).
        weight_decay: decay of the weights.
        fp32_optimizer_states: the momentum is fp32 also for 16-bit parameters; False: of the parameter's dtype.
        adamw_mode: has no meaning here; accelerate hands it to every optimizer of host memory.

    Raises:
        ValueError: a number is out of range.
    """

    BUILDER = "CPULionBuilder"

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
        adamw_mode: bool | None = None,
    ) -> None:
        check_numbers("DeepSpeedCPULion", lr=lr, weight_decay=weight_decay)
        check_betas("DeepSpeedCPULion", betas)
        super().__init__(model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, fp32_optimizer_states)

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def _run_torch(self, update: TensorUpdate, numbers: StepNumbers, group: dict[str, Any]) -> None:
        lion(update, numbers)

    def _values(self, update: TensorUpdate, numbers: StepNumbers, group: dict[str, Any]) -> list[float]:
        return [numbers.lr, *numbers.betas, numbers.weight_decay, numbers.grad_scale]
