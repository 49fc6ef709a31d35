# SPDX-License-Identifier: Apache-2.0
"""Bringing a model into the dtype the config wants, and to the same weights on every rank."""

from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.utils import map_tensors


@torch.no_grad()
def cast_model(model: torch.nn.Module, config: DeepSpeedConfig) -> None:
    """Cast floating-point parameters to fp16 or bf16 as configured; buffers only when ``buffer_dtype`` says so. In
    place."""
    dtype = None
    if config.float16_config.enabled:
        dtype = torch.float16
    elif config.bfloat16_config.enabled:
        dtype = torch.bfloat16
    if dtype is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.grad = None
                parameter.data = parameter.data.to(dtype)
    if config.buffer_dtype is not None:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(config.buffer_dtype)


@torch.no_grad()
def broadcast_from_first_rank(model: torch.nn.Module, group: Any) -> None:
    """Give every rank of ``group`` the parameters and buffers of its first rank."""
    if dist.get_world_size(group) == 1:
        return
    source = dist.get_global_rank(group, 0)
    for tensor in [*model.parameters(), *model.buffers()]:
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
