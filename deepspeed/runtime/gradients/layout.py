# SPDX-License-Identifier: Apache-2.0
"""Shard layouts: who owns what of the reduced gradient, and how flat groups are cut into buckets.

A layout is static: it depends on the parameters, their order, the world size and the bucket size alone, so that every
rank computes the same one without talking to the others. The reducer asks nothing else about sharding.

=================  ==========================================  ===========================================
layout             one flat group is                           this rank keeps of the reduced gradient
=================  ==========================================  ===========================================
``Replicated``     (stage 0) a dtype of a parameter group      all of it
``FlatPartition``  (stages 1, 2) the same, padded to the world  one contiguous slice of ``1/world``
``PerParameter``   (stage 3) the same, cut into sub-groups      ``1/world`` of each parameter, end to end
=================  ==========================================  ===========================================
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from deepspeed.runtime.gradients.ledger import Ledger, ParameterRecord

# Elements per rank below which a slice is so small that sending it to its owner costs more in hops, from rank to rank,
# than in bytes. Then several slices travel together to everybody: twice the bytes, but few times around all ranks. By
# the model of benchmarks/scaling_model.py.
FEW_ELEMENTS = 100_000


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
        return self.stop - self.start == self.record.numel


@dataclass
class BucketPlan:
    """The unit of communication: elements ``[start, stop)`` of one flat group.

    ``result`` is the range of the buffer that this rank keeps after the collective, None when it keeps nothing;
    ``shard_offset`` is where that range goes in this rank's shard of the group. ``gaps`` are ranges of the buffer
    that belong to no parameter (alignment, tail padding) and must read as zero. The buffer is ``rows`` equal rows, of
    which a parameter may have a piece in each.
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
    rows: int = 1

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def pieces_by_record(self) -> dict[ParameterRecord, list[Piece]]:
        """The pieces of each parameter, parameters in the order of their first piece."""
        pieces: dict[ParameterRecord, list[Piece]] = {}
        for piece in self.pieces:
            pieces.setdefault(piece.record, []).append(piece)
        return pieces

    def is_cut_evenly(self) -> bool:
        """Whether the rows are the slices of whole parameters side by side: each parameter padded at its end to a
        multiple of ``rows`` and cut in as many equal slices, with nothing between them."""
        width, column = self.numel // self.rows, 0
        for record, pieces in self.pieces_by_record().items():
            step = slice_numel(record.numel, self.rows)
            slices = [
                (begin, min(begin + step, record.numel), row * width + column)
                for row, begin in enumerate(range(0, record.numel, step))
            ]
            if [(piece.start, piece.stop, piece.offset) for piece in pieces] != slices:
                return False
            column += step
        return column == width


@dataclass(frozen=True)
class OwnRange:
    """Elements ``[begin, end)`` of a parameter, which this rank owns and keeps at ``shard_begin`` of its shard."""

    begin: int = 0
    end: int = 0
    shard_begin: int = 0


@dataclass
class FlatGroup:
    """Parameters of one dtype of one optimizer parameter group, laid end to end.

    ``offsets[i]`` is the first element of ``records[i]``; ``numel`` ends after the last parameter, ``padded_numel``
    is what is communicated. ``shard_start`` and ``shard_numel`` say which part of it this rank owns, and ``own[i]``
    which elements of ``records[i]`` that is. Where each parameter is partitioned alone, offsets are those in the shard.
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
    own: list[OwnRange] = field(default_factory=list)
    comm_dtype: torch.dtype | None = None  # in which gradients are communicated; None: dtype
    on_host: bool = False  # masters, optimizer state and the reduced gradient rest on the host

    @property
    def padding(self) -> int:
        """Padded elements at the tail of this rank's shard."""
        return min(self.shard_numel, max(0, self.shard_start + self.shard_numel - self.numel))

    def local_ranges(self) -> Iterator[tuple[int, ParameterRecord, int, int, int]]:
        """For each parameter with elements in this rank's shard: position in ``records``, record, first and
        last-plus-one element of the parameter, and where that range begins in the shard."""
        for position, (record, own) in enumerate(zip(self.records, self.own)):
            if own.begin < own.end:
                yield position, record, own.begin, own.end, own.shard_begin


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of master weights and accumulated gradients for weights of ``dtype``: fp32, or wider weights' own."""
    return torch.promote_types(dtype, torch.float32)


