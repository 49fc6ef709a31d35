# SPDX-License-Identifier: Apache-2.0
"""Rounds in which ranks are killed within a save, for tests and for ``tests/kill_campaign.py``.

A round saves a first checkpoint, then a second one whose save is killed; a new job must then find a whole one under
``latest``, the former or the new one, with exactly what it held, and must be able to save over it.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.checkpoint import block_stream, host_copies, native_sums, optimizer_transfer
from deepspeed.runtime.checkpoint_engine import unfinished
from unit.checkpoint.checkpoint_cases import differences, everything, fresh, make_config, make_engine, train
from unit.common import DistributedTest, _make_job, _new_group
from unit.rank_group import RankGroup
from unit.rank_server import Outcome

WORLD = 2
# What a save does to the disk.
CALLS: dict[str, tuple[Any, str]] = {
    "write": (torch, "save"),
    "pwrite": (os, "pwrite"),
    "ftruncate": (os, "ftruncate"),
    "fsync": (os, "fsync"),
    "replace": (os, "replace"),
    "rename": (os, "rename"),
    "makedirs": (os, "makedirs"),
    "remove": (shutil, "rmtree"),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Kill:
    """When ranks die within a save.

    Args:
        victims: ranks that die.
        kind: which of ``CALLS`` are counted; "" counts all.
        nth: the call, from 1, at which a victim dies: one number for all, or one per rank.
        after: the call has done its work; otherwise it has not begun, or has written half.
    """

    victims: tuple[int, ...]
    kind: str
    nth: int | tuple[int, ...]
    after: bool


@dataclass(frozen=True)
class Case:
    """One round. ``replacing``: the second save is over the tag of the first one."""

    folder: str
    stage: int
    kill: Kill
    replacing: bool
    decoupled: bool = False

    def engine_config(self) -> dict[str, Any]:
        writer = {"decoupled": True, "io_buffer_size": 4096} if self.decoupled else None
        return make_config(self.stage, "bf16", checkpoint={"writer": writer})


class Events:
    """Counts calls of all threads, and ends the process at one of them.

    Args:
        kind, nth, after: as of ``Kill``; ``nth`` 0 only counts.
    """

    def __init__(self, kind: str = "", nth: int = 0, after: bool = False) -> None:
        self.nth, self.after, self.count = nth, after, 0
        self._lock = threading.Lock()
        self._originals = {one: getattr(*CALLS[one]) for one in ([kind] if kind else CALLS)}

    def __enter__(self) -> Events:
        for kind, function in self._originals.items():
            setattr(*CALLS[kind], self._counted(kind, function))
        return self

    def __exit__(self, *_: Any) -> None:
        for kind, function in self._originals.items():
            setattr(*CALLS[kind], function)

    def _counted(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.count += 1
                now = self.count == self.nth
            if now and not self.after:
                if kind == "pwrite":
                    os.ftruncate(args[0], args[2] + len(args[1]) // 2)
                die()
            result = function(*args, **kwargs)
            if now:
                die()
            return result

        return call


class Ranks(DistributedTest):
    """What ranks do; called by ``run_in_ranks``."""

    world_size = WORLD

    def save_and_die(self, case: Case, counts: str = "") -> None:
        """Save twice; the victims die within the second save, or ``counts`` gets how many calls each rank has made."""
        if case.decoupled:  # what is done for large tensors only
            host_copies.WORTH_A_SUM = block_stream.WORTH_A_WRITE = native_sums.WORTH_THE_OP = 1
            optimizer_transfer.WORTH_A_WAIT = 1
        engine, kill = make_engine(case.engine_config()), case.kill
        for step, tag in ((1, "a"), (2, "a" if case.replacing else "b")):
            train(engine, step, 1)
            state = everything(engine)
            if dist.get_rank() == 0:
                torch.save(state, f"{case.folder}.{step}")
            nth = 0
            if step == 2 and dist.get_rank() in kill.victims:
                nth = kill.nth if isinstance(kill.nth, int) else kill.nth[dist.get_rank()]
            with Events(kill.kind, nth, kill.after) as events:
                engine.save_checkpoint(case.folder, tag=tag)
                unfinished.finish(engine._checkpoint_channel())
        if counts:
            torch.save(events.count, f"{counts}.{dist.get_rank()}")
            return
        if dist.get_rank() in kill.victims:
            with open(f"{case.folder}.survived", "w"):
                pass
        die()

    def resume(self, cases: list[Case], result: str) -> None:
        """Load each folder without a tag, say which checkpoint it was, save again over it and load that."""
        found = []
        for case in cases:
            folder = case.folder
            engine = fresh(make_config(case.stage, "bf16"))
            path, _ = engine.load_checkpoint(folder)
            assert path is not None, folder
            now = everything(engine)
            same = [step for step in (1, 2) if not differences(now, torch.load(f"{folder}.{step}", weights_only=False))]
            assert len(same) == 1, f"{folder}: neither the former nor the new checkpoint"
            found.append(same[0])
            train(engine, 3, 1)
            later = everything(engine)
            engine.save_checkpoint(folder, tag="a")
            engine.load_checkpoint(folder)
            assert not differences(everything(engine), later)
            assert not [name for name in os.listdir(folder) if name.startswith(".") and name.endswith("-a")]
            engine.destroy()
        if dist.get_rank() == 0:
            torch.save(found, result)


def run_in_ranks(method: str, **arguments: Any) -> list[Outcome]:
    job = _make_job(Ranks, method, {}, arguments)
    group: RankGroup = _new_group(Ranks, WORLD, job)
    outcomes = group.run(job, 240.0, Ranks.idle_timeout)
    if group.usable:
        group.close()
    return outcomes


def kill_within(case: Case) -> bool:
    """Run a round's saves; whether the victims died within the second one."""
    outcomes = run_in_ranks("save_and_die", case=case)
    ends = [outcome.kind for outcome in outcomes]
    # Where several are to die, one may notice the death of another one before its own turn comes.
    assert any(ends[rank] == "died" for rank in case.kill.victims) and "passed" not in ends, outcomes
    return not os.path.exists(f"{case.folder}.survived")


def resume(cases: list[Case], result: str) -> list[int]:
    """Look at what the rounds left: 1 or 2 for each, the checkpoint that was found.

    Raises:
        AssertionError: one of them has no readable ``latest``, or it holds something else.
    """
    outcomes = run_in_ranks("resume", cases=cases, result=result)
    assert [outcome.kind for outcome in outcomes] == ["passed"] * WORLD, [outcome.details for outcome in outcomes]
    return torch.load(result)
