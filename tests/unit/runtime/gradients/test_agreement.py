# SPDX-License-Identifier: Apache-2.0
"""What ranks agree on before they reduce. Ranks are threads here; the channel over processes has tests of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from deepspeed.runtime.gradients.agreement import Verdict, agree
from deepspeed.runtime.gradients.ledger import GradientAccountingError, Ledger


class ThreadChannel:
    """A Channel whose ranks are threads of this process."""

    def __init__(self, rank: int, world_size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, world_size
        self._board, self._barrier = board, barrier
        self.calls: list[str] = []

    def gather(self, obj: object, what: str) -> list[object]:
        self.calls.append(what)
        self._board[self.rank] = obj
        self._barrier.wait(timeout=10)
        everyone = list(self._board)
        self._barrier.wait(timeout=10)
        return everyone

    def all_reduce_max(self, values: list[int], what: str) -> list[int]:
        return [max(column) for column in zip(*self.gather(values, what))]


def on_ranks(world_size: int, body: Callable[[ThreadChannel], Any]) -> list[Any]:
    """What ``body`` returned or raised in each rank."""
    board: list[Any] = [None] * world_size
    barrier = threading.Barrier(world_size)
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = body(ThreadChannel(rank, world_size, board, barrier))
        except GradientAccountingError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_nobody_wants_anything(world_size: int) -> None:
    verdicts = on_ranks(world_size, lambda c: agree(c, Ledger([]), wants_round=False, leftovers=False))
    assert verdicts == [Verdict(False, False)] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("flag", ["wants_round", "leftovers"])
def test_what_one_rank_wants_every_rank_hears(world_size: int, flag: str) -> None:
    def body(channel: ThreadChannel) -> Verdict:
        mine = channel.rank == world_size - 1
        return agree(
            channel,
            Ledger([]),
            wants_round=mine and flag == "wants_round",
            leftovers=mine and flag == "leftovers",
        )

    expected = Verdict(flag == "wants_round", flag == "leftovers")
    assert on_ranks(world_size, body) == [expected] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_poisoned_window_is_refused_by_every_rank_naming_the_one(world_size: int) -> None:
    def body(channel: ThreadChannel) -> Verdict:
        bad = channel.rank == world_size - 1
        ledger = Ledger([], rank=channel.rank, poison="a backward was aborted" if bad else "")
        return agree(channel, ledger, wants_round=False, leftovers=False)

    for result in on_ranks(world_size, body):
        assert isinstance(result, GradientAccountingError)
        assert f"rank {world_size - 1}: a backward was aborted" in str(result)
        assert "zero_grad()" in str(result)


def test_a_round_that_some_rank_wants_comes_before_the_refusal() -> None:
    """The rank that reduces in its backward must not be left alone; the refusal follows when nobody reduces."""

    def body(channel: ThreadChannel) -> Verdict:
        ledger = Ledger([], poison="why" if channel.rank == 0 else "")
        return agree(channel, ledger, wants_round=channel.rank == 1, leftovers=False)

    assert on_ranks(2, body) == [Verdict(True, False)] * 2


def test_ranks_in_different_windows_are_refused_until_all_start_a_new_one() -> None:
    def body(channel: ThreadChannel) -> tuple[str, Verdict]:
        ledger = Ledger([], generation=2 if channel.rank == 1 else 0)
        with pytest.raises(GradientAccountingError, match=r"different number of times.*\[0, 2, 0\]") as error:
            agree(channel, ledger, wants_round=False, leftovers=False)
        with pytest.raises(GradientAccountingError, match="unusable"):
            agree(channel, ledger, wants_round=False, leftovers=False)
        ledger.start_window()
        return str(error.value), agree(channel, ledger, wants_round=False, leftovers=False)

    results = on_ranks(3, body)
    assert len({message for message, _ in results}) == 1
    assert all(verdict == Verdict(False, False) for _, verdict in results), "the next window is usable"


def test_the_message_says_what_a_rank_waits_for() -> None:
    def body(channel: ThreadChannel) -> list[str]:
        agree(channel, Ledger([]), wants_round=True, leftovers=True)
        agree(channel, Ledger([]), wants_round=False, leftovers=False)
        return channel.calls

    for calls in on_ranks(2, body):
        assert len(calls) == 2 and "loss.backward()" in calls[0] and "step" in calls[1]


def test_one_rank_alone_asks_nobody() -> None:
    channel = ThreadChannel(0, 1, [None], threading.Barrier(1))
    assert agree(channel, Ledger([]), wants_round=True, leftovers=True) == Verdict(True, True)
    assert channel.calls == []