def make_flat_groups(record_groups: Sequence[Sequence[ParameterRecord]]) -> list[FlatGroup]:
    """Split each parameter group by dtype, device and dtype of communication, in order of first appearance."""
    groups: list[FlatGroup] = []
    for param_group, records in enumerate(record_groups):
        by_kind: dict[tuple[torch.dtype, torch.device, torch.dtype], FlatGroup] = {}
        for record in records:
            parameter = record.parameter
            kind = (parameter.dtype, parameter.device, record.comm_dtype)
            if kind not in by_kind:
                by_kind[kind] = FlatGroup(len(groups), param_group, kind[0], kind[1], [], comm_dtype=kind[2])
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

    @property
    def first_dtype(self) -> torch.dtype:
        """dtype of the first group, that of the model where it has one; float32 without any."""
        return self.groups[0].dtype if self.groups else torch.float32

    def make_ledger(self) -> Ledger:
        """A ledger of all parameters of the groups, in the order of the model."""
        return Ledger(records_in_model_order(self.groups), rank=self.rank)

    def _set_buckets(self, buckets: list[BucketPlan]) -> None:
        """Fix the order: buckets whose parameters come late in the model are ready first."""

        def first_parameter(bucket: BucketPlan) -> int:
            return min((piece.record.index for piece in bucket.pieces), default=-1)

        self.buckets = sorted(buckets, key=lambda b: (-first_parameter(b), b.group, -b.start))
        counts = Counter(record for bucket in self.buckets for record in bucket.pieces_by_record())
        for record, count in counts.items():
            record.buckets = count


class Replicated(ShardLayout):
    """Stage 0: every rank keeps the whole reduced gradient."""

    replicated = True

    def __init__(self, groups: list[FlatGroup], rank: int, world_size: int, bucket_size: int) -> None:
        super().__init__(groups, rank, world_size)
        for group in groups:
            _place(group, alignment=1, multiple=1)
            _own(group, 0, group.padded_numel)
        self._set_buckets(
            [
                _filled(
                    BucketPlan(
                        group.index, start, stop, Collective.ALL_REDUCE, result=(0, stop - start), shard_offset=start
                    ),
                    group,
                )
                for group in groups
                for start, stop in cut(0, group.padded_numel, bucket_size)
            ]
        )


