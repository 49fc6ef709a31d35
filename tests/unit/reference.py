# SPDX-License-Identifier: Apache-2.0
"""The float64 reference that gradient tests compare with: plain autograd, one process, every rank's data, no engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def reference_gradients(
    model: nn.Module | Callable[[], nn.Module],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches_per_rank: Sequence[Sequence[Any]],
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Mean over ranks and micro-steps of each parameter's gradient, computed in float64 on the CPU.

    Args:
        model: a module, which is copied and left as it is, or a function that makes one.
        loss_fn: called as ``loss_fn(model, batch)`` with the float64 copy and one batch; returns a scalar, or a list
            of scalars whose gradients add up.
        batches_per_rank: for each rank its list of one batch per micro-step. Floating tensors in tuples, lists and
            dicts are widened to float64 before use. Every rank needs the same number of micro-steps.
        dtype: dtype that the engine under test trains in. Parameters are rounded to it first, as the engine does, and
            then widened, so that the reference starts from the same numbers; None keeps the module's own.

    Returns:
        float64 tensors by the names of ``named_parameters()`` (a tied parameter once), for parameters that require a
        gradient. A parameter that no batch used has zeros.

    Raises:
        ValueError: there is no batch, or ranks differ in their number of micro-steps.
    """
    counts = {len(batches) for batches in batches_per_rank}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(f"every rank needs the same, non-zero number of micro-steps, got {sorted(counts)}")
    wide = widened_copy(model, dtype)
    for batches in batches_per_rank:
        for batch in batches:
            losses = loss_fn(wide, _widen(batch))
            # Gradients add up in .grad, in float64, over all batches of all ranks.
            torch.autograd.backward(losses if isinstance(losses, Tensor) else list(losses))
    contributions = len(batches_per_rank) * counts.pop()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / contributions
        for name, parameter in wide.named_parameters()
        if parameter.requires_grad
    }


def widened_copy(model: nn.Module | Callable[[], nn.Module], dtype: torch.dtype | None = None) -> nn.Module:
    """A float64 copy on the CPU of the module, its values rounded to ``dtype`` first; no gradients are copied."""
    copied = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
    copied.zero_grad(set_to_none=True)
    if dtype is not None:
        copied.to(dtype)
    return copied.to(device="cpu", dtype=torch.float64)


def _widen(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        batch = batch.detach().cpu()
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: _widen(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_widen(value) for value in batch)
    return batch


def max_relative_error(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], zero_tolerance: float = 0.0
) -> tuple[str, float]:
    """The worst parameter and its relative error ``||actual - expected|| / ||expected||``, in float64.

    A parameter whose expected value is exactly zero has error 0 if the largest magnitude in its actual value is at
    most ``zero_tolerance``, else infinity; so has one with a NaN or infinite value anywhere.

    Raises:
        ValueError: names or shapes differ, an actual value is None, nothing is compared, or every expected value is
            zero - in each of which a comparison would prove nothing.
    """
    if actual.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
        raise ValueError(f"not the same parameters: actual lacks {missing}, expected lacks {extra}")
    if not any(value.numel() for value in expected.values()):
        raise ValueError("no element to compare")
    if not any(bool(value.count_nonzero()) for value in expected.values()):
        raise ValueError("the reference of every parameter is zero: the comparison would prove nothing")
    errors = {name: _relative_error(name, actual[name], expected[name], zero_tolerance) for name in expected}
    worst = max(errors, key=lambda name: errors[name])
    return worst, errors[worst]


def _relative_error(name: str, actual: Tensor, expected: Tensor, zero_tolerance: float) -> float:
    if actual is None:
        raise ValueError(f"{name}: there is no actual value (None)")
    if actual.shape != expected.shape:
        raise ValueError(f"{name}: actual shape {tuple(actual.shape)}, expected shape {tuple(expected.shape)}")
    wide, reference = actual.detach().cpu().double(), expected.detach().cpu().double()
    if not bool(torch.isfinite(wide).all()) or not bool(torch.isfinite(reference).all()):
        return float("inf")
    scale = reference.norm().item()
    if scale == 0.0:
        largest = wide.abs().max().item() if wide.numel() else 0.0
        return 0.0 if largest <= zero_tolerance else float("inf")
    return (wide - reference).norm().item() / scale
