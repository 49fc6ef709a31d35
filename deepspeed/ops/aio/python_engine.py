# SPDX-License-Identifier: Apache-2.0
"""The engine of asynchronous I/O where nothing can be compiled: a thread pool with ``preadv`` and ``pwrite``.

Its interface is that of the compiled module (csrc/aio/bindings.cpp).
"""

import ctypes
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

END_OF_FILE = -1
PAGE = 4096
_MOST_THREADS = 32


def direct_alignment(fd: int) -> tuple[int, int]:
    """Bytes that memory and file offsets of O_DIRECT must be multiples of; this engine cannot ask and is careful."""
    return PAGE, PAGE


class Transfer:
    """One read or write of a range of a file, in blocks."""

    def __init__(self, direct_fd: int, buffered_fd: int, writes: bool, address: int, size: int, offset: int) -> None:
        self.direct_fd = direct_fd
        self.buffered_fd = buffered_fd
        self.writes = writes
        self.offset = offset
        self.done = 0
        self.error = 0
        self.error_offset = 0
        self.blocks = 0
        self.memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B") if size else memoryview(b"")
        self._lock = threading.Lock()
        self._over = threading.Event()

    @property
    def finished(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        """Until the transfer is over, well or not."""
        self._over.wait()

    def move(self, begin: int, end: int, direct: bool) -> None:
        """Bytes ``[begin, end)`` of the transfer, in a thread of the pool."""
        try:
            if self.error:
                return
            while begin < end:
                fd = self.direct_fd if direct else self.buffered_fd
                view, place = self.memory[begin:end], self.offset + begin
                try:
                    moved = os.pwrite(fd, view, place) if self.writes else os.preadv(fd, [view], place)
                except OSError as error:
                    if direct and error.errno == errno.EINVAL:
                        direct = False
                        continue
                    self._fail(error.errno or errno.EIO, place)
                    return
                if moved == 0:
                    self._fail(errno.EIO if self.writes else END_OF_FILE, place)
                    return
                begin += moved
                direct = direct and (self.offset + begin) % PAGE == 0
                with self._lock:
                    self.done += moved
        finally:
            self.end_block()

    def _fail(self, number: int, place: int) -> None:
        with self._lock:
            if self.error == 0 or place < self.error_offset:
                self.error, self.error_offset = number, place

    def end_block(self) -> None:
        """One block is settled; the last one closes the files."""
        with self._lock:
            self.blocks -= 1
            if self.blocks > 0:
                return
        for fd in (self.direct_fd, self.buffered_fd):
            if fd < 0:
                continue
            try:
                os.close(fd)
            except OSError as error:  # network file systems report a full disk here
                self._fail(error.errno or errno.EIO, self.offset)
        self.memory.release()
        self._over.set()


class Engine:
    """Moves transfers through a pool of threads, as many as there may be requests in flight.

    ``single_submit`` and ``overlap_events`` say how requests are put together for one system call; here each has its
    own.
    """

    def __init__(
        self,
        backend: str,
        block_size: int,
        queue_depth: int,
        single_submit: bool,
        overlap_events: bool,
        threads: int,
    ) -> None:
        self._block_size = block_size
        self._pool = ThreadPoolExecutor(max(threads, min(threads * queue_depth, _MOST_THREADS)), "deepspeed_aio")
        self._process = os.getpid()

    def submit(
        self,
        direct_fd: int,
        buffered_fd: int,
        writes: bool,
        address: int,
        bytes: int,
        offset: int,
        direct_begin: int,
        direct_end: int,
    ) -> Transfer:
        """Starts a transfer and takes the file descriptors over. Bytes ``[direct_begin, direct_end)`` may go through
        ``direct_fd``.

        Raises:
            RuntimeError: the engine is closed, or belongs to the process that this one was forked from.
        """
        if os.getpid() != self._process:
            raise RuntimeError("a handle of asynchronous I/O does not work in a forked process: make one there")
        transfer = Transfer(direct_fd, buffered_fd, writes, address, bytes, offset)
        blocks = list(self._blocks(bytes, direct_begin, direct_end))
        transfer.blocks = len(blocks) + 1  # the last one is this method's own, so that no thread ends it too early
        submitted = 0
        try:
            for block in blocks:
                self._pool.submit(transfer.move, *block)
                submitted += 1
        except RuntimeError as error:
            if submitted == 0:
                raise RuntimeError("this handle of asynchronous I/O is closed") from error
            raise
        transfer.end_block()
        return transfer

    def _blocks(self, size: int, direct_begin: int, direct_end: int) -> list[tuple[int, int, bool]]:
        whole_pages = -(-self._block_size // PAGE) * PAGE
        blocks = []
        at = 0
        while at < size:
            direct = direct_begin <= at < direct_end
            limit = direct_end if direct else direct_begin if at < direct_begin else size
            end = min(at + (whole_pages if direct else self._block_size), limit)
            blocks.append((at, end, direct))
            at = end
        return blocks

    def close(self) -> None:
        """Finishes what was submitted and ends the threads."""
        if os.getpid() == self._process:
            self._pool.shutdown(wait=True)
