# SPDX-License-Identifier: Apache-2.0
"""Stateless collectives over one flat buffer. They know no parameter, and at world size 1 they are identities."""

import torch

from deepspeed import comm as dist
from deepspeed.runtime.gradients.layout import Collective


def reduce_buffer(
    buffer: torch.Tensor, collective: Collective, owner: int, result: tuple[int, int] | None, group: object
) -> object | None:
    """Sum ``buffer`` over the ranks of ``group``, asynchronously.

    Args:
        buffer: 1-D, the same size and dtype on every rank. Overwritten: afterwards only the range ``result`` means
            anything.
        collective: which ranks need the sum.
        owner: for ``REDUCE``, the rank within ``group`` that needs it.
        result: for ``REDUCE_SCATTER``, the range of this rank.

    Returns:
        a work handle with ``wait()``, or None at world size 1.
    """
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return None
    if collective is Collective.ALL_REDUCE:
        return dist.all_reduce(buffer, group=group, async_op=True)
    if collective is Collective.REDUCE:
        return dist.reduce(buffer, dst=dist.get_global_rank(group, owner), group=group, async_op=True)
    begin, end = result
    if buffer.device.type == "cpu":
        # gloo's tensor form copies its whole input into fresh memory; the list form takes views
        slices = list(buffer.chunk(world_size))
        return dist.reduce_scatter(buffer[begin:end], slices, group=group, async_op=True)
    return dist.reduce_scatter_tensor(buffer[begin:end], buffer, group=group, async_op=True)


def all_gather_slices(flat: torch.Tensor, rank: int, group: object, bucket_numel: int) -> None:
    """Fill every rank's slice of ``flat`` from its owner.

    Args:
        flat: 1-D, ``world_size`` equal slices; the slice of ``rank`` is valid on entry, all are on return.
        bucket_numel: most elements gathered by one collective.
    """
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return
    slices: list[torch.Tensor] = list(flat.chunk(world_size))
    if flat.numel() <= bucket_numel:
        dist.all_gather_into_tensor(flat, slices[rank], group=group)
        return
    step = max(1, bucket_numel // world_size)
    for begin in range(0, slices[0].numel(), step):
        parts = [part[begin : begin + step] for part in slices]
        dist.all_gather(parts, parts[rank], group=group)


def broadcast_slices(flat: torch.Tensor, group: object) -> None:
    """As ``all_gather_slices``, by one broadcast per owner."""
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return
    for owner, part in enumerate(flat.chunk(world_size)):
        dist.broadcast(part, src=dist.get_global_rank(group, owner), group=group)


def sum_over_ranks(value: torch.Tensor, group: object) -> torch.Tensor:
    """Sum a small tensor over the ranks, in place."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(value, group=group)
    return value
