# SPDX-License-Identifier: Apache-2.0
"""Where the decisions of a random case come from: one integer, or hypothesis, which can make them smaller afterwards.

Whoever asks puts the simplest answer first: a case that fails shrinks towards first options, small numbers and "no".
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Choices(Protocol):
    """Decides."""

    def pick(self, options: Sequence[T]) -> T:
        """One of the options, all equally likely; repeat an option to have it more often."""

    def number(self, low: int, high: int) -> int:
        """An integer from ``low`` to ``high``, both included."""

    def maybe(self, percent: int) -> bool:
        """True in so many cases out of a hundred."""


class SeededChoices:
    """The same decisions for the same seed, whatever version of hypothesis there is."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)

    def pick(self, options: Sequence[T]) -> T:
        return self._random.choice(options)

    def number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def maybe(self, percent: int) -> bool:
        return self._random.randrange(100) < percent


def some(choices: Choices, items: Iterable[T], percent: int) -> tuple[T, ...]:
    """Each item with the same chance, in order."""
    return tuple(item for item in items if choices.maybe(percent))
