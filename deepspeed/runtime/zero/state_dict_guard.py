# SPDX-License-Identifier: Apache-2.0
"""``torch.distributed.checkpoint`` must not take the empty tensors of a partitioned model for its weights."""

import sys
import weakref
from typing import Any

import torch

from deepspeed.runtime.zero.sharded_parameter import shards_of

_TORCH_MODULE = "torch.distributed.checkpoint.state_dict"
_guarded: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def refuse_distributed_checkpoints(module: torch.nn.Module) -> None:
    """From now on ``get_model_state_dict(module)`` and ``set_model_state_dict(module, ...)`` raise a RuntimeError that
    says what to do while weights are partitioned. ``module.state_dict()`` itself is as it was."""
    if module in _guarded:
        return
    _guarded.add(module)
    module.register_state_dict_pre_hook(_before_state_dict)
    register = getattr(module, "register_load_state_dict_pre_hook", None)
    if register is not None:  # torch 2.5; before, torch's own error names sizes that differ
        register(_before_load)


def _before_state_dict(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    _refuse(module, "get_model_state_dict", "")


def _before_load(module: torch.nn.Module, *args: Any) -> None:
    _refuse(module, "set_model_state_dict", ", modifier_rank=0")


def _refuse(module: torch.nn.Module, function: str, modifier: str) -> None:
    frame, depth = sys._getframe(1), 0
    while frame is not None and depth < 8:
        if frame.f_globals.get("__name__") == _TORCH_MODULE:
            break
        frame, depth = frame.f_back, depth + 1
    else:
        return
    absent = [shard.name for shard in shards_of(module.parameters()) if shard.full is None]
    if absent:
        raise RuntimeError(
            f"torch.distributed.checkpoint.state_dict.{function} at ZeRO stage 3: the values of {', '.join(absent[:3])}"
            " are partitioned over the ranks, and what stands in the model is empty. Call it inside"
            f" deepspeed.zero.GatheredParameters(list(engine.module.parameters()){modifier}), or use"
            " engine.save_checkpoint / load_checkpoint, which keep optimizer state too"
        )
