# SPDX-License-Identifier: Apache-2.0
"""The reducer as a state machine: whatever happens in whatever order, no contribution is lost or counted twice.

After every event, for each parameter

    true gradient of the window  =  mean over ranks( pending )  +  reduced

where the left side is what the test gave the reducer, and the right side is read out of ``.grad``, local buffers,
buckets in flight and shards. All numbers are small integers times powers of two, so that both sides are equal to the
last bit. What is not legal raises the documented error and loses nothing.

On one rank events come one at a time, also in the middle of a backward. On two ranks, which are threads, a backward of
either rank is whole, and the ranks' events come in any order that the documentation allows.

``DS_STATE_MACHINE_EXAMPLES=N`` runs N random sequences of each instead of always the same 60.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

from deepspeed.runtime.gradients import collectives
from deepspeed.runtime.gradients.accumulation import AccumulationSchedule
from deepspeed.runtime.gradients.backward_scope import BackwardScope
from deepspeed.runtime.gradients.layout import FlatPartition, PerParameter, Replicated, make_flat_groups
from deepspeed.runtime.gradients.ledger import (
    TRANSITIONS,
    GradientAccountingError,
    Ledger,
    Move,
    ParameterRecord,
    Phase,
)
from deepspeed.runtime.gradients.reducer import GradientReducer, ReductionSettings
from unit.hypothesis_phases import PHASES
from unit.pretended_ranks import Hub, Member, transport

SHAPES = ((3, 2), (5,), (1,), (4,), (2, 2))
SCALES = (1.0, 8.0)  # of the loss

settings_strategy = st.fixed_dictionaries(
    {
        "stage": st.sampled_from([0, 1, 2, 3]),
        "steps": st.sampled_from([1, 2, 4]),
        "bucket_size": st.sampled_from([100, 8, 5, 1]),
        "overlap": st.booleans(),
        "persistent_buffers": st.booleans(),
        "reduce_scatter": st.booleans(),
        "prescale": st.booleans(),
        "predivide": st.sampled_from([1.0, 2.0]),
        "comm_dtype": st.sampled_from([None, torch.float16]),
        "parameters": st.integers(1, len(SHAPES)),
        "two_groups": st.booleans(),
    }
)


def pattern(record: ParameterRecord, value: int) -> Tensor:
    """A contribution: elements differ, so that one in the wrong place shows."""
    return (torch.arange(record.numel) % 3 + value).float().view(record.shape)


class RankState:
    """The reducer of one rank, and what it was given: ``given[i]`` is this rank's part of the true gradient of
    parameter ``i``, before the mean over ranks."""

    def __init__(self, member: Member, drawn: dict[str, Any]) -> None:
        self.rank = member.rank
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES[: drawn["parameters"]]]
        records = [ParameterRecord(parameter, f"p{i}", i) for i, parameter in enumerate(parameters)]
        half = len(records) // 2 if drawn["two_groups"] else 0
        groups = make_flat_groups([part for part in (records[:half], records[half:]) if part])
        stage, size, scatter = drawn["stage"], drawn["bucket_size"], drawn["reduce_scatter"]
        world = member.world_size
        if stage == 0:
            self.layout = Replicated(groups, member.rank, world, size)
        elif stage == 3:
            self.layout = PerParameter(groups, member.rank, world, size, scatter)
        else:
            self.layout = FlatPartition(groups, member.rank, world, size, scatter)
        self.schedule = AccumulationSchedule(drawn["steps"])
        self.schedule.boundary_override = True
        settings = ReductionSettings(
            every_backward=stage >= 2,
            overlap=drawn["overlap"],
            persistent_buffers=drawn["persistent_buffers"],
            comm_dtype=drawn["comm_dtype"],
            prescale=drawn["prescale"],
            predivide=drawn["predivide"],
            gathers_in_backward=stage == 3,
        )
        self.ledger: Ledger = self.layout.make_ledger()
        self.reducer = GradientReducer(self.layout, self.ledger, member, member, self.schedule, settings)
        self.ledger.serial = 1  # each rank's own count of engines, which threads share here
        self.records = self.ledger.records
        self.scope: BackwardScope | None = None
        self.forget()

    def forget(self) -> None:
        self.given = [torch.zeros(record.shape, dtype=torch.float64) for record in self.records]
        self.fired = [0] * len(self.records)

    # ------------------------------------------------------------------ events

    def begin(self, scope: BackwardScope) -> None:
        self.reducer.begin_backward(scope)
        self.scope = scope
        self.given_before = [value.clone() for value in self.given]
        self.fired_before = list(self.fired)

    def fire(self, index: int, value: int) -> None:
        """What autograd does: the contribution is added to ``.grad``, then the hook runs."""
        record, scope = self.records[index % len(self.records)], self.scope
        assert scope is not None
        contribution = pattern(record, value)
        scaled = contribution * scope.loss_scale
        parameter = record.parameter
        parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        self.given[record.index] += contribution.double() / (self.schedule.steps if scope.scale_by_accumulation else 1)
        self.fired[record.index] += 1
        self.reducer.firing_of(record, lambda _: scope)(parameter)

    def end(self) -> None:
        scope, self.scope = self.scope, None
        assert scope is not None
        self.reducer.end_backward(scope)

    def abort(self) -> None:
        self.scope = None
        self.reducer.abort_backward("a test")
        self.given, self.fired = self.given_before, self.fired_before

    def backward(self, scope: BackwardScope, firings: list[tuple[int, int]]) -> None:
        """A whole one."""
        self.begin(scope)
        for index, value in firings:
            self.fire(index, value)
        self.end()

    def drop(self) -> None:
        self.reducer.drop_window()
        self.forget()

    # ------------------------------------------------------------------ what the reducer has

    def pending(self, record: ParameterRecord) -> Tensor:
        """This rank's contributions that no collective has taken, as parts of the true gradient before the mean."""
        reducer, unit = self.reducer, self.reducer._unit()
        total = torch.zeros(record.numel, dtype=torch.float64)
        if record.parameter.grad is not None:
            total += record.parameter.grad.double().view(-1) * (reducer._factor * unit)
        for bucket in reducer.buckets:
            for piece in bucket.plan.pieces:
                if piece.record is not record:
                    continue
                if bucket.local_in_use:
                    local = bucket.local.narrow(0, piece.offset, piece.stop - piece.start)
                    total[piece.start : piece.stop] += local.double() * unit
                if record.buckets_left and record.in_hand is not None and bucket.position >= reducer._next:
                    taken = record.in_hand.reshape(-1)[piece.start : piece.stop]
                    total[piece.start : piece.stop] += taken.double() * (reducer._factor * unit)
        return total.view(record.shape)

    def add_reduced(self, totals: list[Tensor]) -> None:
        """Add what this rank's shards hold, and what is on its way into them, to the whole gradients."""
        for group in self.layout.groups:
            shard = torch.zeros(group.shard_numel, dtype=torch.float64)
            for bucket in self.reducer.buckets:
                plan = bucket.plan
                if plan.group == group.index and bucket.landed and plan.result is not None:
                    begin, end = plan.shard_offset, plan.shard_offset + plan.result[1] - plan.result[0]
                    reduced = self.reducer.shards[group.index].pieces(begin, end)
                    shard[begin:end] = torch.cat([values for values, _, _ in reduced]).double()
            for flight in self.reducer.transport.in_flight:
                plan = flight.bucket.plan
                if plan.group == group.index and plan.result is not None:
                    begin, end = plan.shard_offset, plan.shard_offset + plan.result[1] - plan.result[0]
                    shard[begin:end] += sum(part.double() for part in flight.reduction.parts) * flight.scale
            for _, record, begin, end, start in group.local_ranges():
                totals[record.index].view(-1)[begin:end] += shard[start : start + end - begin]

    def check_books(self) -> None:
        """Every firing is in the books, taken over or still in ``.grad``."""
        for record, fired in zip(self.records, self.fired):
            assert record.seen == fired, f"{record.name}: {fired} firings, {record.seen} seen"
            assert record.seen == record.taken + record.unmoved, f"{record.name}: {record.seen} seen, {record.taken}"
            if self.scope is None:  # all that is pending is parked, and shown to whoever asks for it
                shown = self.reducer.local_gradient(record).double()
                assert torch.equal(shown, self.pending(record)), f"{record.name}: shown as pending is {shown}"
            waits = record.unmoved or record.parked
            assert bool(waits) == (record.phase in (Phase.PENDING, Phase.LATE)), f"{record.name}: {record.phase.name}"


