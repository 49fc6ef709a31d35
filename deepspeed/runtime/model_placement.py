# SPDX-License-Identifier: Apache-2.0
"""Bringing a model into the dtype the config wants, and to the same weights on every rank."""

from collections.abc import Callable
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.keep_in_fp32 import (
    buffers_to_keep_in_fp32,
    keep_in_fp32_pattern,
    parameters_to_keep_in_fp32,
)
from deepspeed.runtime.parameter_handover import refuse_shared_memory
from deepspeed.runtime.utils import map_tensors
from deepspeed.runtime.zero.optimizer_offload import shard_memory
from deepspeed.runtime.zero.partition_parameters import convert_to_zero_parameters, prepare_whole
from deepspeed.runtime.zero.sharded_parameter import rest_shards, shard_of


def model_dtype(config: DeepSpeedConfig) -> torch.dtype | None:
    """dtype that the configuration wants floating-point parameters in; None leaves each its own."""
    if config.float16_config.enabled:
        return torch.float16
    return torch.bfloat16 if config.bfloat16_config.enabled else None


def place_whole_model(model: torch.nn.Module, config: DeepSpeedConfig, device: torch.device | None, group: Any) -> None:
    """Cast the model, bring it to ``device`` (None: leave it) and give it the first rank's values. In place."""
    partitioned = [name for name, parameter in model.named_parameters() if shard_of(parameter) is not None]
    if partitioned:
        raise ValueError(
            f"the model's parameters ({partitioned[0]!r} and others) are partitioned by deepspeed.zero.Init, which only"
            " ZeRO stage 3 can train. Set zero_optimization.stage to 3, or build the model without zero.Init"
            " (enabled=False)"
        )
    cast_model(model, config)
    if device is not None:
        model.to(device)
    broadcast_from_first_rank([*model.parameters(), *model.buffers()], group)


@torch.no_grad()
def partition_model(model: torch.nn.Module, config: DeepSpeedConfig, device: torch.device | None, group: Any) -> None:
    """Cast, move, broadcast and partition parameter by parameter, so that the device never holds all whole ones.

    Parameters that ``zero.Init`` has partitioned keep their values; they are cast and brought to the device, or, with
    ``offload_param``, to the host.
    """
    host = shard_memory(config.zero_config.offload_param)
    dtype_of = _dtypes(model, config)
    whole = [(name, parameter) for name, parameter in model.named_parameters() if shard_of(parameter) is None]
    refuse_shared_memory(whole)
    for _, parameter in whole:
        prepare_whole(parameter, dtype_of(parameter), device or parameter.device, group)
        sanity_checks = config.zero_config.enable_sanity_checks
        rest_shards(convert_to_zero_parameters([parameter], group, sanity_checks=sanity_checks), host)
    for parameter in model.parameters():
        shard = shard_of(parameter)
        kind = (dtype_of(parameter) if shard.dtype.is_floating_point else None) or shard.dtype
        place = device or shard.device
        away = host is not None
        if (kind, place, away) != (shard.dtype, shard.device, shard.away):
            shard.hide()
            shard.device = place
            numel = shard.slice_numel
            new = host.empty(numel, kind) if away else torch.empty(numel, dtype=kind, device=place)
            shard.move_shard(new, away)
            shard.hide()
    for buffer in model.buffers():
        if device is not None:
            buffer.data = buffer.data.to(device)
    _cast_buffers(model, config)
    broadcast_from_first_rank(list(model.buffers()), group)


@torch.no_grad()
def cast_model(model: torch.nn.Module, config: DeepSpeedConfig) -> None:
    """Cast floating-point parameters to fp16 or bf16 as configured, but for those that are kept in fp32; buffers only
    when ``buffer_dtype`` says so. In place."""
    dtype_of = _dtypes(model, config)
    for parameter in model.parameters():
        dtype = dtype_of(parameter)
        if parameter.is_floating_point() and dtype is not None:
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)
    _cast_buffers(model, config)


def _dtypes(model: torch.nn.Module, config: DeepSpeedConfig) -> Callable[[torch.nn.Parameter], torch.dtype | None]:
    """The dtype that a floating-point parameter is to have; None leaves it its own."""
    dtype = model_dtype(config)
    kept = parameters_to_keep_in_fp32(model, keep_in_fp32_pattern(model, config.keep_in_fp32_modules, dtype))
    return lambda parameter: torch.float32 if parameter in kept else dtype


def _cast_buffers(model: torch.nn.Module, config: DeepSpeedConfig) -> None:
    """Bring floating-point buffers to ``buffer_dtype``, but for those of parts that are kept in fp32."""
    if config.buffer_dtype is None:
        return
    pattern = keep_in_fp32_pattern(model, config.keep_in_fp32_modules, model_dtype(config))
    kept = {buffer for _, buffer in buffers_to_keep_in_fp32(model, pattern)}
    for buffer in model.buffers():
        if buffer.is_floating_point() and buffer not in kept:
            buffer.data = buffer.data.to(config.buffer_dtype)


@torch.no_grad()
def broadcast_from_first_rank(tensors: list[torch.Tensor], group: Any) -> None:
    """Give every rank of ``group`` the values of its first rank."""
    if dist.get_world_size(group) == 1:
        return
    source = dist.get_global_rank(group, 0)
    for tensor in tensors:
        if tensor.is_meta:
            raise ValueError("the model has tensors on the meta device; materialise it before deepspeed.initialize")
        if tensor.numel():
            contiguous = tensor.data.contiguous()
            dist.broadcast(contiguous, src=source, group=group)
            if not tensor.is_contiguous():
                tensor.data.copy_(contiguous)


def cast_floating_inputs(value: Any, dtype: torch.dtype) -> Any:
    """Copy of a nested structure (tuple, list, dict) with floating-point tensors cast."""
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
