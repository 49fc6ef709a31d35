# SPDX-License-Identifier: Apache-2.0
"""``aio_handle``: reads files into tensors and writes tensors to files while the program goes on."""

import errno
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Union

import torch

from deepspeed.ops.aio.engines import available_engines, choose_engine
from deepspeed.ops.aio.errors import AsyncIOError
from deepspeed.runtime.swap_tensor import constants as const
from deepspeed.utils.pin_memory import get_native_pinned_memory

__all__ = ["AsyncIOError", "FileTransfer", "OpenFile", "aio_handle", "aio_read", "aio_write", "available_engines"]

# Direct and buffered requests to one file must not share a page of the page cache.
PAGE = 4096
ALIGNMENT = PAGE
FILE_MODE = 0o600
O_DIRECT = getattr(os, "O_DIRECT", 0)  # 0 where the system has none

# What the compiled function returned for a call that did what it was asked, by the interface.
ONE_COMPLETED = 1
STARTED = 0


FileName = Union[str, os.PathLike, "OpenFile"]


class OpenFile:
    """A file that stays open for many reads and writes of a handle; also when its name is removed meanwhile.

    Args:
        path: made if it does not exist and ``writes``.
        direct_alignment: of the engine's module.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(
        self, path: str, reads: bool, writes: bool, direct_alignment: Callable[[int], tuple[int, int]]
    ) -> None:
        self.path = path
        flags = os.O_RDWR if reads and writes else os.O_WRONLY if writes else os.O_RDONLY
        flags |= getattr(os, "O_CLOEXEC", 0)
        self.buffered = os.open(path, flags | (os.O_CREAT if writes else 0), FILE_MODE)
        self._alignment, position = direct_alignment(self.buffered) if O_DIRECT else (0, 0)
        self.direct = -1
        if self._alignment and PAGE % position == 0:
            try:
                self.direct = os.open(path, flags | O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:  # how a file system says that it has no direct I/O
                    os.close(self.buffered)
                    raise

    def direct_range(self, host: torch.Tensor, offset: int) -> tuple[int, int]:
        """Which bytes of ``host``, put at ``offset``, may go around the page cache: whole pages, aligned in memory."""
        begin = min(-offset % PAGE, host.nbytes)
        end = max(begin, host.nbytes - (offset + host.nbytes) % PAGE)
        if end == begin or self.direct < 0 or (host.data_ptr() + begin) % self._alignment:
            return host.nbytes, host.nbytes
        return begin, end

    def descriptors(self) -> tuple[int, int]:
        """The file once more, for the engine to close: with O_DIRECT (-1 where that is not possible) and without."""
        buffered = os.dup(self.buffered)
        try:
            return (os.dup(self.direct) if self.direct >= 0 else -1), buffered
        except OSError:
            os.close(buffered)
            raise

    def close(self) -> None:
        """Transfers that were started go on."""
        for fd in (self.direct, self.buffered):
            if fd >= 0:
                os.close(fd)
        self.direct = self.buffered = -1


class FileTransfer:
    """A read or write that was started. It keeps the tensor alive.

    Args:
        ticket: of the engine.
        module: that the engine is from.
        tensor: the caller's.
        host: what is moved: ``tensor``, or memory of the host beside a tensor of a device.
    """

    def __init__(
        self, ticket: Any, module: ModuleType, path: str, writes: bool, tensor: torch.Tensor, host: torch.Tensor,
        offset: int,
    ) -> None:  # fmt: skip
        self.path = path
        self.writes = writes
        self.offset = offset
        self._ticket = ticket
        self._module = module
        self._tensor = tensor
        self._host = host

    @property
    def finished(self) -> bool:
        """Whether it is over, well or not; ``wait`` does not block then."""
        return self._ticket.finished

    def wait(self) -> None:
        """Until it is over. May be called again.

        Raises:
            AsyncIOError: not all bytes were moved.
        """
        self._ticket.wait()
        number = self._ticket.error
        if number:
            raise AsyncIOError(
                errno.ENODATA if number == self._module.END_OF_FILE else number,
                self.path,
                "write" if self.writes else "read",
                self.offset,
                self._ticket.error_offset,
                self._host.nbytes,
                self._ticket.done,
            )
        if not self.writes and self._host is not self._tensor:
            self._tensor.copy_(self._host)
            self._host = self._tensor

    def settle(self) -> AsyncIOError | None:
        """As ``wait``, with the error as the result."""
        try:
            self.wait()
        except AsyncIOError as error:
            return error
        return None


class aio_handle:
    """Reads and writes files in blocks, several at a time. The calling thread keeps running, and so do others: the GIL
    is free while a method waits.

    Whole pages go around the page cache (``O_DIRECT``) where the file system can and the tensor lies as it wants, as
    one from :meth:`new_cpu_locked_tensor` does; everything else is buffered. Requests that the kernel cuts short are
    completed. A write changes the bytes it was given and leaves the rest of the file as it is.

    Args:
        block_size: bytes of one request.
        queue_depth: requests in flight per thread.
        single_submit: one system call per request.
        overlap_events: submit the next request when one is completed, not when all are.
        intra_op_parallelism: threads.
        engine: ``io_uring``, ``libaio``, ``threads`` (compiled) or ``python``; None chooses, see ``choose_engine``.

    Raises:
        ValueError: a number below 1, or an unknown engine.
        RuntimeError: the engine does not work on this host.
        OSError: the kernel refuses the engine, for example because its limits are reached.
    """

    def __init__(
        self,
        block_size: int = const.AIO_BLOCK_SIZE_DEFAULT,
        queue_depth: int = const.AIO_QUEUE_DEPTH_DEFAULT,
        single_submit: bool = const.AIO_SINGLE_SUBMIT_DEFAULT,
        overlap_events: bool = const.AIO_OVERLAP_EVENTS_DEFAULT,
        intra_op_parallelism: int = const.AIO_INTRA_OP_PARALLELISM_DEFAULT,
        engine: str | None = None,
    ) -> None:
        numbers = {
            "block_size": block_size,
            "queue_depth": queue_depth,
            "intra_op_parallelism": intra_op_parallelism,
        }
        for name, value in numbers.items():
            if value < 1:
                raise ValueError(f"aio_handle: {name}={value} must be at least 1")
        self._numbers = numbers
        self._single_submit = single_submit
        self._overlap_events = overlap_events
        self._started: list[FileTransfer] = []
        self.engine, self._module = choose_engine(engine)
        self._engine = self._module.Engine(
            self.engine, block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism
        )

    # ------------------------------------------------------------------ starting

    def start_read(self, buffer: torch.Tensor, filename: FileName, file_offset: int = 0) -> FileTransfer:
        """Start to fill ``buffer`` from ``filename``, from byte ``file_offset`` on. Until the transfer is waited for,
        the buffer must not be used.

        Args:
            buffer: contiguous, any dtype, on any device (through memory of the host).

        Raises:
            AsyncIOError: the file cannot be opened.
            ValueError: the tensor is not contiguous.
        """
        return self._start(buffer, filename, file_offset, writes=False)

    def start_write(self, buffer: torch.Tensor, filename: FileName, file_offset: int = 0) -> FileTransfer:
        """Start to write ``buffer`` to ``filename``, which is made if it does not exist. Until the transfer is waited
        for, the buffer must not be changed. Arguments and errors are those of ``start_read``."""
        return self._start(buffer, filename, file_offset, writes=True)

    def _start(self, buffer: torch.Tensor, filename: FileName, offset: int, writes: bool) -> FileTransfer:
        if not buffer.is_contiguous():
            raise ValueError(f"aio_handle moves contiguous tensors, this one has strides {buffer.stride()}")
        if offset < 0:
            raise ValueError(f"aio_handle: file_offset={offset} must not be negative")
        path = filename.path if isinstance(filename, OpenFile) else os.fspath(filename)
        host = buffer.detach()
        if host.device.type != "cpu":
            host = host.cpu() if writes else torch.empty_like(host, device="cpu")
        try:
            files, direct = self._files(filename, host, offset, writes)
        except OSError as error:
            operation = "write" if writes else "read"
            raise AsyncIOError(error.errno or errno.EIO, path, operation, offset, offset, host.nbytes, 0) from error
        try:
            ticket = self._engine.submit(*files, writes, host.data_ptr(), host.nbytes, offset, *direct)
        except BaseException:
            for fd in files:
                if fd >= 0:
                    os.close(fd)
            raise
        own = buffer if buffer.device.type != "cpu" else host
        return FileTransfer(ticket, self._module, path, writes, own, host, offset)

    def _files(
        self, file: FileName, host: torch.Tensor, offset: int, writes: bool
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """File descriptors with and without O_DIRECT, for the engine, and the range of bytes that is for the first."""
        if isinstance(file, OpenFile):
            return file.descriptors(), file.direct_range(host, offset)
        opened = OpenFile(os.fspath(file), not writes, writes, self._module.direct_alignment)
        return (opened.direct, opened.buffered), opened.direct_range(host, offset)

    def open(self, filename: str | os.PathLike) -> OpenFile:
        """A file for reads and writes, made if it does not exist, to be given to other methods in place of its name.

        Raises:
            AsyncIOError: it cannot be opened.
        """
        path = os.fspath(filename)
        try:
            return OpenFile(path, True, True, self._module.direct_alignment)
        except OSError as error:
            raise AsyncIOError(error.errno or errno.EIO, path, "open", 0, 0, 0, 0) from error

    # ------------------------------------------------------------------ the interface

    def async_pread(self, buffer: torch.Tensor, filename: FileName, file_offset: int = 0) -> int:
        """As ``start_read``, finished by ``wait()``; 0."""
        self._started.append(self.start_read(buffer, filename, file_offset))
        return STARTED

    def async_pwrite(self, buffer: torch.Tensor, filename: FileName, file_offset: int = 0) -> int:
        """As ``start_write``, finished by ``wait()``; 0."""
        self._started.append(self.start_write(buffer, filename, file_offset))
        return STARTED

    def wait(self) -> int:
        """Until everything that ``async_pread`` and ``async_pwrite`` started is over; how many that were.

        Raises:
            AsyncIOError: the first that failed. All are over then, too.
        """
        started, self._started = self._started, []
        failures: list[AsyncIOError] = []
        for position, transfer in enumerate(started):
            try:
                transfer.wait()
            except AsyncIOError as error:
                failures.append(error)
            except BaseException:  # an interrupt: what is still moving stays known
                self._started = started[position:] + self._started
                raise
        if failures:
            raise failures[0] if len(failures) == 1 else _with_more(failures)
        return len(started)

    def sync_pread(self, buffer: torch.Tensor, filename: FileName, file_offset: int = 0) -> int:
        """Fill ``buffer`` from a file; 1. Errors are those of ``start_read`` and of ``FileTransfer.wait``."""
        self.start_read(buffer, filename, file_offset).wait()
        return ONE_COMPLETED

    def sync_pwrite(self, buffer: torch.Tensor, filename: FileName, file_offset: int = 0) -> int:
        """Write ``buffer`` to a file; 1. Errors are those of ``start_write`` and of ``FileTransfer.wait``."""
        self.start_write(buffer, filename, file_offset).wait()
        return ONE_COMPLETED

    def pread(
        self,
        buffer: torch.Tensor,
        filename: str | os.PathLike,
        validate: bool = False,
        async_op: bool = False,
        file_offset: int = 0,
    ) -> int:
        """``async_pread`` or ``sync_pread``. ``validate``, which needs the latter: read the file again by plain means
        and compare.

        Raises:
            RuntimeError: the comparison failed.
        """
        if async_op:
            _refuse_validation(validate)
            return self.async_pread(buffer, filename, file_offset)
        self.sync_pread(buffer, filename, file_offset)
        if validate:
            _compare(buffer, os.fspath(filename), file_offset)
        return ONE_COMPLETED

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: str | os.PathLike,
        validate: bool = False,
        async_op: bool = False,
        file_offset: int = 0,
    ) -> int:
        """``async_pwrite`` or ``sync_pwrite``; ``validate`` as in ``pread``."""
        if async_op:
            _refuse_validation(validate)
            return self.async_pwrite(buffer, filename, file_offset)
        self.sync_pwrite(buffer, filename, file_offset)
        if validate:
            _compare(buffer, os.fspath(filename), file_offset)
        return ONE_COMPLETED

    def read(
        self, buffer: torch.Tensor, filename: str | os.PathLike, validate: bool = False, file_offset: int = 0
    ) -> int:
        """``pread`` that does not return before the buffer is filled."""
        return self.pread(buffer, filename, validate, False, file_offset)

    def write(
        self, buffer: torch.Tensor, filename: str | os.PathLike, validate: bool = False, file_offset: int = 0
    ) -> int:
        """``pwrite`` that does not return before the bytes are written."""
        return self.pwrite(buffer, filename, validate, False, file_offset)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Uninitialised 1-D tensor of the host with the dtype of ``example_tensor``, at the beginning of a page;
        page-locked where there is an accelerator."""
        return get_native_pinned_memory().pin_empty(example_tensor, (num_elem,))

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Unlock a tensor of ``new_cpu_locked_tensor``; False if it is none. Its memory goes with its last use."""
        memory = get_native_pinned_memory()
        if not memory.is_pinned(tensor):
            return False
        memory.unpin(tensor)
        return True

    def get_block_size(self) -> int:
        """Bytes of one request."""
        return self._numbers["block_size"]

    def get_queue_depth(self) -> int:
        """Requests in flight per thread."""
        return self._numbers["queue_depth"]

    def get_single_submit(self) -> bool:
        """Whether each request has a system call of its own."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """Whether a request is submitted as soon as another is completed."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Threads."""
        return self._numbers["intra_op_parallelism"]

    def get_alignment(self) -> int:
        """Bytes that offsets and lengths should be multiples of, to go around the page cache altogether."""
        return ALIGNMENT

    def close(self) -> None:
        """Finish what was started and end the threads; failures of what nobody waited for are not reported."""
        self._engine.close()


