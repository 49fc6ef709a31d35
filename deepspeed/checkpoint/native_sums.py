# SPDX-License-Identifier: Apache-2.0
"""CRC-32 by the processor's instructions for it, alone or while memory is copied (``csrc/checkpoint``).

No save or load waits for a compiler. Where the op was not compiled before, it is compiled beside the first one that is
large enough; until then, and where that is not possible, zlib computes the same numbers.
"""

import os
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy
import torch

from deepspeed.utils.logging import logger

WORTH_THE_OP = 1 << 20  # bytes from which the op is asked for; fewer are summed by it only if it is there already
_MOST_BESIDE = 4  # threads that copy beside training
_PROCESSORS_EACH = 4


def address_of(view: memoryview) -> int:
    """Where the bytes of a view lie."""
    return int(numpy.frombuffer(view, dtype=numpy.uint8).__array_interface__["data"][0])


class NativeSums:
    """The compiled op.

    Args:
        op: the module.
        level: which way to compute, of ``op.levels()``.
    """

    def __init__(self, op: ModuleType, level: int = 0) -> None:
        self._op, self._level = op, level

    def crc32(self, view: memoryview, before: int = 0, target: int = 0) -> int:
        """As ``zlib.crc32``. Other threads run meanwhile.

        Args:
            target: address of as many bytes that the view is copied to; 0: it is not.
        """
        if not len(view):
            return before
        return int(self._op.crc32(address_of(view), target, len(view), before, self._level))

    def combined(self, first: int, second: int, length: int) -> int:
        """CRC-32 of two pieces of memory end to end, from that of each and the bytes of the second one."""
        return int(self._op.combined(first, second, length))

    def copies(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], beside: bool) -> "NativeCopies":
        """Begin to copy; see ``NativeCopies``."""
        return NativeCopies(self._op, self._level, pairs, beside)


class NativeCopies:
    """Copies of tensors in host memory, contiguous ones, and the CRC-32 of each.

    Args:
        pairs: target and source, of the same bytes.
        beside: begin now, with threads that give way to all other work. Otherwise ``finish`` does all.
    """

    def __init__(
        self, op: ModuleType, level: int, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], beside: bool
    ) -> None:
        self._op = op
        self._pairs = list(pairs)  # keeps the memory
        addresses = tuple(n for into, of in pairs for n in (into.data_ptr(), of.data_ptr(), of.nbytes))
        self._begun = op.begin(addresses, _threads_beside() if beside and pairs else 0, level)

    def finish(self, threads: int) -> tuple[int, ...]:
        """Wait until all is copied; the CRC-32 of each. By any thread, and by several.

        Args:
            threads: of the caller's priority that take part. 0: only wait.

        Raises:
            RuntimeError: this is a child that was forked after the copies were begun.
        """
        return tuple(self._op.finish(self._begun, threads))


def _threads_beside() -> int:
    return max(1, min(_MOST_BESIDE, torch.get_num_threads() // _PROCESSORS_EACH))


class _Answer:
    """What is known of the op in this process."""

    def __init__(self) -> None:
        self.native: NativeSums | None = None
        self.asked = False
        self._lock = threading.Lock()

    def ask(self) -> None:
        """Once: load the op if it is compiled, else have a thread compile it."""
        with self._lock:
            if self.asked:
                return
            self.asked = True
        if os.environ.get("DS_NATIVE_OPS", "1") == "0":
            return
        from deepspeed.ops.op_builder import CheckpointBuilder

        builder = CheckpointBuilder()
        if builder.compiled():
            self._load(builder)
        else:
            threading.Thread(target=self._load, args=(builder,), name="compiles checkpoint op", daemon=True).start()

    def _load(self, builder: Any) -> None:
        try:
            self.native = NativeSums(builder.load())
        except (RuntimeError, OSError, ImportError) as error:
            if os.environ.get("RANK", "0") == "0":
                reason = " ".join(str(error).split())
                logger.warning(f"op checkpoint cannot be had, zlib computes the checksums of checkpoints: {reason}")


_answer = _Answer()


def native_sums(count: int) -> NativeSums | None:
    """The op, or None where it is not there (yet).

    Args:
        count: bytes that are to be summed.
    """
    if count >= WORTH_THE_OP and not _answer.asked:
        _answer.ask()
    return _answer.native
