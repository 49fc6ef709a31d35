# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeedCPUAdam, DeepSpeedCPUAdagrad and DeepSpeedCPULion share: tensors in host memory, one pass for each."""

import os
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch

from deepspeed.ops.fused_kernels import TYPE_NUMBERS, StepNumbers, TensorUpdate
from deepspeed.ops.optimizer_arguments import run_closure

LEVEL_VARIABLE = "DS_CPU_SIMD"
STEP = "step"
_GRADIENT = 1  # among the operands of a kernel


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
        """As in torch, except that moments keep the dtype that this optimizer gives them, and are copies.

        torch would cast them to the parameter's dtype, which for 16-bit parameters loses most digits, and share what
        has it already.
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
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    dtype = torch.float32 if key == STEP else self._state_dtype(parameter)
                    self.state[parameter][key] = value.to(device=parameter.device, dtype=dtype, copy=True)

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
        loss = run_closure(closure)
        for group in self.param_groups:
            self._step_parameters([p for p in group["params"] if p.grad is not None], group)
        return loss

    def _step_parameters(self, parameters: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        """A step of those parameters of a group, which have gradients."""
        updates = [self._prepare(p, p.grad, self.state[p], group, None) for p in parameters]
        self._update(updates, group, 1.0)

    @torch.no_grad()
    def step_flat(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        low_precision: torch.Tensor | None = None,
        grad_scale: float | torch.Tensor = 1.0,
    ) -> None:
        """One step of one tensor, in one pass: scale the gradient, update, write the low-precision weights.

        Other threads may run meanwhile, also in another ``step_flat``, if it is of other tensors.

        Args:
            master: updated in place.
            gradient: of the same shape; left as it is.
            state: the optimizer's state of ``master``; filled in the first step.
            group: the parameter group that says learning rate and so on.
            low_precision: of the same shape; receives the new values, rounded to nearest.
            grad_scale: by which the gradient is multiplied, such as a clipping factor: a number, or a 0-dim tensor on
                any device, which is waited for.

        Each tensor may be fp32, bf16 or fp16, whatever the others are. Where they do not all have their elements in the
        same order without gaps, the kernel works on copies.

        Raises:
            RuntimeError: a tensor is not in host memory, sparse, or not real floating-point.
            ValueError: shapes differ.
        """
        self._update([self._prepare(master, gradient, state, group, low_precision)], group, float(grad_scale))

    def _prepare(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        low_precision: torch.Tensor | None,
    ) -> TensorUpdate:
        """Check the tensors, make the state that is missing, count the step."""
        self._check("parameter", master, master)
        self._check("gradient", gradient, master)
        if low_precision is not None:
            self._check("low-precision weight", low_precision, master)
        names = self._state_names(group)
        if STEP not in state or not all(name in state for name in names):
            self._make_state(master, state, group)
        elif not isinstance(state[STEP], torch.Tensor):  # of an optimizer that counts in a number
            state[STEP] = torch.tensor(float(state[STEP]))
        state[STEP] += 1
        return TensorUpdate(master, gradient, [state[name] for name in names], state[STEP], low_precision)

    def _update(self, updates: Sequence[TensorUpdate], group: dict[str, Any], grad_scale: float) -> None:
        """Those with the same step in one call of the kernel; in torch what it does not know."""
        numbers = self._numbers(group, -grad_scale if group.get("maximize") else grad_scale)
        by_step: dict[float, list[TensorUpdate]] = {}
        for update in updates:
            by_step.setdefault(float(update.step), []).append(update)
        for alike in by_step.values():
            native = _native(self.BUILDER) if all(map(_has_known_types, alike)) else None
            if native is None:
                for update in alike:
                    self._run_torch(update, numbers, group)
            else:
                operands = [self._operands(update) for update in alike]
                run_kernel(native, operands, self._values(alike[0], numbers, group))

    def _check(self, what: str, tensor: torch.Tensor, master: torch.Tensor) -> None:
        name = type(self).__name__
        if not tensor.is_cpu:
            raise RuntimeError(
                f"{name} updates tensors in host memory, and a {what} is on {tensor.device}: offload the "
                "optimizer, or use one that runs there"
            )
        if tensor.layout != torch.strided:
            raise RuntimeError(f"{name} does not take sparse tensors, and a {what} is {tensor.layout}")
        if not tensor.is_floating_point():
            raise RuntimeError(f"{name} updates real floating-point tensors, and a {what} is {tensor.dtype}")
        if tensor.shape != master.shape:
            raise ValueError(f"{name}: a {what} has shape {tuple(tensor.shape)}, its parameter {tuple(master.shape)}")

    def _state_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        if self.fp32_optimizer_states:
            return torch.promote_types(parameter.dtype, torch.float32)
        return parameter.dtype

    def _make_state(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if STEP not in state:
            state[STEP] = torch.zeros((), dtype=torch.float32)
        for name in self._state_names(group):
            if name not in state:
                state[name] = torch.full_like(
                    parameter,
                    self._initial_value(name, group),
                    dtype=self._state_dtype(parameter),
                    memory_format=torch.preserve_format,
                    requires_grad=False,
                )

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

    def _operands(self, update: TensorUpdate) -> list[torch.Tensor | None]:
        """The tensors of an update in the order of the kernel, the gradient second; None for one that is not there."""
        return [update.param, update.grad, *update.states, update.low]

    def _values(self, update: TensorUpdate, numbers: StepNumbers, group: dict[str, Any]) -> list[float]:
        """The numbers of a step, in the order of the kernel."""
        raise NotImplementedError


def _has_known_types(update: TensorUpdate) -> bool:
    return all(tensor.dtype in TYPE_NUMBERS for tensor in update.tensors())


def _native(builder_name: str) -> ModuleType | None:
    """The kernel of a builder of ``deepspeed.ops.op_builder``; None where it cannot be had, after one warning."""
    from deepspeed.ops import op_builder

    return getattr(op_builder, builder_name)().load_or_none()


def run_kernel(native: ModuleType, updates: Sequence[Sequence[torch.Tensor | None]], values: Sequence[float]) -> None:
    """Calls a kernel of ``csrc`` for several updates with the same numbers.

    Args:
        native: the op's module.
        updates: of each its operands: tensors of one shape, in host memory.
        values: numbers, in the order of the kernel.
    """
    copied_back: list[tuple[torch.Tensor, torch.Tensor]] = []
    kept: list[Any] = []  # copies, until the kernel has used them
    tensors: list[int] = []
    numels: list[int] = []
    for operands in updates:
        flat = _in_one_order(operands, copied_back)
        kept.append(flat)
        numels.append(flat[0].numel())
        for tensor in flat:
            tensors += (0, 0) if tensor is None else (tensor.data_ptr(), TYPE_NUMBERS[tensor.dtype])
    level = _level(native.levels())
    native.update(tuple(tensors), tuple(numels), tuple(map(float, values)), level, torch.get_num_threads())
    for tensor, copy in copied_back:
        tensor.copy_(copy)


def _in_one_order(
    operands: Sequence[torch.Tensor | None], copied_back: list[tuple[torch.Tensor, torch.Tensor]]
) -> Sequence[torch.Tensor | None]:
    """The operands with their elements in the same order in memory and nothing between them; as copies if need be.

    Args:
        copied_back: receives each tensor that must be written to, with its copy.
    """
    present = [tensor for tensor in operands if tensor is not None]
    if all(tensor.is_contiguous() for tensor in present):
        return operands
    first = present[0]
    order = sorted(range(first.dim()), key=first.stride, reverse=True)  # in which a tensor without gaps is contiguous
    if all(tensor.permute(order).is_contiguous() for tensor in present):
        return operands
    flat = [None if tensor is None else tensor.contiguous() for tensor in operands]
    for index, (tensor, copy) in enumerate(zip(operands, flat)):
        if tensor is not None and copy is not tensor and index != _GRADIENT:
            copied_back.append((tensor, copy))
    return flat


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
