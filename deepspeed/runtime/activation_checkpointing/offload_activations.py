# SPDX-License-Identifier: Apache-2.0
"""Chosen saved tensors wait in host memory: the hidden states between checkpointed layers, for models whose layers
checkpoint themselves.

::

    offload = get_checkpoint_hidden_states_offloading_ctx_manager()
    with offload:
        loss = model(batch)
    loss.backward()

What is moved is what was marked: arguments of this package's checkpoints that require a gradient, hidden states of
transformers' checkpointed layers, and what ``mark()`` was called with. Everything else is saved as always.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.activation_storage import (
    ContiguousBuffers,
    StorageSettings,
    StoredActivation,
    is_activation,
    store,
)
from deepspeed.runtime.gradients import autograd_internals


@dataclass
class CheckpointActivationOffloadStats:
    """Counts since the last ``reset()``.

    Args:
        saved_tensors_seen: tensors that autograd saved inside the context.
        marked_tensors: calls of ``mark()``.
        offloaded_tensors: marked ones that were copied to the host.
        restored_tensors: times that one was copied back.
        skipped_marked_tensors: marked ones that are too small, or not on the device.
        kept_last_tensors: times that a marked one was needed while it was still on the device.
        offloaded_bytes, restored_bytes: sizes of the copies.
    """

    saved_tensors_seen: int = 0
    marked_tensors: int = 0
    offloaded_tensors: int = 0
    restored_tensors: int = 0
    skipped_marked_tensors: int = 0
    kept_last_tensors: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0


class _Waiting:
    """A marked tensor between forward and backward: on the device until it is on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = autograd_internals.version_of(tensor)
        self.stored: StoredActivation | None = None
        self.copied: Any = None  # event after the copy to the host

    def is_unchanged(self) -> bool:
        return autograd_internals.version_of(self.tensor) == self.version


