# SPDX-License-Identifier: Apache-2.0
"""Writing files so that none is ever half there under its own name, and reading them without running code.

A file is written under another name, flushed to the disk, and renamed. A checkpoint is whole when its manifest, written
last, names every file with its size.
"""

import json
import os
import pickle
from collections.abc import Iterable
from typing import Any

import torch

from deepspeed.checkpoint.files import MANIFEST
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

PART = ".part"
# Classes in files of this format besides tensors and containers.
_KNOWN_CLASSES = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, torch.Size]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read: it is incomplete, damaged, or of another model."""


def sync_folder(folder: str) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_tensors(path: str, content: Any) -> int:
    """``torch.save`` that replaces ``path`` at once, when everything is on the disk; the size in bytes."""
    part = path + PART
    with open(part, "wb") as stream:
        torch.save(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
        size = stream.tell()
    os.replace(part, path)
    return size


def write_text(path: str, text: str) -> None:
    """Replace a small text file at once."""
    part = path + PART
    with open(part, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, path)
    sync_folder(os.path.dirname(path) or ".")


def read_tensors(path: str, trust: bool = False) -> Any:
    """Contents of a file that ``write_tensors`` or DeepSpeed has written; tensors are read from the disk when used.

    Args:
        trust: also accept files that run code when they are read (other classes than tensors and plain data).

    Raises:
        CheckpointError: the file is damaged, or holds something else and is not trusted.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"checkpoint file {path} does not exist")
    try:
        with torch.serialization.safe_globals(_KNOWN_CLASSES):
            return torch.load(path, map_location="cpu", weights_only=not trust, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"checkpoint file {path} holds objects that could run code when read ({error}). If you trust its source,"
            " set the environment variable DS_TRUST_CHECKPOINTS=1"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint file {path} is damaged or incomplete ({error})") from error


def checkpoints_are_trusted() -> bool:
    """Whether the user vouches for files that may run code."""
    return os.environ.get("DS_TRUST_CHECKPOINTS", "0") not in ("", "0")


def write_manifest(folder: str, sizes: dict[str, int]) -> None:
    """The last file of a checkpoint: with it, it is whole."""
    write_text(os.path.join(folder, MANIFEST), json.dumps({"files": sizes}, indent=1, sort_keys=True) + "\n")


def faults_of(folder: str, needed: Iterable[str] = ()) -> list[str]:
    """What is wrong with the files of a checkpoint, as far as names and sizes tell; empty when it is whole.

    Args:
        needed: files that must be there where no manifest says which (checkpoints of DeepSpeed have none).
    """
    path = os.path.join(folder, MANIFEST)
    if not os.path.isdir(folder):
        return [f"folder {folder} does not exist"]
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as stream:
            sizes = json.load(stream)["files"]
    else:
        sizes = dict.fromkeys(needed)
    faults = []
    for name, size in sizes.items():
        file = os.path.join(folder, name)
        if not os.path.isfile(file):
            faults.append(f"{name} is missing")
        elif size is not None and os.path.getsize(file) != size:
            faults.append(f"{name} has {os.path.getsize(file)} bytes instead of {size}")
    return faults
