# SPDX-License-Identifier: Apache-2.0
"""Buffers in host memory through which state goes to and from files: a bounded number of them, reused."""

from collections.abc import Callable

import torch

from deepspeed.runtime.gradients.host_memory import HostMemory

PAGE = 4096


def aligned_buffer(memory: HostMemory, nbytes: int) -> torch.Tensor:
    """uint8 tensor of whole pages, at the beginning of a page, with room for ``nbytes``."""
    length = max(1, -(-nbytes // PAGE)) * PAGE
    room = memory.empty(length + PAGE, torch.uint8)
    start = -room.data_ptr() % PAGE
    return room[start : start + length]


class BufferPool:
    """At most ``count`` buffers, unless more are insisted on.

    Args:
        largest: bytes of the largest tensor; a buffer that is made has room for it.
        allocate: makes a buffer of at least so many bytes.
    """

    def __init__(self, count: int, largest: int, allocate: Callable[[int], torch.Tensor]) -> None:
        self.count = count
        self.largest = largest
        self._allocate = allocate
        self._free: list[torch.Tensor] = []
        self.made = 0  # that exist, free or taken
        self.most_made = 0

    def take(self, nbytes: int, insist: bool = False) -> torch.Tensor | None:
        """A buffer with room for ``nbytes``; None if all are in use, and not ``insist``."""
        fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
        if fitting:
            best = min(fitting, key=lambda buffer: buffer.nbytes)
            self._free = [buffer for buffer in self._free if buffer is not best]
            return best
        if self._free and self.made >= self.count:
            self._free.pop()  # too small: another takes its place
            self.made -= 1
        within = self.made < self.count
        if not within and not insist:
            return None
        buffer = self._allocate(max(nbytes, self.largest) if within else nbytes)
        self.made += 1
        self.most_made = max(self.most_made, self.made)
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """A buffer that was taken is free again; one beyond the bound is let go of."""
        if self.made > self.count:
            self.made -= 1
        else:
            self._free.append(buffer)

    def clear(self) -> None:
        """Let go of the free buffers."""
        self.made -= len(self._free)
        self._free.clear()
