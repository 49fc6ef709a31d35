# SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads of one process, and collectives among them, for tests of what knows no process group.

``transport`` stands in for the module ``deepspeed.comm``; a *group* is a ``Member``, one per thread. What a collective
delivers is there after ``wait()`` and not before; ranks that issue different ones are found out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Combine = Callable[[list[Tensor]], Tensor]
PATIENCE = 20.0  # seconds


class RanksDiffer(AssertionError):
    """Ranks issued different collectives, or one of them never came."""


@dataclass
class _Meeting:
    """The n-th operation of one kind of traffic: what each rank brought."""

    brought: dict[int, Any] = field(default_factory=dict)
    kinds: dict[int, Any] = field(default_factory=dict)


class Hub:
    """Where the ranks of one group meet."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._changed = threading.Condition()
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        self._counts: dict[tuple[str, int], int] = {}

    def bring(self, traffic: str, rank: int, kind: Any, value: Any) -> int:
        """Take part in this rank's next operation; returns its number."""
        with self._changed:
            number = self._counts.get((traffic, rank), 0)
            self._counts[traffic, rank] = number + 1
            meeting = self._meetings.setdefault((traffic, number), _Meeting())
            meeting.brought[rank] = value
            meeting.kinds[rank] = kind
            self._changed.notify_all()
            return number

    def everyone(self, traffic: str, number: int) -> list[Any]:
        """What all ranks brought, by rank; waits for them."""
        with self._changed:
            meeting = self._meetings[traffic, number]
            if not self._changed.wait_for(lambda: len(meeting.brought) == self.world_size, PATIENCE):
                raise RanksDiffer(f"{traffic} {number}: only ranks {sorted(meeting.brought)} came, for {meeting.kinds}")
            if len(set(meeting.kinds.values())) > 1:
                raise RanksDiffer(f"{traffic} {number}: ranks issued {meeting.kinds}")
            return [meeting.brought[rank] for rank in range(self.world_size)]

    def counts(self, traffic: str) -> list[int]:
        """How many operations each rank has issued."""
        return [self._counts.get((traffic, rank), 0) for rank in range(self.world_size)]


@dataclass(eq=False)
class Member:
    """One rank of a hub: what is passed as process group, and the channel of its agreements."""

    hub: Hub
    rank: int

    @property
    def world_size(self) -> int:
        return self.hub.world_size

    def all_reduce_max(self, values: list[int], what: str) -> list[int]:
        number = self.hub.bring("agreement", self.rank, ("max", len(values)), list(values))
        return [max(column) for column in zip(*self.hub.everyone("agreement", number))]

    def gather(self, obj: object, what: str) -> list[object]:
        number = self.hub.bring("agreement", self.rank, "gather", obj)
        return self.hub.everyone("agreement", number)


class _Work:
    """A collective under way: ``target`` holds NaN until ``wait()`` puts in what ``combine`` makes of all inputs."""

    def __init__(
        self,
        member: Member,
        kind: Any,
        source: Tensor,
        targets: list[Tensor],
        combine: Callable[[list[Tensor]], Tensor],
    ) -> None:
        self._member = member
        self._number = member.hub.bring("collective", member.rank, kind, source.clone())
        self._targets = targets
        self._combine = combine
        self._done = False
        for target in targets:
            target.fill_(float("nan"))

    def wait(self, timeout: Any = None) -> bool:
        if not self._done:
            self._done = True
            result = self._combine(self._member.hub.everyone("collective", self._number))
            for target in self._targets:
                target.copy_(result)
        return True

    def is_completed(self) -> bool:
        return self._done


class Transport:
    """The functions of ``deepspeed.comm`` that reductions use, over ``Member`` groups."""

    @staticmethod
    def get_world_size(group: Member) -> int:
        return group.world_size

    @staticmethod
    def get_rank(group: Member) -> int:
        return group.rank

    @staticmethod
    def get_global_rank(group: Member, rank: int) -> int:
        return rank

    @staticmethod
    def all_reduce(buffer: Tensor, group: Member, async_op: bool = False) -> Any:
        return _finish(_Work(group, ("all_reduce", buffer.numel()), buffer, [buffer], sum_of), async_op)

    @staticmethod
    def reduce(buffer: Tensor, dst: int, group: Member, async_op: bool = False) -> Any:
        def combine(parts: list[Tensor]) -> Tensor:
            # what other ranks than the owner find in their buffer is not defined
            return sum_of(parts) if group.rank == dst else torch.full_like(buffer, float("nan"))

        return _finish(_Work(group, ("reduce", dst, buffer.numel()), buffer, [buffer], combine), async_op)

    @staticmethod
    def all_to_all_single(output: Tensor, buffer: Tensor, group: Member, async_op: bool = False) -> Any:
        def combine(parts: list[Tensor]) -> Tensor:
            return torch.cat([part.chunk(group.world_size)[group.rank] for part in parts])

        return _finish(_Work(group, ("all_to_all", buffer.numel()), buffer, [output], combine), async_op)

    @staticmethod
    def reduce_scatter_tensor(output: Tensor, buffer: Tensor, group: Member, async_op: bool = False) -> Any:
        def combine(parts: list[Tensor]) -> Tensor:
            return sum_of(parts).chunk(group.world_size)[group.rank]

        return _finish(_Work(group, ("reduce_scatter", buffer.numel()), buffer, [output], combine), async_op)


transport = Transport()


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


def _finish(work: _Work, async_op: bool) -> Any:
    if async_op:
        return work
    work.wait()
    return None
