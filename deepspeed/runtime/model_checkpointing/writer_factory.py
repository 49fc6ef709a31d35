# SPDX-License-Identifier: Apache-2.0
"""Streams that checkpoint files are written to, by ``checkpoint.writer.type``."""

import io
import queue
import threading
import time
from typing import Any

import numpy

from deepspeed.runtime.model_checkpointing import constants as const
from deepspeed.utils.logging import logger


class CheckpointStream(io.RawIOBase):
    """A new file, or none at all (MOCK); counts bytes and time.

    Args:
        path: of the file; "" writes nothing.
        buffer_size: bytes handed to the system at once.
        double: a thread writes one buffer while the next one is filled.
        statistics: log the rate when the stream is closed.
    """

    def __init__(self, path: str, buffer_size: int, double: bool, statistics: bool) -> None:
        super().__init__()
        self._path = path
        self._file = open(path, "wb", buffering=0) if path else None
        self._size = buffer_size
        self._statistics = statistics
        self._begun = time.perf_counter()
        self._buffers: queue.SimpleQueue[numpy.ndarray] = queue.SimpleQueue()
        for _ in range(1 + double):
            self._buffers.put(numpy.empty(buffer_size if self._file else 0, dtype=numpy.uint8))
        self._buffer = self._buffers.get()
        self._filled = self._position = 0
        self._full: queue.SimpleQueue[tuple[numpy.ndarray, int] | None] = queue.SimpleQueue()
        self._fault: OSError | None = None
        self._thread = None
        if double and self._file is not None:
            self._thread = threading.Thread(target=self._write_buffers, name="checkpoint file", daemon=True)
            self._thread.start()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._position += len(view)
        if self._file is None or not len(view):
            return len(view)
        # numpy lets other threads run while it copies; a bytearray would stop training for as long.
        source, start = numpy.frombuffer(view, dtype=numpy.uint8), 0
        while start < len(view):
            count = min(len(view) - start, self._size - self._filled)
            self._buffer[self._filled : self._filled + count] = source[start : start + count]
            self._filled += count
            start += count
            if self._filled == self._size:
                self._hand_over()
        return len(view)

    def tell(self) -> int:
        return self._position

    def fileno(self) -> int:
        if self._file is None:
            raise io.UnsupportedOperation("a stream that writes nothing has no file")
        return self._file.fileno()

    def _hand_over(self) -> None:
        """The buffer goes to the file; go on with another one."""
        if self._thread is None:
            self._write_out(self._buffer, self._filled)
        else:
            self._full.put((self._buffer, self._filled))
            self._buffer = self._buffers.get()
        self._filled = 0
        self._raise_fault()

    def _write_out(self, buffer: numpy.ndarray, filled: int) -> None:
        view = memoryview(buffer)[:filled]
        while len(view):
            view = view[self._file.write(view) :]

    def _write_buffers(self) -> None:
        while (item := self._full.get()) is not None:
            if self._fault is None:
                try:
                    self._write_out(*item)
                except OSError as error:  # the next write or flush raises it
                    self._fault = error
            self._buffers.put(item[0])

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def flush(self) -> None:
        """Hand everything to the system.

        Raises:
            OSError: a write has failed.
        """
        if self._file is None or self._file.closed:
            return
        if self._filled:
            self._hand_over()
        if self._thread is not None:
            other = self._buffers.get()  # comes back when it was written, and so was all before it
            self._buffers.put(other)
        self._raise_fault()

    def close(self) -> None:
        if self.closed:
            return
        if self._thread is not None:
            self._full.put(None)
            self._thread.join()
        if self._file is not None:
            self._file.close()
        if self._statistics:
            seconds = time.perf_counter() - self._begun
            rate = self._position / max(seconds, 1e-9) / 1e9
            logger.info(f"checkpoint file {self._path or '(not written)'}: {self._position} bytes, {rate:.2f} GB/s")
        self._filled = 0
        super().close()


class CheckpointWriterFactory:
    """Makes the streams of ``checkpoint.writer``.

    FAST fills one buffer while another is written (``io_buffer_double``), PYTHON has one buffer, MOCK writes nothing.

    Args:
        writer_config: the section, parsed.
        aio_config: without meaning here.
        dp_writer_config: must be None: each rank writes its own files.

    Raises:
        NotImplementedError: an option that does not exist here.
        ValueError: a buffer without bytes.
    """

    def __init__(self, writer_config: dict[str, Any], aio_config: Any = None, dp_writer_config: Any = None) -> None:
        where = f"{const.CHECKPOINT}.{const.CHECKPOINT_WRITER}"
        if dp_writer_config is not None or writer_config[const.CHECKPOINT_DATA_PARALLEL] is not None:
            raise NotImplementedError(
                f"'{where}.{const.CHECKPOINT_DATA_PARALLEL}' is not supported: each rank writes its"
                " own files. Take it out"
            )
        if writer_config[const.CHECKPOINT_IO_MULTIPLIER] != 1:
            raise NotImplementedError(
                f"'{where}.{const.CHECKPOINT_IO_MULTIPLIER}' is {writer_config[const.CHECKPOINT_IO_MULTIPLIER]}, only 1"
                f" is supported: one stream per file. Raise '{const.CHECKPOINT_IO_BUFFER_SIZE}' for larger writes"
            )
        if writer_config[const.CHECKPOINT_IO_BUFFER_SIZE] <= 0:
            raise ValueError(
                f"'{where}.{const.CHECKPOINT_IO_BUFFER_SIZE}' is {writer_config[const.CHECKPOINT_IO_BUFFER_SIZE]},"
                " must be a positive number of bytes"
            )
        self._config = writer_config

    def create_writer(self, file_path: str, optimize_dp_state: bool = False) -> CheckpointStream:
        """A stream that writes to ``file_path``; its ``tell`` counts what was written so far."""
        kind = self._config[const.CHECKPOINT_WRITER_TYPE]
        return CheckpointStream(
            "" if kind == const.CheckpointWriterType.MOCK else file_path,
            self._config[const.CHECKPOINT_IO_BUFFER_SIZE],
            kind == const.CheckpointWriterType.FAST and self._config[const.CHECKPOINT_IO_BUFFER_DOUBLE],
            self._config[const.CHECKPOINT_IO_STATISTICS],
        )

    def release_writer(self) -> None:
        """Nothing is kept between files."""
