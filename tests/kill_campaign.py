# SPDX-License-Identifier: Apache-2.0
"""Kill one rank or all of two at points spread over a save, and see whether ``latest`` can still be read.

    python tests/kill_campaign.py [--rounds 100] [--points 20] [--folder DIR]

Each round saves a checkpoint and then another one, within which the first rank, the second one or both get SIGKILL.
Points lie evenly between the first and the last call with which a save changes the disk (writes, half of a write,
fsync, truncation, renaming, making and deleting folders), as counted in a save that is left alone. Rounds go through
stages 0 to 3, new and replaced tags, blocking and decoupled saves. A new job then loads without a tag, compares every
value with what was saved, trains, saves over it and loads again. The exit status says whether all rounds were fine.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

if str(Path(__file__).resolve().parent) not in sys.path:
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import torch

from unit.checkpoint.killing import WORLD, Case, Kill, kill_within, resume, run_in_ranks

VICTIMS = ((0,), (1,), (0, 1))
RESUMED_TOGETHER = 20


def kinds() -> list[tuple[int, bool, bool]]:
    """Stage, whether a tag is replaced, whether the save is decoupled."""
    return [
        (stage, replacing, decoupled)
        for stage in range(4)
        for replacing in (True, False)
        for decoupled in (False, True)
    ]


def count_calls(folder: Path) -> dict[tuple[int, bool, bool], tuple[int, ...]]:
    """Calls of each rank in a save of each kind."""
    counts = {}
    for index, (stage, replacing, decoupled) in enumerate(kinds()):
        case = Case(str(folder / f"count{index}"), stage, Kill((), "", 0, False), replacing, decoupled)
        outcomes = run_in_ranks("save_and_die", case=case, counts=f"{case.folder}.calls")
        assert [outcome.kind for outcome in outcomes] == ["passed"] * WORLD, outcomes
        counts[stage, replacing, decoupled] = tuple(torch.load(f"{case.folder}.calls.{rank}") for rank in range(WORLD))
    return counts


def draw(index: int, points: int, counts: dict[tuple[int, bool, bool], tuple[int, ...]], folder: Path) -> Case:
    """The round of this number. Points, victims and kinds are counted through at different paces, so that all meet."""
    stage, replacing, decoupled = kind = kinds()[(index * 7) % len(counts)]
    victims = VICTIMS[(index + index // points) % len(VICTIMS)]
    if stage == 0:
        victims = (0,) if victims == (1,) else victims  # the second rank writes nothing
    place = (index % points + 0.5) / points
    nth = tuple(max(1, min(count, 1 + int(place * count))) for count in counts[kind])
    return Case(str(folder / str(index)), stage, Kill(victims, "", nth, index % 2 > 0), replacing, decoupled)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--folder", help="for the checkpoints; default: a temporary one")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    begun = time.monotonic()
    counts = count_calls(folder)
    print(f"calls of a save, by rank: {min(counts.values())} to {max(counts.values())}", flush=True)
    waiting: list[Case] = []
    killed = bad = former = 0
    for index in range(options.rounds):
        case = draw(index, options.points, counts, folder)
        killed += kill_within(case)
        waiting.append(case)
        if len(waiting) == RESUMED_TOGETHER or index + 1 == options.rounds:
            try:
                found = resume(waiting, str(folder / "found"))
                former += found.count(1)
            except AssertionError as error:
                bad += 1
                print(f"UNREADABLE within rounds up to {index}: {error}", flush=True)
            for done in waiting:
                shutil.rmtree(done.folder, ignore_errors=True)
            waiting = []
            seconds = time.monotonic() - begun
            print(
                f"{index + 1} of {options.rounds} rounds, {killed} killed within the save, {former} found the former"
                f" checkpoint, {bad} bad batches, {seconds:.0f} s",
                flush=True,
            )
    shutil.rmtree(folder)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
