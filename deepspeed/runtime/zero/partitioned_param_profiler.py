# SPDX-License-Identifier: Apache-2.0
"""How often, for how many elements and for how long ZeRO-3 fetched and gathered parameters."""

from dataclasses import dataclass
from typing import Any

from deepspeed.utils.logging import print_dist


class PartitionedParameterProfiler:
    """Counts and times events by name. Without timers it does nothing.

    Args:
        timers: a ``SynchronizedWallClockTimer``, in which each event is a timer of that name, or None.
    """

    @dataclass
    class EventCounter:
        """Times an event took place, and elements it was about."""

        name: str
        count: int = 0
        num_elem: int = 0

    def __init__(self, timers: Any | None) -> None:
        self.timers = timers
        self.event_counters: dict[str, PartitionedParameterProfiler.EventCounter] = {}

    def start_event(self, name: str) -> None:
        """An event begins. Raises AssertionError if one of this name runs."""
        if self.timers is not None:
            self.timers(name).start()

    def stop_event(self, name: str, num_elem: int) -> None:
        """It has ended, and was about ``num_elem`` elements. Raises AssertionError if none of this name runs."""
        if self.timers is None:
            return
        self.timers(name).stop()
        counter = self.event_counters.setdefault(name, self.EventCounter(name))
        counter.count += 1
        counter.num_elem += num_elem

    def reset_events(self) -> None:
        """Forget counts and times."""
        for name in self.event_counters:
            self.timers(name).reset()
        self.event_counters.clear()

    def log_events(self) -> None:
        """Print each event on rank 0: its count, elements, and milliseconds in all."""
        if not self.event_counters:
            return
        parts = [
            f"{counter.name}: {counter.count} times, {counter.num_elem} elements,"
            f" {self.timers(counter.name).elapsed(reset=False):.2f} ms"
            for counter in self.event_counters.values()
        ]
        print_dist("parameter fetches | " + " | ".join(parts), ranks=[0])
