# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeedCPUAdam, DeepSpeedCPUAdagrad and DeepSpeedCPULion share: tensors in host memory, one pass for each."""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch

from deepspeed.ops.fused_kernels import TYPE_NUMBERS, StepNumbers, TensorUpdate

LEVEL_VARIABLE = "DS_CPU_SIMD"
STEP = "step"


class CPUOptimizer(torch.optim.Optimizer):
    """A torch optimizer over parameters in host memory.

    The native kernel of ``BUILDER`` does the work, with torch's number of threads. Where it cannot be compiled, and for
    tensors of other dtypes than fp32, bf16 and fp16, the torch implementation does.

    State is named as in torch; ``step`` is a 0-dim fp32 tensor. Moments are fp32, or of the parameter's dtype if that
    is wider or ``fp32_optimizer_states`` is False. A parameter group may say ``maximize: True``, as torch's do.

    Attributes:
        optimizer_id: number of this optimizer among those of its class in this process.
        fp32_optimizer_states: as passed.
    """

    BUILDER = ""  # class name in deepspeed.ops.op_builder
    optimizer_id = 0

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], fp32_optimizer_states: bool) -> None:
        super().__init__(params, defaults)
        self.fp32_optimizer_states = fp32_optimizer_states
        self.optimizer_id = type(self).optimizer_id
        type(self).optimizer_id += 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Groups of another optimizer, such as torch's, get the entries that they lack.

        Raises:
            ValueError: a group asks for ``differentiable``, which is not built.
        """
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            if group.get("differentiable"):
                raise ValueError(f"{type(self).__name__} is not differentiable, which a parameter group asks for")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, except that moments keep the dtype that this optimizer gives them.

        torch would cast them to the parameter's dtype, which for 16-bit parameters loses most digits.
        """
        # The last hook sees what the others made of the dictionary.
        received: list[dict[str, Any]] = []
        hook = self.register_load_state_dict_pre_hook(lambda _, loaded: received.append(loaded))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in received[0]["param_groups"] for number in group["params"]]
        for parameter, number in zip(parameters, numbers):
            for key, value in received[0]["state"].get(number, {}).items():
                if key != STEP and isinstance(value, torch.Tensor) and value.is_floating_point():
                    self.state[parameter][key] = value.to(self._state_dtype(parameter), copy=True)

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, of whatever floating-point dtype that is.

        Args:
            closure: computes the loss anew; gradients are enabled in it.

        Returns:
            what ``closure`` returned, else None.

        Raises:
            RuntimeError: a parameter or gradient is not in host memory, sparse, or not real floating-point.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_flat(parameter, parameter.grad, self.state[parameter], group)
        return loss

    @torch.no_grad()
    def step_flat(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        low_precision: torch.Tensor | None = None,
        grad_scale: float = 1.0,
    ) -> None:
        """One step of one tensor, in one pass: scale the gradient, update, write the low-precision weights.

        Other threads may run meanwhile, also in another ``step_flat``, if it is of other tensors.

        Args:
            master: updated in place.
            gradient: of the same shape; left as it is.
            state: the optimizer's state of ``master``; filled in the first step.
            group: the parameter group that says learning rate and so on.
            low_precision: of the same shape; receives the new values, rounded to nearest.
            grad_scale: by which the gradient is multiplied, such as a clipping factor.

        Each tensor may be fp32, bf16 or fp16, whatever the others are. Where they do not all have their elements in the
        same order without gaps, the kernel works on copies.

        Raises:
            RuntimeError: a tensor is not in host memory, sparse, or not real floating-point.
            ValueError: shapes differ.
        """
        self._check(master, gradient, low_precision)
        self._make_state(master, state, group)
        state[STEP] += 1
        scale = -grad_scale if group.get("maximize") else grad_scale
        states = [state[name] for name in self._state_names(group)]
        update = TensorUpdate(master, gradient, states, state[STEP], low_precision)
        numbers = self._numbers(group, scale)
        native = self._native_for(update)
        if native is None:
            self._run_torch(update, numbers, group)
        elif master.numel():
            self._run_native(native, update, numbers, group)

    def _check(self, master: torch.Tensor, gradient: torch.Tensor, low_precision: torch.Tensor | None) -> None:
        name = type(self).__name__
        tensors = {"parameter": master, "gradient": gradient}
        if low_precision is not None:
            tensors["low-precision weight"] = low_precision
        for what, tensor in tensors.items():
            if tensor.device.type != "cpu":
                raise RuntimeError(
                    f"{name} updates tensors in host memory, and a {what} is on {tensor.device}: offload the "
                    "optimizer, or use one that runs there"
                )
            if tensor.layout != torch.strided:
                raise RuntimeError(f"{name} does not take sparse tensors, and a {what} is {tensor.layout}")
            if not tensor.is_floating_point():
                raise RuntimeError(f"{name} updates real floating-point tensors, and a {what} is {tensor.dtype}")
            if tensor.shape != master.shape:
                raise ValueError(
                    f"{name}: a {what} has shape {tuple(tensor.shape)} and its parameter {tuple(master.shape)}"
                )

    def _state_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        if self.fp32_optimizer_states:
            return torch.promote_types(parameter.dtype, torch.float32)
        return parameter.dtype

    def _make_state(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if STEP not in state:
            state[STEP] = torch.zeros((), dtype=torch.float32)
        elif not isinstance(state[STEP], torch.Tensor):  # of an optimizer that counts in a number
            state[STEP] = torch.tensor(float(state[STEP]))
        for name in self._state_names(group):
            if name not in state:
                state[name] = torch.full_like(
                    parameter,
                    self._initial_value(name, group),
                    dtype=self._state_dtype(parameter),
                    memory_format=torch.preserve_format,
                    requires_grad=False,
                )

    def _native_for(self, update: TensorUpdate) -> ModuleType | None:
        if not all(tensor.dtype in TYPE_NUMBERS for tensor in update.tensors()):
            return None
        return _native(self.BUILDER)

    # ------------------------------------------------------------------ what the kinds differ in

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the entries that have the parameter's size, in the order of the kernel."""
        raise NotImplementedError

    def _initial_value(self, name: str, group: dict[str, Any]) -> float:
        return 0.0

    def _numbers(self, group: dict[str, Any], grad_scale: float) -> StepNumbers:
        return StepNumbers(
            lr=float(group["lr"]),
            betas=tuple(group.get("betas", (0.0, 0.0))),
            eps=group.get("eps", 0.0),
            weight_decay=group["weight_decay"],
            bias_correction=bool(group.get("bias_correction", True)),
            grad_scale=grad_scale,
        )

    def _run_torch(self, update: TensorUpdate, numbers: StepNumbers, group: dict[str, Any]) -> None:
        """The step in torch operations, for any floating-point dtype and memory layout."""
        raise NotImplementedError

    def _run_native(
        self, native: ModuleType, update: TensorUpdate, numbers: StepNumbers, group: dict[str, Any]
    ) -> None:
        """The same by the kernel."""
        raise NotImplementedError


@functools.cache
def _native(builder_name: str) -> ModuleType | None:
    """The kernel of a builder of ``deepspeed.ops.op_builder``; None where it cannot be had, after one warning."""
    from deepspeed.ops import op_builder

    return getattr(op_builder, builder_name)().load_or_none()


def run_kernel(native: ModuleType, operands: Sequence[torch.Tensor | None], values: Sequence[float]) -> None:
    """Calls a kernel of ``csrc`` over tensors of one shape, in host memory.

    Args:
        native: the op's module.
        operands: in the order of the kernel, the gradient second; None for one that is not there.
        values: numbers, in the order of the kernel.
    """
    flat, copied_back = _in_one_order(operands)
    tensors = [
        number
        for tensor in flat
        for number in ((0, 0) if tensor is None else (tensor.data_ptr(), TYPE_NUMBERS[tensor.dtype]))
    ]
    level = _level(native.levels())
    native.update(tuple(tensors), flat[0].numel(), tuple(map(float, values)), level, torch.get_num_threads())
    for tensor, copy in copied_back:
        tensor.copy_(copy)


def _in_one_order(
    operands: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor | None], list[tuple[torch.Tensor, torch.Tensor]]]:
    """The operands with their elements in the same order in memory and nothing between them.

    Returns:
        the operands, some of them as copies; and the pairs of those that are written to with their copies.
    """
    present = [tensor for tensor in operands if tensor is not None]
    if all(tensor.is_contiguous() for tensor in present):
        return list(operands), []
    first = present[0]
    order = sorted(range(first.dim()), key=first.stride, reverse=True)  # of the largest, where memory is without gaps
    if all(tensor.permute(order).is_contiguous() for tensor in present):
        return list(operands), []
    flat = [None if tensor is None else tensor.contiguous() for tensor in operands]
    copies = [
        (tensor, copy)
        for index, (tensor, copy) in enumerate(zip(operands, flat))
        if tensor is not copy and index != 1 and tensor is not None
    ]
    return flat, copies


def _level(levels: tuple[str, ...]) -> int:
    """Which of the instruction sets is used: the widest, or what ``DS_CPU_SIMD`` names.

    Raises:
        ValueError: this processor or build does not have the one that is named.
    """
    named = os.environ.get(LEVEL_VARIABLE)
    if not named:
        return 0
    if named not in levels:
        raise ValueError(f"{LEVEL_VARIABLE}={named!r}: this processor has {', '.join(levels)}")
    return levels.index(named)
