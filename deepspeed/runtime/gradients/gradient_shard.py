# SPDX-License-Identifier: Apache-2.0
"""This rank's share of one flat group's reduced gradient, and the memory that it takes.

A share is cut into a few parts, none of them inside a parameter. Where memory of the device is what is scarce, a part
has none before the first result of a window lands in it, and none after the step: the gradient of the last layers fills
while the activations of the first ones are still there, and during forward there is no gradient at all.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

import torch

from deepspeed.runtime.gradients.host_memory import HostMemory
from deepspeed.runtime.gradients.layout import FlatGroup
from deepspeed.runtime.gradients.ledger import GradientAccountingError
from deepspeed.runtime.gradients.streams import HostOrder

PARTS = 16  # at most, about: what is allocated ahead of need is below a sixteenth
LEAST_PART = 1 << 22  # elements; a launch for less is not worth it
ALIGNMENT = 128  # elements: each part begins where the same place of masters and weights can be read by vectors


class Keeping(Enum):
    """How long memory is held, and in how many tensors."""

    ALWAYS = "always"  # one tensor from the first use on
    WINDOW = "window"  # one tensor, from the first result of a window to its end
    PARTS = "parts"  # a tensor for each part, from its first result to the end of the window


class GradientShard:
    """1-D, of ``numel`` elements and fp32 or wider, unless gradients are accumulated in bf16.

    Args:
        group: whose share it is.
        dtype: of the elements.
        allocate: makes a tensor of so many elements. What it holds is overwritten, but for ``Keeping.ALWAYS``, where
            it is zeros.
        keeping: how long memory is held.
    """

    def __init__(
        self,
        group: FlatGroup,
        dtype: torch.dtype,
        allocate: Callable[[int], torch.Tensor],
        keeping: Keeping = Keeping.ALWAYS,
    ) -> None:
        self.numel = group.shard_numel
        self.dtype = dtype
        self.keeping = keeping
        self._allocate = allocate
        self._ranges = cut_between_parameters(group)
        self._whole: torch.Tensor | None = None
        self._parts: list[torch.Tensor | None] = [None] * len(self._ranges)

    # ------------------------------------------------------------------ memory

    @property
    def held(self) -> bool:
        """Whether there is memory for all of it."""
        return self._whole is not None or all(part is not None for part in self._parts)

    def memory(self) -> list[torch.Tensor]:
        """The tensors that are held, each with memory of its own."""
        return [tensor for tensor in (self._whole, *self._parts) if tensor is not None]

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(tensor.nbytes for tensor in self.memory())

    def provide(self, begin: int, end: int) -> None:
        """Let there be memory for elements ``[begin, end)``, out of the current stream's pool; its content is
        arbitrary."""
        if self.keeping is Keeping.PARTS:
            for index, first, last in self._overlapping(begin, end):
                if self._parts[index] is None:
                    self._parts[index] = self._allocate(last - first)
        elif self._whole is None:
            self._whole = self._allocate(self.numel)

    def end_window(self, order: HostOrder) -> None:
        """The values are not needed any more, once the current stream has done what it was given."""
        if self.keeping is not Keeping.ALWAYS:
            order.hold_for_current(self.memory())
            self.release()

    def release(self) -> None:
        """Let go of all memory."""
        self._whole = None
        self._parts = [None] * len(self._ranges)

    # ------------------------------------------------------------------ values

    def tensors(self) -> list[torch.Tensor]:
        """The parts in order, all of which have memory once a window was reduced."""
        return [self._part(index) for index in range(len(self._ranges))]

    def pieces(self, begin: int, end: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Views of elements ``[begin, end)``, which have memory, each with its range counted from ``begin``."""
        for index, first, last in self._overlapping(begin, end):
            start, stop = max(begin, first), min(end, last)
            yield self._part(index)[start - first : stop - first], start - begin, stop - begin

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """As ``torch.Tensor.narrow`` with ``dim`` 0, for elements of one parameter, with the padding behind them.

        Raises:
            IndexError: they lie in several parts.
            GradientAccountingError: nothing was reduced into them in this window.
        """
        for index, first, last in self._overlapping(start, start + max(length, 1)):
            if first <= start and start + length <= last:
                return self._part(index).narrow(dim, start - first, length)
        raise IndexError(f"elements {start} to {start + length} of a gradient shard lie in several of {self._ranges}")

    def flat(self) -> torch.Tensor:
        """All values in one tensor: the memory itself where it is one, else a copy."""
        tensors = self.memory()
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _part(self, index: int) -> torch.Tensor:
        begin, end = self._ranges[index]
        if self._whole is not None:
            return self._whole[begin:end]
        part = self._parts[index]
        if part is None:
            raise GradientAccountingError(
                f"elements {begin} to {end} of a flat group's reduced gradient are asked for, but no collective has"
                " brought any of them in this window"
            )
        return part

    def _overlapping(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Index and range of each part with elements of ``[begin, end)``."""
        for index, (first, last) in enumerate(self._ranges):
            if first < end and begin < last:
                yield index, first, last


def make_shards(
    groups: Sequence[FlatGroup],
    dtype_of: Callable[[FlatGroup], torch.dtype],
    host_memory: HostMemory,
    keeping: Keeping,
) -> list[GradientShard]:
    """One for each group, without memory yet. Those that rest on the host keep what they got."""
    shards = []
    for group in groups:
        dtype = dtype_of(group)
        if group.on_host:
            allocate: Callable[[int], torch.Tensor] = functools.partial(host_memory.zeros, dtype=dtype)
        else:
            make = torch.zeros if keeping is Keeping.ALWAYS else torch.empty
            allocate = functools.partial(make, dtype=dtype, device=group.device)
        shards.append(GradientShard(group, dtype, allocate, Keeping.ALWAYS if group.on_host else keeping))
    return shards


def cut_between_parameters(group: FlatGroup) -> list[tuple[int, int]]:
    """Consecutive ranges that cover this rank's share of a group, at least one; none ends inside a parameter."""
    least = max(LEAST_PART, -(-group.shard_numel // PARTS))
    begin, ranges = 0, []
    for own in group.own:
        if own.begin < own.end and own.shard_begin - begin >= least and own.shard_begin % ALIGNMENT == 0:
            ranges.append((begin, own.shard_begin))
            begin = own.shard_begin
    return [*ranges, (begin, group.shard_numel)]


def shard_values(shards: Sequence[GradientShard]) -> list[torch.Tensor]:
    """The tensors of all of them."""
    return [tensor for shard in shards for tensor in shard.tensors()]
