# SPDX-License-Identifier: Apache-2.0
"""Cases are drawn in this process and run in ranks that are reused; what fails is made as small as it goes."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
from hypothesis import strategies as st

from unit.hypothesis_phases import PHASES
from unit.random_graphs import running
from unit.random_graphs.cases import Case, as_script
from unit.random_graphs.drawing import STAGES, WORLDS, drawn_case
from unit.rank_group import RankGroup, get_server
from unit.rank_server import Job, Outcome

T = TypeVar("T")
TIMEOUT = 90.0  # seconds for a case
IDLE_TIMEOUT = 10.0  # seconds after which ranks that wait for one that has ended are given up


class WrongCase(AssertionError):
    """A case failed; the message is what the ranks said."""


class DrawnChoices:
    """Decisions of hypothesis. ``draw`` is what ``hypothesis.strategies.composite`` gives."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def pick(self, options: Sequence[T]) -> T:
        return options[self.number(0, len(options) - 1)]

    def number(self, low: int, high: int) -> int:
        # not st.integers, which prefers the ends of a wide range
        return low if low == high else self._draw(st.sampled_from(range(low, high + 1)))

    def maybe(self, percent: int) -> bool:
        return self.number(0, 99) >= 100 - percent


@st.composite
def cases(
    draw: Callable[[st.SearchStrategy[Any]], Any], worlds: Sequence[int] = WORLDS, stages: Sequence[int] = STAGES
) -> Case:
    """Cases as hypothesis draws and shrinks them."""
    return drawn_case(DrawnChoices(draw), worlds, stages)


class Ranks:
    """Groups of ranks by world size, made when first needed and anew after a failure.

    Args:
        job: class whose ``run(case)`` each rank calls.
    """

    def __init__(self, job: type = running.CaseJob) -> None:
        self._job = job
        self._groups: dict[int, RankGroup] = {}

    def run(self, case: Case) -> None:
        """Raises WrongCase unless all ranks pass."""
        job = Job(
            module=self._job.__module__,
            module_file=str(sys.modules[self._job.__module__].__file__),
            class_name=self._job.__name__,
            method="run",
            payload=pickle.dumps(({}, {"case": pickle.dumps(case)})),
            per_rank=(),
            sys_path=list(sys.path),
            directory=os.getcwd(),
            environment=dict(os.environ),
        )
        group = self._groups.get(case.world_size)
        if group is None or not group.usable:
            group = self._groups[case.world_size] = RankGroup(get_server(job), case.world_size)
        outcomes = group.run(job, TIMEOUT, IDLE_TIMEOUT)
        if any(outcome.kind != "passed" for outcome in outcomes):
            raise WrongCase(_told(outcomes))

    def close(self) -> None:
        for group in self._groups.values():
            if group.usable:
                group.close()
        self._groups.clear()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _told(outcomes: Sequence[Outcome]) -> str:
    """One line that says what happened, then the details of each rank, those that failed first in front."""
    order = {"died": 0, "failed": 1, "hung": 2, "stopped": 3}
    bad = sorted((o for o in outcomes if o.kind != "passed"), key=lambda o: (order.get(o.kind, 4), o.when))
    first = bad[0]
    details = "\n".join(f"--- rank {o.rank}: {o.kind} ---\n{o.details}" for o in bad)
    return f"rank {first.rank} of {len(outcomes)} {first.kind}: {first.reason}\n{details}"


@dataclass
class Finding:
    """A case that fails, as small as it got."""

    case: Case
    told: str
    flaky: bool = False  # passed when it was run once more

    def script(self, origin: str) -> str:
        """A program that shows it; ``origin`` says where it was found."""
        note = " Not each time." if self.flaky else ""
        return as_script(self.case, f"{self.told.splitlines()[0]}\n{origin}{note}")


def search(
    seed: int,
    count: int,
    ranks: Ranks,
    worlds: Sequence[int] = WORLDS,
    stages: Sequence[int] = STAGES,
    progress: Callable[[int, float], None] | None = None,
) -> Finding | None:
    """Run ``count`` random cases; the first that fails is shrunk and returned.

    Args:
        seed: of the drawing. The same cases come from the same seed with the same version of hypothesis.
        worlds: numbers of ranks, as often as each is to be drawn.
        stages: of ZeRO, likewise.
        progress: called with the number of cases run so far and the seconds that the last one took.
    """
    failed: list[tuple[Case, str]] = []
    done = 0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=PHASES,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(cases(worlds, stages))
    def check(case: Case) -> None:
        nonlocal done
        begin = time.monotonic()
        try:
            ranks.run(case)
        except WrongCase as error:
            failed.append((case, str(error)))
            raise
        done += 1
        if progress is not None:
            progress(done, time.monotonic() - begin)

    try:
        check()
    except WrongCase:
        return Finding(*failed[-1])  # hypothesis runs the smallest one last
    except hypothesis.errors.Flaky:
        return Finding(*min(failed, key=lambda one: len(one[0].describe())), flaky=True)
    return None


def write_script(finding: Finding, folder: Path, origin: str) -> Path:
    """Write the program that shows a finding, and beside it all that was said."""
    folder.mkdir(parents=True, exist_ok=True)
    number = sum(1 for _ in folder.glob("case_*.py"))
    path = folder / f"case_{number:03d}.py"
    path.write_text(finding.script(origin), encoding="utf-8")
    path.with_suffix(".txt").write_text(f"{finding.case.describe()}\n\n{finding.told}\n", encoding="utf-8")
    return path


def run_alone(case: Case) -> None:
    """Run a case in ranks of its own; exits with status 1 and says why if it fails."""
    with Ranks() as ranks:
        try:
            ranks.run(case)
        except WrongCase as error:
            sys.exit(str(error))
    print("right")
