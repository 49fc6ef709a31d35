# SPDX-License-Identifier: Apache-2.0
"""Flat groups and bucket plans: everything covered exactly once, the same on every rank, for awkward sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from deepspeed.runtime.gradients import layout as layout_module
from deepspeed.runtime.gradients.layout import (
    BucketPlan,
    Collective,
    FlatPartition,
    PerParameter,
    Replicated,
    ShardLayout,
    cut,
    cut_groups,
    make_flat_groups,
    master_dtype,
    round_robin,
    round_up,
)
from deepspeed.runtime.gradients.ledger import ParameterRecord

WORLDS = [1, 2, 3, 4]


def records_of(sizes: Iterable[int], dtype: torch.dtype = torch.float32, first: int = 0) -> list[ParameterRecord]:
    return [
        ParameterRecord(nn.Parameter(torch.zeros(n, dtype=dtype)), f"p{i}", i) for i, n in enumerate(sizes, start=first)
    ]


def sizes_for(world: int) -> list[list[int]]:
    """Below, at and above the world size, odd primes, one only, many."""
    around = [n for n in (world - 1, world, world + 1, 1) if n > 0]
    return [[1], around, [2, 3, 5, 7, 11, 13], [31], [17] * world, [1] * (2 * world + 1)]


def layouts(
    world: int, sizes: list[int], make: Callable[..., ShardLayout], *args: object, **kwargs: object
) -> list[ShardLayout]:
    """The layout of every rank, each over parameters of its own, as in real life."""
    return [make(make_flat_groups([records_of(sizes)]), rank, world, *args, **kwargs) for rank in range(world)]


def check_pieces(layout: ShardLayout) -> None:
    """Pieces cover each parameter exactly once, pieces and gaps cover each bucket exactly once."""
    covered = {r: torch.zeros(r.parameter.numel(), dtype=int) for g in layout.groups for r in g.records}
    for group in layout.groups:
        in_group = torch.zeros(group.padded_numel, dtype=int)
        for bucket in layout.buckets:
            if bucket.group != group.index:
                continue
            in_group[bucket.start : bucket.stop] += 1
            in_bucket = torch.zeros(bucket.numel, dtype=int)
            for begin, end in bucket.gaps:
                assert begin < end
                in_bucket[begin:end] += 1
            for piece in bucket.pieces:
                assert piece.start < piece.stop
                in_bucket[piece.offset : piece.offset + piece.stop - piece.start] += 1
                covered[piece.record][piece.start : piece.stop] += 1
                position = group.records.index(piece.record)
                assert bucket.start + piece.offset == group.offsets[position] + piece.start
                assert piece.whole == (piece.stop - piece.start == piece.record.parameter.numel())
            assert bool((in_bucket == 1).all())
        assert bool((in_group == 1).all())
    assert all(bool((count == 1).all()) for count in covered.values())
    buckets = Counter(record for bucket in layout.buckets for record in {piece.record for piece in bucket.pieces})
    assert all(record.buckets == count for record, count in buckets.items())


def check_shards(ranks: list[ShardLayout]) -> None:
    """What ranks keep of the buckets covers each flat group exactly once; once per rank if replicated."""
    times = len(ranks) if ranks[0].replicated else 1
    for index, group in enumerate(ranks[0].groups):
        kept = torch.zeros(group.padded_numel, dtype=int)
        for layout in ranks:
            own = layout.groups[index]
            shard = torch.zeros(own.shard_numel, dtype=int)
            for bucket in layout.buckets:
                if bucket.group != index or bucket.result is None:
                    continue
                begin, end = bucket.result
                assert 0 <= begin < end <= bucket.numel
                kept[bucket.start + begin : bucket.start + end] += 1
                shard[bucket.shard_offset : bucket.shard_offset + end - begin] += 1
                assert bucket.start + begin == own.shard_start + bucket.shard_offset
            assert bool((shard == 1).all())
        assert bool((kept == times).all())


def order_of(layout: ShardLayout) -> list[tuple[int, int, int, Collective, int]]:
    return [(b.group, b.start, b.stop, b.collective, b.owner) for b in layout.buckets]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["replicated", "reduce_scatter", "all_reduce", "aligned"])
def test_every_bucket_size_covers_everything_once(world: int, kind: str) -> None:
    for sizes in sizes_for(world):
        total = round_up(sum(sizes), 2 * world)
        for bucket_size in [*range(1, 14), total // world, total - 1, total, total + 1, 10**9]:
            if kind == "replicated":
                ranks = layouts(world, sizes, Replicated, bucket_size)
            else:
                ranks = layouts(
                    world,
                    sizes,
                    FlatPartition,
                    bucket_size,
                    reduce_scatter=kind != "all_reduce",
                    aligned_bytes=16 if kind == "aligned" else 0,
                )
            for layout in ranks:
                check_pieces(layout)
                assert all(0 < b.numel <= max(bucket_size, 1) for b in layout.buckets)
                for group in layout.groups:
                    assert group.padded_numel >= group.numel
                    if kind == "aligned":
                        assert all(offset % 4 == 0 for offset in group.offsets)
                    if kind != "replicated":
                        assert group.padded_numel % (2 * world) == 0
                        assert group.padded_numel - group.numel < 2 * world
                        assert group.shard_numel * world == group.padded_numel
            assert len({tuple(order_of(layout)) for layout in ranks}) == 1, "the same order on every rank"
            check_shards(ranks)


def test_the_recorded_example_of_a_flat_layout() -> None:
    ranks = layouts(2, [66, 42, 42], FlatPartition, 10**9)
    for rank, layout in enumerate(ranks):
        (group,) = layout.groups
        assert (group.numel, group.padded_numel, group.shard_numel) == (150, 152, 76)
        assert group.offsets == [0, 66, 108]
        assert group.padding == (0, 2)[rank] and group.shard_start == 76 * rank
    first, second = ([(r.name, b, e, s) for _, r, b, e, s in layout.groups[0].local_ranges()] for layout in ranks)
    assert first == [("p0", 0, 66, 0), ("p1", 0, 10, 66)], "a parameter may straddle ranks"
    assert second == [("p1", 10, 42, 0), ("p2", 0, 42, 32)]


def test_a_shard_may_be_all_padding() -> None:
    ranks = layouts(4, [1], FlatPartition, 10**9)
    assert [layout.groups[0].padding for layout in ranks] == [1, 2, 2, 2]
    assert [list(layout.groups[0].local_ranges()) != [] for layout in ranks] == [True, False, False, False]
    check_shards(ranks)


@pytest.mark.parametrize("world", WORLDS)
def test_a_bucket_of_everything_is_scattered_and_smaller_ones_go_to_their_owner(world: int) -> None:
    (whole,) = layouts(world, [5, 7], FlatPartition, round_up(12, 2 * world))[0].buckets
    assert whole.collective is Collective.REDUCE_SCATTER
    for layout in layouts(world, [5, 7], FlatPartition, 3):
        shard = layout.groups[0].shard_numel
        for bucket in layout.buckets:
            assert bucket.collective is Collective.REDUCE
            assert bucket.owner == bucket.start // shard == (bucket.stop - 1) // shard, "one owner per bucket"
            assert (bucket.result is not None) == (bucket.owner == layout.rank)
    for layout in layouts(world, [5, 7], FlatPartition, 3, reduce_scatter=False):
        assert {bucket.collective for bucket in layout.buckets} == {Collective.ALL_REDUCE}


@pytest.mark.parametrize("world", [8, 33])
def test_small_slices_of_many_owners_travel_together(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most as many buckets as the group fills, however many owners; beyond, each owner's slice by itself."""
    numels, size = [40, 300, 7, 93], 150
    for few, kinds in ((100_000, {Collective.ALL_REDUCE}), (0, {Collective.REDUCE})):
        monkeypatch.setattr(layout_module, "FEW_ELEMENTS", few)
        ranks = layouts(world, numels, FlatPartition, size)
        assert {bucket.collective for bucket in ranks[0].buckets} == kinds
        if few:
            assert len(ranks[0].buckets) == -(-ranks[0].groups[0].padded_numel // size)
        else:
            assert len(ranks[0].buckets) >= world
        check_shards(ranks)
        for layout in ranks:
            check_pieces(layout)
    monkeypatch.setattr(layout_module, "FEW_ELEMENTS", 100_000)
    halves = layouts(2, numels, FlatPartition, 239)[0]
    assert {bucket.collective for bucket in halves.buckets} == {Collective.REDUCE}, "two slices do not fit in a bucket"


def test_late_parameters_come_first() -> None:
    for layout in (*layouts(2, [5, 3, 9, 4], Replicated, 4), *layouts(3, [5, 3, 9, 4], FlatPartition, 4)):
        filled = [b for b in layout.buckets if b.pieces]
        first = [min(piece.record.index for piece in bucket.pieces) for bucket in filled]
        assert first == sorted(first, reverse=True) and len(first) > 3


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 9, 13])
def test_round_robin_is_a_permutation(world: int, count: int) -> None:
    records = records_of([3] * count)
    dealt = round_robin(records, world)
    assert sorted(r.index for r in dealt) == list(range(count))
    assert round_robin(records, 1) == records
    if world > 1 and count > world:
        assert [r.index for r in dealt[:2]] == [0, world]


