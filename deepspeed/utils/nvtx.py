# SPDX-License-Identifier: Apache-2.0
"""Profiler ranges."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from deepspeed.accelerator import get_accelerator

enable_nvtx = True
DEEPSPEED_NVTX_DOMAIN = "DeepSpeed"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def instrument_w_nvtx(func: _Function) -> _Function:
    """Show each call of ``func`` as a range named after it in the device's profiler."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not enable_nvtx or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        accelerator = get_accelerator()
        domain = DEEPSPEED_NVTX_DOMAIN if accelerator.supports_nvtx_domain else None
        accelerator.range_push(func.__qualname__, domain=domain)
        try:
            return func(*args, **kwargs)
        finally:
            accelerator.range_pop(domain=domain)

    return call
