# SPDX-License-Identifier: Apache-2.0
"""What the optimizer is about to see of each parameter on this rank, for the gradient check.

Which elements of which parameter a shard's elements belong to is read off memory, not off the layout that the reducer
works with: element i of a shard is the gradient of what lies at place i of this rank's slice of the weights, since that
is where the updated masters are written. A parameter that is not there is not updated, whatever the layout says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.runtime.gradients.gradient_shard import GradientShard


@dataclass
class SteppedRange:
    """``gradient``, 1-D, is what this rank steps elements ``[begin, begin + numel)`` of a parameter with."""

    begin: int
    gradient: torch.Tensor


@dataclass
class Target:
    """Everything that this rank is about to step with: by parameter, and what belongs to none."""

    ranges: dict[torch.nn.Parameter, list[SteppedRange]]
    padding: list[torch.Tensor]


def stepped_by(optimizer: Any, shards: Sequence[GradientShard], parameters: Sequence[torch.nn.Parameter]) -> Target:
    """The gradients in ``shards`` by parameter.

    Args:
        optimizer: of the stage.
        shards: one per flat group, as its reducer returned them.
        parameters: those to look for; others in the same memory are taken for padding only where no optimizer has them.
    """
    if optimizer.reducer.layout.replicated:
        views = dict(optimizer._gradient_views())
        found = {record.parameter: [SteppedRange(0, view.reshape(-1))] for record, view in views.items()}
        return Target(found, [])
    return _partitioned(optimizer, shards, parameters)


@dataclass
class _Placed:
    """A run of elements of a parameter, from ``first``, at ``place`` elements into some memory."""

    parameter: torch.nn.Parameter
    place: int
    first: int
    numel: int


def _partitioned(optimizer: Any, shards: Sequence[GradientShard], parameters: Sequence[torch.nn.Parameter]) -> Target:
    world_rank = optimizer.reducer.channel.rank
    by_memory: dict[int, list[_Placed]] = {}
    for parameter in parameters:
        memory, placed = _place_of(parameter, world_rank)
        by_memory.setdefault(memory, []).append(placed)
    target = Target({}, [])
    for index, shard in enumerate(shards):
        own = optimizer.weights.own_slice(index)
        if own.numel() != shard.numel:  # the weights are elsewhere (in files): only the layout knows
            _by_layout(optimizer.reducer.layout.groups[index], shard, target)
            continue
        begin = own.storage_offset()
        covered = 0
        placed_here = by_memory.get(own.untyped_storage().data_ptr(), [])
        for placed in sorted(placed_here, key=lambda item: item.place):
            start = max(placed.place, begin)
            stop = min(placed.place + placed.numel, begin + own.numel())
            if start >= stop:
                continue
            gradient = shard.narrow(0, start - begin, stop - start)
            found = SteppedRange(placed.first + start - placed.place, gradient)
            target.ranges.setdefault(placed.parameter, []).append(found)
            if start - begin > covered:
                target.padding += [values for values, _, _ in shard.pieces(covered, start - begin)]
            covered = max(covered, stop - begin)
        if covered < shard.numel:
            target.padding += [values for values, _, _ in shard.pieces(covered, shard.numel)]
    return target


def _by_layout(group: Any, shard: GradientShard, target: Target) -> None:
    for _, record, first, last, start in group.local_ranges():
        found = SteppedRange(first, shard.narrow(0, start, last - first))
        target.ranges.setdefault(record.parameter, []).append(found)


def _place_of(parameter: torch.nn.Parameter, rank: int) -> tuple[int, _Placed]:
    """Memory and place of this rank's elements: of the shard of a partitioned parameter, else of the parameter."""
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None:
        data = parameter.data
        placed = _Placed(parameter, data.storage_offset(), 0, data.numel())
        return data.untyped_storage().data_ptr(), placed
    first = min(rank * shard.numel(), parameter.ds_numel)
    numel = min(shard.numel(), parameter.ds_numel - first)
    return shard.untyped_storage().data_ptr(), _Placed(parameter, shard.storage_offset(), first, numel)
