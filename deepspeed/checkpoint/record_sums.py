# SPDX-License-Identifier: Apache-2.0
"""CRC-32 of large memory by several threads, and the checksums of the records in a file of ``torch.save``.

``torch.save`` computes them itself, in one thread, before it hands a tensor over: a disk that writes faster than that
waits. Here the stream that a file is written to fills them in, while other threads write.
"""

import functools
import os
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future

import torch

from deepspeed.checkpoint.crew import Crew

CHUNK = 8 << 20  # bytes that one thread takes at once
_POLYNOMIAL = 0xEDB88320  # of CRC-32, x^31 in the lowest bit
_ONE, _X = 1 << 31, 1 << 30
_HEADER, _DESCRIPTOR, _ENTRY = b"PK\x03\x04", b"PK\x07\x08", b"PK\x01\x02"
_HEADER_BYTES, _ENTRY_BYTES = 30, 46
_HAS_DESCRIPTOR = 8  # a flag in the header


def crew_of_sums() -> Crew:
    """Threads that compute checksums: as many as there are cores, up to a few."""
    return Crew(min(8, os.cpu_count() or 1), "checkpoint sums")


# ----------------------------------------------------------------------------------------------------- combining


def _times(one: int, other: int) -> int:
    """Product of two polynomials modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product


@functools.lru_cache(maxsize=64)
def _shift(length: int) -> int:
    """``x`` to the power of the bits in ``length`` bytes: what so many further bytes do to a checksum."""
    power, square, exponent = _ONE, _X, 8 * length
    while exponent:
        if exponent & 1:
            power = _times(power, square)
        square = _times(square, square)
        exponent >>= 1
    return power


def combined(first: int, second: int, length: int) -> int:
    """CRC-32 of two pieces of memory end to end, from that of each and the bytes of the second one."""
    return _times(_shift(length), first) ^ second


class PendingSum:
    """CRC-32 of what is added, computed by a crew in chunks."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._parts: list[tuple[Future[int] | int, int]] = []
        self.length = 0

    def add(self, view: memoryview, before: Callable[[int], None] | None = None) -> None:
        """Goes on after this returns: the memory must stay as it is until ``value``.

        Args:
            before: what a thread does first, given where in ``view`` a chunk begins.
        """
        self.length += len(view)
        if len(view) < CHUNK // 64:  # less than it takes to hand it to a thread
            self._parts.append((zlib.crc32(view), len(view)))
            return
        for start in range(0, len(view), CHUNK):
            chunk = view[start : start + CHUNK]
            if before is not None:
                self._crew.submit(before, start)
            self._parts.append((self._crew.submit(zlib.crc32, chunk), len(chunk)))

    def value(self) -> int:
        """Wait for it."""
        total = 0
        for part, length in self._parts:
            total = combined(total, part if isinstance(part, int) else part.result(), length)
        return total


# --------------------------------------------------------------------------------------------- in torch's files


class RecordSums:
    """Follows the bytes of a file of ``torch.save`` and puts checksums where torch has left zeros.

    The file is a zip archive: per record a header, the contents in one call of ``write``, and a descriptor with its
    checksum behind them; at the end a directory with all checksums. Bytes that are not of this kind pass as they are.

    Args:
        crew: computes.
    """

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._header = bytearray()
        self._sum: PendingSum | None = None
        self._done: list[int] = []
        self._follows = True
        self.complete = False  # whether the directory has come by, with the checksums of all records

    def through(self, view: memoryview) -> memoryview:
        """The bytes to be written for those handed over, as many."""
        if not self._follows:
            return view
        if self._sum is not None:
            return self._in_record(view)
        if not self._header and view[:4] == _ENTRY:
            return self._in_directory(view)
        return self._in_header(view)

    def _in_header(self, view: memoryview) -> memoryview:
        self._header += view
        known = len(self._header) >= _HEADER_BYTES
        lengths = (int.from_bytes(self._header[at : at + 2], "little") for at in (26, 28))
        end = _HEADER_BYTES + sum(lengths) if known else 0
        # A torch that hands over more than a header at once is not followed.
        self._follows = _HEADER.startswith(bytes(self._header[:4])) and not (known and len(self._header) > end)
        if known and len(self._header) == end:
            if self._header[6] & _HAS_DESCRIPTOR:
                self._sum = PendingSum(self._crew)
            else:  # nothing is in it
                self._done.append(0)
            self._header.clear()
        return view

    def _in_record(self, view: memoryview) -> memoryview:
        pending = self._sum
        number = (len(view) - 8) // 2  # bytes of a size: 8 in large files
        size = int.from_bytes(view[-number:], "little") if number in (4, 8) else None
        if size != pending.length or view[:4] != _DESCRIPTOR:
            pending.add(view)
            return view
        self._sum = None
        self._done.append(pending.value())
        return _with_sum(view, 4, self._done[-1])

    def _in_directory(self, view: memoryview) -> memoryview:
        position = 0
        for value in self._done:
            entry = view[position : position + _ENTRY_BYTES]
            if entry[:4] != _ENTRY:
                break
            view = _with_sum(view, position + 16, value)
            position += _ENTRY_BYTES + sum(int.from_bytes(entry[at : at + 2], "little") for at in (28, 30, 32))
        self.complete = bool(self._done) and position == len(view)
        self._follows = False
        return view


def _with_sum(view: memoryview, at: int, value: int) -> memoryview:
    changed = view.obj if isinstance(view.obj, bytearray) else bytearray(view)
    changed[at : at + 4] = value.to_bytes(4, "little")
    return memoryview(changed)


_switch_lock = threading.Lock()


class TorchSums:
    """torch's switch for the checksums of ``torch.save``, of which there is one for all threads.

    torch reads it when it opens a file. So it is off from ``leave_out`` until the stream has its first bytes, when
    ``put_back`` is called, and hardly any ``torch.save`` of another thread meets it.
    """

    exists = hasattr(torch.serialization, "set_crc32_options")  # in torch 2.6 and later

    def __init__(self) -> None:
        self._before: bool | None = None

    def leave_out(self) -> None:
        _switch_lock.acquire()
        self._before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)

    def put_back(self) -> None:
        """May be called more than once."""
        if self._before is not None:
            torch.serialization.set_crc32_options(self._before)
            self._before = None
            _switch_lock.release()
