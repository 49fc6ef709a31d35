# SPDX-License-Identifier: Apache-2.0
"""Stateless collectives over one flat buffer. They know no parameter, and at world size 1 they are identities."""

from dataclasses import dataclass
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.runtime.gradients.layout import Collective

# On gloo a broadcast per owner is faster than its all-gather, a ring, while owners are few.
FEW_RANKS = 4


@dataclass(frozen=True)
class Reduction:
    """A reduction under way.

    ``work`` is awaited first; then ``parts`` are 1-D tensors whose sum is what this rank keeps, none where it keeps
    nothing.
    """

    work: Any
    parts: list[torch.Tensor]


def needs_scratch(collective: Collective, device: torch.device, group: object) -> bool:
    """Whether ``reduce_buffer`` wants a second buffer of the same size."""
    return collective is Collective.REDUCE_SCATTER and device.type == "cpu" and dist.get_world_size(group) > 1


def reduce_buffer(
    buffer: torch.Tensor,
    collective: Collective,
    owner: int,
    result: tuple[int, int] | None,
    group: object,
    scratch: torch.Tensor | None = None,
) -> Reduction:
    """Sum ``buffer`` over the ranks of ``group``, asynchronously.

    A reduce-scatter with ``scratch`` is an exchange of slices, which the receiver sums: gloo reduces to all ranks even
    where each needs only its slice, and in the dtype of the buffer; this moves half as much and can be summed in fp32.

    Args:
        buffer: 1-D, the same size and dtype on every rank. In use until the reduction has landed, and overwritten.
        collective: which ranks need the sum.
        owner: for ``REDUCE``, the rank within ``group`` that needs it.
        result: the range of the buffer that this rank keeps, None when it keeps nothing.
        scratch: as large as ``buffer``, where ``needs_scratch``; in use as long.
    """
    world_size = dist.get_world_size(group)
    own = [] if result is None else [buffer[result[0] : result[1]]]
    if world_size == 1:
        return Reduction(None, own)
    if collective is Collective.ALL_REDUCE:
        return Reduction(dist.all_reduce(buffer, group=group, async_op=True), own)
    if collective is Collective.REDUCE:
        root = dist.get_global_rank(group, owner)
        return Reduction(dist.reduce(buffer, dst=root, group=group, async_op=True), own)
    if scratch is not None:
        work = dist.all_to_all_single(scratch, buffer, group=group, async_op=True)
        return Reduction(work, list(scratch.chunk(world_size)))
    return Reduction(dist.reduce_scatter_tensor(own[0], buffer, group=group, async_op=True), own)


def all_gather_slices(flat: torch.Tensor, rank: int, group: object, bucket_numel: int) -> None:
    """Fill every rank's slice of ``flat`` from its owner.

    Args:
        flat: 1-D, ``world_size`` equal slices; the slice of ``rank`` is valid on entry, all are on return.
        bucket_numel: most elements gathered by one collective.
    """
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return
    if flat.device.type == "cpu" and world_size <= FEW_RANKS:
        broadcast_slices(flat, group)
        return
    slices = list(flat.chunk(world_size))
    if flat.numel() <= bucket_numel:
        dist.all_gather_into_tensor(flat, slices[rank], group=group)
        return
    step = max(1, bucket_numel // world_size)
    for begin in range(0, slices[0].numel(), step):
        parts = [part[begin : begin + step] for part in slices]
        dist.all_gather(parts, parts[rank], group=group)


def broadcast_slices(flat: torch.Tensor, group: object) -> None:
    """As ``all_gather_slices``, by one broadcast per owner, all under way at once."""
    for work in _start_broadcasts(flat, group):
        work.wait()


def _start_broadcasts(flat: torch.Tensor, group: object) -> list[Any]:
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return []
    return [
        dist.broadcast(part, src=dist.get_global_rank(group, owner), group=group, async_op=True)
        for owner, part in enumerate(flat.chunk(world_size))
    ]


def gather_rows(rows: torch.Tensor, rank: int, group: object, by_all_reduce: bool = False) -> list[Any]:
    """Fill every rank's slice of ``rows`` from its owner, asynchronously.

    Args:
        rows: 1-D, ``world_size`` equal slices; that of ``rank`` is valid on entry.
        by_all_reduce: by summing with zeros.

    Returns:
        what to wait for before all of ``rows`` is valid.
    """
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return []
    slices = list(rows.chunk(world_size))
    if by_all_reduce:
        for owner, part in enumerate(slices):
            if owner != rank:
                part.zero_()
        return [dist.all_reduce(rows, group=group, async_op=True)]
    if rows.device.type == "cpu" and world_size <= FEW_RANKS:
        return _start_broadcasts(rows, group)
    return [dist.all_gather_into_tensor(rows, slices[rank], group=group, async_op=True)]


def sum_over_ranks(value: torch.Tensor, group: object) -> torch.Tensor:
    """Sum a small tensor over the ranks, in place."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(value, group=group)
    return value
