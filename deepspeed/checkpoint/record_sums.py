# SPDX-License-Identifier: Apache-2.0
"""CRC-32 of large memory by several threads, and the checksums of the records in a file of ``torch.save``.

``torch.save`` computes them itself, in one thread, before it hands a tensor over: a disk that writes faster than that
waits. Here the stream that a file is written to fills them in: it computes them while it copies, has threads do it, or
knows them already.
"""

import functools
import os
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from deepspeed.checkpoint.crew import Crew
from deepspeed.checkpoint.native_sums import native_sums

CHUNK = 8 << 20  # bytes that one thread takes at once
_POLYNOMIAL = 0xEDB88320  # of CRC-32, x^31 in the lowest bit
_ONE, _X = 1 << 31, 1 << 30
_HEADER, _DESCRIPTOR, _ENTRY = b"PK\x03\x04", b"PK\x07\x08", b"PK\x01\x02"
_HEADER_BYTES, _ENTRY_BYTES = 30, 46
_HAS_DESCRIPTOR = 8  # a flag in the header
ALIGNMENT = 4096  # of records that go to the disk from where they are; what direct writes need at most


def crc32_of(view: memoryview) -> int:
    """CRC-32, by whatever is fastest here. Other threads run meanwhile."""
    native = native_sums(len(view))
    return zlib.crc32(view) if native is None else native.crc32(view)


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
    """CRC-32 of what is added, computed by a crew in chunks, or by the caller."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._parts: list[tuple[Future[int] | int, int]] = []
        self.length = 0

    def add(self, view: memoryview, before: Callable[[int], None] | None = None) -> None:
        """Goes on after this returns: the memory must stay as it is until ``value``.

        Args:
            before: what a thread does first, given where in ``view`` a chunk begins.
        """
        if len(view) < CHUNK // 64:  # less than it takes to hand it to a thread
            self.add_known(zlib.crc32(view), len(view))
            return
        self.length += len(view)
        for start in range(0, len(view), CHUNK):
            chunk = view[start : start + CHUNK]
            if before is not None:
                self._crew.submit(before, start)
            self._parts.append((self._crew.submit(crc32_of, chunk), len(chunk)))

    def add_known(self, value: int, length: int) -> None:
        """So many bytes with this CRC-32 come next."""
        self.length += length
        self._parts.append((value, length))

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

    def through(self, view: memoryview) -> tuple[memoryview, PendingSum | None]:
        """The bytes to be written for those handed over, as many. Where they are contents of a record also what the
        caller has to add them to, before it hands over any more."""
        if not self._follows:
            return view, None
        if self._sum is not None:
            return self._in_record(view)
        if not self._header and view[:4] == _ENTRY:
            return self._in_directory(view), None
        return self._in_header(view), None

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

    def _in_record(self, view: memoryview) -> tuple[memoryview, PendingSum | None]:
        pending = self._sum
        number = (len(view) - 8) // 2  # bytes of a size: 8 in large files
        size = int.from_bytes(view[-number:], "little") if number in (4, 8) else None
        if size != pending.length or view[:4] != _DESCRIPTOR:
            return view, pending
        self._sum = None
        self._done.append(pending.value())
        return _with_sum(view, 4, self._done[-1]), None

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


@functools.cache
def _alignment() -> Any:
    """torch's settings with ``storage_alignment``; None before it had that."""
    try:
        from torch.utils.serialization import config
    except ImportError:
        return None
    return config.save if hasattr(config.save, "storage_alignment") else None


class TorchSwitches:
    """torch's switches for ``torch.save``, of which there is one set for all threads: its own checksums, and where in
    the file records begin.

    torch reads them when it opens a file. They are other ones from ``change`` until the stream has its first bytes,
    when ``put_back`` is called, and hardly any ``torch.save`` of another thread meets that.
    """

    exist = hasattr(torch.serialization, "set_crc32_options")  # in torch 2.6 and later

    def __init__(self) -> None:
        self._sums_before: bool | None = None
        self._alignment_before = 0

    def change(self, aligned: bool) -> None:
        """Leave checksums out.

        Args:
            aligned: contents of records shall begin at multiples of 4096, in a torch that can do so.
        """
        _switch_lock.acquire()
        self._sums_before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        if aligned and (settings := _alignment()) is not None:
            self._alignment_before = settings.storage_alignment
            settings.storage_alignment = ALIGNMENT

    def put_back(self) -> None:
        """May be called more than once."""
        if self._sums_before is None:
            return
        torch.serialization.set_crc32_options(self._sums_before)
        if self._alignment_before:
            _alignment().storage_alignment = self._alignment_before
        self._sums_before, self._alignment_before = None, 0
        _switch_lock.release()
