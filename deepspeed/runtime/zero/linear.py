# SPDX-License-Identifier: Apache-2.0
"""A linear layer that keeps its parameters, and not copies or views of them, for the backward.

Under ZeRO-3 the data of a parameter is freed after the forward and gathered again, into new memory, for the backward.
Autograd's own linear saves the weight, or under autocast a copy in lower precision, together with what it found in it;
here the parameter itself is saved and looked into only when the gradient is computed.
"""

import math
from typing import Any

import torch
from torch import nn

from deepspeed.utils.logging import print_dist

_plain_linear = nn.functional.linear  # zero.Init puts zero3_linear_wrap in its place while it is open


def print_rank_0(message: str, debug: bool = False, force: bool = False) -> None:
    """Print ``message`` on rank 0, if ``debug`` or ``force``."""
    if debug or force:
        print_dist(message, ranks=[0])


class LinearFunctionForZeroStage3(torch.autograd.Function):
    """``input @ weight.T + bias``: input (..., in), weight (out, in) or (in,), bias broadcast over the output, or None.

    Under autocast the product is computed in autocast's dtype, and gradients come in the dtypes of the arguments. The
    weight is kept only if the input needs a gradient, the input only if the weight does. The backward is made of
    differentiable operations, so it can be differentiated again; ``torch.func.grad`` and ``vmap`` work.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        device = input.device.type
        if not torch.is_autocast_enabled(device):
            return _plain_linear(input, weight, bias)
        # Not left to autocast, which may keep the weight's copy until its context ends. No gradient passes through a
        # copy that is made here, where none are recorded, and other uses of the weight could be given it: versions of
        # torch differ in that.
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return _plain_linear(*(_in_autocast_dtype(each, dtype) for each in (input, weight, bias)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        input, weight, bias = inputs
        needs_input, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None)
        ctx.dtypes = [None if each is None else each.dtype for each in inputs]
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.weight_is_vector = weight.dim() == 1

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        grads: list[torch.Tensor | None] = [None, None, None]
        with torch.autocast(grad_output.device.type, enabled=False):
            rows = grad_output.unsqueeze(-1) if ctx.weight_is_vector else grad_output
            if needs_input:
                matrix = weight.conj().to(grad_output.dtype)
                grads[0] = rows * matrix if ctx.weight_is_vector else rows.matmul(matrix)
            if needs_weight:
                flat = rows.reshape(-1, rows.shape[-1])
                product = flat.t().matmul(input.conj().to(grad_output.dtype).reshape(-1, input.shape[-1]))
                grads[1] = product.squeeze(0) if ctx.weight_is_vector else product
            if needs_bias:
                grads[2] = grad_output.sum_to_size(ctx.bias_shape)
        return tuple(None if grad is None else grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes))


def _in_autocast_dtype(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """autocast's own rule: floating point except float64."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def zero3_linear_wrap(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear`` that keeps the weight itself for the backward; see LinearFunctionForZeroStage3."""
    return LinearFunctionForZeroStage3.apply(input, weight, bias)


class LinearModuleForZeroStage3(nn.Module):
    """``torch.nn.Linear`` over ``zero3_linear_wrap``: input (..., in_features), output (..., out_features)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(in_features), as ``torch.nn.Linear``."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return zero3_linear_wrap(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
