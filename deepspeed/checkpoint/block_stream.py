# SPDX-License-Identifier: Apache-2.0
"""A stream that writes a large new file in large blocks, past the page cache where the file system allows it.

Pages of the cache cost more than the disk: they must be found, cleared, copied to and written back, and nobody reads
them soon. Blocks go from buffers that are used again straight to the disk (``O_DIRECT``), several under way at once.
Memory that stays as it is until the file is written goes to the disk from where it is.
"""

import contextlib
import errno
import fcntl
import io
import mmap
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy
import torch

from deepspeed.checkpoint.crew import Crew
from deepspeed.checkpoint.native_sums import address_of, native_sums
from deepspeed.checkpoint.record_sums import ALIGNMENT, PendingSum, RecordSums, TorchSwitches, crew_of_sums
from deepspeed.utils.logging import logger

_SECTOR = ALIGNMENT  # what direct writes must be a multiple of, in the file and in memory
WORTH_A_WRITE = 1 << 20  # bytes from which memory that stays is written from where it is
_WORTH_NUMPY = 64 << 10  # bytes from which it pays to let other threads run while they are copied
_LARGE_PAGE = 2 << 20
DEFAULT_BLOCK = 16 << 20
DEFAULT_WRITERS = 2

# Memory that stays as it is until the file is written, by address: bytes, and their CRC-32 where that is known.
Steady = Mapping[int, tuple[int, int | None]]


def new_pages(size: int) -> mmap.mmap:
    """New memory, at an address that direct writes accept; in large pages where the system has them, which cost less to
    be cleared and to be found by the disk."""
    pages = mmap.mmap(-1, max(size, 1))
    if size >= _LARGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them says EINVAL
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


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
        return self._free.pop() if self._free else new_pages(self.size)

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
        self._under_way: list[tuple[Future[None], mmap.mmap | None]] = []
        self._summing: Crew | None = None
        self._sums: RecordSums | None = None
        self._steady: Steady = {}
        self._least_steady = 0
        self._switches = TorchSwitches()
        self._fault: BaseException | None = None

    def save(self, content: Any, steady: Steady | None = None) -> None:
        """``torch.save`` into this stream, without its checksums, which are put in here.

        Args:
            steady: memory of tensors in ``content`` that stays as it is until the next ``flush`` has returned.
        """
        if not TorchSwitches.exist:
            torch.save(content, self)
            return
        self._summing = crew_of_sums()
        self._sums = RecordSums(self._summing)
        self._steady = steady or {}
        self._least_steady = min((length for length, _ in self._steady.values()), default=0)
        self._switches.change(aligned=_is_worth_aligning(self._steady))
        try:
            torch.save(content, self)
        finally:
            self._switches.put_back()
            self._steady = {}

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Take over ``data``, which may change after this unless it is known to stay.

        Raises:
            OSError: this or an earlier write has failed.
        """
        self._switches.put_back()
        view, pending = memoryview(data).cast("B"), None
        if not len(view):
            return 0
        if self._sums is not None:
            view, pending = self._sums.through(view)
        self._raise_fault()
        steady = self._find_steady(view)
        if steady is None:
            self._copy(view, pending)
            return len(view)
        address, known = steady
        if pending is not None and known is not None:
            pending.add_known(known, len(view))
        elif pending is not None:
            pending.add(view)
        if len(view) >= WORTH_A_WRITE and self._file is not None:
            self._write_from(view, address)
        else:
            self._copy(view, None)
        return len(view)

    def _find_steady(self, view: memoryview) -> tuple[int, int | None] | None:
        """Address and CRC-32 of memory that stays; None if it is not such."""
        if not self._steady or len(view) < self._least_steady:
            return None
        address = address_of(view)
        length, known = self._steady.get(address, (-1, None))
        return (address, known) if length == len(view) else None

    def _write_from(self, view: memoryview, address: int) -> None:
        """Have memory written from where it is, as far as it fills sectors."""
        direct = _is_direct(self._file)
        whole = len(view) // _SECTOR * _SECTOR if direct else len(view)
        if direct and (self._position % _SECTOR or address % _SECTOR):
            whole = 0
        if whole and self._filled:
            self._hand_over()
        for start in range(0, whole, self._blocks.size):
            self._submit(view[start : min(start + self._blocks.size, whole)], None)
        self._copy(view[whole:], None)

    def _copy(self, view: memoryview, pending: PendingSum | None) -> None:
        """Copy into blocks, and hand over those that are full."""
        native = None
        if pending is not None and (self._file is None or (native := native_sums(len(view))) is None):
            pending.add(view)
        if self._file is None:
            self._position += len(view)
            return
        start = 0
        while start < len(view):
            part = view[start : start + self._blocks.size - self._filled]
            if native is not None:
                target = address_of(memoryview(self._block)) + self._filled
                pending.add_known(native.crc32(part, target=target), len(part))
            elif len(part) < _WORTH_NUMPY:
                memoryview(self._block)[self._filled : self._filled + len(part)] = part
            else:
                target = numpy.frombuffer(self._block, dtype=numpy.uint8, count=len(part), offset=self._filled)
                target[:] = numpy.frombuffer(part, dtype=numpy.uint8)
            self._filled += len(part)
            self._position += len(part)
            start += len(part)
            if self._filled == self._blocks.size:
                self._hand_over()

    def tell(self) -> int:
        return self._position

    def fileno(self) -> int:
        if self._file is None:
            raise io.UnsupportedOperation("a stream that writes nothing has no file")
        return self._file

    def _hand_over(self) -> None:
        """The block goes to the file; go on with another one."""
        block, filled, self._filled = self._block, self._filled, 0
        self._position -= filled
        self._block = self._blocks.take()
        self._submit(memoryview(block)[:filled], block)

    def _submit(self, view: memoryview, block: mmap.mmap | None) -> None:
        """Have memory written behind what was written so far.

        Args:
            block: to be given back afterwards.
        """
        self._under_way.append((self._writers.submit(_write_at, self._file, view, len(view), self._position), block))
        self._position += len(view)
        self._wait_for(self._blocks.writers)

    def _wait_for(self, left: int) -> None:
        """Until no more than ``left`` writes are under way."""
        while len(self._under_way) > left:
            future, block = self._under_way.pop(0)
            self._fault = self._fault or future.exception()
            if block is not None:
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
            place = self._position - self._filled
            _write_at(self._file, memoryview(self._block), self._filled, place)

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
            if block is not None:
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


def _is_worth_aligning(steady: Steady) -> bool:
    """Whether records should begin where direct writes can: padding is little beside them."""
    return bool(steady) and sum(length for length, _ in steady.values()) >= WORTH_A_WRITE * len(steady)


def _is_direct(file: int) -> int:
    """The flag of direct writes if the file has it, else 0."""
    return int(getattr(os, "O_DIRECT", 0) & fcntl.fcntl(file, fcntl.F_GETFL))


def _write_at(file: int, memory: memoryview, count: int, place: int) -> None:
    """Write the first ``count`` bytes at ``place``; where that is not whole sectors, of which ``memory`` then has the
    rest, the file ends there."""
    direct = _is_direct(file)
    padded = -(-count // _SECTOR) * _SECTOR if direct else count
    view = memory[:padded]
    written = 0
    while written < count:
        try:
            written += os.pwrite(file, view[written:], place + written)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EFAULT) or not direct:
                raise
            # Some file systems accept the mode and not the size, or want the rest of a short write in whole sectors;
            # some memory, such as a driver's, the system reads itself but does not let the disk read.
            direct = fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
            view = view[:count]
    if written > count:
        os.ftruncate(file, place + count)
