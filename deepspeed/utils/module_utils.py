# SPDX-License-Identifier: Apache-2.0
"""Attributes of nested modules by dotted name."""

import functools
from typing import Any


def recursive_getattr(model: Any, module_name: str) -> Any:
    """``recursive_getattr(model, "encoder.0.weight")`` is ``model.encoder[0].weight``; AttributeError where it ends."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute that :func:`recursive_getattr` would read; its parents must exist."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)