def handle_of(section: Mapping[str, Any]) -> aio_handle:
    """A handle with the settings of a parsed config section ``aio``; the caller closes it."""
    return aio_handle(
        section[const.AIO_BLOCK_SIZE],
        section[const.AIO_QUEUE_DEPTH],
        section[const.AIO_SINGLE_SUBMIT],
        section[const.AIO_OVERLAP_EVENTS],
        section[const.AIO_INTRA_OP_PARALLELISM],
    )


def aio_read(
    buffer: torch.Tensor,
    filename: str | os.PathLike,
    block_size: int = const.AIO_BLOCK_SIZE_DEFAULT,
    queue_depth: int = const.AIO_QUEUE_DEPTH_DEFAULT,
    single_submit: bool = const.AIO_SINGLE_SUBMIT_DEFAULT,
    overlap_events: bool = const.AIO_OVERLAP_EVENTS_DEFAULT,
    validate: bool = False,
) -> int:
    """``aio_handle.read`` with a handle for this one call."""
    handle = aio_handle(block_size, queue_depth, single_submit, overlap_events)
    try:
        return handle.read(buffer, filename, validate)
    finally:
        handle.close()


def aio_write(
    buffer: torch.Tensor,
    filename: str | os.PathLike,
    block_size: int = const.AIO_BLOCK_SIZE_DEFAULT,
    queue_depth: int = const.AIO_QUEUE_DEPTH_DEFAULT,
    single_submit: bool = const.AIO_SINGLE_SUBMIT_DEFAULT,
    overlap_events: bool = const.AIO_OVERLAP_EVENTS_DEFAULT,
    validate: bool = False,
) -> int:
    """``aio_handle.write`` with a handle for this one call."""
    handle = aio_handle(block_size, queue_depth, single_submit, overlap_events)
    try:
        return handle.write(buffer, filename, validate)
    finally:
        handle.close()


def _with_more(failures: list[AsyncIOError]) -> AsyncIOError:
    first = failures[0]
    first.strerror = f"{first.strerror}; {len(failures) - 1} more reads or writes failed"
    return first


def _refuse_validation(validate: bool) -> None:
    if validate:
        raise ValueError("aio_handle: validate compares when the bytes are there, so it does not go with async_op")


def _compare(buffer: torch.Tensor, path: str, offset: int) -> None:
    mine = buffer.detach().cpu().reshape(-1).view(torch.uint8)
    with open(path, "rb") as file:
        file.seek(offset)
        found = torch.frombuffer(bytearray(file.read(mine.numel()) or b"\0"), dtype=torch.uint8)[: mine.numel()]
    if not torch.equal(mine, found):
        raise RuntimeError(f"aio_handle: the bytes of {path} from {offset} on are not those of the tensor")
