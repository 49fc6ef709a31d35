# SPDX-License-Identifier: Apache-2.0
"""Collectives are counted: one per bucket, whatever a backward does to a parameter, and none without need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.comm.control import ControlChannel
from deepspeed.runtime.gradients import collectives
from unit.common import DistributedTest
from unit.graphs import weights_of
from unit.reference import max_relative_error, reference_gradients
from unit.runtime import engine_cases as cases


class Blocks(nn.Module):
    """Three blocks of odd sizes; how often and under what each runs is up to the test."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.entry = nn.Linear(5, 5)
        self.middle = nn.Linear(5, 5)
        self.exit = nn.Linear(5, 3)


def plain(m: Blocks, x: Tensor) -> Tensor:
    return m.exit(torch.tanh(m.middle(torch.tanh(m.entry(x))))).square().sum()


def reused(m: Blocks, x: Tensor) -> Tensor:
    hidden = m.entry(x)
    for _ in range(4):
        hidden = torch.tanh(m.middle(hidden)) + m.entry(hidden)
    return m.exit(hidden).square().sum()


def twice_checkpointed(m: Blocks, x: Tensor) -> Tensor:
    hidden = m.entry(x)
    for _ in range(2):
        hidden = checkpoint(lambda v: torch.tanh(m.middle(v)), hidden, use_reentrant=True)
    return m.exit(hidden).square().sum()


def checkpointed_and_used_outside(m: Blocks, x: Tensor) -> Tensor:
    hidden = m.entry(x)
    hidden = checkpoint(lambda v: torch.tanh(m.middle(v)), hidden, use_reentrant=True)
    return m.exit(torch.tanh(m.middle(hidden)) + hidden).square().sum()


def different_on_each_rank(m: Blocks, x: Tensor) -> Tensor:
    # the mark that data carry tells the rank, so that the reference can follow
    return plain(m, x) if x[0, 0] > 0 else m.exit(m.entry(x)).square().sum()


def inputs_of(rank: int, window: int) -> Tensor:
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(100 * window + rank))
    x[0, 0] = x[0, 0].abs() if rank == 0 else -x[0, 0].abs()
    return x


class Counted:
    """Counts what goes over the wire, at the calls that the reducer makes."""

    def __init__(self) -> None:
        self.reduced: Counter[str] = Counter()
        self.agreements = 0
        self.bytes = 0

    @contextmanager
    def counting(self) -> Iterator[Counted]:
        names = ("all_reduce", "reduce", "all_to_all_single", "reduce_scatter_tensor")
        real = {name: getattr(collectives.dist, name) for name in names}
        real_agreement = ControlChannel.all_reduce_max

        def counted(name: str) -> Callable[..., Any]:
            def call(buffer: Tensor, *args: Any, **kwargs: Any) -> Any:
                if kwargs.get("async_op"):
                    self.reduced[name] += 1
                return real[name](buffer, *args, **kwargs)

            return call

        def agree(*args: Any, **kwargs: Any) -> Any:
            self.agreements += 1
            return real_agreement(*args, **kwargs)

        for name in names:
            setattr(collectives.dist, name, counted(name))
        ControlChannel.all_reduce_max = agree
        try:
            yield self
        finally:
            for name in names:
                setattr(collectives.dist, name, real[name])
            ControlChannel.all_reduce_max = real_agreement


