# SPDX-License-Identifier: Apache-2.0
"""The gradient self-check: before an update, what the optimizer is about to see against what autograd delivered.

Config section ``gradient_check`` or ``DS_GRADIENT_CHECK=1``. For a checked update an independent record is kept
(``self_check_record``), averaged over ranks by plain all-reduces and compared element by element
(``self_check_compare``) with the gradients on which the optimizer of the stage is about to step
(``self_check_target``). Nothing is shared with the reducer: no hook, no buffer, no count, no factor. Where no update is
checked there is not one hook.
"""

from __future__ import annotations

import fnmatch
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.runtime.gradients.gradient_shard import GradientShard
from deepspeed.runtime.gradients.self_check_compare import Comparator, Comparison, Rounding
from deepspeed.runtime.gradients.self_check_config import GradientCheckConfig
from deepspeed.runtime.gradients.self_check_explain import Explainer
from deepspeed.runtime.gradients.self_check_record import ParameterEntry, WindowRecord
from deepspeed.runtime.gradients.self_check_target import stepped_by
from deepspeed.utils.logging import log_dist

SHOWN = 5


class GradientCheckError(RuntimeError):
    """The gradient of an update is not the mean of what autograd delivered. Nothing was updated."""


@dataclass
class ParameterResult:
    """One parameter in one checked update; the same on every rank.

    Attributes:
        name, param_group: as in the model and in the optimizer.
        verdict: ``right``, ``wrong``, or ``edited`` where the caller wrote the gradient, which is not compared.
        error: largest error of an element as a share of the sizes of its contributions.
        allowed: what rounding may make of it, or the configured tolerance.
        factor: least-squares factor between what is there and what should be; None where that is zero.
        why: where it is wrong, what that looks like; empty beyond the first few.
    """

    name: str
    param_group: int
    verdict: str
    error: float
    allowed: float
    factor: float | None
    why: str = ""


@dataclass
class StepReport:
    """One checked update; the same on every rank.

    Attributes:
        update: number of the update, counted from 1.
        results: one per checked parameter.
        problems: what is wrong beside single parameters (norm, padding).
        backwards: the window's backwards on this rank.
        skipped: the engine skipped the update, since gradients were not finite.
    """

    update: int
    results: list[ParameterResult]
    problems: list[str] = field(default_factory=list)
    backwards: list[str] = field(default_factory=list)
    skipped: bool = False

    @property
    def wrong(self) -> list[ParameterResult]:
        return [result for result in self.results if result.verdict == "wrong"]

    @property
    def right(self) -> bool:
        return not self.wrong and not self.problems

    def message(self) -> str:
        """What to tell a user whose update is wrong."""
        wrong = self.wrong
        lines = [
            f"gradient check of update {self.update}: the optimizer is about to see another gradient than autograd"
            f" delivered, for {len(wrong)} of {len(self.results)} parameters"
        ]
        for result in sorted(wrong, key=lambda item: -item.error)[:SHOWN]:
            lines.append(
                f"  {result.name} (group {result.param_group}): error {result.error:.2g}, allowed {result.allowed:.2g}"
                + (f"; {result.why}" if result.why else "")
            )
        if len(wrong) > SHOWN:
            lines.append(f"  and {len(wrong) - SHOWN} more")
        lines += [f"  {problem}" for problem in self.problems]
        lines.append(f"  backwards of this window on this rank: {'; '.join(self.backwards) or 'none'}")
        return "\n".join(lines)


class Observer:
    """Is told what the gradient checks of this process do; ``ds_grad_check`` is one. Does nothing by itself."""

    def on_engine(self, engine: Any, check: GradientCheck) -> None:
        """An engine was made whose updates are checked."""

    def on_window(self, check: GradientCheck, checked: bool) -> None:
        """A window begins; whether the update that it leads to is checked."""

    def on_drop(self, check: GradientCheck) -> None:
        """The gradients of the window were dropped."""

    def on_compare(self, check: GradientCheck, comparator: Comparator) -> None:
        """The window was compared; what the optimizer steps with is at hand. Every rank is here."""

    def on_report(self, check: GradientCheck, report: StepReport) -> None:
        """What came of it; the same on every rank."""


