# SPDX-License-Identifier: Apache-2.0
"""Numeric and bookkeeping helpers of the runtime."""

import dataclasses
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.gradients import autograd_internals as autograd
from deepspeed.runtime.tensor_lists import align_dense_tensors as align_dense_tensors
from deepspeed.runtime.tensor_lists import call_to_str as call_to_str
from deepspeed.runtime.tensor_lists import clip_tensors_by_global_norm as clip_tensors_by_global_norm
from deepspeed.runtime.tensor_lists import compare_tensors_in_structures as compare_tensors_in_structures
from deepspeed.runtime.tensor_lists import filter_empty_parameters as filter_empty_parameters
from deepspeed.runtime.tensor_lists import get_global_norm_of_tensors as get_global_norm_of_tensors
from deepspeed.runtime.tensor_lists import get_only_unique_item as get_only_unique_item
from deepspeed.runtime.tensor_lists import get_tensor_bytes as get_tensor_bytes
from deepspeed.runtime.tensor_lists import get_weight_norm as get_weight_norm
from deepspeed.runtime.tensor_lists import norm_of, scale_to_norm
from deepspeed.runtime.tensor_lists import partition_balanced as partition_balanced
from deepspeed.runtime.tensor_lists import partition_uniform as partition_uniform
from deepspeed.runtime.tensor_lists import prefix_sum_inc as prefix_sum_inc
from deepspeed.utils.logging import print_dist


def check_internal_apis_for_count_used_parameters() -> bool:
    """Whether this torch can tell which AccumulateGrad nodes the current graph task will run."""
    return autograd.can_count_nodes_to_run()


def count_used_parameters_in_backward(parameters: Sequence[torch.nn.Parameter]) -> int:
    """How many AccumulateGrad firings the current graph task will make among ``parameters``: torch's own answer.

    A parameter counts once however often the graph uses it. Graph tasks nested in this one, such as those of reentrant
    checkpoints, make firings of their own that are not counted here. Call it from inside a backward (a hook).

    Raises:
        RuntimeError: not inside a backward, or torch lacks the internal calls
            (``check_internal_apis_for_count_used_parameters``).
    """
    if not autograd.can_count_nodes_to_run():
        raise RuntimeError("this version of torch cannot tell which nodes a backward will run")
    if autograd.current_graph_task_id() == autograd.NO_GRAPH_TASK:
        raise RuntimeError("count_used_parameters_in_backward must be called during a backward, from a hook")
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return sum(autograd.will_run_in_current_task(node) for node in autograd.accumulate_grad_nodes(trainable))


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def move_to_device(item: Any, device: torch.device, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Copy of a nested structure (list, tuple, dict) with its tensors on ``device``.

    Args:
        criterion_func: move only tensors for which it is true.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device) if criterion_func is None or criterion_func(tensor) else tensor

    return map_tensors(item, move)


def copy_to_device(item: Any, device: torch.device, criterion_func: Callable[[Any], bool]) -> Any:
    """As ``move_to_device``; a tensor that fulfils ``criterion_func`` is copied even where it is on ``device``."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, copy=True) if criterion_func(tensor) else tensor

    return map_tensors(item, copy)


def map_tensors(item: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy of a nested structure (tuple, named tuple, list, dict) with ``function`` applied to its tensors."""
    if isinstance(item, torch.Tensor):
        return function(item)
    if isinstance(item, dict):
        return {key: map_tensors(value, function) for key, value in item.items()}
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(map_tensors(value, function) for value in item))
    if isinstance(item, (list, tuple)):
        return type(item)(map_tensors(value, function) for value in item)
    return item


def tensors_in(item: Any, dataclass_fields: bool = False) -> Iterator[torch.Tensor]:
    """The tensors in a nested structure of tuples, lists, sets and mappings, and of dataclasses where asked for."""
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from tensors_in(value, dataclass_fields)
    elif isinstance(item, (tuple, list, set)):
        for value in item:
            yield from tensors_in(value, dataclass_fields)
    elif dataclass_fields and dataclasses.is_dataclass(item) and not isinstance(item, type):
        for field in dataclasses.fields(item):
            yield from tensors_in(getattr(item, field.name), dataclass_fields)


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """Scale the ``.grad`` of ``parameters`` so that their total norm is at most ``max_norm``.

    With ``mpu`` the norm is taken over its model-parallel group.

    Returns:
        the norm before: 0-dim float32.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    total = norm_of(gradients, norm_type, mpu)
    scale_to_norm(gradients, total, max_norm, 1e-6)
    return total.float()


def get_global_norm(norm_list: list[float]) -> float:
    """L2 norm of norms."""
    return float(sum(norm**2 for norm in norm_list) ** 0.5)


def see_memory_usage(message: str, force: bool = False, ranks: Sequence[int] = (0,)) -> None:
    """Print the memory of this rank's device and host after ``message``, and start the device's peak afresh.

    "Allocated" is what tensors take, "reserved" what torch's allocator holds for them; "peak" is the largest allocation
    since the last call. On CPU all three are the process.

    Args:
        force: False does nothing, so that calls can stay in the code.
        ranks: those that print; the others do nothing.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not force or rank not in ranks:
        return
    device, host = get_accelerator(), CPU_Accelerator()
    gib = 2.0**30
    print_dist(
        f"{message}: device allocated {device.memory_allocated() / gib:.2f} GiB, peak"
        f" {device.max_memory_allocated() / gib:.2f} GiB, reserved {device.memory_reserved() / gib:.2f} GiB; process"
        f" {host.memory_allocated() / gib:.2f} GiB, host free {host.available_memory() / gib:.2f} of"
        f" {host.total_memory() / gib:.2f} GiB",
        ranks=[rank],
    )
    device.reset_peak_memory_stats()


class DummyOptim:
    """An optimizer that updates nothing, for engines whose parameters are not trained.

    Args:
        params: parameters of its single group.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        self.param_groups = [{"params": list(params)}]


def is_model_parallel_parameter(p: torch.nn.Parameter) -> bool:
    """Whether a tensor-parallel library has marked the parameter as one that every rank has its own part of."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def empty_cache() -> None:
    """Give memory that torch's allocator holds for later back to the device."""
    get_accelerator().empty_cache()


def ensure_directory_exists(filename: str) -> None:
    """Make the folder that ``filename`` lies in, and those above it."""
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def noop_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func`` itself."""
    return func


class noop_context:
    """A context that does nothing."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        return None
