# SPDX-License-Identifier: Apache-2.0
"""What the launcher's environment says about this process, and what a collective's arguments say about its size."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

# Names under which the façade's functions take the tensors that this rank contributes, first match wins.
_INPUT_NAMES = ("tensor", "input_list", "input_tensor_list", "input_tensors", "input_tensor", "tensors")


def _first_integer(names: tuple[str, ...], default: int) -> int:
    for name in names:
        text = os.environ.get(name)
        if text is not None:
            try:
                return int(text)
            except ValueError:
                raise ValueError(f"environment variable {name}={text!r} must be an integer") from None
    return default


def get_local_rank_from_launcher() -> int:
    """Rank within the node: ``LOCAL_RANK``, else ``OMPI_COMM_WORLD_LOCAL_RANK``, else 0."""
    return _first_integer(("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), 0)


def get_world_rank_from_launcher() -> int:
    """Global rank: ``RANK``, else ``OMPI_COMM_WORLD_RANK``, else 0."""
    return _first_integer(("RANK", "OMPI_COMM_WORLD_RANK"), 0)


def get_world_size_from_launcher() -> int:
    """Number of ranks: ``WORLD_SIZE``, else ``OMPI_COMM_WORLD_SIZE``, else 1."""
    return _first_integer(("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"), 1)


@functools.cache
def get_default_args(func: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of ``func`` that have defaults, with these (one shared dict per function: do not change it)."""
    parameters = inspect.signature(func).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


@functools.cache
def _input_parameter(func: Callable[..., Any]) -> tuple[int, str] | None:
    names = list(inspect.signature(func).parameters)
    for name in _INPUT_NAMES:
        if name in names:
            return names.index(name), name
    return None


def get_tensor_position(func: Callable[..., Any]) -> int:
    """Position of the parameter that holds this rank's contribution, or -1 where there is none."""
    found = _input_parameter(func)
    return -1 if found is None else found[0]


def get_tensor_kwarg(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """This rank's contribution from ``kwargs``, or None where it is not there."""
    found = _input_parameter(func)
    return None if found is None else kwargs.get(found[1])


def get_msg_size_from_args(func: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Bytes that this rank puts into the call ``func(*args, **kwargs)``; 0 for calls without tensors."""
    position = get_tensor_position(func)
    if position < 0:
        return 0
    value = args[position] if position < len(args) else get_tensor_kwarg(func, kwargs)
    if isinstance(value, torch.Tensor):
        return value.element_size() * value.numel()
    if isinstance(value, (list, tuple)):
        return sum(t.element_size() * t.numel() for t in value if isinstance(t, torch.Tensor))
    return 0


def get_debug_log_name(func_args: Mapping[str, Any], debug: str | None) -> str:
    """Log name of the call with its caller's name added."""
    return f"{func_args['log_name']} | [Caller Func: {debug}]"
