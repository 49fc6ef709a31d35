# SPDX-License-Identifier: Apache-2.0
"""``torch.compile`` for code that names it through this package."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def is_compile_supported() -> bool:
    """Whether this torch has a compiler: always, since 2.4 is the oldest that is supported."""
    return True


def is_compiling() -> bool:
    """Whether ``torch.compile`` or ``torch.export`` is tracing the caller."""
    return torch.compiler.is_compiling()


def disable(func: F) -> F:
    """``func``, called but never traced by ``torch.compile``."""
    return torch.compiler.disable(func)


def lazy_disable(func: F) -> F:
    """As ``disable``, but the compiler is loaded with the first call only."""
    untraced: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not untraced:
            untraced.append(torch.compiler.disable(func))
        return untraced[0](*args, **kwargs)

    return call  # type: ignore[return-value]


def dummy_decorator(func: F) -> F:
    """``func`` itself."""
    return func


def enable(min_version: str | None = None) -> Callable[[F], F]:
    """A decorator for functions that ``torch.compile`` may trace: it leaves them as they are if torch is at least
    ``min_version`` ("2.6"), and keeps the compiler out of them otherwise."""
    if min_version is None:
        return dummy_decorator
    present = torch.torch_version.TorchVersion(torch.__version__)
    return dummy_decorator if present >= min_version else lazy_disable
