# SPDX-License-Identifier: Apache-2.0
"""Adam, Lion and LAMB in torch operations: what the native kernels compute, on any device and for any dtype.

Large tensors are walked in chunks, so that temporaries stay small. Arithmetic is in fp32, or in the parameter's dtype
if that is wider.
"""

import math
from collections.abc import Callable, Iterator

import torch

from deepspeed.ops.fused_kernels import StepNumbers, TensorUpdate

CHUNK = {"cpu": 2**18, "cuda": 2**26}  # elements; on a CPU what fits into its caches
OTHER_CHUNK = 2**22


def chunks(update: TensorUpdate) -> Iterator[TensorUpdate]:
    """The update in parts of bounded size; as a whole where its memory is not contiguous."""
    size = CHUNK.get(update.param.device.type, OTHER_CHUNK)
    tensors = update.tensors()
    if update.param.numel() <= size or not all(tensor.is_contiguous() for tensor in tensors):
        if update.param.numel():
            yield update
        return
    flat = TensorUpdate(
        update.param.view(-1),
        update.grad.view(-1),
        [state.view(-1) for state in update.states],
        update.step,
        None if update.low is None else update.low.view(-1),
    )
    for begin in range(0, update.param.numel(), size):
        yield flat.narrow(begin, min(size, update.param.numel() - begin))


class _Chunk:
    """The tensors of a chunk in the dtype of the arithmetic; ``store`` writes back what was changed in place."""

    def __init__(self, update: TensorUpdate, grad_scale: float | torch.Tensor) -> None:
        self.update = update
        self.dtype = torch.promote_types(update.param.dtype, torch.float32)
        self.param = update.param.to(self.dtype)
        self.states = [state.to(self.dtype) for state in update.states]
        self._grad_scale = grad_scale

    def gradient(self) -> torch.Tensor:
        """Scaled; the caller must not write to it."""
        grad, scale = self.update.grad.to(self.dtype), self._grad_scale
        if isinstance(scale, torch.Tensor):
            return grad * scale.to(device=grad.device, dtype=self.dtype)
        return grad if scale == 1.0 else grad * scale

    def store_states(self) -> None:
        for state, value in zip(self.update.states, self.states):
            if state is not value:
                state.copy_(value)

    def store_param(self) -> None:
        if self.update.param is not self.param:
            self.update.param.copy_(self.param)
        if self.update.low is not None:
            self.update.low.copy_(self.param)


def bias_corrections(
    step: torch.Tensor, betas: tuple[float, float], enabled: bool
) -> tuple[float | torch.Tensor, float | torch.Tensor]:
    """``1 - beta1^step`` and ``sqrt(1 - beta2^step)``; tensors where ``step`` is on a device."""
    if not enabled:
        return 1.0, 1.0
    if step.device.type == "cpu":
        count = float(step)
        return 1.0 - betas[0] ** count, math.sqrt(1.0 - betas[1] ** count)
    count = step.double()
    return 1.0 - torch.pow(betas[0], count), (1.0 - torch.pow(betas[1], count)).sqrt()


def _like(value: float | torch.Tensor, chunk: _Chunk) -> float | torch.Tensor:
    """A number for arithmetic with the chunk's tensors."""
    return value.to(device=chunk.param.device, dtype=chunk.dtype) if isinstance(value, torch.Tensor) else value


def adam(update: TensorUpdate, numbers: StepNumbers, decoupled: bool) -> None:
    """Adam (``decoupled`` False) or AdamW; with three states AMSGrad."""
    beta1, beta2 = numbers.betas
    first, second_root = bias_corrections(update.step, numbers.betas, numbers.bias_correction)
    step_size = numbers.lr / first
    for part in chunks(update):
        chunk = _Chunk(part, numbers.grad_scale)
        param, grad = chunk.param, chunk.gradient()
        if decoupled:
            param.mul_(_like(1.0 - numbers.lr * numbers.weight_decay, chunk))
        elif numbers.weight_decay:
            grad = grad + param * numbers.weight_decay
        exp_avg, exp_avg_sq, *largest = chunk.states
        exp_avg.lerp_(grad, 1.0 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        second = torch.maximum(largest[0], exp_avg_sq, out=largest[0]) if largest else exp_avg_sq
        denominator = second.sqrt().div_(_like(second_root, chunk)).add_(numbers.eps)
        param.sub_((exp_avg / denominator).mul_(_like(step_size, chunk)))
        chunk.store_states()
        chunk.store_param()


def lion(update: TensorUpdate, numbers: StepNumbers) -> None:
    """Lion with decoupled weight decay."""
    beta1, beta2 = numbers.betas
    for part in chunks(update):
        chunk = _Chunk(part, numbers.grad_scale)
        grad, (exp_avg,) = chunk.gradient(), chunk.states
        direction = torch.lerp(exp_avg, grad, 1.0 - beta1)
        # torch gives a NaN the sign 0: the weight would stand still from then on, unnoticed.
        direction = torch.where(direction.isnan(), direction, direction.sign())
        chunk.param.mul_(_like(1.0 - numbers.lr * numbers.weight_decay, chunk))
        chunk.param.sub_(direction.mul_(_like(numbers.lr, chunk)))
        exp_avg.lerp_(grad, 1.0 - beta2)
        chunk.store_states()
        chunk.store_param()


def _lamb_direction(
    numbers: StepNumbers, eps_inside_sqrt: bool, step: torch.Tensor
) -> Callable[[_Chunk], torch.Tensor]:
    first, second_root = bias_corrections(step, numbers.betas, numbers.bias_correction)

    def direction(chunk: _Chunk) -> torch.Tensor:
        exp_avg, exp_avg_sq = chunk.states
        corrected = exp_avg_sq / _like(second_root * second_root, chunk)
        denominator = (corrected + numbers.eps).sqrt_() if eps_inside_sqrt else corrected.sqrt_().add_(numbers.eps)
        result = (exp_avg / _like(first, chunk)).div_(denominator)
        return result.add_(chunk.param, alpha=numbers.weight_decay) if numbers.weight_decay else result

    return direction


def lamb_moments(update: TensorUpdate, numbers: StepNumbers, eps_inside_sqrt: bool) -> torch.Tensor:
    """First pass of LAMB: update the moments.

    Returns:
        sums of the squares of the parameter and of the update before the trust ratio, 1-D float64 of two elements.
    """
    beta1, beta2 = numbers.betas
    direction = _lamb_direction(numbers, eps_inside_sqrt, update.step)
    squares = torch.zeros(2, dtype=torch.float64, device=update.param.device)
    for part in chunks(update):
        chunk = _Chunk(part, numbers.grad_scale)
        grad, (exp_avg, exp_avg_sq) = chunk.gradient(), chunk.states
        exp_avg.lerp_(grad, 1.0 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        chunk.store_states()
        chunk = _Chunk(part, 1.0)  # the moments as they are kept, of which the second pass makes the update
        squares[0] += chunk.param.square().sum(dtype=torch.float64)
        squares[1] += direction(chunk).square_().sum(dtype=torch.float64)
    return squares


def lamb_apply(update: TensorUpdate, numbers: StepNumbers, eps_inside_sqrt: bool, ratio: torch.Tensor) -> None:
    """Second pass of LAMB: the update times the trust ratio, 0-dim."""
    direction = _lamb_direction(numbers, eps_inside_sqrt, update.step)
    for part in chunks(update):
        chunk = _Chunk(part, 1.0)
        chunk.param.sub_(direction(chunk).mul_(_like(numbers.lr * ratio, chunk)))
        chunk.store_param()