def test_groups_are_split_by_dtype_and_keep_their_parameter_group() -> None:
    mixed = records_of([3, 5], torch.float32) + records_of([4], torch.bfloat16, 2) + records_of([2], first=3)
    other = records_of([6], torch.bfloat16, 4)
    groups = make_flat_groups([mixed, [], other])
    assert [(g.index, g.param_group, g.dtype, [r.index for r in g.records]) for g in groups] == [
        (0, 0, torch.float32, [0, 1, 3]),
        (1, 0, torch.bfloat16, [2]),
        (2, 2, torch.bfloat16, [4]),
    ]
    for rank in range(3):
        layout = FlatPartition(make_flat_groups([mixed, [], other]), rank, 3, 4)
        check_pieces(layout)


def test_alignment_is_in_bytes() -> None:
    (layout,) = layouts(1, [3, 5, 1], FlatPartition, 10**9, aligned_bytes=16)
    assert layout.groups[0].offsets == [0, 4, 12]
    narrow = FlatPartition(make_flat_groups([records_of([3, 5, 1], torch.bfloat16)]), 0, 1, 10**9, aligned_bytes=16)
    assert narrow.groups[0].offsets == [0, 8, 16]


def test_no_parameters_no_buckets() -> None:
    assert FlatPartition([], 0, 2, 5).buckets == [] and Replicated([], 0, 2, 5).buckets == []


