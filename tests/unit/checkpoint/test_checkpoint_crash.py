# SPDX-License-Identifier: Apache-2.0
"""Ranks are killed at points spread over a save: afterwards a load without a tag finds a whole checkpoint, the former
or the new one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.checkpoint import folders
from unit.checkpoint.checkpoint_cases import differences, everything, fresh, make_config, make_engine, train
from unit.common import DistributedTest, _make_job, _new_group
from unit.rank_group import RankGroup

WORLD = 2
# What a save does to the disk, in the order in which it happens on rank 0, and how often.
CALLS: dict[str, tuple[Any, str]] = {
    "write": (torch, "save"),
    "fsync": (os, "fsync"),
    "replace": (os, "replace"),
    "rename": (os, "rename"),
    "makedirs": (os, "makedirs"),
    "remove": (folders.shutil, "rmtree"),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Countdown:
    """In place of a function: dies at its n-th call, before or after it has done its work."""

    def __init__(self, function: Callable[..., Any], calls: int, after: bool, dies: Callable[[], None] = die) -> None:
        self.function, self.calls, self.after, self.dies = function, calls, after, dies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls -= 1
        if self.calls == 0 and not self.after:
            self.dies()
        result = self.function(*args, **kwargs)
        if self.calls == 0:
            self.dies()
        return result


class Ranks(DistributedTest):
    """What ranks do; called by the tests below, which look at the folder when ranks are gone."""

    world_size = WORLD

    def save_and_die(self, folder: str, stage: int, replacing: bool, kind: str, nth: int, after: bool, everyone: bool):
        """A first checkpoint that stays, then one whose save is killed. Rank 0 writes what each holds."""
        engine = make_engine(make_config(stage, "bf16"))
        for step, tag in ((1, "a"), (2, "a" if replacing else "b")):
            train(engine, step, 1)
            state = everything(engine)
            if dist.get_rank() == 0:
                torch.save(state, f"{folder}.{step}")
            if step == 2 and (everyone or dist.get_rank() == 0):
                owner, name = CALLS[kind]
                setattr(owner, name, Countdown(getattr(owner, name), nth, after))
            engine.save_checkpoint(folder, tag=tag)
        if dist.get_rank() == 0:
            with open(f"{folder}.survived", "w"):
                pass
        die()

    def resume(self, cases: list[tuple[str, int]], result: str) -> None:
        """Load each folder without a tag, say which checkpoint it was, save again over it and load that."""
        found = []
        for folder, stage in cases:
            engine = fresh(make_config(stage, "bf16"))
            path, _ = engine.load_checkpoint(folder)
            assert path is not None
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


def run_in_ranks(method: str, **arguments: Any) -> list[Any]:
    group: RankGroup = _new_group(Ranks, WORLD)
    outcomes = group.run(_make_job(Ranks, method, {}, arguments), 60.0, Ranks.idle_timeout)
    if group.usable:
        group.close()
    return outcomes


# Kind of call, which one of rank 0, killed after it or before, over a save that replaces a tag or makes a new one.
POINTS = [
    *[("write", nth, after, bool(nth % 2)) for nth in (1, 2) for after in (False, True)],
    *[("fsync", nth, True, nth % 4 < 3) for nth in (1, 3, 5, 7, 8)],
    *[("replace", nth, False, nth % 2 > 0) for nth in (2, 3, 4, 5)],
    *[("rename", nth, after, True) for nth in (1, 2) for after in (False, True)],
    ("rename", 1, False, False),
    ("rename", 1, True, False),
    ("makedirs", 1, True, True),
    ("remove", 1, False, True),
    ("remove", 1, True, True),
]


def test_a_whole_checkpoint_is_always_there(tmp_path):
    cases, killed = [], 0
    for index, (kind, nth, after, replacing) in enumerate(POINTS):
        stage, everyone = 1 + 2 * (index % 2), index % 4 > 1
        folder = str(tmp_path / str(index))
        outcomes = run_in_ranks(
            "save_and_die", folder=folder, stage=stage, replacing=replacing, kind=kind, nth=nth, after=after,
            everyone=everyone,
        )  # fmt: skip
        assert outcomes[0].kind == "died", outcomes[0]
        killed += not os.path.exists(f"{folder}.survived")
        cases.append((folder, stage))
    assert killed >= len(POINTS) - 2, "the points must lie inside the save"
    result = str(tmp_path / "found")
    outcomes = run_in_ranks("resume", cases=cases, result=result)
    assert [outcome.kind for outcome in outcomes] == ["passed"] * WORLD, [outcome.details for outcome in outcomes]
    found = torch.load(result)
    assert found.count(1) >= 5 and found.count(2) >= 5, found