def check_identity(ranks: list[RankState]) -> None:
    """The invariant, of all ranks together, when none is in the middle of an event."""
    world = len(ranks)
    measured = [torch.zeros(record.shape, dtype=torch.float64) for record in ranks[0].records]
    for rank in ranks if ranks[0].layout.replicated is False else ranks[:1]:
        rank.add_reduced(measured)
    for rank in ranks:
        for record in rank.records:
            measured[record.index] += rank.pending(record) / world
    for i, value in enumerate(measured):
        expected = sum(rank.given[i] for rank in ranks) / world
        assert torch.equal(value, expected), f"p{i}: pending and reduced are {value}, contributed was {expected}"


@contextmanager
def pretended_transport() -> Iterator[None]:
    real = collectives.dist
    collectives.dist = transport
    try:
        yield
    finally:
        collectives.dist = real


class OneRank(RuleBasedStateMachine):
    """Events one at a time, also between the firings of a backward."""

    def __init__(self) -> None:
        super().__init__()
        self._transport = pretended_transport()
        self._transport.__enter__()
        self.rank: RankState | None = None
        self.poisoned = False  # a backward was aborted after something of it had been reduced
        self.issued_at_begin = 0  # collectives, when the present backward began
        self.stray: ParameterRecord | None = None

    def teardown(self) -> None:
        self._transport.__exit__(None, None, None)

    @initialize(drawn=settings_strategy)
    def make(self, drawn: dict[str, Any]) -> None:
        self.rank = RankState(Member(Hub(1), 0), drawn)

    def running(self) -> bool:
        return self.rank is not None and self.rank.scope is not None

    def idle(self) -> bool:
        return self.rank is not None and self.rank.scope is None

    # ------------------------------------------------------------------ legal events

    @precondition(lambda self: self.idle() and self.stray is None)
    @rule(announced=st.booleans(), scaled=st.booleans(), loss_scale=st.sampled_from(SCALES), other=st.booleans())
    def begin_backward(self, announced: bool, scaled: bool, loss_scale: float, other: bool) -> None:
        self.rank.begin(BackwardScope(announced, scaled, loss_scale, within_another_engine=other and not announced))
        self.issued_at_begin = self.rank.reducer.transport.collectives_issued

    @precondition(running)
    @rule(index=st.integers(0, 4), value=st.integers(1, 3))
    def fire(self, index: int, value: int) -> None:
        self.rank.fire(index, value)

    @precondition(running)
    @rule(times=st.integers(1, 3), value=st.integers(1, 3))
    def fire_all(self, times: int, value: int) -> None:
        """Each parameter, last first, as often as under so many reentrant checkpoints."""
        for _ in range(times):
            for index in reversed(range(len(self.rank.records))):
                self.rank.fire(index, value)

    @precondition(running)
    @rule()
    def end_backward(self) -> None:
        self.rank.end()

    @precondition(running)
    @rule()
    def abort_backward(self) -> None:
        reduced = self.rank.reducer.transport.collectives_issued > self.issued_at_begin
        self.rank.abort()
        self.poisoned |= reduced
        assert bool(self.rank.ledger.poison) == self.poisoned

    @precondition(idle)
    @rule(boundary=st.booleans(), deferred=st.booleans())
    def schedule(self, boundary: bool, deferred: bool) -> None:
        self.rank.schedule.boundary_override = boundary
        self.rank.schedule.deferred_by = "no_sync()" if deferred else ""

    @precondition(idle)
    @rule(index=st.integers(0, 4))
    def hold_back(self, index: int) -> None:
        self.rank.reducer.hold_back([self.rank.records[index % len(self.rank.records)]])

    @precondition(lambda self: self.rank is not None and not self.poisoned and self.stray is None)
    @rule()
    def settle(self) -> None:
        """Also in the middle of a backward."""
        self.rank.reducer.settle()
        assert not self.rank.ledger.waiting() or self.running()

    @precondition(lambda self: self.idle() and not self.poisoned and self.stray is None)
    @rule()
    def reduce_pending(self) -> None:
        self.rank.reducer.reduce_pending()
        assert not self.rank.ledger.waiting()

    @precondition(lambda self: self.idle() and not self.poisoned and self.stray is None)
    @rule()
    def step(self) -> None:
        rank = self.rank
        shards = rank.reducer.synchronize()
        assert not rank.ledger.waiting()
        if rank.ledger.reduced:
            for group in rank.layout.groups:
                for _, record, begin, end, start in group.local_ranges():
                    own = shards[group.index].narrow(0, start, end - begin).double()
                    assert torch.equal(own, rank.given[record.index].view(-1)[begin:end])
                used = sum(end - begin for _, _, begin, end, _ in group.local_ranges())
                assert shards[group.index].flat().count_nonzero() <= used, "padding is not zero"
        rank.reducer.start_window()
        rank.forget()

    @precondition(idle)
    @rule()
    def drop_window(self) -> None:
        self.rank.drop()
        self.poisoned, self.stray = False, None

    # ------------------------------------------------------------------ what is not legal

    @precondition(lambda self: self.idle() and self.stray is None)
    @rule(index=st.integers(0, 4))
    def set_grad_by_hand(self, index: int) -> None:
        record = self.rank.records[index % len(self.rank.records)]
        record.parameter.grad = torch.full(record.shape, 100.0)
        self.stray = record

    @precondition(lambda self: self.idle() and self.stray is not None)
    @rule(event=st.sampled_from(["begin", "settle", "synchronize"]))
    def go_on_after_setting_grad_by_hand(self, event: str) -> None:
        reducer = self.rank.reducer
        calls = {"begin": lambda: reducer.begin_backward(BackwardScope(True)), "settle": reducer.settle}
        with pytest.raises(
            GradientAccountingError, match="unusable" if self.poisoned and event != "begin" else "no backward"
        ):
            calls.get(event, reducer.synchronize)()
        self.stray.parameter.grad = None  # as the message says; the window stays refused once it was asked for
        self.stray = None
        self.poisoned |= event != "begin"

    @precondition(lambda self: self.idle() and self.poisoned)
    @rule(event=st.sampled_from(["settle", "synchronize"]))
    def use_a_poisoned_window(self, event: str) -> None:
        with pytest.raises(GradientAccountingError, match="unusable"):
            getattr(self.rank.reducer, event)()

    @precondition(lambda self: self.rank is not None)
    @rule(index=st.integers(0, 4), move=st.sampled_from(list(Move)))
    def illegal_move(self, index: int, move: Move) -> None:
        record = self.rank.records[index % len(self.rank.records)]
        if TRANSITIONS[move][record.phase] is None:
            with pytest.raises(GradientAccountingError, match=f"'{record.name}': illegal move {move.name}"):
                record.move(move)

    @precondition(lambda self: self.idle() and not self.poisoned and self.stray is None)
    @rule(index=st.integers(0, 4), field=st.sampled_from(["seen", "taken"]))
    def wrong_books(self, index: int, field: str) -> None:
        """A contribution that was seen and not taken over, or taken over twice, is found out at the step."""
        record = self.rank.records[index % len(self.rank.records)]
        setattr(record, field, getattr(record, field) + 1)
        with pytest.raises(GradientAccountingError, match=f"incomplete.*{record.name}"):
            self.rank.reducer.synchronize()
        setattr(record, field, getattr(record, field) - 1)

    # ------------------------------------------------------------------ what holds after each

    @invariant()
    def nothing_is_lost(self) -> None:
        if self.rank is None or self.poisoned or self.stray is not None:
            return
        check_identity([self.rank])
        self.rank.check_books()


