# SPDX-License-Identifier: Apache-2.0
"""Config section ``torch_autocast``: the engine runs the model under ``torch.autocast``, weights stay in fp32.

Gradients of the modules that autocast computes in the lower precision are also communicated in it.
"""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed.utils.logging import warning_once

LOWER_PRECISION_SAFE_MODULES: list[type[torch.nn.Module]] = [
    torch.nn.Linear,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
]
PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"

TORCH_AUTOCAST_INITIALIZED = False
TORCH_AUTOCAST_DTYPE: torch.dtype | None = None


def init_autocast_params(
    engine: Any, dtype: torch.dtype, torch_autocast_lower_precision_safe_modules: list[str] | None
) -> None:
    """Mark the parameters whose gradients are communicated in ``dtype``: those of the named classes.

    Args:
        engine: anything with the model as ``module``.
        torch_autocast_lower_precision_safe_modules: dotted class names; None: ``LOWER_PRECISION_SAFE_MODULES``.

    Raises:
        ValueError: a name that cannot be imported, or that is no module class.
    """
    global TORCH_AUTOCAST_INITIALIZED, TORCH_AUTOCAST_DTYPE
    TORCH_AUTOCAST_INITIALIZED, TORCH_AUTOCAST_DTYPE = True, dtype
    names = torch_autocast_lower_precision_safe_modules
    classes = tuple(LOWER_PRECISION_SAFE_MODULES if names is None else map(_class_named, names))
    for module in engine.module.modules():
        if isinstance(module, classes):
            for parameter in module.parameters(recurse=False):
                if parameter.is_floating_point():
                    setattr(parameter, PARAM_COMM_DTYPE_ATTR_NAME, dtype)


def _class_named(name: str) -> type[torch.nn.Module]:
    place, _, attribute = name.rpartition(".")
    advice = "'torch_autocast.lower_precision_safe_modules' lists dotted names of module classes (torch.nn.Linear)"
    try:
        found = getattr(importlib.import_module(place), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r} cannot be imported ({error}); {advice}") from error
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        raise ValueError(f"{name!r} is {found!r}; {advice}")
    return found


def is_autocast_initialized() -> bool:
    """Whether an engine with ``torch_autocast`` has been made."""
    return TORCH_AUTOCAST_INITIALIZED


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Dotted names of ``LOWER_PRECISION_SAFE_MODULES``."""
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in LOWER_PRECISION_SAFE_MODULES]


def get_autocast_dtype() -> torch.dtype | None:
    """The dtype of the last engine with ``torch_autocast``."""
    return TORCH_AUTOCAST_DTYPE


def has_comm_dtype(param: torch.nn.Parameter) -> bool:
    """Whether the parameter's gradient is communicated in a dtype of its own."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: torch.nn.Parameter) -> torch.dtype:
    """dtype in which the parameter's gradient is communicated."""
    return getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)


def get_all_comm_dtypes(params: Iterable[torch.nn.Parameter]) -> set[torch.dtype]:
    return {get_comm_dtype(parameter) for parameter in params}


def sort_dtypes(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """In a fixed order."""
    return sorted(dtypes, key=str)


def autocast_dtype_of(config: Any) -> torch.dtype | None:
    """What the configuration's ``torch_autocast`` computes in; None when it is off. bf16 by default."""
    if not config.torch_autocast_enabled:
        return None
    return config.torch_autocast_dtype or torch.bfloat16


@contextmanager
def autocast_if_enabled(engine: Any) -> Iterator[None]:
    """What the engine's forward runs under.

    An autocast of the caller is switched off where the configuration asks for none, as the model's dtype is that of the
    configuration then; this is said once.
    """
    dtype = autocast_dtype_of(engine._config)
    device = engine.device.type
    if dtype is not None:
        with torch.autocast(device, dtype=dtype):
            yield
        return
    if not torch.is_autocast_enabled(device):
        yield
        return
    warning_once(
        "torch.autocast around the engine is switched off inside of it, since the config does not ask for it: set"
        ' "torch_autocast": {"enabled": true, "dtype": ...} in the config'
    )
    with torch.autocast(device, enabled=False):
        yield
