# SPDX-License-Identifier: Apache-2.0
"""Adagrad for parameters in host memory."""

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed.ops.cpu_optimizer import CPUOptimizer
from deepspeed.ops.fused_kernels import StepNumbers, TensorUpdate
from deepspeed.ops.optimizer_arguments import check_numbers
from deepspeed.ops.torch_updates import chunks


class DeepSpeedCPUAdagrad(CPUOptimizer):
    """Adagrad as ``torch.optim.Adagrad`` computes it, in one pass over host memory.

    State dictionaries can be exchanged with its. Groups may have its ``lr_decay`` and ``initial_accumulator_value``.

    Args:
        model_params: parameters, or groups of them, on the CPU; fp32, bf16 or fp16 (others by torch's operations).
        lr: learning rate.
        eps: added to the root of the sum.
        weight_decay: decay of the weights, added to the gradient.
        amsgrad: there is no such thing for Adagrad; must be False.
        fp32_optimizer_states: the sum is fp32 also for 16-bit parameters; False: of the parameter's dtype.
        adamw_mode: has no meaning here; accelerate hands it to every optimizer of host memory.

    Raises:
        ValueError: a number is out of range, or ``amsgrad`` is asked for.
    """

    BUILDER = "CPUAdagradBuilder"

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        adamw_mode: bool | None = None,
    ) -> None:
        check_numbers("DeepSpeedCPUAdagrad", lr=lr, eps=eps, weight_decay=weight_decay)
        if amsgrad:
            raise ValueError("DeepSpeedCPUAdagrad: amsgrad=True has no meaning for Adagrad, whose sum never shrinks")
        defaults = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            # torch.optim.Adagrad wants to find them in a state dictionary.
            "lr_decay": 0.0,
            "initial_accumulator_value": 0.0,
        }
        super().__init__(model_params, defaults, fp32_optimizer_states)

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("sum",)

    def _initial_value(self, name: str, group: dict[str, Any]) -> float:
        return group["initial_accumulator_value"]

    def _rate(self, update: TensorUpdate, numbers: StepNumbers, group: dict[str, Any]) -> float:
        return numbers.lr / (1 + (float(update.step) - 1) * group["lr_decay"])

    def _run_torch(self, update: TensorUpdate, numbers: StepNumbers, group: dict[str, Any]) -> None:
        rate = self._rate(update, numbers, group)
        for part in chunks(update):
            _step_in_torch(part, numbers, rate)

    def _values(self, update: TensorUpdate, numbers: StepNumbers, group: dict[str, Any]) -> list[float]:
        return [self._rate(update, numbers, group), numbers.eps, numbers.weight_decay, numbers.grad_scale]


def _step_in_torch(update: TensorUpdate, numbers: StepNumbers, rate: float) -> None:
    dtype = torch.promote_types(update.param.dtype, torch.float32)
    param, total = update.param.to(dtype), update.states[0].to(dtype)
    gradient = update.grad.to(dtype) * numbers.grad_scale
    if numbers.weight_decay:
        gradient.add_(param, alpha=numbers.weight_decay)
    total.addcmul_(gradient, gradient)
    param.addcdiv_(gradient, total.sqrt().add_(numbers.eps), value=-rate)
    for target, value in ((update.param, param), (update.states[0], total), (update.low, param)):
        if target is not None and target is not value:
            target.copy_(value)
