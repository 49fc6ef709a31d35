# SPDX-License-Identifier: Apache-2.0
"""Where we are in an accumulation window: the one owner of the boundary flag, which everyone else asks."""

from collections.abc import Iterator
from contextlib import contextmanager


class AccumulationSchedule:
    """Counts micro-steps and says which one ends a window.

    Args:
        steps: micro-steps per window (gradient_accumulation_steps).
        managed: False when the caller decides: every ``step()`` ends a window.
    """

    def __init__(self, steps: int = 1, managed: bool = True) -> None:
        self.steps = steps
        self.managed = managed
        self.micro_steps = 0
        self.counted_from = 0  # micro-step at which windows of the present length began
        self.boundary_override: bool | None = None
        self.inside_step = False
        self.deferred_by = ""  # name of the context that postpones reduction, empty when none

    def is_boundary(self) -> bool:
        """Whether the present micro-step ends the window."""
        if not self.managed:
            return self.inside_step
        if self.boundary_override is not None:
            return self.boundary_override
        return (self.micro_steps - self.counted_from + 1) % self.steps == 0

    def change_steps(self, steps: int) -> None:
        """Windows of another length from the present micro-step on, which must be the first of a window."""
        self.steps = steps
        self.counted_from = self.micro_steps

    def set_micro_steps(self, micro_steps: int) -> None:
        """Set the count of micro-steps, as after loading a checkpoint; windows are then counted from zero."""
        self.micro_steps = micro_steps
        self.counted_from = 0

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around ``step()``, which is the boundary when the caller manages accumulation."""
        self.inside_step = True
        try:
            yield
        finally:
            self.inside_step = False

    @contextmanager
    def deferring(self, name: str) -> Iterator[None]:
        """Backwards inside keep their contributions on this rank."""
        self.deferred_by = name
        try:
            yield
        finally:
            self.deferred_by = ""
