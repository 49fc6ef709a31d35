# SPDX-License-Identifier: Apache-2.0
"""What ``ds_grad_check`` runs in each rank: the script, until enough updates were checked, and then the table."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.runtime.gradients.self_check import OBSERVERS, GradientCheck, Observer, StepReport
from deepspeed.runtime.gradients.self_check_replay import Replay

RIGHT, WRONG, UNCHECKED = 0, 1, 2
# Norm-wise error of a parameter up to which a step in plain torch agrees: the model's arithmetic need not be the same
# to the last bit. What is looked for is of the order of 0.1 to 1.
REPLAY_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
SLOW_ENGINE = 3  # an engine that has so many times the updates asked for does not wait for others


class EnoughSteps(SystemExit):
    """Ends the script where it stands: enough updates were checked."""


@dataclass
class Row:
    """One line of a table: a parameter group."""

    group: int
    parameters: int = 0
    elements: int = 0
    error: float = 0.0
    allowed: float = 0.0
    worst: str = ""
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, verdict: str, error: float, allowed: float) -> None:
        """One parameter in one update."""
        self.counts[verdict] = self.counts.get(verdict, 0) + 1
        compared = verdict in ("right", "wrong")
        if compared and (not self.worst or error / allowed > self.error / self.allowed):
            self.error, self.allowed, self.worst = error, allowed, name

    @property
    def verdict(self) -> str:
        if self.counts.get("wrong"):
            return "WRONG"
        if not self.counts.get("right"):
            return "not compared"
        return ", ".join(["right", *(f"{n} {what}" for what, n in self.counts.items() if what != "right")])


class EngineResults:
    """The checked updates of one engine."""

    def __init__(self, engine: Any, check: GradientCheck, against: bool) -> None:
        self.check = check
        self.facts = _facts(engine)
        self.dtype_of = {entry.name: entry.parameter.dtype for entry in check.record.entries}
        self.numel_of = {entry.name: entry.numel for entry in check.record.entries}
        self.group_of = {entry.name: entry.param_group for entry in check.record.entries}
        self.reports: list[StepReport] = []
        self.replay = Replay(engine, check) if against else None

    @property
    def wrong(self) -> bool:
        rows = self.replay_rows() if self.replay is not None else []
        return any(not report.right for report in self.reports) or any(row.verdict == "WRONG" for row in rows)

    def rows(self) -> list[Row]:
        """By group, over all updates: what the engine steps with against what autograd delivered."""
        rows = self._empty_rows()
        for report in self.reports:
            for result in report.results:
                rows[result.param_group].add(result.name, result.verdict, result.error, result.allowed)
        return list(rows.values())

    def replay_rows(self) -> list[Row]:
        """By group, over all updates: what the engine steps with against the step in plain torch."""
        rows = self._empty_rows()
        for comparisons, bypassed in zip(self.replay.results, self.replay.bypassed):
            for comparison in comparisons:
                name = comparison.entry.name
                allowed = REPLAY_TOLERANCE[self.dtype_of[name]]
                error = math.inf if math.isinf(comparison.error) else comparison.distance
                verdict = "right" if error <= allowed else "wrong"
                if name in bypassed:
                    verdict = "bypassed"
                elif comparison.entry.edited:
                    verdict = "edited"
                rows[self.group_of[name]].add(name, verdict, error, allowed)
        return list(rows.values())

    def _empty_rows(self) -> dict[int, Row]:
        rows = {group: Row(group) for group in sorted(set(self.group_of.values()))}
        for name, group in self.group_of.items():
            rows[group].parameters += 1
            rows[group].elements += self.numel_of[name]
        return rows


class Session(Observer):
    """All engines that the script makes.

    Args:
        steps: updates to check of each.
        against: also do them again in plain torch.
    """

    def __init__(self, steps: int, against: bool) -> None:
        self.steps = steps
        self.against = against
        self.engines: list[EngineResults] = []

    def on_engine(self, engine: Any, check: GradientCheck) -> None:
        self.engines.append(EngineResults(engine, check, self.against))

    def _replay_of(self, check: GradientCheck) -> Observer:
        for results in self.engines:
            if results.check is check and results.replay is not None:
                return results.replay
        return _NOBODY

    def on_drop(self, check: GradientCheck) -> None:
        self._replay_of(check).on_drop(check)

    def on_compare(self, check: GradientCheck, comparator: Any) -> None:
        self._replay_of(check).on_compare(check, comparator)

    def on_report(self, check: GradientCheck, report: StepReport) -> None:
        next(results for results in self.engines if results.check is check).reports.append(report)

    def on_window(self, check: GradientCheck, checked: bool) -> None:
        done = [len(results.reports) for results in self.engines]
        if done and (min(done) >= self.steps or max(done) >= SLOW_ENGINE * self.steps):
            raise EnoughSteps(0)
        self._replay_of(check).on_window(check, checked)


_NOBODY = Observer()


# ---------------------------------------------------------------------------------------------------- the table


def _facts(engine: Any) -> str:
    dtype = str(engine.get_data_types()[0]).removeprefix("torch.")
    return (
        f"{dist.get_world_size()} ranks, ZeRO stage {int(engine.zero_optimization_stage())}, {dtype},"
        f" gradient_accumulation_steps {engine.gradient_accumulation_steps()}"
    )


def _table(rows: Sequence[Row], share: str) -> list[str]:
    head = ("group", "parameters", "elements", share, "allowed", "worst parameter", "verdict")
    cells = [head] + [
        (
            str(row.group),
            str(row.parameters),
            f"{row.elements:,}",
            f"{row.error:.1e}" if row.worst else "-",
            f"{row.allowed:.1e}" if row.worst else "-",
            row.worst or "-",
            row.verdict,
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]


def summary(engines: Sequence[EngineResults]) -> list[str]:
    """What is printed at the end: a table per engine. How a wrong update is wrong was logged when it was found."""
    lines = []
    for number, results in enumerate(engines):
        which = f"engine {number}: " if len(engines) > 1 else ""
        skipped = sum(report.skipped for report in results.reports)
        note = f", {skipped} of them skipped by the engine as not finite" if skipped else ""
        lines.append(f"ds_grad_check: {which}{len(results.reports)} updates checked{note}; {results.facts}")
        if not results.reports:
            continue
        lines += ["what the optimizer steps with, against what autograd delivered:"]
        lines += _table(results.rows(), "largest error")
        replay = results.replay
        if replay is not None and replay.impossible:
            lines.append(f"the step was not done again in plain torch: {replay.impossible}")
        elif replay is not None:
            lines.append("against the same step in plain torch on the same batches:")
            lines += _table(results.replay_rows(), "error")
            around = sorted(set().union(*replay.bypassed))
            if around:
                shown = ", ".join(around[:5]) + (f" and {len(around) - 5} more" if len(around) > 5 else "")
                lines.append(
                    f"  bypassed: gradients of {shown} come around engine.forward, so plain torch cannot do them again"
                )
        wrong = [str(report.update) for report in results.reports if not report.right]
        if wrong:
            lines.append(f"wrong in update{'s' * (len(wrong) > 1)} {', '.join(wrong)}; the warnings above say how")
    return lines


def status_of(engines: Sequence[EngineResults]) -> int:
    """Exit status."""
    if any(results.wrong for results in engines):
        return WRONG
    return RIGHT if any(results.reports for results in engines) else UNCHECKED


# ---------------------------------------------------------------------------------------------------- the rank


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Own arguments; a ``--local_rank`` that the launcher put in front of them goes to the script."""
    parser = argparse.ArgumentParser(prog="ds_grad_check (rank)", allow_abbrev=False)
    parser.add_argument("--local_rank", default=None)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--against", default=None)
    parser.add_argument("--as_module", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(list(arguments))


@contextlib.contextmanager
def _as_program(options: argparse.Namespace) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as the script expects them."""
    local_rank = [] if options.local_rank is None else [f"--local_rank={options.local_rank}"]
    argv, path = sys.argv, list(sys.path)
    sys.argv = [options.script, *local_rank, *options.arguments]
    sys.path[0:1] = [os.getcwd() if options.as_module else os.path.dirname(os.path.abspath(options.script))]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def run(options: argparse.Namespace) -> bool:
    """Run the script until enough was checked or it ends; whether it went well."""
    try:
        with _as_program(options):
            if options.as_module:
                runpy.run_module(options.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(options.script, run_name="__main__")
    except EnoughSteps:
        return True
    except SystemExit as end:
        return end.code in (None, 0)
    except BaseException:  # noqa: BLE001 - whatever a script raises, what was checked before is shown
        traceback.print_exc()
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank; the exit status."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    session = Session(options.steps, options.against is not None)
    OBSERVERS.append(session)
    rank = int(os.environ.get("RANK", "0"))
    went_well = run(options)
    OBSERVERS.remove(session)
    status = status_of(session.engines)
    if rank == 0:
        for line in summary(session.engines):
            print(line)
        if status == UNCHECKED:
            made = "made no engine with an optimizer" if not session.engines else "made no update"
            print(f"ds_grad_check: the script ended before an update was checked: it {made}")
        elif not went_well:
            print("ds_grad_check: the script failed before it was stopped, see above")
        sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
    return status if went_well or status == WRONG else UNCHECKED


if __name__ == "__main__":
    sys.exit(main())
