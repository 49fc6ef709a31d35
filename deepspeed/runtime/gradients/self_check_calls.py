# SPDX-License-Identifier: Apache-2.0
"""Which call of backward is running: for the gradient check, seen independently of the engine's own bookkeeping.

While somebody watches, ``torch.autograd.backward``, which every ``tensor.backward()`` goes through, is replaced by a
function that calls it and notes that it began, and whether it returned or raised. Calls inside of it (reentrant
checkpoints) belong to it. ``torch.autograd.grad`` is not watched: it accumulates nothing.

What a backward's contributions have to be divided by comes from here too: the factor by which the engine really
multiplied the loss is read off the gradient that arrives at the caller's loss.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

PLAIN = "loss.backward"
SCALED = "engine.scale(loss).backward"
UNSEEN = "a backward that torch.autograd.backward did not start"


class BackwardCall:
    """One backward as its caller sees it.

    Args:
        route: by which call.
        announced: the engine announced it, so its loss is the engine's to scale.
        factor: by what the engine says that it multiplied the loss.
        scale_wrt_gas: False where the caller has divided by the accumulation count already.
    """

    __slots__ = ("route", "announced", "factor", "scale_wrt_gas")

    def __init__(self, route: str, announced: bool = False, factor: float = 1.0, scale_wrt_gas: bool = True) -> None:
        self.route = route if scale_wrt_gas else f"{route}(scale_wrt_gas=False)"
        self.announced = announced
        self.factor = factor
        self.scale_wrt_gas = scale_wrt_gas

    def note_factor(self, gradient: torch.Tensor) -> None:
        """Hook of the caller's loss: its gradient is the factor that it was multiplied by."""
        measured = gradient.item()
        if measured and math.isfinite(measured):
            self.factor = measured


class Listener(Protocol):
    """Who is told how a call ended."""

    def on_call_end(self, call: BackwardCall, completed: bool) -> None: ...


class BackwardCalls:
    """The calls of backward of this process. One instance, ``CALLS``."""

    def __init__(self) -> None:
        self.current: BackwardCall | None = None
        self._next: BackwardCall | None = None  # announced, about to begin
        self._listeners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._real: Callable[..., Any] | None = None
        # told the roots of each backward that begins
        self.before_call: dict[object, Callable[[Sequence[torch.Tensor]], None]] = {}

    # ------------------------------------------------------------------ watching

    def watch(self, listener: Listener) -> None:
        """Tell ``listener`` of each call that ends, until ``ignore``."""
        self._listeners.add(listener)
        if self._real is None:
            self._real = torch.autograd.backward
            torch.autograd.backward = self._observed

    def ignore(self, listener: Listener) -> None:
        """Stop telling ``listener``; without any, torch's own function is back."""
        self._listeners.discard(listener)
        if not self._listeners and self._real is not None and torch.autograd.backward == self._observed:
            torch.autograd.backward = self._real
            self._real = None

    def _observed(self, *args: Any, **kwargs: Any) -> Any:
        """In place of ``torch.autograd.backward``."""
        if self.current is not None:
            return self._real(*args, **kwargs)
        call, self._next = self._next or BackwardCall(PLAIN), None
        for follow in self.before_call.values():
            follow(_roots(*args, **kwargs))
        self.current = call
        completed = False
        try:
            result = self._real(*args, **kwargs)
            completed = True
        finally:
            self.current = None
            for listener in list(self._listeners):
                listener.on_call_end(call, completed)
        return result

    # ------------------------------------------------------------------ what the engine tells

    def announced(
        self, route: str, loss: torch.Tensor, factor: float, scale_wrt_gas: bool
    ) -> AbstractContextManager[None]:
        """Around the one backward of ``loss`` that the engine is about to run, times ``factor``."""
        if not self._listeners or self.current is not None:
            return nullcontext()
        return self._announced(loss, BackwardCall(route, True, factor, scale_wrt_gas))

    @contextmanager
    def _announced(self, loss: torch.Tensor, call: BackwardCall) -> Iterator[None]:
        self._next = call
        # The gradient of a float16 loss is float16, which a loss scale may leave.
        readable = isinstance(loss, torch.Tensor) and loss.requires_grad and loss.dtype is not torch.float16
        handle = loss.register_hook(call.note_factor) if readable else None
        try:
            yield
        finally:
            self._next = None
            if handle is not None:
                handle.remove()

    @contextmanager
    def repeating(self, call: BackwardCall) -> Iterator[None]:
        """The backward inside counts like ``call``."""
        self._next = call
        try:
            yield
        finally:
            self._next = None

    def scaled(self, factor: float) -> None:
        """The running backward is that of a loss which ``engine.scale`` multiplied by ``factor``."""
        call = self.current
        if call is not None and not call.announced and call.route == PLAIN:
            call.route, call.factor = SCALED, factor


def _roots(tensors: Any, *_: Any, **__: Any) -> Sequence[torch.Tensor]:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)


CALLS = BackwardCalls()