class FlatPartition(ShardLayout):
    """Stages 1 and 2: each flat group is padded and cut into ``world_size`` equal contiguous slices, one per rank.

    Args:
        bucket_size: most elements in one bucket.
        reduce_scatter: reduce each bucket to its owners only, unless owners are so many that each would need a bucket
            for a small slice; otherwise all-reduce it and keep the own part.
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
            shard_numel = group.padded_numel // world_size
            _own(group, rank * shard_numel, shard_numel)
        cut_group = self._scatter_buckets if reduce_scatter else self._all_reduce_buckets
        self._set_buckets([_filled(bucket, group) for group in groups for bucket in cut_group(group, bucket_size)])

    def _scatter_buckets(self, group: FlatGroup, bucket_size: int) -> Iterator[BucketPlan]:
        shard = group.shard_numel
        if group.padded_numel <= bucket_size:
            mine = (group.shard_start, group.shard_start + shard)
            yield BucketPlan(group.index, 0, group.padded_numel, Collective.REDUCE_SCATTER, result=mine)
            return
        if 2 * shard <= bucket_size and shard < FEW_ELEMENTS * self.world_size:
            yield from self._all_reduce_buckets(group, bucket_size)
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


class PerParameter(ShardLayout):
    """Stage 3: each parameter alone is padded to a multiple of ``world_size`` and cut into equal slices, one per rank.

    A rank's shard of a group is its slices end to end. A bucket covers the same range of every rank's shard and lies in
    the buffer as one row per rank, so that a reduce-scatter gives each rank its row. A parameter larger than a bucket
    is cut within its slices.

    Args:
        bucket_size: most elements in one bucket.
        reduce_scatter: reduce each row to its owner only; otherwise all-reduce the bucket and keep the own row.
    """

    def __init__(
        self, groups: list[FlatGroup], rank: int, world_size: int, bucket_size: int, reduce_scatter: bool = True
    ) -> None:
        super().__init__(groups, rank, world_size)
        self._collective = Collective.REDUCE_SCATTER if reduce_scatter else Collective.ALL_REDUCE
        for group in groups:
            self._place_slices(group)
        width = max(1, bucket_size // world_size)
        self._set_buckets(
            [self._bucket(group, start, stop) for group in groups for start, stop in self._cuts(group, width)]
        )

    def _place_slices(self, group: FlatGroup) -> None:
        position = 0
        group.offsets, group.own = [], []
        for record in group.records:
            numel = slice_numel(record.numel, self.world_size)
            begin = min(self.rank * numel, record.numel)
            group.offsets.append(position)
            group.own.append(OwnRange(begin, min(begin + numel, record.numel), position))
            position += numel
        group.numel = sum(record.numel for record in group.records)
        group.shard_numel = position
        group.shard_start = self.rank * position
        group.padded_numel = self.world_size * position

    def _cuts(self, group: FlatGroup, width: int) -> Iterator[tuple[int, int]]:
        """Ranges of the shard for one bucket each: whole slices while they fit, a large slice in parts."""
        start = stop = 0
        for record in group.records:
            numel = slice_numel(record.numel, self.world_size)
            if stop > start and stop + numel - start > width:
                yield start, stop
                start = stop
            stop += numel
            while stop - start > width:
                yield start, start + width
                start += width
        if stop > start:
            yield start, stop

    def _bucket(self, group: FlatGroup, start: int, stop: int) -> BucketPlan:
        width = stop - start
        own = (self.rank * width, (self.rank + 1) * width)
        bucket = BucketPlan(group.index, 0, self.world_size * width, self._collective, result=own, shard_offset=start)
        bucket.rows = self.world_size
        covered = 0
        first = max(0, bisect_right(group.offsets, start) - 1)
        last = bisect_left(group.offsets, stop)
        for row in range(self.world_size):
            for record, offset in zip(group.records[first:last], group.offsets[first:last]):
                numel = slice_numel(record.numel, self.world_size)
                begin, end = max(offset, start), min(offset + numel, stop)
                # of the parameter: padding at the end of the last slices belongs to nobody
                element = row * numel + begin - offset
                end_element = min(row * numel + end - offset, record.numel)
                if element >= end_element:
                    continue
                place = row * width + begin - start
                if place > covered:
                    bucket.gaps.append((covered, place))
                bucket.pieces.append(Piece(record, element, end_element, place))
                covered = place + end_element - element
        if covered < bucket.numel:
            bucket.gaps.append((covered, bucket.numel))
        return bucket


def slice_numel(numel: int, world_size: int) -> int:
    """Elements of one rank's slice of a parameter that is partitioned alone."""
    return -(-numel // world_size)


def cut_groups(groups: Sequence[FlatGroup], world_size: int, slice_limit: int) -> list[FlatGroup]:
    """Sub-groups: each group is cut where its slices per rank reach ``slice_limit`` elements."""
    result: list[FlatGroup] = []
    for group in groups:
        records: list[ParameterRecord] = []
        held = 0
        for record in group.records:
            records.append(record)
            held += slice_numel(record.numel, world_size)
            if held >= slice_limit:
                result.append(replace(group, index=len(result), records=records))
                records, held = [], 0
        if records:
            result.append(replace(group, index=len(result), records=records))
    return result


def place_on_host(groups: Sequence[FlatGroup], world_size: int, share: float) -> list[FlatGroup]:
    """Let the first parameters of each group, up to ``share`` of its elements, rest on the host, as a group of their
    own; at least one parameter where ``share`` is not 0."""
    result: list[FlatGroup] = []
    for group in groups:
        wanted = share * sum(slice_numel(record.numel, world_size) for record in group.records)
        count, held = 0, 0
        while count < len(group.records) and held < wanted:
            held += slice_numel(group.records[count].numel, world_size)
            count += 1
        for records, on_host in ((group.records[:count], True), (group.records[count:], False)):
            if records:
                result.append(replace(group, index=len(result), records=records, on_host=on_host))
    return result


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
        position += record.numel
    group.numel = position
    group.padded_numel = round_up(position, multiple)


def _own(group: FlatGroup, start: int, numel: int) -> None:
    """Give this rank elements ``[start, start + numel)`` of the group."""
    group.shard_start, group.shard_numel = start, numel
    group.own = []
    for record, offset in zip(group.records, group.offsets):
        begin, end = max(offset, start), min(offset + record.numel, start + numel)
        group.own.append(OwnRange(begin - offset, end - offset, begin - start) if begin < end else OwnRange())


def _filled(bucket: BucketPlan, group: FlatGroup) -> BucketPlan:
    """Find the pieces of parameters inside the bucket, and the gaps between them."""
    covered = bucket.start
    first = max(0, bisect_right(group.offsets, bucket.start) - 1)
    last = bisect_left(group.offsets, bucket.stop)
    for record, offset in zip(group.records[first:last], group.offsets[first:last]):
        begin, end = max(offset, bucket.start), min(offset + record.numel, bucket.stop)
        if begin >= end:
            continue
        bucket.pieces.append(Piece(record, begin - offset, end - offset, begin - bucket.start))
        if begin > covered:
            bucket.gaps.append((covered - bucket.start, begin - bucket.start))
        covered = end
    if bucket.stop > covered:
        bucket.gaps.append((covered - bucket.start, bucket.stop - bucket.start))
    return bucket
