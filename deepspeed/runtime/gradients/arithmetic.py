# SPDX-License-Identifier: Apache-2.0
"""Elementwise arithmetic between tensors of different dtypes that makes no large temporary.

On CPU, torch's mixed-dtype operators first cast a whole operand into fresh memory, and the page faults of that cost
more than the arithmetic. Here the cast goes through a small scratch that is kept.
"""

import threading
from collections.abc import Iterator, Sequence

import torch

from deepspeed.runtime.gradients.autograd_internals import add_each

CHUNK = 1 << 18  # elements: a scratch of one megabyte, few enough operator calls
NORM_ROW = 1 << 12  # elements summed in fp32; a longer sum of squares loses what is added late on CPU

_kept = threading.local()  # one set per thread: two threads may train two engines


def _scratch(index: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A kept 1-D tensor of ``numel`` elements, at most ``CHUNK``; different for each ``index``."""
    kept = _kept.__dict__.setdefault("tensors", {})
    key = (index, dtype, device)
    if key not in kept or kept[key].numel() < numel:
        kept[key] = torch.empty(max(numel, CHUNK), dtype=dtype, device=device)
    return kept[key][:numel]


@torch.no_grad()
def assign_scaled(target: torch.Tensor, source: torch.Tensor, scale: float) -> None:
    """``target = scale * source``, rounded once to ``target``'s dtype. Both 1-D of equal size."""
    if scale == 1.0:
        target.copy_(source)
        return
    if target.dtype == source.dtype:
        torch.mul(source, scale, out=target)
        return
    wide = torch.promote_types(target.dtype, source.dtype)  # float32 for the two 16-bit types
    if target.dtype == wide:
        target.copy_(source).mul_(scale)
        return
    for into, chunk, scratch in _chunks(target, source, wide):
        into.copy_(scratch.copy_(chunk).mul_(scale))


@torch.no_grad()
def add_scaled(target: torch.Tensor, source: torch.Tensor, scale: float) -> None:
    """``target += scale * source``, computed in ``target``'s dtype. Both 1-D of equal size."""
    if target.dtype == source.dtype or target.device.type != "cpu":
        target.add_(source, alpha=scale)
        return
    for into, chunk, scratch in _chunks(target, source, target.dtype):
        into.add_(scratch.copy_(chunk), alpha=scale)


@torch.no_grad()
def deliver(target: torch.Tensor, parts: Sequence[torch.Tensor], scale: float, add: bool) -> None:
    """``target = scale * sum(parts)``, or that added to ``target``. All 1-D of equal size, the parts of equal dtype.

    Parts are summed in order, in fp32 or wider, and the result is rounded once to ``target``'s dtype.
    """
    combine = add_scaled if add else assign_scaled
    if len(parts) == 1:
        combine(target, parts[0], scale)
        return
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    if not add and target.dtype == wide:
        target.copy_(parts[0])
        for part in parts[1:]:
            add_scaled(target, part, 1.0)
        if scale != 1.0:
            target.mul_(scale)
        return
    for begin in range(0, target.numel(), CHUNK):
        into = target[begin : begin + CHUNK]
        total = _scratch(1, into.numel(), wide, target.device)
        total.copy_(parts[0][begin : begin + CHUNK])
        for part in parts[1:]:
            add_scaled(total, part[begin : begin + CHUNK], 1.0)
        combine(into, total, scale)


def _chunks(
    target: torch.Tensor, source: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    for into, chunk in zip(target.split(CHUNK), source.split(CHUNK)):
        yield into, chunk, _scratch(0, into.numel(), dtype, target.device)


def add_scaled_each(targets: list[torch.Tensor], sources: list[torch.Tensor], scale: float) -> None:
    """``add_scaled`` for each pair of equal shapes; ``targets`` are contiguous."""
    small_targets, small_sources = [], []
    for target, source in zip(targets, sources):
        mixed = target.dtype != source.dtype and target.device.type == "cpu"
        if mixed and target.numel() > CHUNK:
            add_scaled(target.view(-1), source.reshape(-1), scale)
        else:
            small_targets.append(target)
            small_sources.append(source)
    add_each(small_targets, small_sources, scale)


@torch.no_grad()
def scale_each(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply each tensor by a number, or by a 0-dim tensor, in place."""
    if isinstance(factor, torch.Tensor) or factor != 1.0:
        for tensor in tensors:
            tensor.mul_(factor)


@torch.no_grad()
def sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of a 1-D contiguous tensor: 0-dim float64 on its device, without waiting for it.

    Rows of ``NORM_ROW`` are summed in fp32 (float64 for 64-bit tensors), rows in float64. Infinite where squares leave
    the range of fp32, too small where they fall below it; ``exact_sum_of_squares`` has no such limits.
    """
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    whole = tensor.numel() - tensor.numel() % NORM_ROW
    rows = torch.linalg.vector_norm(tensor[:whole].view(-1, NORM_ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(tensor[whole:], dtype=dtype)
    return rows.double().square().sum() + rest.double().square()


@torch.no_grad()
def exact_sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    """The same in float64 throughout, at several times the cost."""
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for chunk in tensor.split(CHUNK):
        wide = _scratch(2, chunk.numel(), torch.float64, tensor.device).copy_(chunk)
        total += wide.dot(wide)
    return total
