# SPDX-License-Identifier: Apache-2.0
"""A transport that is as late as it may be: what an asynchronous collective delivers exists only after ``wait()``.

Gloo on one machine is so fast that code which forgets to wait, or writes into a buffer in flight, usually gets away
with it. Here, from the call to ``wait()``, the buffer holds NaN: who reads it early gets NaN, and who writes into it is
found out by ``wait()``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import deepspeed.comm as comm

_NAMES = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
    "all_gather_into_tensor",
)


class BufferInFlightError(AssertionError):
    """A buffer was written between the call of a collective and its ``wait()``."""


class DelayedWork:
    """Handle of a collective on copies.

    Args:
        work: handle of the collective on ``copies``.
        in_flight: buffers of the caller that no one may touch until ``wait()``. Filled with NaN here.
        deliver: pairs of a caller's tensor and the copy that it becomes in ``wait()``.
    """

    def __init__(
        self, work: Any, in_flight: Sequence[torch.Tensor], deliver: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._work = work
        self._in_flight = list(in_flight)
        self._deliver = list(deliver)
        self.waited = False
        for tensor in self._in_flight:
            tensor.fill_(float("nan"))

    def wait(self, timeout: Any = None) -> bool:
        if self.waited:
            return True
        self.waited = True
        self._work.wait()
        if not all(bool(tensor.isnan().all()) for tensor in self._in_flight):
            raise BufferInFlightError("a buffer was written while its collective was in flight")
        for target, result in self._deliver:
            target.copy_(result)
        return True

    def is_completed(self) -> bool:
        return self.waited


@contextmanager
def delayed_transport() -> Iterator[list[DelayedWork]]:
    """Inside, asynchronous reductions and gathers of ``deepspeed.comm`` are delayed. Yields the handles given out."""
    works: list[DelayedWork] = []
    real = {name: getattr(comm, name) for name in _NAMES}

    def launch(
        work: Any, in_flight: Sequence[torch.Tensor], *deliver: tuple[torch.Tensor, torch.Tensor]
    ) -> DelayedWork:
        works.append(DelayedWork(work, in_flight, deliver))
        return works[-1]

    def in_place(name: str) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            if not async_op:
                return real[name](tensor, *args, **kwargs)
            copy = tensor.clone()
            work = real[name](copy, *args, async_op=True, **kwargs)
            receives = name in ("all_reduce", "broadcast") or comm.get_rank() == (args[0] if args else kwargs["dst"])
            return launch(work, [tensor], *([(tensor, copy)] if receives else []))

        return call

    def reduce_scatter(output: torch.Tensor, input_list: Any, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if not async_op:
            return real["reduce_scatter"](output, input_list, *args, **kwargs)
        copies, result = [tensor.clone() for tensor in input_list], torch.empty_like(output)
        work = real["reduce_scatter"](result, copies, *args, async_op=True, **kwargs)
        return launch(work, [output, *input_list], (output, result))

    def reduce_scatter_tensor(
        output: torch.Tensor, tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any
    ) -> Any:
        if not async_op:
            return real["reduce_scatter_tensor"](output, tensor, *args, **kwargs)
        copy, result = tensor.clone(), torch.empty_like(output)
        work = real["reduce_scatter_tensor"](result, copy, *args, async_op=True, **kwargs)
        return launch(work, [output, tensor], (output, result))

    def all_to_all_single(
        output: torch.Tensor, tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any
    ) -> Any:
        if not async_op:
            return real["all_to_all_single"](output, tensor, *args, **kwargs)
        copy, result = tensor.clone(), torch.empty_like(output)
        work = real["all_to_all_single"](result, copy, *args, async_op=True, **kwargs)
        return launch(work, [output, tensor], (output, result))

    def all_gather_into_tensor(
        output: torch.Tensor, tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any
    ) -> Any:
        if not async_op:
            return real["all_gather_into_tensor"](output, tensor, *args, **kwargs)
        copy, result = tensor.clone(), torch.empty_like(output)
        work = real["all_gather_into_tensor"](result, copy, *args, async_op=True, **kwargs)
        return launch(work, [output], (output, result))

    comm.all_to_all_single, comm.all_gather_into_tensor = all_to_all_single, all_gather_into_tensor
    comm.broadcast = in_place("broadcast")
    comm.all_reduce, comm.reduce = in_place("all_reduce"), in_place("reduce")
    comm.reduce_scatter, comm.reduce_scatter_tensor = reduce_scatter, reduce_scatter_tensor
    try:
        yield works
    finally:
        for name, function in real.items():
            setattr(comm, name, function)


@contextmanager
def jittery_transport(seconds: float, lateness: random.Random) -> Iterator[None]:
    """Inside, this rank comes late to collectives of ``deepspeed.comm``, by another time each, ``seconds`` at most.

    Give each rank numbers of its own: what is wrong only when one rank is far ahead of another comes to light.
    """
    real = {name: getattr(comm, name) for name in _NAMES}

    def late(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if lateness.random() < 0.5:
                time.sleep(seconds * lateness.random())
            return real[name](*args, **kwargs)

        return call

    for name in real:
        setattr(comm, name, late(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(comm, name, function)
