# SPDX-License-Identifier: Apache-2.0
"""Whether the packages that monitors need are installed, without importing them; and where files go."""

import importlib.util
import os
import sys
import weakref
from pathlib import Path
from typing import Any

from deepspeed.utils.logging import logger


def _require(package: str, what: str, key: str) -> None:
    if package in sys.modules:
        found = sys.modules[package] is not None
    else:
        found = importlib.util.find_spec(package) is not None
    if not found:
        raise ImportError(
            f"the config enables {what} ('{key}'), which needs the package {package!r}, and it is not installed:"
            f" pip install {package}, or set '{key}.enabled' to false",
            name=package,
        )


def check_tb_availability() -> None:
    """Raises:
    ImportError: tensorboard is not installed (torch has the writer, tensorboard the file format).
    """
    _require("tensorboard", "TensorBoard", "tensorboard")


def check_wandb_availability() -> None:
    """Raises:
    ImportError: wandb is not installed.
    """
    _require("wandb", "Weights & Biases", "wandb")


def check_comet_availability() -> None:
    """Raises:
    ImportError: comet_ml is not installed.
    """
    _require("comet_ml", "Comet", "comet")


_writer_of: weakref.WeakValueDictionary[tuple[type, str], Any] = weakref.WeakValueDictionary()


def log_directory(writer: Any, base: str) -> str:
    """Make and return ``output_path/job_name`` of a monitor, ``base/job_name`` where it has no output path.

    ``~`` is expanded. Warns where another living monitor of the same kind writes into the same folder, as two engines
    with one config do: their events would mix.
    """
    directory = Path(os.path.expanduser(writer.output_path or base)).absolute() / writer.job_name
    directory.mkdir(parents=True, exist_ok=True)
    other = _writer_of.setdefault((type(writer), str(directory)), writer)
    if other is not writer:
        logger.warning(
            "two engines of this process write events into %s, where they mix: give each its own job_name, or"
            " destroy() the first engine before making the second",
            directory,
        )
    return str(directory)


def release_directory(writer: Any) -> None:
    """The monitor has closed its files: another may write into its folder."""
    for key, other in list(_writer_of.items()):
        if other is writer:
            del _writer_of[key]