def run(engine: Any, loss: Callable[[Blocks, Tensor], Tensor], window: int, gas: int) -> tuple[list[int], int, int]:
    """One window: collectives of each backward, those that corrected it, agreements of the step. Values are checked.

    Corrections come in the step; at stage 0, which shows the gradient after the last backward, at the end of that.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    twin = Blocks()
    twin.load_state_dict(weights_of(engine.module))
    data = [[inputs_of(r, 10 * window + i) for i in range(gas)] for r in range(world)]
    expected = reference_gradients(twin, loss, data)
    before = weights_of(engine.module)
    per_backward, corrections = [], 0
    for position, x in enumerate(data[rank]):
        with Counted().counting() as counted:
            engine.backward(loss(engine.module, x))
        per_backward.append(sum(counted.reduced.values()))
        shows = engine.zero_optimization_stage() == 0 and position == gas - 1
        assert counted.agreements == shows, "every rank calls engine.backward: nothing else to agree on"
        if shows:
            corrections = max(0, per_backward[-1] - len(engine._stepper.reducer.buckets))
            per_backward[-1] -= corrections
        with Counted().counting() as in_step:
            engine.step()
    moved = {n: (before[n] - weight) / 0.1 for n, weight in weights_of(engine.module).items()}
    name, error = max_relative_error(moved, expected)
    assert error < 1e-4, f"update of {name} is off by {error:.2g}"
    return per_backward, corrections + sum(in_step.reduced.values()), in_step.agreements


def asked_in_step(stage: int) -> int:
    """Agreements of a step: whether all is reduced; at stage 3 before that whether ranks gathered the same weights."""
    return 2 if stage == 3 else 1


GRAPHS = [plain, reused, different_on_each_rank]
REENTRANT = [twice_checkpointed, checkpointed_and_used_outside]


class TestCounts(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_one_collective_per_bucket_and_backward(self, stage: int) -> None:
        for loss in GRAPHS if stage < 3 else [plain, reused]:
            for size in (7, 30, 10**9):
                gas = 3
                engine = cases.make_engine(
                    cases.make_config(stage, gas=gas, zero={"reduce_bucket_size": size}), Blocks()
                )
                buckets = len(engine._stepper.reducer.buckets)
                assert (buckets == 1) == (size == 10**9)
                each = [buckets] * gas if stage >= 2 else [0] * (gas - 1) + [buckets]
                for window in range(3):
                    case = f"{loss.__name__}, bucket size {size}, window {window}"
                    assert run(engine, loss, window, gas) == (each, 0, asked_in_step(stage)), case
                engine.destroy()

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_reentrant_checkpoints_correct_once_and_then_know(self, stage: int) -> None:
        """The first window expects one firing per parameter. A bucket that left before a later firing of one of its
        parameters is made good by one correcting round at the step, after which the firings are known."""
        for loss in REENTRANT:
            for size in (7, 10**9):
                engine = cases.make_engine(cases.make_config(stage, zero={"reduce_bucket_size": size}), Blocks())
                buckets = len(engine._stepper.reducer.buckets)
                per_backward, corrections, _ = run(engine, loss, 0, 1)
                assert per_backward == [buckets] and corrections in (0, buckets), loss.__name__
                if size == 7 and stage < 3:  # at stage 3 buckets that would have to wait leave in the sweep
                    assert corrections == buckets, "the small buckets of the twice fired block left after one firing"
                for window in range(1, 4):
                    case = f"{loss.__name__}, bucket size {size}, window {window}"
                    assert run(engine, loss, window, 1) == ([buckets], 0, asked_in_step(stage)), case
                engine.destroy()

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_more_firings_than_ever_before_are_corrected(self, stage: int) -> None:
        engine = cases.make_engine(cases.make_config(stage, zero={"reduce_bucket_size": 7}), Blocks())
        buckets = len(engine._stepper.reducer.buckets)
        for window, (loss, corrections) in enumerate(
            [(plain, 0), (twice_checkpointed, buckets), (plain, 0), (plain, 0)]
            + [(different_on_each_rank, 0)] * (stage < 3)
        ):
            per_backward, corrected, agreements = run(engine, loss, window, 1)
            assert (per_backward, agreements) == ([buckets], asked_in_step(stage)), (loss.__name__, window)
            assert corrected in {corrections, corrections * (stage < 3)}, (loss.__name__, window)

    def test_correcting_rounds_when_one_rank_alone_is_late(self) -> None:
        for stage in (0, 1, 2):
            engine = cases.make_engine(cases.make_config(stage, zero={"reduce_bucket_size": 7}), Blocks())
            buckets = len(engine._stepper.reducer.buckets)

            def late_on_rank_one(m: Blocks, x: Tensor) -> Tensor:
                return plain(m, x) if x[0, 0] > 0 else twice_checkpointed(m, x)

            assert run(engine, plain, 0, 1) == ([buckets], 0, 1)
            assert run(engine, late_on_rank_one, 1, 1) == ([buckets], buckets, 1)
            # expectations are each rank's own: rank 1 waits for two firings now, rank 0 for one
            assert run(engine, late_on_rank_one, 2, 1) == ([buckets], 0, 1)

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_plain_loss_backward_asks_once(self, stage: int) -> None:
        engine = cases.make_engine(cases.make_config(stage, zero={"reduce_bucket_size": 7}), Blocks())
        buckets = len(engine._stepper.reducer.buckets)
        for window in range(3):
            with Counted().counting() as counted:
                plain(engine.module, inputs_of(dist.get_rank(), window)).backward()
            assert (sum(counted.reduced.values()), counted.agreements) == (buckets, 1)
            engine.step()

    def test_kinds_and_bytes(self) -> None:
        for stage, size, scatter, kinds in (
            (0, 10**9, True, {"all_reduce"}),
            (1, 10**9, True, {"all_to_all_single"}),  # on gloo, slices are exchanged and summed
            (2, 7, True, {"reduce"}),
            (2, 7, False, {"all_reduce"}),
            (3, 10**9, True, {"all_to_all_single"}),
            (3, 7, True, {"all_to_all_single"}),  # every bucket has a slice for every rank
            (3, 7, False, {"all_reduce"}),
        ):
            zero = {"reduce_bucket_size": size, "reduce_scatter": scatter}
            engine = cases.make_engine(cases.make_config(stage, zero=zero), Blocks())
            reducer, sent = engine._stepper.reducer, engine._stepper.reducer.transport
            with Counted().counting() as counted:
                engine.backward(plain(engine.module, inputs_of(dist.get_rank(), 0)))
            assert set(counted.reduced) == kinds
            padded = sum(group.padded_numel for group in reducer.layout.groups)
            assert sent.collectives_issued == len(reducer.buckets) and sent.bytes_communicated == 4 * padded

    def test_nothing_travels_in_no_sync_and_coalesced_backwards_travel_once(self) -> None:
        x = inputs_of(dist.get_rank(), 0)
        engine = cases.make_engine(cases.make_config(1, zero={"reduce_bucket_size": 7}), Blocks())
        with Counted().counting() as counted, engine.no_sync():
            engine.backward(plain(engine.module, x))
            plain(engine.module, x).backward()
        assert not counted.reduced and counted.agreements == 0
        for stage in (2, 3):
            engine = cases.make_engine(cases.make_config(stage, zero={"reduce_bucket_size": 7}), Blocks())
            with Counted().counting() as counted, engine.coalesce_grad_reduction():
                for _ in range(3):
                    engine.backward(plain(engine.module, x))
                assert not counted.reduced
            assert sum(counted.reduced.values()) == len(engine._stepper.reducer.buckets)


class TestOneRank(DistributedTest):
    world_size = 1

    def test_same_path_without_a_wire(self) -> None:
        for stage in (0, 1, 2, 3):
            engine = cases.make_engine(cases.make_config(stage, zero={"reduce_bucket_size": 7}), Blocks())
            with Counted().counting() as counted:
                engine.backward(plain(engine.module, inputs_of(0, 0)))
            assert not counted.reduced
            assert engine._stepper.reducer.transport.collectives_issued == len(engine._stepper.reducer.buckets)
            engine.step()
