# SPDX-License-Identifier: Apache-2.0
"""What FusedAdam, FusedLion and FusedLamb share: from parameter groups to updates that one launch can do."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from deepspeed.ops.fused_kernels import StepNumbers, TensorUpdate, kernels_can_run, load_kernels
from deepspeed.ops.optimizer_arguments import refuse_arguments, run_closure
from deepspeed.runtime.gradients.autograd_internals import add_number_to_each
from deepspeed.utils.logging import log_dist_once

STEP = "step"


class FusedOptimizer(torch.optim.Optimizer):
    """A torch optimizer that updates all its tensors in few launches.

    On CUDA the kernels of ``BUILDER`` run; on other devices, for other dtypes, and where the kernels cannot be
    compiled, the torch implementation. State is named as in torch: ``step`` (0-dim fp32) and moments in the
    parameter's dtype.

    A parameter group may say ``capturable: True``: the step count and a learning rate that is a tensor then stay on the
    device, and ``step`` may be captured in a CUDA graph.
    """

    BUILDER = ""  # class name in deepspeed.ops.op_builder
    takes_parts = True  # whether the gradient of ``step_flat`` may lie in several tensors

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], set_grad_none: bool = True) -> None:
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("set_grad_none", True)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            unknown = [key for key in ("maximize", "differentiable") if group.get(key)]
            if unknown:
                raise ValueError(
                    f"{type(self).__name__} has no {' and no '.join(unknown)}, which a parameter group asks for"
                )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As in torch; without an argument as ``set_grad_none`` of the constructor says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        """One step with the gradients in ``.grad``. Returns what ``closure`` returned.

        Raises:
            RuntimeError: an argument other than ``closure``, or a sparse gradient.
        """
        refuse_arguments(
            type(self).__name__,
            grads=grads,
            output_params=output_params,
            scale=scale,
            grad_norms=grad_norms,
            grad_scaler=grad_scaler,
        )
        loss = run_closure(closure)
        self.step_each({})
        return loss

    @torch.no_grad()
    def step_each(
        self, low_precision: Mapping[torch.Tensor, torch.Tensor], grad_scale: float | torch.Tensor = 1.0
    ) -> None:
        """One step with the gradients in ``.grad``, as ``step_flat`` for all parameters together.

        Args:
            low_precision: of a parameter, memory of the same size that receives its new values, rounded.
            grad_scale: see ``step_flat``.
        """
        for group in self.param_groups:
            updates = [
                self._prepare(parameter, [parameter.grad], self.state[parameter], group, low_precision.get(parameter))
                for parameter in group["params"]
                if parameter.grad is not None
            ]
            if updates:
                self._advance(updates)
                self._update(updates, group, grad_scale)

    @torch.no_grad()
    def step_flat(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor | Sequence[torch.Tensor],
        state: dict[str, Any],
        group: dict[str, Any],
        low_precision: torch.Tensor | None = None,
        grad_scale: float | torch.Tensor = 1.0,
    ) -> None:
        """One step of one flat tensor, in one pass: scale the gradient, update, write the low-precision weights.

        Args:
            master: 1-D, updated in place.
            gradient: of the same size, in one tensor or, where ``takes_parts``, in several 1-D ones end to end; fp32,
                bf16 or fp16. Left as it is.
            state: the optimizer's state of ``master``; filled in the first step.
            group: the parameter group that says learning rate and so on.
            low_precision: of the same size; receives the new values, rounded.
            grad_scale: by which the gradient is multiplied, such as a clipping factor: a number, or a 0-dim tensor on
                the device that the host does not wait for.
        """
        gradients = [gradient] if isinstance(gradient, torch.Tensor) else list(gradient)
        update = self._prepare(master, gradients, state, group, low_precision)
        self._advance([update])
        self._update(update.in_parts(gradients), group, grad_scale)

    def _prepare(
        self,
        param: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        state: dict[str, Any],
        group: dict[str, Any],
        low: torch.Tensor | None = None,
    ) -> TensorUpdate:
        """Check the tensors, and make the state that is missing. The update has the first gradient."""
        name = type(self).__name__
        if any(gradient.is_sparse for gradient in gradients):
            raise RuntimeError(f"{name} does not take sparse gradients; use torch.optim.SparseAdam for this parameter")
        if not param.is_floating_point():
            raise RuntimeError(f"{name} updates real floating-point parameters, not {param.dtype}")
        numel = sum(gradient.numel() for gradient in gradients)
        if numel != param.numel() or (low is not None and low.numel() != param.numel()):
            raise ValueError(
                f"{name}: sizes differ: {param.numel()} elements of parameter, {numel} of gradient"
                + ("" if low is None else f", {low.numel()} of low-precision weights")
            )
        if STEP not in state:
            state[STEP] = torch.zeros((), dtype=torch.float32)
        elif not isinstance(state[STEP], torch.Tensor):  # of an optimizer that counts in a number
            state[STEP] = torch.tensor(float(state[STEP]))
        for key in self._state_names(group):
            if key not in state:
                state[key] = torch.zeros_like(param, memory_format=torch.preserve_format, requires_grad=False)
        wanted = param.device if group["capturable"] else torch.device("cpu")
        if state[STEP].device != wanted:
            state[STEP] = state[STEP].to(wanted)
        return TensorUpdate(param, gradients[0], [state[key] for key in self._state_names(group)], state[STEP], low)

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the entries that have the parameter's size, in the order of the kernel."""
        raise NotImplementedError

    @staticmethod
    def _advance(updates: Sequence[TensorUpdate]) -> None:
        """Count the step."""
        add_number_to_each([update.step for update in updates], 1)

    def _update(self, updates: list[TensorUpdate], group: dict[str, Any], grad_scale: float | torch.Tensor) -> None:
        """Update tensors of one group."""
        numbers = self._numbers(group, grad_scale)
        for alike in _alike(updates, group["capturable"]):
            kernels = self._kernels_for(alike[0])
            if kernels is None:
                for update in alike:
                    self._run_torch(update, numbers, group)
            else:
                with torch.cuda.device(alike[0].param.device):
                    self._run_kernels(kernels, alike, numbers, group)

    def _kernels_for(self, update: TensorUpdate) -> ModuleType | None:
        if not kernels_can_run(update):
            kind = f"{update.param.dtype} parameters on {update.param.device.type}"
            log_dist_once(f"{type(self).__name__}: the torch implementation updates {kind}", ranks=[0])
            return None
        return load_kernels(self.BUILDER)

    def _numbers(self, group: dict[str, Any], grad_scale: float | torch.Tensor) -> StepNumbers:
        capturable = group["capturable"]
        return StepNumbers(
            lr=group["lr"] if capturable else float(group["lr"]),
            betas=tuple(group["betas"]),
            eps=group.get("eps", 0.0),
            weight_decay=group["weight_decay"],
            bias_correction=bool(group.get("bias_correction", True)),
            grad_scale=grad_scale,
        )

    def _run_torch(self, update: TensorUpdate, numbers: StepNumbers, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _run_kernels(
        self, kernels: ModuleType, updates: list[TensorUpdate], numbers: StepNumbers, group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


def _alike(updates: Iterable[TensorUpdate], capturable: bool) -> list[list[TensorUpdate]]:
    """Updates that one launch can do: of one device, with the same dtypes and the same step, kernels or not."""
    result: dict[Any, list[TensorUpdate]] = {}
    for update in updates:
        step = None if capturable or update.step is None else float(update.step)
        key = (update.param.get_device(), update.types, step, kernels_can_run(update))
        result.setdefault(key, []).append(update)
    return list(result.values())
