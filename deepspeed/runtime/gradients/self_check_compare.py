# SPDX-License-Identifier: Apache-2.0
"""Element by element: what the optimizer is about to see against the plain mean of what autograd delivered.

The record is averaged by all-reduces of its own, in fp32 or wider, in the order of the parameters. An element may
differ from the mean by a share of its *mass*, the mean of the absolute values of its contributions: their sum may be
small by cancellation, but the rounding of each on its way is not. The share follows from the dtypes and the number of
roundings on the way, and holds for every element, so that a correct reduction is never reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.runtime.gradients.self_check_record import ParameterEntry, Sums, fold
from deepspeed.runtime.gradients.self_check_target import SteppedRange

CHUNK = 1 << 20  # elements averaged and compared together
LARGE = 1 << 14  # elements from which a parameter is averaged and compared alone
SAFE_FP16_SUM = 2.0**14  # below it no order of summation leaves the range of float16
TINY = 1e-37  # smaller errors are those of denormal numbers
MASS_UNIT = 2.0**-8  # rounding of the sum of absolute values, which is kept in bfloat16


@dataclass(frozen=True)
class Rounding:
    """What a reduction may round on the way of one parameter.

    Args:
        parameter: dtype in which autograd delivers and adds contributions.
        comm: dtype of collectives.
        accum: dtype of sums on this rank and of the shard.
        world_size: ranks that are summed over.
        inverse_scale: 1 over the loss scale.
    """

    parameter: torch.dtype
    comm: torch.dtype
    accum: torch.dtype
    world_size: int
    inverse_scale: float = 1.0

    def share(self, firings: int, most_per_backward: int) -> float:
        """Largest error as a share of the mass.

        Args:
            firings: contributions in the window, on the rank with most.
            most_per_backward: largest number of them in one backward, which autograd adds up itself.
        """
        unit = {dtype: torch.finfo(dtype).eps / 2 for dtype in (self.parameter, self.comm, self.accum, torch.float32)}
        wide = unit[torch.float32] if self.parameter.itemsize <= 4 else unit[self.parameter]
        share = most_per_backward * unit[self.parameter] + (self.world_size + 3) * unit[self.comm]
        share += (2 * firings + 3) * unit[self.accum] + (firings + self.world_size + 8) * wide
        return share * (1 + firings * MASS_UNIT)

    def floor(self, firings: int) -> float:
        """Largest error where numbers are too small to be rounded to a share of themselves."""
        if torch.float16 not in (self.parameter, self.comm, self.accum):
            return TINY
        return (2 * firings + self.world_size + 4) * 2.0**-25 * self.inverse_scale

    @property
    def overflows_from(self) -> float:
        """Mass, summed over ranks and not divided by the accumulation count, from which a sum may overflow."""
        if torch.float16 not in (self.parameter, self.comm, self.accum):
            return float("inf")
        return SAFE_FP16_SUM * self.inverse_scale


@dataclass
class Comparison:
    """One parameter, over all ranks.

    Attributes:
        error: largest error of an element as a share of its mass, after what denormal numbers explain.
        allowed: what it may be.
        factor: least-squares factor between what is there and what should be; None where that is zero.
        residual: what the factor leaves, as a share of what should be.
        missing: elements that no rank steps on (negative: that too many do).
        distance: norm of the difference as a share of the norm of the mass.
        squares: sums of squares of what should be, and of its mass.
    """

    entry: ParameterEntry
    error: float
    allowed: float
    factor: float | None
    residual: float
    missing: int
    distance: float
    squares: tuple[float, float]

    @property
    def right(self) -> bool:
        return self.entry.edited or (self.error <= self.allowed and self.missing == 0)


@dataclass
class _Averaged:
    """A few entries end to end: means of their records."""

    entries: list[ParameterEntry]
    first: int  # position of the first among all
    value: torch.Tensor
    mass: torch.Tensor

    def offsets(self) -> Iterator[tuple[ParameterEntry, int]]:
        begin = 0
        for entry in self.entries:
            yield entry, begin
            begin += entry.numel


class Comparator:
    """Compares one window. Collective: every rank calls the same with entries in the same order.

    Args:
        entries: records of the window.
        ranges: what this rank steps with, by parameter.
        roundings: one per entry.
        group: process group to average over.
        mean: False where gradients are summed over ranks.
        replicated: every rank steps with everything.
        accumulation_steps: contributions were divided by.
    """

    def __init__(
        self,
        entries: Sequence[ParameterEntry],
        ranges: dict[torch.nn.Parameter, list[SteppedRange]],
        roundings: Sequence[Rounding],
        group: Any,
        mean: bool,
        replicated: bool,
        accumulation_steps: int,
    ) -> None:
        self.entries = list(entries)
        self.ranges = ranges
        self.roundings = list(roundings)
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.divisor = self.world_size if mean else 1
        self.replicated = replicated
        self.accumulation_steps = accumulation_steps
        self.device = entries[0].parameter.device if entries else torch.device("cpu")

    def of(self, entries: Sequence[ParameterEntry]) -> Comparator:
        """The same step compared with other records of the same parameters, in the same order."""
        ranges = {new.parameter: self.ranges.get(old.parameter, []) for old, new in zip(self.entries, entries)}
        mean = self.divisor == self.world_size
        return Comparator(entries, ranges, self.roundings, self.group, mean, self.replicated, self.accumulation_steps)

    def run(self) -> list[Comparison]:
        """All comparisons, the same on every rank."""
        count = len(self.entries)
        most = torch.tensor(
            [[entry.firings, entry.most_firings, int(entry.edited)] for entry in self.entries], device=self.device
        ).view(count, 3)
        self._reduce(most, dist.ReduceOp.MAX)
        limits = []
        for entry, rounding, (firings, in_one, edited) in zip(self.entries, self.roundings, most.tolist()):
            entry.edited = bool(edited)
            limits.append((rounding.share(firings, in_one), rounding.floor(firings), rounding.overflows_from))
        worst = torch.zeros(count, dtype=torch.float64, device=self.device)
        sums = torch.zeros(count, 5, dtype=torch.float64, device=self.device)
        for averaged in self.averages(self.entries):
            if len(averaged.entries) > 1 or not self._measure_finite(averaged, limits, worst, sums):
                self._measure(averaged, limits, worst, sums)
        self._reduce(worst, dist.ReduceOp.MAX)
        self._reduce(sums, dist.ReduceOp.SUM)
        copies = self.world_size if self.replicated else 1
        table = (sums / copies).tolist()
        return [
            _comparison(entry, error, limit[0], row)
            for entry, error, limit, row in zip(self.entries, worst.tolist(), limits, table)
        ]

    def _reduce(self, tensor: torch.Tensor, op: Any) -> None:
        if self.world_size > 1 and tensor.numel():
            dist.all_reduce(tensor, op=op, group=self.group)

    # ------------------------------------------------------------------ the mean of the record

    def averages(self, entries: Sequence[ParameterEntry]) -> Iterator[_Averaged]:
        """Means over ranks of the records, a few at a time. Collective."""
        batch: list[ParameterEntry] = []
        done = 0
        for entry in entries:
            fits = not batch or (
                max(entry.numel, batch[-1].numel) < LARGE
                and sum(other.numel for other in batch) + entry.numel <= CHUNK
                and (entry.dtype, entry.parameter.device) == (batch[0].dtype, batch[0].parameter.device)
            )
            if not fits:
                yield self._average(batch, done)
                done += len(batch)
                batch = []
            batch.append(entry)
        if batch:
            yield self._average(batch, done)

    def _average(self, entries: list[ParameterEntry], first: int) -> _Averaged:
        device = entries[0].parameter.device
        dtype = entries[0].dtype
        kept = [entry.kept or zero_sums(entry) for entry in entries]
        both = torch.empty(2, sum(entry.numel for entry in entries), dtype=dtype, device=device)
        torch.cat([sums.value for sums in kept], out=both[0])
        both[1].copy_(torch.cat([sums.mass for sums in kept]))
        self._reduce(both, dist.ReduceOp.SUM)
        both /= self.divisor
        return _Averaged(entries, first, both[0], both[1])

    # ------------------------------------------------------------------ differences

    def present(self, averaged: _Averaged) -> tuple[torch.Tensor, torch.Tensor]:
        """What this rank steps with, laid out like ``averaged``, and which elements those are."""
        actual = torch.zeros_like(averaged.value)
        mine = torch.zeros(actual.numel(), dtype=torch.bool, device=actual.device)
        for entry, offset in averaged.offsets():
            for part in self.ranges.get(entry.parameter, ()):
                begin = offset + part.begin
                actual[begin : begin + part.gradient.numel()].copy_(part.gradient)
                mine[begin : begin + part.gradient.numel()] = True
        return actual, mine

    def _measure_finite(
        self, averaged: _Averaged, limits: list[tuple[float, float, float]], worst: torch.Tensor, sums: torch.Tensor
    ) -> bool:
        """``_measure`` of one parameter in few passes; False, and nothing is added, where something is not finite."""
        (entry,) = averaged.entries
        floor = limits[averaged.first][1]
        largest, total = 0.0, torch.zeros(5, dtype=torch.float64)
        for part in self.ranges.get(entry.parameter, ()):
            for begin in range(0, part.gradient.numel(), CHUNK):
                is_ = part.gradient[begin : begin + CHUNK].to(averaged.value.device, averaged.value.dtype)
                here = slice(part.begin + begin, part.begin + begin + is_.numel())
                should, mass = averaged.value[here], averaged.mass[here]
                apart = is_ - should
                products = [is_.dot(should), should.dot(should), apart.dot(apart), mass.dot(mass)]
                apart.abs_().sub_(floor).clamp_(min=0.0).div_(mass + TINY)
                figures = torch.stack([*products, apart.max()]).tolist()
                if not all(map(math.isfinite, figures)):
                    return False
                largest = max(largest, figures[4])
                total += torch.tensor([*figures[:3], float(is_.numel()), figures[3]], dtype=torch.float64)
        worst[averaged.first] = largest
        sums[averaged.first] += total.to(sums.device)
        return True

    def _measure(
        self, averaged: _Averaged, limits: list[tuple[float, float, float]], worst: torch.Tensor, sums: torch.Tensor
    ) -> None:
        """Add what one batch of entries shows to ``worst`` (largest error) and ``sums`` (see ``_comparison``)."""
        actual, mine = self.present(averaged)
        count, first = len(averaged.entries), averaged.first
        device = actual.device
        ends = torch.tensor([entry.numel for entry in averaged.entries], device=device).cumsum(0)
        floors, overflows = (
            torch.tensor([limits[first + i][k] for i in range(count)], dtype=actual.dtype, device=device)
            for k in (1, 2)
        )
        overflows = overflows / (self.divisor * self.accumulation_steps)
        for begin in range(0, actual.numel(), CHUNK):
            end = min(begin + CHUNK, actual.numel())
            ids = torch.bucketize(torch.arange(begin, end, device=device), ends, right=True)
            is_, should, mass, own = (t[begin:end] for t in (actual, averaged.value, averaged.mass, mine))
            error = torch.where(own, _errors(is_, should, mass, floors[ids], overflows[ids]), 0.0)
            shown = torch.where(own & torch.isfinite(is_) & torch.isfinite(should), 1.0, 0.0).double()
            is_, should = (torch.nan_to_num(t.double()) * shown for t in (is_, should))
            masses = torch.nan_to_num(mass.double()) * own
            rows = torch.stack([is_ * should, should**2, (is_ - should) ** 2, own.double(), masses**2], dim=1)
            part = torch.zeros(count, rows.shape[1], dtype=torch.float64, device=device).index_add_(0, ids, rows)
            sums[first : first + count] += part.to(sums.device)
            largest = torch.zeros(count, dtype=torch.float64, device=device)
            largest.scatter_reduce_(0, ids, error.double(), "amax")
            worst[first : first + count] = torch.maximum(worst[first : first + count], largest.to(worst.device))

    def difference(self, entry: ParameterEntry) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of one parameter, on this rank: what is there minus what should be (zero where not this rank's), what should
        be, and its mass. Collective."""
        (averaged,) = self.averages([entry])
        actual, mine = self.present(averaged)
        return torch.nan_to_num(actual - averaged.value) * mine, averaged.value, averaged.mass

    def sketch_of_difference(self, entry: ParameterEntry) -> torch.Tensor:
        """``fold`` of the difference over all ranks. Collective."""
        sketch = fold(self.difference(entry)[0])
        self._reduce(sketch, dist.ReduceOp.SUM)
        return sketch / (self.world_size if self.replicated else 1)


