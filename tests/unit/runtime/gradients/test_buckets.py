# SPDX-License-Identifier: Apache-2.0
"""Buckets filled, summed and landed without any process group: the sum over pretended ranks is formed in the test."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from deepspeed.runtime.gradients import autograd_internals as autograd
from deepspeed.runtime.gradients import buckets as buckets_module
from deepspeed.runtime.gradients import gradient_shard
from deepspeed.runtime.gradients.buckets import Bucket, BufferPool
from deepspeed.runtime.gradients.gradient_shard import GradientShard, Keeping
from deepspeed.runtime.gradients.layout import FlatPartition, PerParameter, Replicated, ShardLayout, make_flat_groups
from deepspeed.runtime.gradients.ledger import ParameterRecord
from deepspeed.runtime.gradients.streams import HostOrder

SHAPES = [(3, 5), (1,), (7,), (2, 2, 3)]
ORDER = HostOrder()


class Rank:
    """One pretended rank: records, layout, buckets and a shard."""

    def __init__(self, rank: int, world: int, kind: str, bucket_size: int, comm: torch.dtype, accum: torch.dtype):
        self.records = [
            ParameterRecord(nn.Parameter(torch.zeros(s, dtype=comm)), f"p{i}", i) for i, s in enumerate(SHAPES)
        ]
        groups = make_flat_groups([self.records])
        self.layout: ShardLayout = (
            Replicated(groups, rank, world, bucket_size)
            if kind == "replicated"
            else FlatPartition(groups, rank, world, bucket_size, kind == "scatter", 16, 2)
        )
        self.buckets = [Bucket(plan, i, comm, accum, torch.device("cpu")) for i, plan in enumerate(self.layout.buckets)]
        self.shard = GradientShard(
            groups[0], torch.float32, lambda numel: torch.full((numel,), float("nan")), Keeping.PARTS
        )
        self.total = [torch.zeros(s, dtype=torch.float64) for s in SHAPES]

    def fire(self, generator: torch.Generator, which: list[int], factor: float) -> None:
        for i in which:
            record = self.records[i]
            gradient = torch.randn(SHAPES[i], generator=generator).to(record.parameter.dtype)
            record.parameter.grad = gradient.clone()
            record.count()
            self.total[i] += factor * gradient.double()


def round_of(ranks: list[Rank], factor: float, before: float, after: float) -> None:
    """Send every bucket of every rank, sum, land."""
    for position in range(len(ranks[0].buckets)):
        buckets = [rank.buckets[position] for rank in ranks]
        sent = []
        for bucket in buckets:
            buffer = torch.full((bucket.plan.numel + 3,), float("nan"), dtype=bucket.comm_dtype)
            sent.append(bucket.fill(buffer, ORDER, factor, before).double())
            assert bool(buffer[bucket.plan.numel :].isnan().all()), "writes beyond the bucket"
        total = torch.stack(sent).sum(0)
        for rank, bucket in zip(ranks, buckets):
            summed, kept = total.to(bucket.comm_dtype), bucket.plan.result
            if kept is not None:
                offset = bucket.plan.shard_offset
                rank.shard.provide(offset, offset + kept[1] - kept[0])
            bucket.land([] if kept is None else [summed[kept[0] : kept[1]]], rank.shard, after)


def gathered(ranks: list[Rank]) -> list[torch.Tensor]:
    """The reduced gradient of each parameter, from all shards."""
    group = ranks[0].layout.groups[0]
    holders = ranks[:1] if ranks[0].layout.replicated else ranks
    flat = torch.cat([rank.shard.flat() for rank in holders]).double()
    assert not bool(flat.isnan().any()), "a shard element was never written, or padding is not zero"
    covered = torch.zeros_like(flat, dtype=torch.bool)
    result = []
    for record, offset in zip(group.records, group.offsets):
        numel = record.parameter.numel()
        covered[offset : offset + numel] = True
        result.append(flat[offset : offset + numel].view(record.parameter.shape))
    assert not bool(flat[~covered].count_nonzero()), "gaps and padding must read as zero"
    return result


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are cut wherever a parameter begins."""
    monkeypatch.setattr(gradient_shard, "LEAST_PART", 1)
    monkeypatch.setattr(gradient_shard, "ALIGNMENT", 1)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["replicated", "scatter", "all_reduce"])
