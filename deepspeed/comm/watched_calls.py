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

# Started without waiting, and what arrives when is between two ranks; or watched by itself.
_LEFT_ALONE = ("isend", "irecv", "batch_isend_irecv", "monitored_barrier")
_POINT_TO_POINT_WAITS = ("send", "recv")
# All ranks give tensors of one size; elsewhere sizes may differ by rank.
_SAME_SIZE = ("all_reduce", "inference_all_reduce", "broadcast", "reduce", "reduce_scatter_tensor")


# Names under which functions take the tensors that tell the size.
_TENSORS = ("tensor", "tensors", "output", "output_tensor_list", "output_tensors")


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


def watch_calls(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func``, a collective of the façade, with its calls noted and its waits watched."""
    name = func.__name__
    parameters = list(inspect.signature(func).parameters)
    if name in _LEFT_ALONE or "group" not in parameters:
        return func
    group_at = parameters.index("group")
    async_at = parameters.index("async_op") if "async_op" in parameters else None
    tensor_name = next((parameter for parameter in _TENSORS if parameter in parameters), None)
    tensor_at = None if tensor_name is None else parameters.index(tensor_name)
    code = crc32(name.encode())
    same_size = name in _SAME_SIZE
    ordered = name not in _POINT_TO_POINT_WAITS
    lane_name = "" if ordered else "point to point"

    # Runs with every collective, so it is written for speed: 3 to 5 microseconds beside the collective itself.
    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not watchdog.running() or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        given = len(args)
        group = args[group_at] if given > group_at else kwargs.get("group")
        if group is torch_dist.GroupMember.NON_GROUP_MEMBER:
            return func(*args, **kwargs)
        lane = watchdog.lane(group, lane_name)
        tensor, size, what = None, 0, (name,)
        if tensor_at is not None:
            tensor = _first(args[tensor_at] if given > tensor_at else kwargs.get(tensor_name))
            if tensor is not None:
                size = tensor.numel()
                what = (name, "of", size, tensor.dtype, "elements")
        if ordered:
            lane.note("", what, code ^ size if same_size else code)
        on_host = torch_dist.get_backend(group) == "gloo" if tensor is None else tensor.is_cpu
        if async_at is not None:
            if args[async_at] if given > async_at else kwargs.get("async_op"):
                work = func(*args, **kwargs)
                return WatchedWork(work, what, lane) if on_host and work is not None else work
            if on_host:
                if given > async_at:
                    args = (*args[:async_at], True, *args[async_at + 1 :])
                else:
                    kwargs["async_op"] = True
                watchdog.wait(func(*args, **kwargs), what, lane)
                return None
        with watchdog.waiting(what, lane):
            return func(*args, **kwargs)

    return call


def _first(tensors: torch.Tensor | Sequence[torch.Tensor] | None) -> torch.Tensor | None:
    if type(tensors) not in (list, tuple):  # isinstance of a tensor takes a microsecond
        return tensors
    return tensors[0] if tensors else None
