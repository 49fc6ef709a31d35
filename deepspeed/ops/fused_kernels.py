# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of optimizers: compiled on first use, called with addresses of tensors."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

TYPE_NUMBERS = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
STATES = 3  # that a kernel takes at most


@dataclass
class TensorUpdate:
    """One tensor of a step.

    Args:
        param: what is updated.
        grad: of the same size.
        states: of the same size and dtype as ``param``.
        step: 0-dim count of steps, this one included; on the device of ``param`` if the step is capturable.
        low: of the same size; receives the new values, rounded.
    """

    param: torch.Tensor
    grad: torch.Tensor
    states: list[torch.Tensor]
    step: torch.Tensor | None = None
    low: torch.Tensor | None = None

    @property
    def types(self) -> tuple[torch.dtype, torch.dtype, torch.dtype | None]:
        return self.param.dtype, self.grad.dtype, None if self.low is None else self.low.dtype

    def tensors(self) -> list[torch.Tensor]:
        """All of them that have the parameter's size."""
        return [self.param, self.grad, *self.states, *([] if self.low is None else [self.low])]

    def narrow(self, offset: int, numel: int) -> "TensorUpdate":
        """The same of a part; all tensors are 1-D."""
        return self.part(offset, self.grad.narrow(0, offset, numel))

    def part(self, offset: int, grad: torch.Tensor) -> "TensorUpdate":
        """Of a part, from ``offset`` on, that has another gradient."""
        numel = grad.numel()
        return TensorUpdate(
            self.param.narrow(0, offset, numel),
            grad,
            [state.narrow(0, offset, numel) for state in self.states],
            self.step,
            None if self.low is None else self.low.narrow(0, offset, numel),
        )

    def in_parts(self, grads: Sequence[torch.Tensor]) -> list["TensorUpdate"]:
        """One for each of the tensors in which the gradient lies end to end."""
        if len(grads) == 1:
            return [self]
        offsets = itertools.accumulate((grad.numel() for grad in grads), initial=0)
        return [self.part(offset, grad) for offset, grad in zip(offsets, grads)]


@dataclass
class StepNumbers:
    """The numbers of a step. ``lr`` and ``grad_scale`` may be 0-dim tensors on the device, which the host never reads;
    the gradient is multiplied by ``grad_scale``."""

    lr: float | torch.Tensor
    betas: tuple[float, float]
    eps: float = 0.0
    weight_decay: float = 0.0
    bias_correction: bool = True
    grad_scale: float | torch.Tensor = 1.0


def kernels_can_run(update: TensorUpdate) -> bool:
    """Whether devices, dtypes and memory layout of the tensors are those that kernels are written for."""
    param, grad, low = update.types
    if param == torch.float32:
        fits = grad in TYPE_NUMBERS and (low is None or low in SIXTEEN_BITS)
    else:
        fits = param in SIXTEEN_BITS and grad in (param, torch.float32) and low is None
    if not fits or not update.param.is_cuda:
        return False
    device = update.param.get_device()
    return all(tensor.get_device() == device and tensor.is_contiguous() for tensor in update.tensors())


@functools.cache
def load_kernels(builder_name: str) -> ModuleType | None:
    """The compiled kernels of a builder of ``deepspeed.ops.op_builder``; None, with one warning, where they cannot be
    compiled."""
    from deepspeed.ops import op_builder

    return getattr(op_builder, builder_name)().load_or_none()


@dataclass
class KernelArguments:
    """What every kernel is called with, and what must stay alive until it is launched."""

    tensors: list[int]
    types: tuple[int, int, int]
    values: list[float]
    bias_correction: bool
    addresses: list[int]
    kept: list[Any] = field(default_factory=list)

    def positional(self) -> tuple[Any, ...]:
        """In the order of the bindings."""
        return self.tensors, *self.types, self.values, self.bias_correction, self.addresses


def kernel_arguments(updates: Sequence[TensorUpdate], numbers: StepNumbers, on_device: bool) -> KernelArguments:
    """Arguments for updates of one device, with the same dtypes and, unless ``on_device``, the same step.

    Args:
        on_device: steps and learning rate are read by the kernel.
    """
    first = updates[0]
    kept: list[Any] = []

    def address(value: float | torch.Tensor) -> tuple[float, int]:
        if not isinstance(value, torch.Tensor):
            return float(value), 0
        on_its_device = value.to(device=first.param.device, dtype=torch.float32)
        kept.append(on_its_device)
        return 1.0, on_its_device.data_ptr()

    lr, lr_address = address(numbers.lr if on_device else float(numbers.lr))
    scale, scale_address = address(numbers.grad_scale)
    step = 0.0 if on_device or first.step is None else float(first.step)
    tensors = [number for update in updates for number in _numbers_of(update, on_device)]
    values = [lr, *map(float, numbers.betas), float(numbers.eps), float(numbers.weight_decay), step, scale]
    stream = torch.cuda.current_stream(first.param.device).cuda_stream
    types = tuple(TYPE_NUMBERS[dtype] for dtype in first.types)
    return KernelArguments(tensors, types, values, numbers.bias_correction, [lr_address, scale_address, stream], kept)


def _numbers_of(update: TensorUpdate, on_device: bool) -> list[int]:
    states = [state.data_ptr() for state in update.states]
    return [
        update.param.data_ptr(),
        update.grad.data_ptr(),
        0 if update.low is None else update.low.data_ptr(),
        *states,
        *[0] * (STATES - len(states)),
        update.step.data_ptr() if on_device and update.step is not None else 0,
        update.param.numel(),
    ]
