# SPDX-License-Identifier: Apache-2.0
"""Lists of tensors and of numbers: norms, clipping, alignment, cutting into parts. Shown by ``runtime.utils``."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.runtime.gradients.arithmetic import sum_of_squares


def norm_of(tensors: Sequence[torch.Tensor], norm_type: float, mpu: Any = None) -> torch.Tensor:
    """Norm of all elements of ``tensors`` together: 0-dim float64 on the device of the first.

    Args:
        mpu: also over the ranks of its model-parallel group, each of which has other elements.
    """
    device = tensors[0].device
    if norm_type == 2:
        total = torch.stack([sum_of_squares(t.detach().reshape(-1)).to(device) for t in tensors]).sum().sqrt()
    else:
        wide = [torch.promote_types(t.dtype, torch.float32) for t in tensors]
        norms = [torch.linalg.vector_norm(t.detach(), norm_type, dtype=d).double() for t, d in zip(tensors, wide)]
        total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
    if mpu is None:
        return total
    infinite = norm_type == math.inf
    powered = total if infinite else total**norm_type
    dist.all_reduce(
        powered, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=mpu.get_model_parallel_group()
    )
    return powered if infinite else powered ** (1.0 / norm_type)


@torch.no_grad()
def scale_to_norm(tensors: Iterable[torch.Tensor], total: torch.Tensor, max_norm: float, eps: float) -> None:
    """Multiply ``tensors`` in place so that a norm of ``total`` becomes at most ``max_norm``."""
    factor = (max_norm / (total + eps)).clamp(max=1.0)
    for tensor in tensors:
        # as 0-dim tensor it does not widen the product, and is not rounded to the tensor's dtype before
        tensor.mul_(factor.to(tensor.device))


def get_weight_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """Norm of the values of ``parameters`` (a tensor or several) together."""
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return float(norm_of(tensors, norm_type, mpu)) if tensors else 0.0


def get_global_norm_of_tensors(
    input_tensors: Sequence[torch.Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> torch.Tensor:
    """Norm of all elements of ``input_tensors`` together: 0-dim float32.

    Raises:
        NotImplementedError: ``moe_ep_group`` is given (mixture of experts).
    """
    if moe_ep_group is not None:
        raise NotImplementedError("get_global_norm_of_tensors(moe_ep_group=...): mixture of experts is not built")
    return norm_of(input_tensors, norm_type, mpu).float() if input_tensors else torch.zeros(())


def clip_tensors_by_global_norm(
    input_tensors: Sequence[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: float | torch.Tensor | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> float | torch.Tensor:
    """Scale ``input_tensors`` in place so that their L2 norm together is at most ``max_norm``.

    Args:
        global_norm: their norm, if it is known already.

    Returns:
        the norm before.
    """
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    scale_to_norm(input_tensors, torch.as_tensor(norm, dtype=torch.float64), max_norm, eps)
    return norm


def align_dense_tensors(tensor_list: Sequence[torch.Tensor], alignment: int) -> list[torch.Tensor]:
    """``tensor_list``, and at its end zeros that make the number of all elements a multiple of ``alignment``, where it
    is none."""
    missing = -sum(tensor.numel() for tensor in tensor_list) % alignment
    if missing == 0:
        return list(tensor_list)
    return [*tensor_list, tensor_list[0].new_zeros(missing)]


def get_tensor_bytes(item: Any) -> int:
    """Bytes of the elements of the tensors in nested lists, tuples and dicts."""
    if isinstance(item, torch.Tensor):
        return item.numel() * item.element_size()
    inside = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
    return sum(get_tensor_bytes(value) for value in inside)


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """Whether two nested structures of lists and dicts are of the same form and hold equal tensors and values."""
    if isinstance(inputs1, torch.Tensor) and isinstance(inputs2, torch.Tensor):
        return inputs1.shape == inputs2.shape and torch.equal(inputs1, inputs2.to(inputs1.device))
    if type(inputs1) is not type(inputs2):
        return False
    if isinstance(inputs1, dict):
        return inputs1.keys() == inputs2.keys() and all(
            compare_tensors_in_structures(value, inputs2[key]) for key, value in inputs1.items()
        )
    if isinstance(inputs1, (list, tuple)):
        pairs = zip(inputs1, inputs2)
        return len(inputs1) == len(inputs2) and all(compare_tensors_in_structures(a, b) for a, b in pairs)
    return bool(inputs1 == inputs2)


def filter_empty_parameters(params: Iterable[Any]) -> list[Any]:
    """``params``, or the groups of an optimizer in it, without tensors that have no elements."""
    kept = []
    for item in params:
        if isinstance(item, dict):
            kept.append({**item, "params": filter_empty_parameters(item["params"])})
        elif getattr(item, "ds_numel", item.numel()) > 0:  # the data of a partitioned parameter is empty
            kept.append(item)
    return kept


def prefix_sum_inc(weights: Iterable[float]) -> list[float]:
    """Sum of the first one, two, three ... of ``weights``."""
    return list(itertools.accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of ``num_parts`` consecutive parts of ``num_items`` items, of sizes that differ by one at most: part i is
    from ``bounds[i]`` up to, and without, ``bounds[i + 1]``."""
    smallest, larger = divmod(num_items, num_parts)
    return [part * smallest + min(part, larger) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Bounds of ``num_parts`` consecutive parts of ``weights`` whose heaviest part is as light as it can be."""
    sums = [0, *prefix_sum_inc(weights)]
    if len(weights) <= num_parts:
        return [min(part, len(weights)) for part in range(num_parts + 1)]
    bounds = _cut_greedily(sums, num_parts, _least_heaviest(sums, num_parts))
    assert bounds is not None
    return bounds


def _least_heaviest(sums: Sequence[float], num_parts: int) -> float:
    """The least weight of a heaviest part with which the parts suffice: a sum of consecutive weights, found by
    bisection."""
    weights = sorted({after - before for before, after in itertools.combinations(sums, 2)})
    low, high = 0, len(weights) - 1
    while low < high:
        middle = (low + high) // 2
        if _cut_greedily(sums, num_parts, weights[middle]) is None:
            low = middle + 1
        else:
            high = middle
    return weights[low]


def _cut_greedily(sums: Sequence[float], num_parts: int, heaviest: float) -> list[int] | None:
    """Bounds of parts no heavier than ``heaviest``, each as long as it can be and none empty; None if there are too
    few parts."""
    items = len(sums) - 1
    bounds = [0]
    for part in range(num_parts):
        end = bounds[-1]
        while end < items - (num_parts - part - 1) and sums[end + 1] - sums[bounds[-1]] <= heaviest:
            end += 1
        bounds.append(end)
    return bounds if bounds[-1] == items and all(a < b for a, b in itertools.pairwise(bounds)) else None


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """The one value that all ``items`` are.

    Raises:
        RuntimeError: there are none, or several different ones.
    """
    different = set(items)
    if len(different) != 1:
        raise RuntimeError(f"expected one value, got {sorted(map(str, different))}")
    return different.pop()


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """The text of a call: ``call_to_str("f", 1, b=2)`` is ``f(1, b=2)``."""
    shown = [*(repr(value) for value in args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{base}({', '.join(shown)})"
