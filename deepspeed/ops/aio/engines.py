# SPDX-License-Identifier: Apache-2.0
"""Which engine moves the bytes: the fastest that this host has, or the one that ``DS_AIO_ENGINE`` names."""

import functools
import os
from types import ModuleType

from deepspeed.ops.aio import python_engine
from deepspeed.utils.logging import logger

PYTHON = "python"
NATIVE = ("io_uring", "libaio", "threads")
ENGINE_VARIABLE = "DS_AIO_ENGINE"


@functools.cache
def native_module() -> ModuleType | None:
    """The compiled engines, compiled on first use; None, and one line in the log, where that is not possible. None
    also where ``DS_NATIVE_OPS=0`` says so."""
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.builder import NATIVE_VARIABLE

    if os.environ.get(NATIVE_VARIABLE, "1") == "0":
        return None
    try:
        return AsyncIOBuilder().load_native()
    except (RuntimeError, OSError, ImportError) as error:
        if os.environ.get("RANK", "0") == "0":
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            logger.warning(f"op async_io cannot be compiled, files are read and written by Python threads: {reason}")
        return None


def available_engines() -> list[str]:
    """Names of the engines that work here, the one used by default first."""
    native = native_module()
    return [*(native.available_backends() if native is not None else []), PYTHON]


def choose_engine(name: str | None) -> tuple[str, ModuleType]:
    """Name of an engine, and the module that has it.

    Args:
        name: of the engine; None: the one in the environment variable ``DS_AIO_ENGINE``, else the first available.

    Raises:
        ValueError: no engine has that name.
        RuntimeError: this host does not have the engine that was named.
    """
    source = "engine"
    if name is None:
        name, source = os.environ.get(ENGINE_VARIABLE) or None, ENGINE_VARIABLE
    if name is not None and name not in (*NATIVE, PYTHON):
        raise ValueError(f"{source}={name!r} must be one of {', '.join((*NATIVE, PYTHON))}")
    if name == PYTHON:
        return PYTHON, python_engine
    available = available_engines()
    if name is not None and name not in available:
        raise RuntimeError(f"{source}={name!r} does not work on this host; these do: {', '.join(available)}")
    name = name or available[0]
    return name, python_engine if name == PYTHON else native_module()
