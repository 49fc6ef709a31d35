# SPDX-License-Identifier: Apache-2.0
"""The account of contributions: legal moves, counts, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from deepspeed.runtime.gradients.ledger import (
    GradientAccountingError,
    Ledger,
    Move,
    ParameterRecord,
    Phase,
    describe,
)

# What each move does, in words: firing makes contributions wait, parking leaves them waiting, sending takes all that
# waits (or zeros), landing ends the flight, dropping discards what waits but not what flies.
EXPECTED = {
    Phase.IDLE: {Move.FIRE: Phase.PENDING, Move.SEND: Phase.IN_FLIGHT, Move.DROP: Phase.IDLE},
    Phase.PENDING: {
        Move.FIRE: Phase.PENDING,
        Move.PARK: Phase.PENDING,
        Move.SEND: Phase.IN_FLIGHT,
        Move.DROP: Phase.IDLE,
    },
    Phase.IN_FLIGHT: {Move.FIRE: Phase.LATE, Move.LAND: Phase.IDLE, Move.DROP: Phase.IN_FLIGHT},
    Phase.LATE: {
        Move.FIRE: Phase.LATE,
        Move.PARK: Phase.LATE,
        Move.LAND: Phase.PENDING,
        Move.DROP: Phase.IN_FLIGHT,
    },
}


def make_record(name: str = "block.weight", numel: int = 4, index: int = 0) -> ParameterRecord:
    return ParameterRecord(nn.Parameter(torch.zeros(numel)), name, index)


def fire(record: ParameterRecord, value: float = 1.0) -> None:
    """As autograd does it: accumulate into .grad, then the hook."""
    parameter = record.parameter
    gradient = torch.full_like(parameter, value)
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    record.count()


@pytest.mark.parametrize(("phase", "move"), list(itertools.product(Phase, Move)))
def test_every_move_is_legal_as_expected_or_refused_by_name(phase: Phase, move: Move) -> None:
    record = make_record("decoder.0.weight")
    record.phase, record.seen, record.taken = phase, 7, 5
    after = EXPECTED[phase].get(move)
    if after is not None:
        record.move(move)
        assert record.phase is after
        return
    with pytest.raises(GradientAccountingError) as error:
        record.move(move)
    for part in ("decoder.0.weight", f"move {move.name} in phase {phase.name}", "7 contributions seen", "5 taken"):
        assert part in str(error.value)
    assert record.phase is phase, "a refused move changes nothing"


@pytest.mark.parametrize("phase", Phase)
def test_a_firing_moves_as_the_table_says(phase: Phase) -> None:
    record = make_record()
    record.phase = phase
    fire(record)
    assert record.phase is EXPECTED[phase][Move.FIRE]


def test_contributions_are_counted_when_seen_and_when_taken() -> None:
    record = make_record()
    fire(record, 1.0)
    fire(record, 2.0)
    assert (record.seen, record.taken, record.unmoved, record.fired_in_backward) == (2, 0, 2, 2)
    assert record.take_gradient().tolist() == [3.0] * 4
    assert (record.seen, record.taken, record.unmoved) == (2, 2, 0)
    assert record.parameter.grad is None, "a later firing must start afresh"
    assert record.take_gradient() is None
    fire(record, 5.0)
    assert record.take_gradient().tolist() == [5.0] * 4
    assert (record.seen, record.taken) == (3, 3)


def test_a_firing_without_a_gradient_is_no_contribution() -> None:
    record = make_record()
    record.count()
    assert (record.seen, record.unmoved, record.fired_in_backward, record.phase) == (0, 0, 1, Phase.IDLE)


def test_a_sparse_gradient_is_taken_dense() -> None:
    record = ParameterRecord(nn.Parameter(torch.zeros(3, 2)), "embedding", 0)
    record.parameter.grad = torch.sparse_coo_tensor([[0, 2, 2]], torch.ones(3, 2), (3, 2))
    record.count()
    assert record.take_gradient().tolist() == [[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]


def test_a_gradient_nobody_saw_is_refused_by_name() -> None:
    record = make_record("head.bias")
    record.parameter.grad = torch.ones(4)
    with pytest.raises(GradientAccountingError, match=r"head\.bias.*safe_set_full_grad"):
        record.take_gradient()
    assert record.parameter.grad is not None, "what the user put there is still there"
    assert Ledger([record]).strays() == [record]


@pytest.mark.parametrize("buckets", [1, 2, 5])
def test_a_split_parameter_is_sent_once_and_lands_with_its_last_bucket(buckets: int) -> None:
    record = make_record()
    record.buckets = buckets
    fire(record, 2.0)
    for i in range(buckets):
        assert record.gradient_for_bucket(Move.SEND).tolist() == [2.0] * 4
        assert record.phase is Phase.IN_FLIGHT and record.parameter.grad is None
        assert record.buckets_left == buckets - 1 - i
    assert record.in_hand is None and record.taken == 1
    for _ in range(buckets - 1):
        record.bucket_landed()
        assert record.phase is Phase.IN_FLIGHT
    record.bucket_landed()
    assert record.phase is Phase.IDLE


def test_a_firing_between_the_buckets_stays_for_later() -> None:
    record = make_record()
    record.buckets = 2
    fire(record, 1.0)
    record.gradient_for_bucket(Move.SEND)
    fire(record, 10.0)
    assert record.phase is Phase.LATE
    assert record.gradient_for_bucket(Move.SEND).tolist() == [1.0] * 4, "all buckets copy from one gradient"
    record.bucket_landed()
    record.bucket_landed()
    assert record.phase is Phase.PENDING and record.unmoved == 1
    assert record.gradient_for_bucket(Move.SEND).tolist() == [10.0] * 4


def test_nothing_is_sent_as_zeros_and_parked_as_nothing() -> None:
    record = make_record()
    assert record.gradient_for_bucket(Move.PARK) is None and record.phase is Phase.IDLE and not record.parked
    assert record.gradient_for_bucket(Move.SEND) is None and record.phase is Phase.IN_FLIGHT
    record.bucket_landed()
    assert record.phase is Phase.IDLE and record.seen == record.taken == 0


def test_parking_may_visit_some_buckets_of_an_idle_parameter_only() -> None:
    """Found by test_buckets: a pass begun and left unfinished shifted all later pieces by one bucket."""
    record = make_record()
    record.buckets = 2
    assert record.gradient_for_bucket(Move.PARK) is None
    fire(record, 4.0)
    assert [record.gradient_for_bucket(Move.PARK).tolist() for _ in range(2)] == [[4.0] * 4] * 2


def test_dropping_keeps_what_earlier_backwards_parked() -> None:
    record = make_record()
    fire(record)
    record.gradient_for_bucket(Move.PARK)
    fire(record)
    record.drop_gradient()
    assert (record.seen, record.taken, record.phase) == (1, 1, Phase.PENDING)
    assert record.parameter.grad is None
    other = make_record()
    fire(other)
    other.drop_gradient()
    assert (other.seen, other.taken, other.phase) == (0, 0, Phase.IDLE)


def test_dropping_does_not_touch_what_is_in_flight() -> None:
    record = make_record()
    fire(record)
    record.gradient_for_bucket(Move.SEND)
    fire(record)
    record.drop_gradient()
    assert record.phase is Phase.IN_FLIGHT
    record.bucket_landed()
    Ledger([record]).check_closed()


@pytest.mark.parametrize("left", ["pending", "in flight", "not taken", "in hand", "stray"])
def test_an_open_account_is_refused_with_rank_names_and_counts(left: str) -> None:
    good, bad = make_record("good"), make_record("the.bad.one", index=1)
    if left == "pending":
        fire(bad)
        bad.gradient_for_bucket(Move.PARK)
    elif left == "in flight":
        bad.gradient_for_bucket(Move.SEND)
    elif left == "not taken":
        bad.seen = 1
    elif left == "in hand":
        bad.in_hand = torch.zeros(4)
    else:
        bad.parameter.grad = torch.zeros(4)
    ledger = Ledger([good, bad], rank=3, backwards=2)
    with pytest.raises(
        GradientAccountingError, match=r"rank 3: .*of 1 parameters.*2 backwards.*the\.bad\.one"
    ) as error:
        ledger.check_closed()
    assert "the.bad.one" in str(error.value) and "good" not in str(error.value)


def test_a_closed_account_passes_and_a_new_window_forgets() -> None:
    ledger = Ledger([make_record("a"), make_record("b", index=1)])
    fire(ledger.records[0])
    assert ledger.waiting() == [ledger.records[0]] and ledger.empty
    ledger.records[0].gradient_for_bucket(Move.SEND)
    ledger.records[0].bucket_landed()
    ledger.check_closed()
    ledger.backwards, ledger.reduced, ledger.poison = 3, True, "why"
    assert not ledger.empty
    ledger.start_window()
    assert ledger.empty and not ledger.reduced and ledger.poison == ""
    assert all(r.seen == r.taken == r.fired_in_backward == 0 for r in ledger.records)


def test_firings_are_learnt_per_ordinal_of_the_backward() -> None:
    ledger = Ledger([make_record("a"), make_record("b", index=1)])
    a, b = ledger.records

    def backward(firings_of_a: int, firings_of_b: int) -> tuple[int, int]:
        ledger.expect()
        awaited = (a.awaited, b.awaited)
        a.fired_in_backward, b.fired_in_backward = firings_of_a, firings_of_b
        ledger.learn()
        ledger.backwards += 1
        return awaited

    assert backward(2, 0) == (1, 1), "one firing where nothing is known"
    assert backward(1, 3) == (1, 1)
    ledger.start_window()
    assert backward(2, 0) == (2, 0)
    assert backward(0, 1) == (1, 3)
    ledger.start_window()
    assert backward(0, 1) == (2, 0)
    assert backward(0, 0) == (1, 1), "who ever fired here is waited for"
    ledger.start_window()
    assert backward(0, 0) == (1, 1)


def test_messages_name_a_few_and_count_the_rest() -> None:
    text = describe([make_record(f"p{i}") for i in range(9)])
    assert "p0" in text and "p4" in text and "p5" not in text and "and 4 more" in text
