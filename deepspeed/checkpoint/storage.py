# SPDX-License-Identifier: Apache-2.0
"""Writing files so that none is ever half there under its own name, and reading them without running code.

A file is written under another name, flushed to the disk, and renamed. A checkpoint is whole when its manifest, written
last, names every file with its size.
"""

import argparse
import codecs
import collections
import datetime
import json
import mmap
import os
import pathlib
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch

from deepspeed.checkpoint.block_stream import Blocks, BlockStream, Steady
from deepspeed.checkpoint.files import MANIFEST
from deepspeed.checkpoint.record_sums import CHUNK, PendingSum, crew_of_sums
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

PART = ".part"
# Classes in files of this format besides tensors and containers.
_OWN_CLASSES = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, torch.Size]
# What scripts keep in a client state and schedulers in theirs; making one of them runs no code of the file's choice.
_DATA_CLASSES = [
    argparse.Namespace, set, frozenset, slice, complex, pathlib.PosixPath,
    pathlib.PurePosixPath, datetime.datetime, datetime.date, datetime.timedelta, datetime.timezone,
]  # fmt: skip
_CHUNKS_AHEAD = 4
_PICKLE = b"\x80\x02\x8a\n"  # protocol 2, then a long number: the mark of torch's format before zip


def _numpy_classes() -> list[Any]:
    """What arrays and numbers of numpy, such as its random state, are pickled with."""
    rebuild, scalar = numpy.zeros(1).__reduce__()[0], numpy.float64(0).__reduce__()[0]
    dtypes = [type(numpy.dtype(kind)) for kind in "?bBhHiIlLqQefdFD"]
    # Their bytes are written as text to be encoded, which torch reads without being told from 2.5 on.
    return [rebuild, scalar, numpy.ndarray, numpy.dtype, codecs.encode, *dict.fromkeys(dtypes)]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read: it is incomplete, damaged, or of another model."""


class DamagedFileError(CheckpointError):
    """A file is not what was written."""


class MissingCheckpointError(CheckpointError, AssertionError):
    """There is no such checkpoint."""


def sync_folder(folder: str) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _open(path: str) -> BlockStream:
    return BlockStream(path, Blocks())


def write_tensors(
    path: str,
    content: Any,
    open_stream: Callable[[str], BlockStream] = _open,
    keep: bool = True,
    steady: Steady | None = None,
) -> int:
    """``torch.save`` that replaces ``path`` at once, when everything is on the disk; the size in bytes.

    Args:
        open_stream: makes the stream that is written to, given a path.
        keep: False for a stream that leaves no file.
        steady: memory in ``content`` that stays as it is while this runs.
    """
    part = path + PART
    with open_stream(part) as stream:
        stream.save(content, steady)
        stream.flush()
        if keep:
            os.fsync(stream.fileno())
        size = stream.tell()
    if keep:
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


@contextmanager
def _reading_classes(classes: list[Any]) -> Iterator[None]:
    """``torch.load`` makes objects of these classes inside."""
    serialization = torch.serialization
    if hasattr(serialization, "safe_globals"):  # torch 2.5
        with serialization.safe_globals(classes):
            yield
        return
    before = serialization.get_safe_globals()
    serialization.add_safe_globals(classes)
    try:
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(before)


def read_tensors(path: str, trust: bool = False, map_location: Any = "cpu") -> Any:
    """Contents of a file that ``write_tensors`` or DeepSpeed has written; tensors are read from the disk when used.

    Args:
        trust: also accept files that run code when they are read (other classes than tensors and plain data).
        map_location: where tensors go, as for ``torch.load``.

    Raises:
        CheckpointError: the file is damaged, or holds something else and is not trusted.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"checkpoint file {path} does not exist")
    try:
        with _reading_classes(_OWN_CLASSES + _DATA_CLASSES + _numpy_classes()):
            mapped = not _is_of_old_format(path)
            return torch.load(path, map_location=map_location, weights_only=not trust, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"checkpoint file {path} holds objects that could run code when read ({error}). If you trust its source,"
            " set the environment variable DS_TRUST_CHECKPOINTS=1"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise DamagedFileError(f"checkpoint file {path} is damaged or incomplete ({error})") from error


def _is_of_old_format(path: str) -> bool:
    """Whether a file is of ``checkpoint_serialization: false``: pickles one after the other, not a zip archive."""
    with open(path, "rb") as stream:
        return stream.read(len(_PICKLE)) == _PICKLE


def checkpoints_are_trusted() -> bool:
    """Whether the user vouches for files that may run code."""
    return os.environ.get("DS_TRUST_CHECKPOINTS", "0") not in ("", "0")


def sums_are_checked() -> bool:
    """Whether loading compares checksums; it does unless ``DS_CHECKPOINT_VERIFY=0``."""
    return os.environ.get("DS_CHECKPOINT_VERIFY", "1") not in ("", "0")


def needs_trust(content: Any) -> set[str]:
    """Classes in nested containers that a file cannot be read with unless it is trusted."""
    if isinstance(content, dict) and not isinstance(content, collections.defaultdict):
        content = [*content.keys(), *content.values()]
    if isinstance(content, (list, tuple, set, frozenset)):
        return set().union(*(needs_trust(item) for item in content))
    kind = type(content)
    plain = (int, float, bool, str, bytes, bytearray, type(None), torch.dtype, torch.device, torch.nn.Parameter)
    if isinstance(content, argparse.Namespace):
        return needs_trust(vars(content))
    if kind in plain or kind in _OWN_CLASSES or kind in _DATA_CLASSES or isinstance(content, torch.Tensor):
        return set()
    if isinstance(content, (numpy.ndarray, numpy.generic)) and content.dtype.kind in "?biufc":
        return set()
    return {f"{kind.__module__}.{kind.__qualname__}"}


def wrong_sums(path: str) -> list[str]:
    """What does not match the checksums in a file of ``torch.save``, which threads compute; empty if all does."""
    if _is_of_old_format(path):
        return []  # there are none
    try:
        with (
            open(path, "rb") as stream,
            zipfile.ZipFile(stream) as archive,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
        ):
            wrong = _wrong_records(view, mapped, archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        return [f"{os.path.basename(path)} is damaged ({error})"]
    return [f"{os.path.basename(path)}: contents of {wrong[:3]} do not match their checksums"] if wrong else []


def _wrong_records(file: memoryview, mapped: mmap.mmap, records: list[zipfile.ZipInfo]) -> list[str]:
    crew = crew_of_sums()
    try:
        sums = []
        for record in records:
            if record.CRC:  # 0: written without, by torch.serialization.set_crc32_options
                begin, end = _place_of(file, record)
                pending = PendingSum(crew)
                pending.add(file[begin:end], partial(_read_ahead, mapped, begin))
                sums.append((record, pending))
        return [record.filename for record, pending in sums if pending.value() != record.CRC]
    finally:
        crew.close()


def _read_ahead(mapped: mmap.mmap, begin: int, start: int) -> None:
    """Let the system read what will be needed some chunks later than ``start`` bytes behind ``begin``."""
    place = (begin + start + _CHUNKS_AHEAD * CHUNK) // mmap.PAGESIZE * mmap.PAGESIZE
    if place < len(mapped) and hasattr(mmap, "MADV_WILLNEED"):
        mapped.madvise(mmap.MADV_WILLNEED, place, min(CHUNK, len(mapped) - place))


def _place_of(file: memoryview, record: zipfile.ZipInfo) -> tuple[int, int]:
    """First and last byte of the contents of a record, which lie behind a header of 30 bytes, its name and an extra
    field of its own length."""
    lengths = file[record.header_offset + 26 : record.header_offset + 30]
    begin = record.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    return begin, begin + record.file_size


def write_manifest(folder: str, sizes: dict[str, int], save: str = "") -> None:
    """The last file of a checkpoint: with it, it is whole.

    Args:
        save: which save this is part of, where nodes have folders of their own.
    """
    content = {"files": sizes} | ({"save": save} if save else {})
    write_text(os.path.join(folder, MANIFEST), json.dumps(content, indent=1, sort_keys=True) + "\n")


def read_manifest(folder: str) -> dict[str, int] | None:
    """Names and sizes of the files of a checkpoint; None where there is no manifest.

    Raises:
        CheckpointError: it is not one.
    """
    manifest = _read_manifest(folder)
    return None if manifest is None else manifest[0]


def save_of(folder: str) -> str:
    """Which save a checkpoint is part of; empty where the manifest, if there is one, does not say so.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    manifest = _read_manifest(folder)
    return "" if manifest is None else manifest[1]


def _read_manifest(folder: str) -> tuple[dict[str, int], str] | None:
    path = os.path.join(folder, MANIFEST)
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
        return {str(name): int(size) for name, size in content["files"].items()}, str(content.get("save", ""))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def faults_of(folder: str, needed: Iterable[str] = (), only: Callable[[str], bool] = lambda name: True) -> list[str]:
    """What is wrong with the files of a checkpoint, as far as names and sizes tell; empty when it is whole.

    Args:
        needed: files that must be there where no manifest says which (checkpoints of DeepSpeed have none).
        only: which files matter.
    """
    if not os.path.isdir(folder):
        return [f"folder {folder} does not exist"]
    try:
        sizes: dict[str, Any] | None = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    if sizes is None:
        sizes = dict.fromkeys(needed)
    faults = []
    for name, size in sizes.items():
        if not only(name):
            continue
        file = os.path.join(folder, name)
        if not os.path.isfile(file):
            faults.append(f"{name} is missing")
        elif size is not None and os.path.getsize(file) != size:
            faults.append(f"{name} has {os.path.getsize(file)} bytes instead of {size}")
    return faults