def test_small_arithmetic() -> None:
    assert [round_up(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert list(cut(2, 9, 3)) == [(2, 5), (5, 8), (8, 9)] and list(cut(3, 3, 5)) == []
    assert master_dtype(torch.bfloat16) is torch.float32 and master_dtype(torch.float64) is torch.float64
    assert BucketPlan(0, 3, 10, Collective.REDUCE).numel == 7


# ---------------------------------------------------------------------------------------------------- stage 3


def sizes_for_slices(world: int, bucket_size: int) -> list[list[int]]:
    """Around the world size, odd primes, larger than a bucket and exactly a bucket, alone and among small ones."""
    around = [n for n in (1, world - 1, world, world + 1) if n > 0]
    exact, larger = max(1, bucket_size), bucket_size * 2 + 3
    return [[1], around, [2, 3, 5, 7, 11, 13, 31], [exact], [larger], [2, exact, 3, larger, 1, larger, exact]]


def check_reduction(ranks: list[ShardLayout], sizes: list[int]) -> None:
    """Carry numbers through the plans as the reducer does: each rank's shard is its slices of the sum, zero in the
    padding."""
    world = len(ranks)
    generator = torch.Generator().manual_seed(sum(sizes))
    gradients = [[torch.randint(1, 1000, (n,), generator=generator) for n in sizes] for _ in ranks]
    shards = [[torch.full((g.shard_numel,), -1) for g in layout.groups] for layout in ranks]
    for number in range(len(ranks[0].buckets)):
        total = torch.zeros(ranks[0].buckets[number].numel, dtype=torch.int64)
        for rank, layout in enumerate(ranks):
            bucket = layout.buckets[number]
            buffer = torch.full((bucket.numel,), -(10**9))  # what nobody writes is noticed
            for piece in bucket.pieces:
                assert piece.start < piece.stop
                values = gradients[rank][piece.record.index][piece.start : piece.stop]
                buffer[piece.offset : piece.offset + len(values)] = values
            for begin, end in bucket.gaps:
                assert begin < end
                buffer[begin:end] = 0
            total += buffer
        for rank, layout in enumerate(ranks):
            bucket = layout.buckets[number]
            begin, end = bucket.result
            target = shards[rank][bucket.group][bucket.shard_offset : bucket.shard_offset + end - begin]
            assert bool((target == -1).all()), "two buckets go to one place in the shard"
            target.copy_(total[begin:end])
    for rank, layout in enumerate(ranks):
        for group in layout.groups:
            right = []
            for record in group.records:
                width = -(-record.numel // world)
                whole = torch.zeros(width * world, dtype=torch.int64)
                whole[: record.numel] = sum(one[record.index] for one in gradients)
                right.append(whole[rank * width : (rank + 1) * width])
            assert torch.equal(shards[rank][group.index], torch.cat(right))


def check_slices(ranks: list[ShardLayout]) -> None:
    """What ranks own of each parameter covers it once, and lies where the parameter's slice begins in the shard."""
    for index, group in enumerate(ranks[0].groups):
        covered = [torch.zeros(record.numel, dtype=int) for record in group.records]
        for layout in ranks:
            mine = layout.groups[index]
            assert mine.padded_numel == mine.shard_numel * len(ranks) and mine.offsets == group.offsets
            assert all(0 <= own.begin <= own.end <= r.numel for r, own in zip(mine.records, mine.own))
            for position, record, begin, end, place in mine.local_ranges():
                width = -(-record.numel // len(ranks))
                assert (begin, place) == (layout.rank * width, mine.offsets[position])
                covered[position][begin:end] += 1
        assert all(bool((count == 1).all()) for count in covered)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("reduce_scatter", [True, False])
def test_slices_of_each_parameter_are_reduced_to_their_owners(world: int, reduce_scatter: bool) -> None:
    for bucket_size in (1, 2, 3, 4, 7, 12, 13, 24, 10**9):
        for sizes in sizes_for_slices(world, min(bucket_size, 40)):
            ranks = layouts(world, sizes, PerParameter, bucket_size, reduce_scatter)
            check_reduction(ranks, sizes)
            check_slices(ranks)
            assert len({tuple(order_of(layout)) for layout in ranks}) == 1, "the same order on every rank"
            kind = Collective.REDUCE_SCATTER if reduce_scatter else Collective.ALL_REDUCE
            for layout in ranks:
                assert {bucket.collective for bucket in layout.buckets} == {kind}
                assert all(0 < bucket.numel <= max(bucket_size, world) for bucket in layout.buckets)
                buckets = Counter(record for bucket in layout.buckets for record in bucket.pieces_by_record())
                assert all(record.buckets == buckets[record] for record in layout.groups[0].records)
                assert all(
                    piece.whole == (piece.stop - piece.start == piece.record.numel)
                    for bucket in layout.buckets
                    for piece in bucket.pieces
                )


def test_the_recorded_example_of_slices() -> None:
    """Two ranks: 5 elements are padded to 6, so that rank 1 owns two of its three."""
    ranks = layouts(2, [5, 4, 1], PerParameter, 10**9)
    for rank, layout in enumerate(ranks):
        (group,), (bucket,) = layout.groups, layout.buckets
        assert (group.offsets, group.numel, group.padded_numel, group.shard_numel) == ([0, 3, 5], 10, 12, 6)
        assert bucket.result == (6 * rank, 6 * rank + 6) and bucket.gaps == [(8, 9), (11, 12)]
        assert [(p.record.index, p.start, p.stop, p.offset) for p in bucket.pieces] == [
            (0, 0, 3, 0), (1, 0, 2, 3), (2, 0, 1, 5), (0, 3, 5, 6), (1, 2, 4, 9),
        ]  # fmt: skip
    first, second = ([(r.name, b, e, s) for _, r, b, e, s in layout.groups[0].local_ranges()] for layout in ranks)
    assert first == [("p0", 0, 3, 0), ("p1", 0, 2, 3), ("p2", 0, 1, 5)]
    assert second == [("p0", 3, 5, 0), ("p1", 2, 4, 3)], "of the one element rank 1 has only padding"


def test_a_slice_that_fits_stays_whole_and_a_larger_one_is_cut_alone() -> None:
    (layout, _) = layouts(2, [4, 4, 20, 4], PerParameter, 8)  # slices of 2, 2, 10 and 2 elements, four in a bucket
    cuts = [sorted({piece.record.index for piece in bucket.pieces}) for bucket in layout.buckets]
    assert cuts == [[2], [2], [2, 3], [0, 1]]
    assert [bucket.numel for bucket in layout.buckets] == [8, 8, 8, 8]


@pytest.mark.parametrize("world", WORLDS)
def test_sub_groups_end_where_their_slices_reach_the_limit(world: int) -> None:
    sizes = [1, world, world + 1, 31, 2, 3, 17, 1]
    for limit in (1, 2, 5, 8, 10**12):
        made = []
        for rank in range(world):
            halves = [records_of(sizes[:3]), records_of(sizes[3:], first=3)]
            groups = cut_groups(make_flat_groups(halves), world, limit)
            assert [r.index for g in groups for r in g.records] == list(range(len(sizes))), "each once, in order"
            assert [g.index for g in groups] == list(range(len(groups)))
            assert [g.param_group for g in groups] == sorted(g.param_group for g in groups)
            assert all(len({r.index < 3 for r in g.records}) == 1 for g in groups), "never over two groups"
            for group in groups:
                widths = [-(-record.numel // world) for record in group.records]
                assert sum(widths[:-1]) < limit, "it would have ended before"
                last = group.records[-1].index in (2, len(sizes) - 1)
                assert last or sum(widths) >= limit
            made.append(PerParameter(groups, rank, world, 7))
        if limit == 1:
            assert len(made[0].groups) == len(sizes)
        if limit == 10**12:
            assert len(made[0].groups) == 2
        check_reduction(made, sizes)
        check_slices(made)


def test_sub_groups_keep_dtypes_apart() -> None:
    mixed = records_of([3, 5], torch.float32) + records_of([4, 9], torch.bfloat16, 2)
    groups = cut_groups(make_flat_groups([mixed]), 2, 3)
    assert [(g.index, g.dtype, [r.index for r in g.records]) for g in groups] == [
        (0, torch.float32, [0, 1]),
        (1, torch.bfloat16, [2, 3]),
    ]
    assert cut_groups([], 2, 3) == [] and PerParameter([], 0, 2, 5).buckets == []
