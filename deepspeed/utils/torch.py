# SPDX-License-Identifier: Apache-2.0
"""Differences among torch releases."""

from collections.abc import Callable
from typing import Any

import torch


def _release(version: str) -> tuple[int, ...]:
    """(major, minor) of a version such as ``2.4.1+cu121``."""
    parts = version.split("+")[0].split(".")
    return int(parts[0]), int(parts[1]) if len(parts) > 1 else 0


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether the installed torch lies in the closed range of releases; only major and minor numbers count.

    Give versions as text: as numbers 2.1 and 2.10 are the same.

    Raises:
        ValueError: neither bound is given.
    """
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version needs min_version, max_version or both")
    installed = _release(torch.__version__)
    if min_version is not None and installed < _release(str(min_version)):
        return False
    return max_version is None or installed <= _release(str(max_version))


def is_functorch_transforming() -> bool:
    """Whether the call happens inside a ``torch.func`` transform (grad, vmap, ...)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def register_grad_hook(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Call ``hook(param)`` each time autograd has accumulated into ``param.grad``; returns a removable handle."""
    return param.register_post_accumulate_grad_hook(hook)


def jit_script_compat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` itself: TorchScript, which this once applied, is deprecated; use :func:`torch.compile` for speed."""
    return fn
