# SPDX-License-Identifier: Apache-2.0
"""A barrier over the store of torch.distributed, which names the ranks that did not come, whatever the backend."""

import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist

from deepspeed.comm import watchdog
from deepspeed.comm.torch import timeout_of
from deepspeed.comm.watchdog_report import names

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between looks at the store
_FAREWELL_SECONDS = 5.0  # for which the process that may hold the store waits for the others to have read the outcome

_rounds: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


class _Barrier:
    """One barrier. A handle for :func:`watchdog.wait`.

    The first rank that sees everybody, or that has waited too long, writes the outcome; it holds for all ranks, so
    that none passes while another gives up.
    """

    def __init__(self, group: Any, timeout: timedelta, wait_all_ranks: bool) -> None:
        self._ranks = torch_dist.get_process_group_ranks(group)
        self._rank = torch_dist.get_rank()
        self._seconds = timeout.total_seconds()
        self._deadline = time.monotonic() + self._seconds
        self._all = wait_all_ranks
        number = _rounds[group] = _rounds.get(group, 0) + 1
        place = f"deepspeed/barrier/{watchdog.world_number()}/{group.group_name}"
        store = torch_dist.distributed_c10d._get_default_store()
        self._store = torch_dist.PrefixStore(f"{place}/{number}", store)
        self._before = torch_dist.PrefixStore(f"{place}/{number - 1}", store)
        self.what = f"monitored barrier {number}"

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait for the outcome.

        Raises:
            CollectiveTimeoutError: not every rank came in time.
            RuntimeError: ``limit`` is over; wait again.
        """
        end = float("inf") if limit is None else time.monotonic() + limit.total_seconds()
        self._store.set(f"here/{self._rank}", "")
        pause = _FIRST_PAUSE
        while (outcome := self._outcome()) is None:
            if time.monotonic() > end:
                raise RuntimeError("the ranks are not all here yet")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._leave(outcome)

    def _outcome(self) -> str | None:
        """None while it is open."""
        if self._store.check(["outcome"]):
            return self._store.get("outcome").decode()
        if self._store.check([f"here/{rank}" for rank in self._ranks]):
            return self._decide("passed")
        if time.monotonic() < self._deadline:
            return None
        missing = [rank for rank in self._ranks if not self._store.check([f"here/{rank}"])]
        return self._decide(" ".join(map(str, missing)) or "passed")

    def _decide(self, outcome: str) -> str:
        return self._store.compare_set("outcome", "", outcome).decode()

    def _leave(self, outcome: str) -> None:
        if outcome != "passed":
            raise self._failure([int(rank) for rank in outcome.split()])
        self._store.set(f"left/{self._rank}", "")
        self._before.delete_key(f"here/{self._rank}")  # nobody reads the barrier before this one any more
        self._before.delete_key(f"left/{self._rank}")
        if self._rank != 0:
            return
        self._before.delete_key("outcome")
        left = [f"left/{rank}" for rank in self._ranks]
        end = time.monotonic() + _FAREWELL_SECONDS
        while not self._store.check(left) and time.monotonic() < end:
            time.sleep(_FIRST_PAUSE)

    def _failure(self, missing: list[int]) -> watchdog.CollectiveTimeoutError:
        if self._rank in missing:
            text = f"rank {self._rank} came to {self.what} after others had given up waiting for {names(missing)}"
        else:
            told = missing if self._all else missing[:1]
            more = "" if self._all else "; wait_all_ranks=True names all that are missing"
            text = f"rank {self._rank}: {names(told)} did not come to {self.what} within {self._seconds:g} s{more}"
        return watchdog.CollectiveTimeoutError("\n".join(filter(None, [text, watchdog.report_now()])))


def monitored_barrier(group: Any, timeout: timedelta | None, wait_all_ranks: bool) -> None:
    """See ``deepspeed.comm.monitored_barrier``."""
    if torch_dist.get_backend(group) == "mpi":  # MPI has no store
        torch_dist.monitored_barrier(group, timeout, wait_all_ranks)
        return
    group = torch_dist.group.WORLD if group is None else group
    barrier = _Barrier(group, timeout_of(group) if timeout is None else timeout, wait_all_ranks)
    watchdog.wait(barrier, barrier.what, watchdog.lane(group, "barriers"))
