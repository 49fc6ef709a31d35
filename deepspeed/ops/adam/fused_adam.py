# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW whose step is one pass over all parameters.

Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015); Loshchilov and Hutter, "Decoupled Weight Decay
Regularization" (2019); Reddi et al., "On the Convergence of Adam and Beyond" (2018) for AMSGrad.
"""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from deepspeed.ops import torch_updates
from deepspeed.ops.fused_kernels import StepNumbers, TensorUpdate, kernel_arguments
from deepspeed.ops.fused_optimizer import FusedOptimizer
from deepspeed.ops.optimizer_arguments import check_betas, check_numbers


class FusedAdam(FusedOptimizer):
    """Adam, as AdamW by default.

    Args:
        params: parameters or parameter groups, fp32, bf16 or fp16 on CUDA for the kernels, anything real elsewhere.
        lr: learning rate; a 0-dim tensor on the device for capturable steps whose rate changes.
        bias_correction: divide the moments by ``1 - beta^step``.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        adam_w_mode: weight decay shrinks the weights (AdamW); False: it is added to the gradient (L2).
        weight_decay: its factor.
        amsgrad: divide by the largest second moment so far.
        set_grad_none: what ``zero_grad()`` does.
        capturable: see ``FusedOptimizer``.

    Raises:
        ValueError: a number out of its range.
    """

    BUILDER = "FusedAdamBuilder"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        *,
        capturable: bool = False,
    ) -> None:
        check_numbers("FusedAdam", lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas("FusedAdam", betas)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "adam_w_mode": bool(adam_w_mode),
            "capturable": capturable,
        }
        super().__init__(params, defaults, set_grad_none)

    @property
    def adam_w_mode(self) -> bool:
        """Whether weight decay is decoupled, unless a group says otherwise."""
        return self.defaults["adam_w_mode"]

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        largest = ("max_exp_avg_sq",) if group["amsgrad"] else ()
        return ("exp_avg", "exp_avg_sq", *largest)

    def _run_torch(self, update: TensorUpdate, numbers: StepNumbers, group: dict[str, Any]) -> None:
        torch_updates.adam(update, numbers, group["adam_w_mode"])

    def _run_kernels(
        self, kernels: ModuleType, updates: list[TensorUpdate], numbers: StepNumbers, group: dict[str, Any]
    ) -> None:
        arguments = kernel_arguments(updates, numbers, group["capturable"])
        kernels.adam(*arguments.positional(), group["adam_w_mode"], bool(group["amsgrad"]))
