# SPDX-License-Identifier: Apache-2.0
"""State dicts of modules whose parameters may be partitioned, with whole weights."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.runtime.zero.sharded_parameter import ShardedParameter, shard_of

AT_ONCE = 50_000_000  # elements gathered together


@torch.no_grad()
def load_whole_weights(module: torch.nn.Module, weights: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Load a state dict of whole weights, the same on every rank; each rank keeps its shards. No communication.

    Returns:
        names that are missing in ``weights``, and names in ``weights`` that the module does not have.

    Raises:
        RuntimeError: a weight has another shape; nothing was loaded then.
    """
    partitioned = {
        name: shard
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if (shard := shard_of(parameter)) is not None
    }
    _refuse_other_shapes(partitioned, weights)
    # what is partitioned is left out here: its own data has no elements at the moment
    rest = {name: value for name, value in weights.items() if name not in partitioned}
    result = module.load_state_dict(rest, strict=False)
    for name, shard in partitioned.items():
        if name in weights:
            shard.write(weights[name].to(shard.device))
    missing = [name for name in result.missing_keys if name not in weights]
    return missing, list(result.unexpected_keys)


def _refuse_other_shapes(partitioned: Mapping[str, ShardedParameter], weights: Mapping[str, Any]) -> None:
    wrong = [
        f"{name}: {tuple(weights[name].shape)} given, {tuple(shard.shape)} wanted"
        for name, shard in partitioned.items()
        if name in weights and weights[name].shape != shard.shape
    ]
    if wrong:
        raise RuntimeError(f"weights of other shapes: {'; '.join(wrong[:5])}")


@torch.no_grad()
def whole_state_dict(
    module: torch.nn.Module, keep: bool, exclude_frozen_parameters: bool = False
) -> "OrderedDict[str, Any] | None":
    """``module.state_dict()`` with whole weights, on the CPU; gathers a few parameters at a time. Collective.

    Args:
        keep: whether this rank wants the result; others get None.
        exclude_frozen_parameters: leave parameters out that do not require grad.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    whole: dict[torch.nn.Parameter, torch.Tensor] = {}
    for batch in _batches(list(dict.fromkeys(parameters.values()))):
        with GatheredParameters(batch):
            if keep:
                whole.update((p, p.detach().to("cpu", copy=True)) for p in batch if shard_of(p) is not None)
    if not keep:
        return None
    state: OrderedDict[str, Any] = OrderedDict()
    for name, value in module.state_dict().items():
        parameter = parameters.get(name)
        if exclude_frozen_parameters and parameter is not None and not parameter.requires_grad:
            continue
        if parameter in whole:
            state[name] = whole[parameter]  # tied names share one tensor
        else:
            state[name] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    return state


def _batches(parameters: list[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    batch: list[torch.nn.Parameter] = []
    numel = 0
    for parameter in parameters:
        shard = shard_of(parameter)
        batch.append(parameter)
        numel += 0 if shard is None else shard.numel
        if numel >= AT_ONCE:
            yield batch
            batch, numel = [], 0
    yield batch