class _ActivationOffloadEngine:
    """Moves marked tensors to the host as they are saved, all but the last ones, and back as they are needed."""

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_bytes: int = 1024,
        max_fwd_stash_count: int = 2,
        max_cpu_buffer_pool_count: int = 64,
        keep_last_count: int = 1,
    ) -> None:
        for name, value in (
            ("min_offload_bytes", min_offload_bytes),
            ("max_fwd_stash_count", max_fwd_stash_count),
            ("max_cpu_buffer_pool_count", max_cpu_buffer_pool_count),
            ("keep_last_count", keep_last_count),
        ):
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        self.min_offload_bytes = min_offload_bytes
        self.max_fwd_stash_count = max_fwd_stash_count
        self.keep_last_count = keep_last_count
        self.stats = CheckpointActivationOffloadStats()
        self._settings = StorageSettings(on_host=True, pinned=use_pin_memory)
        self._use_streams = use_streams and not get_accelerator().is_synchronized_device()
        self._stream: Any = None
        self._marks: dict[tuple[Any, ...], weakref.ref[Tensor]] = {}
        self._newest: deque[weakref.ref[_Waiting]] = deque()
        self._stash: deque[tuple[Any, Tensor]] = deque()  # sources of copies that may still run

    def mark(self, tensor: Tensor) -> None:
        """Move ``tensor`` to the host if autograd saves it."""
        self.stats.marked_tensors += 1
        key = _identity(tensor)
        # Reports of a tensor's death must not remove the mark of the one that got its memory.
        self._marks[key] = weakref.ref(tensor, lambda dead: self._marks.get(key) is dead and self._marks.pop(key))

    def reset(self) -> None:
        """Forget marks and counts. What waits on the host is still restored."""
        self.stats = CheckpointActivationOffloadStats()
        self._marks = {}
        self._newest.clear()
        self._release_sources(0)

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in place of ``tensor``."""
        self.stats.saved_tensors_seen += 1
        mark = self._marks.get(_identity(tensor))
        if mark is None or mark() is None:
            return tensor
        if tensor.nbytes < self.min_offload_bytes or not self._may_move(tensor):
            self.stats.skipped_marked_tensors += 1
            return tensor
        waiting = _Waiting(tensor)
        self._newest.append(weakref.ref(waiting))
        while len(self._newest) > self.keep_last_count:
            oldest = self._newest.popleft()()
            if oldest is not None:
                self._offload(oldest)
        return waiting

    def unpack(self, kept: Any) -> Tensor:
        """The tensor again, on its device.

        Raises:
            RuntimeError: it was changed in place after it was saved.
        """
        if not isinstance(kept, _Waiting):
            return kept
        if kept.stored is None:
            if not kept.is_unchanged():
                raise RuntimeError(
                    f"a hidden state of shape {tuple(kept.tensor.shape)} was modified in place after it was saved for"
                    " backward; use an operation that makes a new tensor"
                )
            self.stats.kept_last_tensors += 1
            return kept.tensor
        if kept.copied is not None:
            get_accelerator().current_stream().wait_event(kept.copied)
        tensor = kept.stored.restore()
        self.stats.restored_tensors += 1
        self.stats.restored_bytes += tensor.nbytes
        return tensor

    def _may_move(self, tensor: Tensor) -> bool:
        accelerator = get_accelerator()
        moves = tensor.device.type != "cpu" and accelerator.on_accelerator(tensor)
        return moves and is_activation(tensor, self._settings)

    def _offload(self, waiting: _Waiting) -> None:
        if not waiting.is_unchanged():
            return  # unpack() says so
        tensor = waiting.tensor
        accelerator = get_accelerator()
        if self._use_streams:
            self._stream = self._stream or accelerator.Stream()
            self._stream.wait_stream(accelerator.current_stream())
            with accelerator.stream(self._stream):
                waiting.stored = store(tensor, 0, self._settings, ContiguousBuffers())
                waiting.copied = accelerator.Event()
                waiting.copied.record(self._stream)
            self._stash.append((waiting.copied, tensor))
            self._release_sources(self.max_fwd_stash_count)
        else:
            waiting.stored = store(tensor, 0, self._settings, ContiguousBuffers())
        waiting.tensor = None
        self.stats.offloaded_tensors += 1
        self.stats.offloaded_bytes += tensor.nbytes

    def _release_sources(self, keep: int) -> None:
        """Free device tensors whose copy runs on the side stream, all but ``keep``; later work waits for the copy."""
        while len(self._stash) > keep:
            copied, _ = self._stash.popleft()
            get_accelerator().current_stream().wait_event(copied)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Autograd saves an alias: the same memory, seen the same way."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class CheckpointHiddenStatesOffload(_ActivationOffloadEngine, torch.autograd.graph.saved_tensors_hooks):
    """Context for a forward, in which marked tensors that autograd saves go to host memory.

    Args:
        use_pin_memory: page-locked host memory, from which copies run beside computation.
        use_streams: copy to the host on a stream of its own.
        min_offload_bytes: smaller tensors stay.
        max_fwd_stash_count: device tensors that may be kept for copies under way; more wait for the oldest.
        max_cpu_buffer_pool_count: accepted; torch's own allocator keeps page-locked memory for reuse.
        keep_last_count: marked tensors that stay on the device at the end of the forward, as backward needs them first.

    Raises:
        ValueError: a negative number.
    """

    _active: list[CheckpointHiddenStatesOffload] = []  # innermost last

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_bytes: int = 1024,
        max_fwd_stash_count: int = 2,
        max_cpu_buffer_pool_count: int = 64,
        keep_last_count: int = 1,
    ) -> None:
        _ActivationOffloadEngine.__init__(
            self,
            use_pin_memory,
            use_streams,
            min_offload_bytes,
            max_fwd_stash_count,
            max_cpu_buffer_pool_count,
            keep_last_count,
        )
        torch.autograd.graph.saved_tensors_hooks.__init__(self, self.pack, self.unpack)

    def __enter__(self) -> CheckpointHiddenStatesOffload:
        torch.autograd.graph.saved_tensors_hooks.__enter__(self)
        CheckpointHiddenStatesOffload._active.append(self)
        return self

    def __exit__(self, *args: Any, **kwargs: Any) -> None:
        CheckpointHiddenStatesOffload._active.remove(self)
        torch.autograd.graph.saved_tensors_hooks.__exit__(self, *args, **kwargs)
        self._release_sources(0)


def mark_hidden_states(values: Iterable[Any]) -> None:
    """Mark tensors that require a gradient in the innermost offload context, if there is one."""
    if CheckpointHiddenStatesOffload._active:
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                CheckpointHiddenStatesOffload._active[-1].mark(value)


def get_checkpoint_hidden_states_offloading_ctx_manager(
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_bytes: int = 1024,
    max_fwd_stash_count: int = 2,
    max_cpu_buffer_pool_count: int = 64,
    keep_last_count: int = 1,
) -> CheckpointHiddenStatesOffload:
    """A :class:`CheckpointHiddenStatesOffload`. Where transformers is loaded, its checkpointed layers mark their hidden
    states from now on."""
    if "transformers" in sys.modules:
        patch_gradient_checkpointing_layer_marker()
    return CheckpointHiddenStatesOffload(
        use_pin_memory,
        use_streams,
        min_offload_bytes,
        max_fwd_stash_count,
        max_cpu_buffer_pool_count,
        keep_last_count,
    )


def patch_gradient_checkpointing_layer_marker() -> None:
    """Make transformers' checkpointed layers mark their hidden states. Calling it again changes nothing.

    Raises:
        ImportError: there is no transformers, or one without ``GradientCheckpointingLayer``.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    call = GradientCheckpointingLayer.__call__
    if getattr(call, "marks_hidden_states", False):
        return

    @functools.wraps(call)
    def marking_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training:
            mark_hidden_states(args[:1] or [kwargs.get("hidden_states")])
        return call(self, *args, **kwargs)

    marking_call.marks_hidden_states = True  # type: ignore[attr-defined]
    GradientCheckpointingLayer.__call__ = marking_call