def zero_sums(entry: ParameterEntry) -> Sums:
    """The record of a parameter to which nothing was delivered on this rank."""
    zeros = torch.zeros(entry.numel, dtype=entry.dtype, device=entry.parameter.device)
    return Sums(zeros, zeros)


def _errors(
    is_: torch.Tensor, should: torch.Tensor, mass: torch.Tensor, floor: torch.Tensor, overflow: torch.Tensor
) -> torch.Tensor:
    """Error of each element as a share of its mass; infinite where only one side is finite, zero where neither is."""
    excess = ((is_ - should).abs() - floor).clamp(min=0.0)
    share = torch.where(excess > 0, excess / mass, torch.zeros_like(excess))
    finite, expected = torch.isfinite(is_), torch.isfinite(should)
    share = torch.where(finite & expected, share, torch.full_like(share, float("inf")))
    agreed = (~finite & ~expected) | (~finite & (mass >= overflow))
    return torch.where(agreed, torch.zeros_like(share), share)


def _comparison(entry: ParameterEntry, error: float, allowed: float, row: list[float]) -> Comparison:
    product, square, apart, covered, mass = row
    factor = product / square if square > 0 else None
    left = max(0.0, apart - square * ((factor or 0.0) - 1.0) ** 2)  # the difference is (factor - 1) x should, and this
    residual = (left / square) ** 0.5 if square > 0 else float("inf")
    distance = (apart / mass) ** 0.5 if mass > 0 else 0.0 if apart == 0 else float("inf")
    missing = entry.numel - round(covered)
    return Comparison(entry, error, allowed, factor, residual, missing, distance, (square, mass))
