# SPDX-License-Identifier: Apache-2.0
"""Profiler ranges: labels in a torch profile, ranges in the device's profiler (NVTX on CUDA).

A range costs one check while nobody looks. It is written while a torch profiler records, in a process that Nsight
Systems started, and after :func:`request_ranges`, which an engine with ``wall_clock_breakdown`` calls.
"""

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.gradients.autograd_internals import profiler_is_recording

enable_nvtx = True  # False: no ranges, whoever asks
DEEPSPEED_NVTX_DOMAIN = "DeepSpeed"

_requested = "NSYS_PROFILING_SESSION_ID" in os.environ  # set by Nsight Systems for what it starts
_NO_RANGE: AbstractContextManager[None] = nullcontext()

_Function = TypeVar("_Function", bound=Callable[..., Any])


def request_ranges(wanted: bool = True) -> None:
    """Write ranges in this process from now on, whether or not a profiler is known to look; or stop doing so."""
    global _requested
    _requested = wanted


def ranges_wanted() -> bool:
    """Whether a range entered now is written."""
    return enable_nvtx and (_requested or profiler_is_recording())


class _Range:
    """A label of the torch profiler and a range of the device's profiler around the same code."""

    __slots__ = ("_domain", "_label", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        accelerator = get_accelerator()
        self._domain = DEEPSPEED_NVTX_DOMAIN if accelerator.supports_nvtx_domain else None
        self._label = torch.profiler.record_function(self._name)
        self._label.__enter__()
        accelerator.range_push(self._name, domain=self._domain)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        get_accelerator().range_pop(domain=self._domain)
        self._label.__exit__(kind, error, trace)


def profiler_range(name: str) -> AbstractContextManager[None]:
    """``with profiler_range("deepspeed.norm"): ...`` shows the block under that name, if anybody looks."""
    return _Range(name) if ranges_wanted() else _NO_RANGE


class _Named(Protocol):
    name: str


def span_range(what: str, items: Sequence[_Named]) -> AbstractContextManager[None]:
    """A range named ``what``, with the names of the first and the last item, which are joined only if anybody looks."""
    return _Range(span_label(what, items)) if ranges_wanted() else _NO_RANGE


def span_label(what: str, items: Sequence[_Named]) -> str:
    """``what (first to last)``."""
    names = dict.fromkeys(item.name for item in (*items[:1], *items[-1:]))
    return f"{what} ({' to '.join(names)})"


def instrument_w_nvtx(func: _Function) -> _Function:
    """Show each call of ``func`` as a range named after it, if anybody looks."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not ranges_wanted() or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        with _Range(func.__qualname__):
            return func(*args, **kwargs)

    return call
