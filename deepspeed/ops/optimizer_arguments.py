# SPDX-License-Identifier: Apache-2.0
"""Arguments of optimizers and of their steps: what all classes of this package check and do alike."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """What ``closure`` returns, with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def refuse_arguments(name: str, **arguments: Any) -> None:
    """RuntimeError for arguments of ``step`` that belong to a use this package has no part in."""
    given = [key for key, value in arguments.items() if value is not None]
    if given:
        raise RuntimeError(
            f"{name}.step() does not take {', '.join(given)}: gradients are those in .grad, already unscaled. Call"
            " step() without arguments; the engine scales and clips"
        )


def check_numbers(name: str, **numbers: float | torch.Tensor) -> None:
    """ValueError for a number that is negative."""
    for key, value in numbers.items():
        if not isinstance(value, torch.Tensor) and not value >= 0:
            raise ValueError(f"{name}: {key} must not be negative, got {value}")


def check_betas(name: str, betas: Sequence[float]) -> None:
    """ValueError unless two numbers in [0, 1)."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"{name}: betas must be two numbers in [0, 1), got {betas}")
