# SPDX-License-Identifier: Apache-2.0
"""Says what a wrong gradient looks like: a factor that has a name, or a contribution that was lost or counted twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed.runtime.gradients.self_check_compare import Comparator, Comparison
from deepspeed.runtime.gradients.self_check_record import CallLabel, ParameterEntry

CLOSE = 0.02  # relative difference up to which a factor is a known one
EXPLAINED = 0.05  # share of a difference that an explanation may leave
EXPLAINED_PARAMETERS = 8
FEW_ELEMENTS = 4  # of so few, a factor of one contribution fits any difference

# Exchanges an object among the ranks: object and what for to all ranks' objects in order.
Gather = Callable[[Any, str], list[Any]]


def named_factor(factor: float, accumulation_steps: int, world_size: int, loss_scale: float) -> str:
    """What a wrong factor on a gradient means, empty where it means nothing known."""
    known: list[tuple[float, str]] = []
    for divisor, what in (
        (accumulation_steps, f"gradient_accumulation_steps={accumulation_steps}"),
        (world_size, f"the number of ranks, {world_size}"),
        (loss_scale, f"the loss scale, {loss_scale:g}"),
        (
            accumulation_steps * world_size,
            f"gradient_accumulation_steps={accumulation_steps} and by the number of ranks, {world_size}",
        ),
    ):
        if divisor != 1:
            known.append((divisor, f"as if the division by {what} had not happened"))
            known.append((1.0 / divisor, f"as if it had been divided twice by {what}"))
    known += [
        (2.0, "as if every contribution had been counted twice"),
        (0.0, "as if nothing of it had reached the optimizer"),
        (-1.0, "as if its sign had been changed"),
    ]
    fitting = [words for value, words in known if abs(factor - value) <= CLOSE * max(abs(value), CLOSE)]
    return ", or ".join(dict.fromkeys(fitting))


class Explainer:
    """Explains the wrong parameters of one window. Collective: every rank calls the same.

    Args:
        comparator: that found them.
        gather: exchange on the host.
        accumulation_steps, loss_scale: divisors of each contribution.
    """

    def __init__(self, comparator: Comparator, gather: Gather, accumulation_steps: int, loss_scale: float) -> None:
        self.comparator = comparator
        self.gather = gather
        self.accumulation_steps = accumulation_steps
        self.loss_scale = loss_scale

    def explain(self, wrong: Sequence[Comparison]) -> list[str]:
        """One sentence or two for each of the worst, the same on every rank."""
        return [self._explain(comparison) for comparison in wrong[:EXPLAINED_PARAMETERS]]

    def _explain(self, comparison: Comparison) -> str:
        entry = comparison.entry
        where = self._worst_element(entry, comparison.allowed)
        if comparison.missing:
            more = "no rank" if comparison.missing > 0 else "more than one rank"
            return f"{abs(comparison.missing)} of its {entry.numel} elements are stepped on by {more}"
        if math.isinf(comparison.error) and comparison.factor is None:
            return f"it is not finite where autograd's gradient is, or the reverse; {where}"
        words = self._factor(comparison) or self._contribution(entry)
        return f"{words}; {where}" if words else f"no one factor or contribution explains it; {where}"

    def _factor(self, comparison: Comparison) -> str:
        factor = comparison.factor
        if factor is None:
            return "autograd delivered nothing for it, so it should be zero"
        if comparison.residual > EXPLAINED * max(abs(factor - 1.0), 1e-3):
            return ""
        known = named_factor(factor, self.accumulation_steps, self.comparator.world_size, self.loss_scale)
        return f"{factor:.4g} x what autograd delivered" + (f": {known}" if known else "")

    # ------------------------------------------------------------------ whose contribution

    def _contribution(self, entry: ParameterEntry) -> str:
        """The contribution, or all of a rank, a backward or a micro-step, of which the difference is a multiple."""
        difference = self.comparator.sketch_of_difference(entry).double().cpu()
        mine = [(label, (sketch.double() / self.comparator.divisor).cpu()) for label, sketch in entry.sketches]
        everyone = self.gather(mine, f"what each backward contributed to {entry.name}")
        if entry.numel < FEW_ELEMENTS or not torch.isfinite(difference).all():
            return ""
        best, words = EXPLAINED, ""
        for what, contribution in _candidates(everyone):
            square = float(contribution.dot(contribution))
            if not square:
                continue
            factor = float(difference.dot(contribution)) / square
            left = float((difference - factor * contribution).norm() / difference.norm().clamp(min=1e-300))
            if left < best:
                best, words = left, f"{what} counts {_times(1.0 + factor)}"
        return words

    # ------------------------------------------------------------------ where

    def _worst_element(self, entry: ParameterEntry, allowed: float) -> str:
        """Which ranks see wrong elements, and the worst of them with both numbers."""
        difference, should, mass = self.comparator.difference(entry)
        share = torch.nan_to_num(difference.abs() / mass, nan=0.0, posinf=1e30)
        if self.comparator.ranges.get(entry.parameter):
            worst = int(share.argmax())
            mine = (float(share[worst]), worst, float(should[worst] + difference[worst]), float(should[worst]))
            count = int((share > allowed).sum())
        else:
            mine, count = (0.0, 0, 0.0, 0.0), 0
        everyone = self.gather((mine, count), f"which elements of {entry.name} are wrong")
        ranks = [rank for rank, (_, wrong) in enumerate(everyone) if wrong]
        if not ranks:
            return "elements are not finite where autograd's are, or the reverse"
        (_, place, is_, expected), _ = max(everyone, key=lambda item: item[0][0])
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), entry.shape)) if entry.shape else ()
        total = (max if self.comparator.replicated else sum)(wrong for _, wrong in everyone)
        return (
            f"{total} of {entry.numel} elements, on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}; element"
            f" {list(index)} is {is_:.6g} and should be {expected:.6g}"
        )


def _times(factor: float) -> str:
    if abs(factor) < CLOSE:
        return "0 times: it was lost"
    if abs(factor - 2.0) < CLOSE:
        return "2 times: it was counted twice"
    return f"{factor:.4g} times"


def _candidates(everyone: Sequence[Sequence[tuple[CallLabel, torch.Tensor]]]) -> list[tuple[str, torch.Tensor]]:
    """What may have gone wrong as one, with its sketch: single contributions first."""
    found: list[tuple[str, torch.Tensor]] = []
    sums: dict[str, torch.Tensor] = {}
    for rank, contributions in enumerate(everyone):
        labels = [label for label, _ in contributions]
        for position, (label, sketch) in enumerate(contributions):
            several = labels.count(label)
            number = f", number {position - labels.index(label)} of {several} there," if several > 1 else ""
            found.append((f"the contribution of rank {rank} in {label}{number}", sketch))
            for group in (
                *[f"what rank {rank} contributed in {label}"] * (several > 1),
                f"what all ranks contributed in {label}",
                f"what rank {rank} contributed in micro-step {label.micro_step}",
                f"what all ranks contributed in micro-step {label.micro_step}",
                f"everything from rank {rank}",
                f"everything by {label.route}",
            ):
                sums[group] = sums[group] + sketch if group in sums else sketch
    return found + list(sums.items())
