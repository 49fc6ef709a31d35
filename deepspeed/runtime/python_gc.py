# SPDX-License-Identifier: Apache-2.0
"""Python's cyclic garbage collector, switched off while engines that ask for it are alive."""

import gc


class PythonGCManager:
    """Counts the engines that want no automatic collection and restores the collector after the last one."""

    def __init__(self) -> None:
        self._next_generation = 0
        self._held: set[int] = set()
        self._was_enabled = False

    @property
    def active_engines(self) -> int:
        """Number of engines that hold the collector off."""
        return len(self._held)

    def acquire(self) -> int:
        """Hold automatic collection off; returns what :meth:`release` wants."""
        if not self._held:
            self._was_enabled = gc.isenabled()
            gc.disable()
        self._next_generation += 1
        self._held.add(self._next_generation)
        return self._next_generation

    def release(self, generation: int | None) -> None:
        """End one hold. A second release of the same hold, or None, does nothing."""
        if generation not in self._held:
            return
        self._held.remove(generation)
        if not self._held and self._was_enabled:
            gc.enable()

    def collect(self) -> int:
        """Collect now, if automatic collection is held off; returns the number of objects found."""
        return gc.collect() if self._held else 0


python_gc_manager = PythonGCManager()
