# SPDX-License-Identifier: Apache-2.0
"""Device streams of gradient reduction: which work waits for which.

On CUDA, collectives and the arithmetic on their results run on a side stream, and the host never waits. On a device
without streams the host itself waits for the collective. The reducer is written once, against this small surface.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from deepspeed.comm import watchdog
from deepspeed.runtime.gradients.autograd_internals import current_stream_handle


class HostOrder:
    """No streams: operations happen in program order, a collective is awaited by the host."""

    asynchronous = False

    def here(self) -> list[int]:
        """The current stream, by its handle, as ``note_writer`` notes it: what is noted so alone needs no waiting."""
        return []

    def note_writer(self, streams: list[int]) -> None:
        """Remember the stream on which a gradient was written: in ``streams``, by its handle."""

    def wait_for_writers(self, streams: list[int], gradient: torch.Tensor) -> None:
        """Let the current stream wait for everything that wrote ``gradient``."""

    def side(self) -> AbstractContextManager:
        """Context in which collectives are launched and their results used."""
        return nullcontext()

    def fork(self) -> None:
        """Let the side stream wait for the current stream."""

    def mark(self) -> object | None:
        """An event after everything now on the side stream; None when program order says it all."""
        return None

    def wait_mark(self, mark: object | None) -> None:
        """Let the current stream wait for a mark."""

    def join(self) -> None:
        """Let the current stream wait for the side stream."""

    def hold_for_current(self, tensors: Iterable[torch.Tensor]) -> None:
        """Before memory is let go of that may be another stream's, since hooks run on those of their parameters: nobody
        gets it before the current stream is done with what it has been given so far."""

    def await_mark(self, mark: object | None) -> None:
        """Let the host wait for a mark."""

    def await_all(self) -> None:
        """Let the host wait for the side stream: what it copied to the host may be read then."""

    def watch(self, name: str) -> None:
        """Let the watchdog see that the side stream goes on."""


class SideStream(HostOrder):
    """CUDA: one side stream per device for collectives and their results."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._index = self.stream.device_index
        self._by_handle: dict[int, torch.cuda.Stream] = {}  # those that gradients were written on

    def here(self) -> list[int]:
        return [current_stream_handle(self._index)]

    def note_writer(self, streams: list[int]) -> None:
        # Once per parameter and backward: making the stream's Python object would cost more than all else there.
        current = current_stream_handle(self._index)
        if current not in streams:
            streams.append(current)
            if current not in self._by_handle:
                self._by_handle[current] = torch.cuda.current_stream(self.device)

    def wait_for_writers(self, streams: list[int], gradient: torch.Tensor) -> None:
        taker = torch.cuda.current_stream(self.device)
        for writer in streams:
            if writer != taker.cuda_stream:
                taker.wait_stream(self._by_handle[writer])
                gradient.record_stream(taker)

    def side(self) -> AbstractContextManager:
        return torch.cuda.stream(self.stream)

    def fork(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def mark(self) -> torch.cuda.Event:
        return self.stream.record_event()

    def wait_mark(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def join(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def hold_for_current(self, tensors: Iterable[torch.Tensor]) -> None:
        current = torch.cuda.current_stream(self.device)
        for tensor in tensors:
            tensor.record_stream(current)

    def await_mark(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            mark.synchronize()

    def await_all(self) -> None:
        self.stream.synchronize()

    def watch(self, name: str) -> None:
        watchdog.watch_stream(self.stream, name)


def order_for(device: torch.device) -> HostOrder:
    """The stream discipline of a device."""
    return SideStream(device) if device.type == "cuda" else HostOrder()
