# SPDX-License-Identifier: Apache-2.0
"""Shard layouts: who owns what of the reduced gradient, and how flat groups are cut into buckets.

A layout is static: it depends on the parameters, their order, the world size and the bucket size alone, so that every
rank computes the same one without talking to the others. The reducer asks nothing else about sharding.

=================  ==========================================  ===========================================
layout             one flat group is                           this rank keeps of the reduced gradient
=================  ==========================================  ===========================================
``Replicated``     (stage 0) a dtype of a parameter group      all of it
``FlatPartition``  (stages 1, 2) the same, padded to the world  one contiguous slice of ``1/world``
=================  ==========================================  ===========================================
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from deepspeed.runtime.gradients.ledger import ParameterRecord


class Collective(Enum):
    """How a bucket is reduced over the ranks."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"  # to the rank that owns the whole bucket
    REDUCE_SCATTER = "reduce_scatter"  # equal consecutive slices, one per rank


@dataclass
class Piece:
    """Elements ``[start, stop)`` of one parameter, at ``offset`` in the bucket's buffer."""

    record: ParameterRecord
    start: int
    stop: int
    offset: int

    @property
    def whole(self) -> bool:
        return self.stop - self.start == self.record.parameter.numel()


@dataclass
class BucketPlan:
    """The unit of communication: elements ``[start, stop)`` of one flat group.

    ``result`` is the range of the buffer that this rank keeps after the collective, None when it keeps nothing;
    ``shard_offset`` is where that range goes in this rank's shard of the group. ``gaps`` are ranges of the buffer
    that belong to no parameter (alignment, tail padding) and must read as zero.
    """

    group: int
    start: int
    stop: int
    collective: Collective
    owner: int = 0
    result: tuple[int, int] | None = None
    shard_offset: int = 0
    pieces: list[Piece] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass
class FlatGroup:
    """Parameters of one dtype of one optimizer parameter group, laid end to end.

    ``offsets[i]`` is the first element of ``records[i]``; ``numel`` ends after the last parameter, ``padded_numel``
    is what is communicated. ``shard_start`` and ``shard_numel`` say which part of it this rank owns.
    """

    index: int
    param_group: int
    dtype: torch.dtype
    device: torch.device
    records: list[ParameterRecord]
    offsets: list[int] = field(default_factory=list)
    numel: int = 0
    padded_numel: int = 0
    shard_start: int = 0
    shard_numel: int = 0

    @property
    def padding(self) -> int:
        """Padded elements at the tail of this rank's shard."""
        return min(self.shard_numel, max(0, self.shard_start + self.shard_numel - self.numel))

    def local_ranges(self) -> Iterator[tuple[int, ParameterRecord, int, int, int]]:
        """For each parameter with elements in this rank's shard: position in ``records``, record, first and
        last-plus-one element of the parameter, and where that range begins in the shard."""
        for position, (record, offset) in enumerate(zip(self.records, self.offsets)):
            begin = max(offset, self.shard_start)
            end = min(offset + record.parameter.numel(), self.shard_start + self.shard_numel)
            if begin < end:
                yield position, record, begin - offset, end - offset, begin - self.shard_start


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of master weights and accumulated gradients for weights of ``dtype``: fp32, or wider weights' own."""
    return torch.promote_types(dtype, torch.float32)


def make_flat_groups(record_groups: Sequence[Sequence[ParameterRecord]]) -> list[FlatGroup]:
    """Split each parameter group by dtype and device, in order of first appearance."""
    groups: list[FlatGroup] = []
    for param_group, records in enumerate(record_groups):
        by_kind: dict[tuple[torch.dtype, torch.device], FlatGroup] = {}
        for record in records:
            kind = (record.parameter.dtype, record.parameter.device)
            if kind not in by_kind:
                by_kind[kind] = FlatGroup(len(groups), param_group, kind[0], kind[1], [])
                groups.append(by_kind[kind])
            by_kind[kind].records.append(record)
    return groups


def records_in_model_order(groups: Sequence[FlatGroup]) -> list[ParameterRecord]:
    """All records of the groups, by index: the order of the ledger."""
    return sorted((record for group in groups for record in group.records), key=lambda record: record.index)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def round_robin(records: Sequence[ParameterRecord], world_size: int) -> list[ParameterRecord]:
    """Deal the records out like cards: those a rank owns come from all over the model, so that ranks finish
    together."""
    return [record for rank in range(world_size) for record in records[rank::world_size]]


class ShardLayout:
    """Flat groups and buckets of one model for one rank."""

    replicated = False

    def __init__(self, groups: list[FlatGroup], rank: int, world_size: int) -> None:
        self.groups = groups
        self.rank = rank
        self.world_size = world_size
        self.buckets: list[BucketPlan] = []

    def _set_buckets(self, buckets: list[BucketPlan]) -> None:
        """Fill in the pieces and fix the order: buckets whose parameters come late in the model are ready first."""
        for bucket in buckets:
            _fill_bucket(bucket, self.groups[bucket.group])

        def first_parameter(bucket: BucketPlan) -> int:
            return min((piece.record.index for piece in bucket.pieces), default=-1)

        self.buckets = sorted(buckets, key=lambda b: (-first_parameter(b), b.group, -b.start))
        pieces: dict[ParameterRecord, int] = {}
        for bucket in self.buckets:
            for piece in bucket.pieces:
                pieces[piece.record] = pieces.get(piece.record, 0) + 1
        for record, count in pieces.items():
            record.pieces = count


