# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW for parameters in host memory."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from deepspeed.ops.cpu_optimizer import CPUOptimizer
from deepspeed.ops.fused_kernels import StepNumbers, TensorUpdate
from deepspeed.ops.optimizer_arguments import check_betas, check_numbers, run_closure
from deepspeed.ops.torch_updates import adam, bias_corrections


class DeepSpeedCPUAdam(CPUOptimizer):
    """Adam or AdamW as ``torch.optim.Adam`` and ``torch.optim.AdamW`` compute them, in one pass over host memory.

    State dictionaries can be exchanged with theirs. :meth:`step_flat` steps one flat tensor, as offloading does.

    Args:
        model_params: parameters, or groups of them, on the CPU; fp32, bf16 or fp16 (others by torch's operations).
        lr: learning rate.
        bias_correction: divide the moments by ``1 - beta ** step``.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decay of the weights.
        amsgrad: use the largest second moment so far.
        adamw_mode: the decay acts on the weights (AdamW); False: it is added to the gradient (Adam).
        fp32_optimizer_states: moments are fp32 also for 16-bit parameters; False: of the parameter's dtype.

    Raises:
        ValueError: a number is out of range.
    """

    BUILDER = "CPUAdamBuilder"

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_numbers("DeepSpeedCPUAdam", lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas("DeepSpeedCPUAdam", betas)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "amsgrad": amsgrad,
        }
        super().__init__(model_params, defaults, fp32_optimizer_states)
        self.adam_w_mode = adamw_mode

    @torch.no_grad()
    def step_subgroup(self, subgroup_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """As :meth:`step`, of one parameter: the one at ``subgroup_id``, counted over all groups.

        Raises:
            IndexError: there is no such parameter.
        """
        loss = run_closure(closure)
        entries = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        if not 0 <= subgroup_id < len(entries):
            raise IndexError(f"DeepSpeedCPUAdam has {len(entries)} parameters, and none at {subgroup_id}")
        parameter, group = entries[subgroup_id]
        if parameter.grad is not None:
            self._step_parameters([parameter], group)
        return loss

    def rollback_subgroup(self, sub_group_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Not built.

        Raises:
            NotImplementedError: always. A step cannot be undone exactly from what is left after it.
        """
        raise NotImplementedError(
            "DeepSpeedCPUAdam.rollback_subgroup is not built: a step cannot be undone exactly. Keep a copy of weights "
            "and state if it may have to be"
        )

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if group["amsgrad"] else names

    def _run_torch(self, update: TensorUpdate, numbers: StepNumbers, group: dict[str, Any]) -> None:
        adam(update, numbers, decoupled=self.adam_w_mode)

    def _operands(self, update: TensorUpdate) -> list[torch.Tensor | None]:
        largest = update.states[2] if len(update.states) == 3 else None
        return [update.param, update.grad, *update.states[:2], largest, update.low]

    def _values(self, update: TensorUpdate, numbers: StepNumbers, group: dict[str, Any]) -> list[float]:
        beta1, beta2 = numbers.betas
        first, second = bias_corrections(update.step, numbers.betas, numbers.bias_correction)
        decoupled = float(self.adam_w_mode)
        scale = numbers.grad_scale
        return [numbers.lr, beta1, beta2, numbers.eps, numbers.weight_decay, decoupled, first, second, scale]
