# SPDX-License-Identifier: Apache-2.0
"""Nested arguments and results as flat lists, since autograd sees only the tensors that a function takes and returns
directly.

A tensor inside a container that autograd does not see would lose its gradient without a word. Containers are tuples,
lists, dicts, what derives from them (named tuples, results of torch functions, model outputs), and dataclasses.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

Rebuild = Callable[[Any], Any]  # from an iterator over leaves to the value


def flatten(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves of a nested value, and the function that makes such a value from as many other leaves.

    The function keeps no leaf alive. A container is never shared between the value and what is rebuilt.
    """
    leaves: list[Any] = []
    rebuild = _flatten(value, leaves)
    return leaves, lambda others: rebuild(iter(others))


def holds_tensor(value: Any) -> bool:
    """Whether a tensor is among the leaves of ``value``."""
    if isinstance(value, torch.Tensor):
        return True
    children = _children(value)
    return children is not None and any(holds_tensor(child) for child in children)


def check_no_hidden_tensors(leaves: Sequence[Any]) -> None:
    """Refuse results that hold tensors where autograd does not see them.

    Raises:
        TypeError: an object that is no container and has tensors in its attributes.
    """
    for leaf in leaves:
        attributes = getattr(leaf, "__dict__", None)
        if isinstance(leaf, (torch.Tensor, torch.nn.Module, type)) or not isinstance(attributes, dict):
            continue
        if holds_tensor(attributes):
            raise TypeError(
                f"checkpoint(): the function returned an object of type {type(leaf).__qualname__} with tensors inside,"
                " whose gradient a reentrant checkpoint would lose. Return tensors, tuples, lists, dicts or"
                " dataclasses, or use non_reentrant_checkpoint(), which takes any result"
            )


def _children(value: Any) -> list[Any] | None:
    """What a container holds; None for a leaf."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def _flatten(value: Any, leaves: list[Any]) -> Rebuild:
    children = _children(value)
    plain = type(value) in (tuple, list, dict)
    if children is None or not (plain or holds_tensor(value)):
        leaves.append(value)
        return next
    parts = [_flatten(child, leaves) for child in children]
    if isinstance(value, dict):
        return _filled_shell(value, list(value), _set_item, parts)
    if isinstance(value, (tuple, list)):
        return _sequence(type(value), parts)
    return _filled_shell(value, [field.name for field in dataclasses.fields(value)], object.__setattr__, parts)


def _sequence(kind: type, parts: list[Rebuild]) -> Rebuild:
    named = issubclass(kind, tuple) and hasattr(kind, "_fields")

    def rebuild(leaves: Any) -> Any:
        values = [part(leaves) for part in parts]
        return kind(*values) if named else kind(values)

    return rebuild


def _set_item(target: Any, key: Any, value: Any) -> None:
    target[key] = value


def _filled_shell(
    value: Any, keys: list[Any], assign: Callable[[Any, Any, Any], None], parts: list[Rebuild]
) -> Rebuild:
    """For kinds whose constructor is not known: a copy without the contents, to be copied and filled."""
    shell = copy.copy(value)
    for key in keys:
        assign(shell, key, None)

    def rebuild(leaves: Any) -> Any:
        result = copy.copy(shell)
        for key, part in zip(keys, parts):
            assign(result, key, part(leaves))
        return result

    return rebuild
