# SPDX-License-Identifier: Apache-2.0
"""A stream that writes a large new file in large blocks, past the page cache where the file system allows it.

Pages of the cache cost more than the disk: they must be found, cleared, copied to and written back, and nobody reads
them soon. Blocks go from buffers that are used again straight to the disk (``O_DIRECT``), several under way at once.
"""

import errno
import fcntl
import io
import mmap
import os
import time
from concurrent.futures import Future
from typing import Any

import numpy
import torch

from deepspeed.checkpoint.crew import Crew
from deepspeed.checkpoint.record_sums import RecordSums, TorchSums, crew_of_sums
from deepspeed.utils.logging import logger

_SECTOR = 4096  # what direct writes must be a multiple of, in the file and in memory
DEFAULT_BLOCK = 16 << 20
DEFAULT_WRITERS = 2


class Blocks:
    """Buffers of one size, kept from one file to the next.

    Args:
        size: bytes of each.
        writers: threads that write blocks; one buffer more than that is filled meanwhile. 0: the caller writes.
    """

    def __init__(self, size: int = DEFAULT_BLOCK, writers: int = DEFAULT_WRITERS) -> None:
        self.size, self.writers = size, writers
        self._free: list[mmap.mmap] = []

    def take(self) -> mmap.mmap:
        """A buffer, at an address that direct writes accept. Its memory is made where it is written to."""
        return self._free.pop() if self._free else mmap.mmap(-1, max(self.size, 1))

    def give_back(self, block: mmap.mmap) -> None:
        if len(self._free) <= self.writers:
            self._free.append(block)

    def clear(self) -> None:
        """Give the memory of buffers that wait for a file back."""
        self._free.clear()


def direct_writes_are_wanted() -> bool:
    """Whether files go past the page cache where they can; they do unless ``DS_CHECKPOINT_DIRECT=0``."""
    return os.environ.get("DS_CHECKPOINT_DIRECT", "1") not in ("", "0")


class BlockStream(io.RawIOBase):
    """A new file, or none at all.

    Args:
        path: of the file; "" writes nothing.
        blocks: buffers, and how many are written at once.
        statistics: log the rate when the stream is closed.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: str, blocks: Blocks, statistics: bool = False) -> None:
        super().__init__()
        self._path, self._blocks, self._statistics = path, blocks, statistics
        self._file = _open_new(path, blocks.size) if path else None
        self._begun = time.perf_counter()
        self._block = blocks.take()
        self._filled = self._position = 0
        self._writers = Crew(blocks.writers if path else 0, "checkpoint file")
        self._under_way: list[tuple[Future[None], mmap.mmap]] = []
        self._summing: Crew | None = None
        self._sums: RecordSums | None = None
        self._torch_sums = TorchSums()
        self._fault: BaseException | None = None

    def save(self, content: Any) -> None:
        """``torch.save`` into this stream, with checksums by several threads."""
        if not TorchSums.exists:
            torch.save(content, self)
            return
        self._summing = crew_of_sums()
        self._sums = RecordSums(self._summing)
        self._torch_sums.leave_out()
        try:
            torch.save(content, self)
        finally:
            self._torch_sums.put_back()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Take over ``data``, which may change after this.

        Raises:
            OSError: this or an earlier write has failed.
        """
        self._torch_sums.put_back()
        view = memoryview(data).cast("B")
        if self._sums is not None and len(view):
            view = self._sums.through(view)
        if self._file is None or not len(view):
            self._position += len(view)
            return len(view)
        self._raise_fault()
        # numpy lets other threads run while it copies.
        source, start = numpy.frombuffer(view, dtype=numpy.uint8), 0
        while start < len(view):
            count = min(len(view) - start, self._blocks.size - self._filled)
            target = numpy.frombuffer(self._block, dtype=numpy.uint8, count=count, offset=self._filled)
            target[:] = source[start : start + count]
            self._filled += count
            self._position += count
            start += count
            if self._filled == self._blocks.size:
                self._hand_over()
        return len(view)

    def tell(self) -> int:
        return self._position

    def fileno(self) -> int:
        if self._file is None:
            raise io.UnsupportedOperation("a stream that writes nothing has no file")
        return self._file

    def _hand_over(self) -> None:
        """The block goes to the file; go on with another one."""
        place = self._position - self._filled
        self._under_way.append(
            (self._writers.submit(_write_at, self._file, self._block, self._filled, place), self._block)
        )
        self._filled = 0
        self._block = self._blocks.take()
        self._wait_for(self._blocks.writers)

    def _wait_for(self, left: int) -> None:
        """Until no more than ``left`` blocks are under way."""
        while len(self._under_way) > left:
            future, block = self._under_way.pop(0)
            self._fault = self._fault or future.exception()
            self._blocks.give_back(block)
        self._raise_fault()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def flush(self) -> None:
        """Hand everything to the system.

        Raises:
            OSError: a write has failed.
        """
        if self._file is None or self.closed:
            return
        self._wait_for(0)
        if self._filled:  # stays in the block as well: what comes next is written together with it
            _write_at(self._file, self._block, self._filled, self._position - self._filled)

    def close(self) -> None:
        if self.closed:
            return
        self._writers.close()
        if self._summing is not None:
            self._summing.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        for block in (self._block, *(block for _, block in self._under_way)):
            self._blocks.give_back(block)
        if self._statistics:
            seconds = time.perf_counter() - self._begun
            rate = self._position / max(seconds, 1e-9) / 1e9
            logger.info(f"checkpoint file {self._path or '(not written)'}: {self._position} bytes, {rate:.2f} GB/s")
        super().close()


def _open_new(path: str, block: int) -> int:
    """A new file for blocks of this size, without the page cache if that is possible."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if direct_writes_are_wanted() and block % _SECTOR == 0 and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:  # file systems without direct writes say this
                raise
    return os.open(path, flags, 0o666)


def _write_at(file: int, block: mmap.mmap, count: int, place: int) -> None:
    """Write the first ``count`` bytes of a block at ``place``; where that is not whole sectors, the file ends there."""
    direct = getattr(os, "O_DIRECT", 0) & fcntl.fcntl(file, fcntl.F_GETFL)
    padded = -(-count // _SECTOR) * _SECTOR if direct else count
    view = memoryview(block)[:padded]
    written = 0
    while written < count:
        try:
            written += os.pwrite(file, view[written:], place + written)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            # Some file systems accept the mode and not the size, or want the rest of a short write in whole sectors.
            direct = fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
            view = view[:count]
    if written > count:
        os.ftruncate(file, place + count)
