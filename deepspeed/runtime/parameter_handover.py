# SPDX-License-Identifier: Apache-2.0
"""Giving a torch optimizer other parameters: master weights in place of the model's.

Some optimizers (torch's Adagrad) make their state when they are constructed, so a fresh optimizer may have state.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

STEP = "step"


def refuse_used_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """ValueError when ``optimizer`` has made steps: its state belongs to parameters that are about to be replaced."""
    for state in optimizer.state.values():
        if STEP not in state or float(state[STEP]) != 0.0:
            raise ValueError(
                "the optimizer has already made steps; its state belongs to parameters that the engine replaces by its"
                " own master weights. Pass a fresh optimizer and load the state into the engine"
            )


def replace_parameters(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[torch.Tensor]]) -> None:
    """Let each parameter group of ``optimizer`` hold the tensors of ``groups``, with their constructor-made state.

    Raises:
        ValueError: that state is not one constant per entry, so that it cannot be made anew in another shape.
    """
    for param_group, parameters in zip(optimizer.param_groups, groups):
        old = [optimizer.state[p] for p in param_group["params"] if p in optimizer.state]
        for parameter in parameters:
            if old and parameter not in optimizer.state:
                optimizer.state[parameter] = {key: _anew(key, old, parameter) for key in old[0]}
        param_group["params"] = list(parameters)
    kept = {parameter for parameters in groups for parameter in parameters}
    for parameter in [p for p in optimizer.state if p not in kept]:
        del optimizer.state[parameter]


def _anew(key: str, states: list[dict[str, Any]], parameter: torch.Tensor) -> Any:
    """The initial entry ``key``, elementwise unless it is the step count, in the shape of ``parameter``."""
    first = states[0][key]
    if not isinstance(first, torch.Tensor):
        return first
    if key == STEP:
        return first.clone()
    values = torch.cat([state[key].detach().reshape(-1) for state in states])
    if values.numel() and not bool((values == values[0]).all()):
        raise ValueError(
            f"the optimizer's initial state {key!r} differs between elements; the engine replaces the parameters by"
            " master weights of another shape and cannot carry it over"
        )
    value = values[0].item() if values.numel() else 0.0
    return torch.full_like(parameter, value, requires_grad=False)


def logical_shape(parameter: torch.Tensor) -> torch.Size:
    """Shape of the whole parameter, also while it is partitioned."""
    return getattr(parameter, "ds_shape", parameter.shape)


def refuse_shared_memory(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """ValueError when two different parameters overlap in memory: flattening would separate them in silence."""
    spans = []
    for name, parameter in parameters:
        data = parameter.data
        if data.is_contiguous():
            spans.append((str(data.device), data.data_ptr(), data.data_ptr() + data.nbytes, name))
    spans.sort()
    for (device, _, end, name), (next_device, start, _, next_name) in zip(spans, spans[1:]):
        if device == next_device and start < end:
            raise ValueError(
                f"parameters {name!r} and {next_name!r} are different Parameter objects over the same memory."
                " Partitioning would untie them. Tie the Parameter objects themselves (module_b.weight ="
                " module_a.weight)"
            )
