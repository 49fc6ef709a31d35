# SPDX-License-Identifier: Apache-2.0
"""The file of one flat group: its master and optimizer state, one after the other, each at the beginning of a page."""

import mmap
import os
from dataclasses import dataclass

import torch

from deepspeed.ops.aio.handle import FileTransfer, OpenFile, aio_handle
from deepspeed.runtime.swap_tensor.buffer_pool import PAGE


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in the file; ``room`` is ``nbytes`` in whole pages."""

    offset: int
    nbytes: int
    dtype: torch.dtype

    @property
    def room(self) -> int:
        return -(-self.nbytes // PAGE) * PAGE


class GroupFile:
    """Slots are made as tensors appear and stay where they are.

    Args:
        handle: reads and writes.
        path: of the file, which is made.

    Raises:
        AsyncIOError: it cannot be made.
    """

    def __init__(self, handle: aio_handle, path: str) -> None:
        self._handle = handle
        self._file: OpenFile = handle.open(path)
        self.path = path
        self.slots: dict[str, Slot] = {}
        self._end = 0

    def slot_for(self, name: str, tensor: torch.Tensor) -> Slot:
        """The slot of a tensor; a new one if the tensor is new or has become another kind."""
        slot = self.slots.get(name)
        if slot is None or (slot.nbytes, slot.dtype) != (tensor.nbytes, tensor.dtype):
            slot = self.slots[name] = Slot(self._end, tensor.nbytes, tensor.dtype)
            self._end += slot.room
        return slot

    def forget(self, name: str) -> None:
        """A tensor is no more. Its place in the file is not used again."""
        self.slots.pop(name, None)

    def start_read(self, name: str, buffer: torch.Tensor) -> FileTransfer:
        """Fill the beginning of a uint8 buffer that has ``room``."""
        slot = self.slots[name]
        return self._handle.start_read(buffer[: slot.room], self._file, slot.offset)

    def start_write(self, name: str, buffer: torch.Tensor) -> FileTransfer:
        """Write the beginning of a uint8 buffer that has ``room``."""
        slot = self.slots[name]
        return self._handle.start_write(buffer[: slot.room], self._file, slot.offset)

    def mapped(self, name: str) -> torch.Tensor:
        """The values in the file, read as they are used; valid until they are written again. Writes to the tensor do
        not reach the file.

        Raises:
            OSError: the file is shorter than it was, or cannot be mapped.
        """
        slot = self.slots[name]
        if slot.nbytes == 0:
            return torch.empty(0, dtype=slot.dtype)
        size = os.fstat(self._file.buffered).st_size
        if size < slot.offset + slot.room:  # reading beyond the end would kill the process
            raise OSError(f"{self.path} has {size} bytes and should have {slot.offset + slot.room}: it was cut off")
        memory = mmap.mmap(self._file.buffered, slot.room, access=mmap.ACCESS_COPY, offset=slot.offset)
        return torch.frombuffer(memory, dtype=slot.dtype, count=slot.nbytes // slot.dtype.itemsize)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
