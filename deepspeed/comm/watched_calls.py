# SPDX-License-Identifier: Apache-2.0
"""The façade's collectives under the watchdog: each call is noted, and a wait of the host can be given up."""

import functools
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as torch_dist

from deepspeed.comm import watchdog
from deepspeed.comm.operation_log import Lane, What

# Started without waiting; what arrives when is between two ranks.
_POINT_TO_POINT_STARTS = ("isend", "irecv", "batch_isend_irecv")
_POINT_TO_POINT_WAITS = ("send", "recv")
# All ranks give tensors of one size; elsewhere sizes may differ by rank.
_SAME_SIZE = ("all_reduce", "inference_all_reduce", "broadcast", "reduce", "reduce_scatter_tensor")


class WatchedWork:
    """Work handle whose ``wait()`` stops with a report when other ranks do not come (see :func:`watchdog.wait`)."""

    def __init__(self, work: Any, what: What, lane: Lane) -> None:
        self._work = work
        self._what = what
        self._lane = lane

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:  # a caller who looks after the time
            return self._work.wait(timeout)
        watchdog.wait(self._work, self._what, self._lane)
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Arguments:
    """Where a function's arguments of interest are."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self._positions = {name: position for position, name in enumerate(inspect.signature(func).parameters)}
        tensors = ("tensor", "tensors", "output", "output_tensor_list", "output_tensors")
        self.tensor = next((name for name in tensors if name in self._positions), None)
        self.has_async = "async_op" in self._positions

    def get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position = self._positions[name]
        return args[position] if position < len(args) else kwargs.get(name)

    def started(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with ``async_op`` true."""
        position = self._positions["async_op"]
        if position < len(args):
            return (*args[:position], True, *args[position + 1 :]), kwargs
        return args, {**kwargs, "async_op": True}


def watch_calls(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func``, a collective of the façade, with its calls noted and its waits watched."""
    name = func.__name__
    if name in _POINT_TO_POINT_STARTS:
        return func
    where = _Arguments(func)
    code = crc32(name.encode())
    ordered = name not in _POINT_TO_POINT_WAITS
    lane_name = "" if ordered else "point to point"
    same_size = name in _SAME_SIZE

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not watchdog.running() or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        group = where.get("group", args, kwargs)
        if group is torch_dist.GroupMember.NON_GROUP_MEMBER:
            return func(*args, **kwargs)
        lane = watchdog.lane(group, lane_name)
        tensor = _first(where.get(where.tensor, args, kwargs)) if where.tensor else None
        numel = 0 if tensor is None else tensor.numel()
        what = (name,) if tensor is None else (name, "of", numel, tensor.dtype, "elements")
        if ordered:
            lane.note("the collective", what, code ^ numel if same_size else code)
        on_host = _host_waits(tensor, group)
        if where.has_async and where.get("async_op", args, kwargs):
            work = func(*args, **kwargs)
            return WatchedWork(work, what, lane) if on_host and work is not None else work
        if where.has_async and on_host:
            args, kwargs = where.started(args, kwargs)
            watchdog.wait(func(*args, **kwargs), what, lane)
            return None
        with watchdog.waiting(what, lane):
            return func(*args, **kwargs)

    return call


def _first(tensors: torch.Tensor | Sequence[torch.Tensor] | None) -> torch.Tensor | None:
    if tensors is None or isinstance(tensors, torch.Tensor):
        return tensors
    return tensors[0] if len(tensors) else None


def _host_waits(tensor: torch.Tensor | None, group: Any) -> bool:
    """Whether waiting for the collective blocks this thread: on CPU it does."""
    if tensor is not None:
        return tensor.device.type == "cpu"
    return torch_dist.get_backend(group) == "gloo"