class TwoRanks(RuleBasedStateMachine):
    """Two ranks, which do what the documentation lets them do by themselves, and meet."""

    def __init__(self) -> None:
        super().__init__()
        self._transport = pretended_transport()
        self._transport.__enter__()
        self.ranks: list[RankState] = []
        self.poisoned = False

    def teardown(self) -> None:
        self._transport.__exit__(None, None, None)

    @initialize(drawn=settings_strategy)
    def make(self, drawn: dict[str, Any]) -> None:
        hub = Hub(2)
        self.hub = hub
        self.ranks = [RankState(Member(hub, rank), drawn) for rank in range(2)]

    def together(self, call: Callable[[RankState], Any]) -> list[BaseException | None]:
        """Run it on both ranks at the same time; their exceptions."""
        errors: list[BaseException | None] = [None, None]

        def run(rank: RankState) -> None:
            try:
                call(rank)
            except BaseException as error:  # noqa: BLE001 - handed to the test
                errors[rank.rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    def well(self, call: Callable[[RankState], Any]) -> None:
        for error in self.together(call):
            if error is not None:
                raise error
        counts = self.hub.counts("collective")
        assert counts[0] == counts[1], f"collectives issued by each rank: {counts}"

    def refused(self, call: Callable[[RankState], Any], reason: str) -> None:
        for error in self.together(call):
            assert isinstance(error, GradientAccountingError) and reason in str(error), repr(error)

    # ------------------------------------------------------------------ legal events

    firings = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), max_size=8)

    @precondition(lambda self: not self.poisoned)
    @rule(each=st.tuples(firings, firings), scaled=st.booleans())
    def announced_backward(self, each: tuple[list, list], scaled: bool) -> None:
        self.well(lambda rank: rank.backward(BackwardScope(True, scaled), each[rank.rank]))

    @precondition(lambda self: not self.poisoned)
    @rule(each=st.tuples(st.lists(firings, max_size=3), st.lists(firings, max_size=3)), other=st.booleans())
    def plain_backwards_then_settle(self, each: tuple[list, list], other: bool) -> None:
        """Any number on each rank; whoever has done asks, as ``step()`` does, and helps the other."""

        def run(rank: RankState) -> None:
            for firings in each[rank.rank]:
                rank.backward(BackwardScope(False, within_another_engine=other), firings)
            rank.reducer.settle()

        self.well(run)
        assert not any(rank.ledger.waiting() for rank in self.ranks)

    @precondition(lambda self: not self.poisoned and not self.ranks[0].reducer.reduces_now())
    @rule(which=st.integers(0, 1), fired=firings, aborted=st.booleans())
    def backward_that_does_not_reduce(self, which: int, fired: list, aborted: bool) -> None:
        rank = self.ranks[which]
        rank.begin(BackwardScope(True))
        for index, value in fired:
            rank.fire(index, value)
        rank.abort() if aborted else rank.end()

    @precondition(lambda self: not self.poisoned)
    @rule(each=st.tuples(firings, firings), first_to_abort=st.integers(0, 1), both=st.booleans())
    def backward_aborted_where_it_may_have_reduced(self, each: tuple, first_to_abort: int, both: bool) -> None:
        """A rank whose round is open gives the others zeros for the rest of it, so that nobody hangs."""

        def run(rank: RankState) -> None:
            rank.begin(BackwardScope(True))
            for index, value in each[rank.rank]:
                rank.fire(index, value)
            if rank.reducer._round_open and (both or rank.rank == first_to_abort):
                rank.abort()
            else:
                rank.end()

        self.well(run)
        self.poisoned = any(rank.ledger.poison for rank in self.ranks)

    @rule(boundary=st.booleans(), deferred=st.booleans())
    def schedule(self, boundary: bool, deferred: bool) -> None:
        for rank in self.ranks:
            rank.schedule.boundary_override = boundary
            rank.schedule.deferred_by = "coalesce_grad_reduction()" if deferred else ""

    @rule(index=st.integers(0, 4))
    def hold_back(self, index: int) -> None:
        for rank in self.ranks:
            rank.reducer.hold_back([rank.records[index % len(rank.records)]])

    @precondition(lambda self: not self.poisoned)
    @rule()
    def reduce_pending(self) -> None:
        self.well(lambda rank: rank.reducer.reduce_pending())

    @precondition(lambda self: not self.poisoned)
    @rule()
    def step(self) -> None:
        totals = [sum(rank.given[i] for rank in self.ranks) / 2 for i in range(len(self.ranks[0].records))]

        def run(rank: RankState) -> None:
            shards = rank.reducer.synchronize()
            if not rank.ledger.reduced:
                return
            for group in rank.layout.groups:
                for _, record, begin, end, start in group.local_ranges():
                    own = shards[group.index].narrow(0, start, end - begin).double()
                    assert torch.equal(own, totals[record.index].view(-1)[begin:end]), record.name

        self.well(run)
        for rank in self.ranks:
            rank.reducer.start_window()
            rank.forget()

    @rule()
    def drop_window(self) -> None:
        for rank in self.ranks:
            rank.drop()
        self.poisoned = False

    # ------------------------------------------------------------------ what is not legal

    @precondition(lambda self: self.poisoned)
    @rule()
    def use_a_poisoned_window(self) -> None:
        self.refused(lambda rank: rank.reducer.settle(), "unusable")

    @precondition(lambda self: not self.poisoned and self.ranks[0].ledger.reduced)
    @rule(which=st.integers(0, 1))
    def drop_reduced_window_on_one_rank(self, which: int) -> None:
        self.ranks[which].drop()
        self.refused(lambda rank: rank.reducer.settle(), "a different number of times")
        self.poisoned = True

    @precondition(lambda self: not self.poisoned)
    @rule(which=st.integers(0, 1), index=st.integers(0, 4))
    def set_grad_by_hand_on_one_rank(self, which: int, index: int) -> None:
        record = self.ranks[which].records[index % len(self.ranks[which].records)]
        record.parameter.grad = torch.ones(record.shape)
        self.refused(lambda rank: rank.reducer.settle(), f"rank {which}: 1 parameters have a .grad")
        record.parameter.grad = None
        self.poisoned = True

    @precondition(lambda self: not self.poisoned and all(rank.ledger.empty for rank in self.ranks))
    @rule(each=st.tuples(firings, firings))
    def scale_losses_differently(self, each: tuple[list, list]) -> None:
        for rank in self.ranks:
            rank.schedule.deferred_by = "no_sync()"
            rank.backward(BackwardScope(True, loss_scale=SCALES[rank.rank]), each[rank.rank])
            rank.schedule.deferred_by = ""
        self.refused(lambda rank: rank.reducer.settle(), "loss scale of the window's backwards differs")
        self.poisoned = True

    @invariant()
    def nothing_is_lost(self) -> None:
        if not self.ranks or self.poisoned:
            return
        check_identity(self.ranks)
        for rank in self.ranks:
            rank.check_books()


EXAMPLES = int(os.environ.get("DS_STATE_MACHINE_EXAMPLES", "60"))
COMMON = hypothesis.settings(
    max_examples=EXAMPLES,
    stateful_step_count=30,
    deadline=None,
    derandomize=EXAMPLES == 60,
    database=None,
    phases=PHASES,
    suppress_health_check=list(hypothesis.HealthCheck),
)
TestOneRank = OneRank.TestCase
TestOneRank.settings = COMMON
TestTwoRanks = TwoRanks.TestCase
TestTwoRanks.settings = COMMON