def test_parked_sent_late_and_missing_contributions_all_arrive_once(world: int, kind: str) -> None:
    for bucket_size, (factor, before) in product([1, 3, 7, 8, 1000], [(1.0, 1.0), (2.0, 1.0), (1.0, 0.5)]):
        generator = torch.Generator().manual_seed(7)
        ranks = [Rank(r, world, kind, bucket_size, torch.float32, torch.float32) for r in range(world)]
        used = [[0, 1, 2, 3], [1], [0, 3]]
        for first in (True, False):  # two windows: the second must not see the first
            for rank in ranks:
                rank.total = [torch.zeros_like(t) for t in rank.total]
            for micro_step in range(2):  # parked twice, by different parameters on different ranks
                for r, rank in enumerate(ranks):
                    rank.fire(generator, used[(r + micro_step) % 3], 1.5)
                    for bucket in rank.buckets:
                        bucket.park(ORDER, 1.5)
            for r, rank in enumerate(ranks):
                rank.fire(generator, used[r % 3], factor)
            round_of(ranks, factor, before, 1.0 / (world * before))
            for rank in ranks:  # a correcting round
                rank.fire(generator, [2], factor)
            round_of(ranks, factor, before, 1.0 / (world * before))
            expected = [sum(rank.total[i] for rank in ranks) / world for i in range(len(SHAPES))]
            for i, (right, found) in enumerate(zip(expected, gathered(ranks))):
                assert right.norm() > 0.1
                case = f"p{i}, first window {first}, {bucket_size=} {factor=} {before=}"
                assert (found - right).abs().max() <= 2e-6 * right.norm(), case
            for rank in ranks:
                assert all(r.seen == r.taken and r.parameter.grad is None for r in rank.records)
                rank.shard.end_window(ORDER)
                assert not rank.shard.held
                for bucket in rank.buckets:
                    assert not bucket.local_in_use
                    bucket.drop()
                for record in rank.records:
                    record.start_window()


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("comm", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_slices_of_a_parameter_lie_in_the_rows_of_their_ranks(
    world: int, comm: torch.dtype, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole buckets and cut ones, gradients that are not contiguous and some that are missing, with and without the
    operator that cuts all of them at once."""
    monkeypatch.setattr(autograd, "_chunk_cat", autograd._chunk_cat if at_once else None)
    calls: list[int] = []
    real = buckets_module.copy_into_rows
    monkeypatch.setattr(buckets_module, "copy_into_rows", lambda m, s: (calls.append(len(s)), real(m, s)))
    shapes = [(4, 6), (), (7,), (3, 4), (12,), (5, 3), (1,)]
    generator = torch.Generator().manual_seed(5)
    for bucket_size, missing in product([10**6, 16, 7], [set(), {0}, {1, 4, 6}]):
        records = [ParameterRecord(nn.Parameter(torch.zeros(s)), f"p{i}", i) for i, s in enumerate(shapes)]
        layout = PerParameter(make_flat_groups([records]), 0, world, bucket_size)
        gradients = [torch.randn(s, generator=generator) for s in shapes]
        gradients[0] = gradients[0].t().contiguous().t()
        for i, (record, gradient) in enumerate(zip(records, gradients)):
            if i in missing:
                gradient.zero_()
            else:
                record.parameter.grad = gradient.clone(memory_format=torch.preserve_format)
                record.count()
        expected = torch.zeros(world, layout.groups[0].shard_numel)
        for gradient, offset in zip(gradients, layout.groups[0].offsets):
            for row, part in enumerate(gradient.reshape(-1).split(-(-gradient.numel() // world))):
                expected[row, offset : offset + part.numel()] = part
        for position, plan in enumerate(layout.buckets):
            bucket = Bucket(plan, position, comm, torch.float32, torch.device("cpu"))
            buffer = torch.full((plan.numel + 3,), float("nan"), dtype=comm)
            filled = bucket.fill(buffer, ORDER, 1.0, 1.0).view(world, -1)
            width = filled.size(1)
            assert torch.equal(filled, expected[:, plan.shard_offset : plan.shard_offset + width].to(comm))
            assert bool(buffer[plan.numel :].isnan().all()), "writes beyond the bucket"
        assert all(r.seen == r.taken and r.parameter.grad is None and r.in_hand is None for r in records)
    assert bool(calls) == (at_once and world > 1), "used where there are rows"


@pytest.mark.parametrize("comm", [torch.bfloat16, torch.float16])
def test_parked_contributions_keep_their_own_precision(comm: torch.dtype) -> None:
    """64 parked contributions of 2^-10 beside one of 1: a 16-bit accumulation would lose all of them."""
    rank = Rank(0, 1, "scatter", 1000, comm, torch.float32)
    record = rank.records[1]
    for value in [1.0] + [2.0**-10] * 64:
        record.parameter.grad = torch.full((1,), value, dtype=comm)
        record.count()
        rank.buckets[0].park(ORDER, 1.0)
    round_of([rank], 1.0, 1.0, 1.0)
    assert gathered([rank])[1].item() == pytest.approx(1.0625, rel=0.004)


def test_a_dropped_window_leaves_nothing_behind() -> None:
    rank = Rank(0, 1, "scatter", 4, torch.float32, torch.float32)
    generator = torch.Generator().manual_seed(3)
    rank.fire(generator, [0, 1, 2, 3], 1.0)
    for bucket in rank.buckets:
        bucket.park(ORDER, 1.0)
    held = sum(bucket.local_nbytes for bucket in rank.buckets)
    assert held == 4 * rank.layout.groups[0].padded_numel or held > 0
    for bucket in rank.buckets:
        bucket.drop()
    for record in rank.records:
        record.start_window()
    rank.total = [torch.zeros_like(t) for t in rank.total]
    rank.fire(generator, [1], 1.0)
    round_of([rank], 1.0, 1.0, 1.0)
    found = gathered([rank])
    assert torch.equal(found[1], rank.total[1].float().double()) and not found[0].count_nonzero()
    for bucket in rank.buckets:
        bucket.free_local()
        assert bucket.local_nbytes == 0


def test_the_local_part_of_one_parameter_can_be_read() -> None:
    rank = Rank(0, 2, "scatter", 4, torch.float32, torch.float32)
    rank.fire(torch.Generator().manual_seed(3), [0, 2], 1.0)
    for bucket in rank.buckets:
        bucket.park(ORDER, 1.0)
    for i in (0, 1, 2):
        full = torch.zeros(rank.records[i].parameter.numel())
        for bucket in rank.buckets:
            bucket.add_local_to(full, rank.records[i], 0.5)
        assert torch.equal(full.view(SHAPES[i]), 0.5 * rank.total[i].float())


def test_the_pool_allocates_at_use_and_as_large_as_the_largest() -> None:
    cpu = torch.device("cpu")
    pool = BufferPool()
    for numel in (5, 100, 7):
        pool.reserve(numel, torch.float32, cpu)
    pool.reserve(30, torch.bfloat16, cpu)
    assert pool.nbytes == 0
    first = pool.get(0, torch.float32, cpu)
    assert first.data.numel() == 100 and pool.get(0, torch.float32, cpu) is first
    assert pool.get(1, torch.float32, cpu) is not first
    assert pool.get(0, torch.bfloat16, cpu).data.dtype is torch.bfloat16
    assert pool.nbytes == 2 * 400 + 60
    pool.clear()
    assert pool.nbytes == 0