class Replicated(ShardLayout):
    """Stage 0: every rank keeps the whole reduced gradient."""

    replicated = True

    def __init__(self, groups: list[FlatGroup], rank: int, world_size: int, bucket_size: int) -> None:
        super().__init__(groups, rank, world_size)
        for group in groups:
            _place(group, alignment=1, multiple=1)
            group.shard_start, group.shard_numel = 0, group.padded_numel
        self._set_buckets(
            [
                BucketPlan(
                    group.index, start, stop, Collective.ALL_REDUCE, result=(0, stop - start), shard_offset=start
                )
                for group in groups
                for start, stop in cut(0, group.padded_numel, bucket_size)
            ]
        )


class FlatPartition(ShardLayout):
    """Stages 1 and 2: each flat group is padded and cut into ``world_size`` equal contiguous slices, one per rank.

    Args:
        bucket_size: most elements in one bucket.
        reduce_scatter: reduce each bucket to its owners only; otherwise all-reduce it and keep the own part.
        alignment: each parameter begins at a multiple of so many elements (per dtype, from bytes).
        padding_multiple: a slice is a multiple of so many elements.
    """

    def __init__(
        self,
        groups: list[FlatGroup],
        rank: int,
        world_size: int,
        bucket_size: int,
        reduce_scatter: bool = True,
        aligned_bytes: int = 0,
        padding_multiple: int = 2,
    ) -> None:
        super().__init__(groups, rank, world_size)
        for group in groups:
            alignment = max(1, aligned_bytes // group.dtype.itemsize)
            _place(group, alignment, padding_multiple * world_size)
            group.shard_numel = group.padded_numel // world_size
            group.shard_start = rank * group.shard_numel
        cut_group = self._scatter_buckets if reduce_scatter else self._all_reduce_buckets
        self._set_buckets([bucket for group in groups for bucket in cut_group(group, bucket_size)])

    def _scatter_buckets(self, group: FlatGroup, bucket_size: int) -> Iterator[BucketPlan]:
        shard = group.shard_numel
        if group.padded_numel <= bucket_size:
            mine = (group.shard_start, group.shard_start + shard)
            yield BucketPlan(group.index, 0, group.padded_numel, Collective.REDUCE_SCATTER, result=mine)
            return
        for owner in range(self.world_size):
            for start, stop in cut(owner * shard, (owner + 1) * shard, bucket_size):
                bucket = BucketPlan(group.index, start, stop, Collective.REDUCE, owner=owner)
                if owner == self.rank:
                    bucket.result, bucket.shard_offset = (0, bucket.numel), start - group.shard_start
                yield bucket

    def _all_reduce_buckets(self, group: FlatGroup, bucket_size: int) -> Iterator[BucketPlan]:
        for start, stop in cut(0, group.padded_numel, bucket_size):
            bucket = BucketPlan(group.index, start, stop, Collective.ALL_REDUCE)
            begin, end = max(start, group.shard_start), min(stop, group.shard_start + group.shard_numel)
            if begin < end:
                bucket.result, bucket.shard_offset = (begin - start, end - start), begin - group.shard_start
            yield bucket


def cut(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of at most ``size`` elements that cover ``[start, stop)``."""
    for begin in range(start, stop, size):
        yield begin, min(begin + size, stop)


def _place(group: FlatGroup, alignment: int, multiple: int) -> None:
    """Give each parameter its offset and the group its sizes."""
    position = 0
    group.offsets = []
    for record in group.records:
        position = round_up(position, alignment)
        group.offsets.append(position)
        position += record.parameter.numel()
    group.numel = position
    group.padded_numel = round_up(position, multiple)


def _fill_bucket(bucket: BucketPlan, group: FlatGroup) -> None:
    """Find the pieces of parameters inside the bucket, and the gaps between them."""
    covered = bucket.start
    first = max(0, bisect_right(group.offsets, bucket.start) - 1)
    last = bisect_left(group.offsets, bucket.stop)
    for record, offset in zip(group.records[first:last], group.offsets[first:last]):
        begin, end = max(offset, bucket.start), min(offset + record.parameter.numel(), bucket.stop)
        if begin >= end:
            continue
        bucket.pieces.append(Piece(record, begin - offset, end - offset, begin - bucket.start))
        if begin > covered:
            bucket.gaps.append((covered - bucket.start, begin - bucket.start))
        covered = end
    if bucket.stop > covered:
        bucket.gaps.append((covered - bucket.start, bucket.stop - bucket.start))