OBSERVERS: list[Observer] = []


class GradientCheck:
    """Checks the updates of one engine that the config asks for.

    Args:
        config: which updates, which parameters, how closely.
        optimizer: of the stage; asked for the gradients of its step.
        group: data-parallel process group.
        mean: False where gradients are summed over ranks.
        accumulation_steps: divisor of each contribution, asked for at each.
        micro_steps: count of micro-steps of the engine.
    """

    def __init__(
        self,
        config: GradientCheckConfig,
        optimizer: Any,
        group: Any,
        mean: bool,
        accumulation_steps: Callable[[], int],
        micro_steps: Callable[[], int],
    ) -> None:
        self.config = config
        self.group = group
        self.mean = mean
        self.accumulation_steps = accumulation_steps
        self.micro_steps = micro_steps
        self.checked = 0  # updates so far
        self._optimizer = weakref.ref(optimizer)
        self._update = 0  # the one that this window leads to
        self._first_micro_step = 0
        self._records = list(optimizer.reducer.ledger.records)
        self._every_parameter = True
        self.record = WindowRecord(self._entries(optimizer), accumulation_steps, self._micro_step)

    def _entries(self, optimizer: Any) -> list[ParameterEntry]:
        group_of = {r: group.param_group for group in optimizer.reducer.layout.groups for r in group.records}
        entries = [
            ParameterEntry(record.name, record.parameter, record.shape, group_of[record])
            for record in self._records
            if any(fnmatch.fnmatchcase(record.name, pattern) for pattern in self.config.parameters)
        ]
        self._every_parameter = len(entries) == len(self._records)
        if not entries and self._records:
            raise ValueError(
                f"gradient_check.parameters {self.config.parameters} matches none of the {len(self._records)} trained"
                f" parameters, which are {', '.join(r.name for r in self._records[:SHOWN])} and so on"
            )
        return entries

    def _micro_step(self) -> int:
        return self.micro_steps() - self._first_micro_step

    # ------------------------------------------------------------------ windows

    def begin_window(self, updates: int) -> None:
        """After ``updates`` updates a window begins: record it if the update that it leads to is to be checked."""
        self._update = updates + 1
        self._first_micro_step = self.micro_steps()
        finished = self.config.steps is not None and self.checked >= self.config.steps
        due = updates % self.config.every == 0 and not finished
        if due:
            self.record.clear()
            self.record.attach()
        elif self.record.attached:
            self.record.detach()
        for observer in OBSERVERS:
            observer.on_window(self, due)

    def drop(self) -> None:
        """The caller dropped the window (``zero_grad``)."""
        self.record.clear()
        for observer in OBSERVERS:
            observer.on_drop(self)

    def gradient_edited(self, parameter: torch.nn.Parameter) -> None:
        """The caller wrote this parameter's gradient: it is not compared in this window."""
        for entry in self.record.entries:
            if entry.parameter is parameter:
                entry.edited = True

    def close(self) -> None:
        """Remove all hooks."""
        self.record.detach()

    # ------------------------------------------------------------------ comparison

    @torch.no_grad()
    def compare(self, shards: Sequence[GradientShard], norm: Any, overflow: bool) -> None:
        """Right before the update: compare. Collective.

        Args:
            shards: what the optimizer is about to see, before clipping.
            norm: the global norm (``GradientNorm``) that clipping goes by; None where none was computed.
            overflow: the update is skipped.

        Raises:
            GradientCheckError: on every rank, where it is wrong, with ``on_mismatch: raise``.
        """
        if not self.record.attached:
            return
        report = self._report(self._optimizer(), shards, norm, overflow)
        for observer in OBSERVERS:
            observer.on_report(self, report)
        self.checked += 1
        self.record.clear()
        self._tell(report)

    def _report(self, optimizer: Any, shards: Sequence[GradientShard], norm: Any, overflow: bool) -> StepReport:
        optimizer.reducer.order.join()
        entries = self.record.entries
        target = stepped_by(optimizer, shards, [record.parameter for record in self._records])
        roundings = [self._rounding(optimizer, record) for record in self._records_of(entries)]
        replicated = optimizer.reducer.layout.replicated
        comparator = Comparator(
            entries, target.ranges, roundings, self.group, self.mean, replicated, self.accumulation_steps()
        )
        comparisons = comparator.run()
        for observer in OBSERVERS:
            observer.on_compare(self, comparator)
        for comparison in comparisons:
            comparison.allowed = self.config.tolerance or comparison.allowed
        problems = self._padding(target.padding) + self._norm(optimizer, comparisons, norm, overflow)
        wrong = sorted((c for c in comparisons if not c.right), key=lambda c: -c.error)
        explainer = Explainer(
            comparator, optimizer.reducer.channel.gather, self.accumulation_steps(), optimizer.factor_on_loss
        )
        why = dict(zip((c.entry.name for c in wrong), explainer.explain(wrong)))
        results = [_result(comparison, why.get(comparison.entry.name, "")) for comparison in comparisons]
        return StepReport(self._update, results, problems, [str(label) for label in self.record.labels], overflow)

    def _records_of(self, entries: Sequence[ParameterEntry]) -> list[Any]:
        by_parameter = {record.parameter: record for record in self._records}
        return [by_parameter[entry.parameter] for entry in entries]

    def _rounding(self, optimizer: Any, record: Any) -> Rounding:
        settings = optimizer.reducer.settings
        own = record.parameter.dtype
        comm = settings.comm_dtype or record.comm_dtype
        accum = own if own.itemsize > 4 else settings.accum_dtype
        scale = 1.0 / optimizer.factor_on_loss
        return Rounding(own, comm, accum, dist.get_world_size(self.group), scale)

    def _padding(self, padding: Sequence[torch.Tensor]) -> list[str]:
        """Padding belongs to no parameter; what stands there changes the norm, and an optimizer's state."""
        dirty = torch.zeros((), dtype=torch.float64)
        for part in padding:
            dirty += (part != 0).sum().cpu()  # NaN is not 0
        if dist.get_world_size(self.group) > 1:
            device = self._records[0].parameter.device
            total = dirty.to(device)
            dist.all_reduce(total, group=self.group)
            dirty = total.cpu()
        return [f"{int(dirty)} elements of padding, which no parameter owns, are not zero"] if dirty else []

    def _norm(self, optimizer: Any, comparisons: Sequence[Comparison], norm: Any, overflow: bool) -> list[str]:
        """The norm that the engine clips by and reports, against that of the record."""
        edited = any(comparison.entry.edited for comparison in comparisons)
        shared = optimizer.mpu is not None and hasattr(optimizer.mpu, "get_model_parallel_group")
        if norm is None or overflow or edited or shared or not self._every_parameter:
            return []
        value = norm.read()
        expected = math.sqrt(sum(comparison.squares[0] for comparison in comparisons))
        slack = math.sqrt(sum(c.squares[1] * c.allowed**2 for c in comparisons)) + 1e-5 * expected + 1e-30
        if abs(value - expected) <= slack or not (math.isfinite(value) or math.isfinite(expected)):
            return []
        return [f"the global norm is {value:.6g} and should be {expected:.6g}; clipping went by it"]

    def _tell(self, report: StepReport) -> None:
        edited = [result.name for result in report.results if result.verdict == "edited"]
        if edited:
            log_dist(
                f"gradient check of update {report.update}: {len(edited)} parameters were not compared, as the caller"
                f" wrote their gradients ({', '.join(edited[:SHOWN])})",
                ranks=[0],
            )
        if report.right:
            return
        if self.config.on_mismatch == "raise":
            raise GradientCheckError(
                f"rank {dist.get_rank(self.group)}: {report.message()}\n"
                "Nothing was updated. Call engine.zero_grad() on every rank to go on without this window, or set"
                " gradient_check.on_mismatch to 'warn' to go on with it"
            )
        log_dist(report.message(), ranks=[0], level=logging.WARNING)


def _result(comparison: Comparison, why: str) -> ParameterResult:
    entry = comparison.entry
    verdict = "edited" if entry.edited else "right" if comparison.right else "wrong"
    return ParameterResult(
        entry.name, entry.param_group, verdict, comparison.error, comparison.allowed, comparison.factor, why
    )
