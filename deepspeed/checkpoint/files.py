# SPDX-License-Identifier: Apache-2.0
"""Names of the files of a checkpoint, and what a folder of checkpoints holds.

::

    save_dir/latest                                        text: the tag of the last whole checkpoint
    save_dir/<tag>/mp_rank_MM_model_states.pt              stages 0 to 2
    save_dir/<tag>/zero_pp_rank_R_mp_rank_MM_model_states.pt             stage 3, one per rank
    save_dir/<tag>/[bf16_]zero_pp_rank_R_mp_rank_MM_optim_states.pt      stages 1 to 3, one per rank
    save_dir/<tag>/manifest.json                           name and size of every file
"""

import os
import re
from collections.abc import Iterator

LATEST = "latest"
MANIFEST = "manifest.json"
MODEL_SUFFIX = "_model_states.pt"
OPTIM_SUFFIX = "_optim_states.pt"
_TAG_DEPTH = 2  # folders below the folder of checkpoints in which tags are looked for
_OPTIM_FILE = re.compile(r"^(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d\d)_?optim_states\.pt$")
_SHARD_MODEL_FILE = re.compile(r"^zero_pp_rank_(\d+)_mp_rank_(\d\d)_model_states\.pt$")


def model_file(mp_rank: int, shard_rank: int | None = None) -> str:
    """Name of a file of weights and counters; ``shard_rank`` at stage 3."""
    front = "" if shard_rank is None else f"zero_pp_rank_{shard_rank}_"
    return f"{front}mp_rank_{mp_rank:02d}{MODEL_SUFFIX}"


def optim_file(shard_rank: int, mp_rank: int, bf16: bool) -> str:
    """Name of a rank's file of masters and optimizer state."""
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{shard_rank}_mp_rank_{mp_rank:02d}{OPTIM_SUFFIX}"


def is_optim_file(name: str) -> bool:
    """Whether a file holds optimizer state, of whatever rank."""
    return _OPTIM_FILE.match(name) is not None


def is_checkpoint_file(name: str) -> bool:
    """Whether a file in the folder of a tag is part of the checkpoint, as far as the name tells."""
    return name.endswith((MODEL_SUFFIX, "optim_states.pt")) or name == MANIFEST


def find_optim_files(folder: str, mp_rank: int = 0) -> list[str]:
    """Paths of the optimizer files of a checkpoint, by rank (a number: 10 comes after 9).

    Raises:
        FileNotFoundError: a rank's file is missing between others.
    """
    return _all_of(folder, optim_files_there(folder, mp_rank))


def find_shard_model_files(folder: str, mp_rank: int = 0) -> list[str]:
    """Paths of the model files of a stage 3 checkpoint, by rank.

    Raises:
        FileNotFoundError: a rank's file is missing between others.
    """
    return _all_of(folder, shard_model_files_there(folder, mp_rank))


def optim_files_there(folder: str, mp_rank: int = 0) -> dict[int, str]:
    """Paths of those optimizer files of a checkpoint that are in this folder, by rank."""
    return _numbered(folder, _OPTIM_FILE, mp_rank)


def shard_model_files_there(folder: str, mp_rank: int = 0) -> dict[int, str]:
    """Paths of those model files of a stage 3 checkpoint that are in this folder, by rank."""
    return _numbered(folder, _SHARD_MODEL_FILE, mp_rank)


def _numbered(folder: str, pattern: re.Pattern[str], mp_rank: int) -> dict[int, str]:
    found: dict[int, str] = {}
    for name in os.listdir(folder):
        match = pattern.match(name)
        if match and int(match[2]) == mp_rank:
            found[int(match[1])] = os.path.join(folder, name)
    return found


def _all_of(folder: str, found: dict[int, str]) -> list[str]:
    missing = sorted(set(range(len(found))) - set(found))
    if missing:
        raise FileNotFoundError(
            f"checkpoint {folder}: the files of ranks {missing} are missing beside those of ranks {sorted(found)}"
            f" (such as {os.path.basename(next(iter(found.values())))})"
        )
    return [found[rank] for rank in range(len(found))]


def read_latest(save_dir: str) -> str | None:
    """The tag in ``latest``; None without that file."""
    path = os.path.join(save_dir, LATEST)
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as stream:
        return stream.read().strip()


def tags_in(save_dir: str) -> list[str]:
    """Folders below ``save_dir`` that hold a model file, by age, oldest first; also such as ``"run/step1"``."""
    tags = sorted(_folders_with_model(save_dir, "", _TAG_DEPTH))
    return sorted(tags, key=lambda name: os.path.getmtime(os.path.join(save_dir, name)))


def _folders_with_model(save_dir: str, below: str, depth: int) -> Iterator[str]:
    if not os.path.isdir(os.path.join(save_dir, below)):
        return
    for entry in os.scandir(os.path.join(save_dir, below)):
        if not entry.name.startswith(".") and entry.is_dir():
            tag = f"{below}/{entry.name}" if below else entry.name
            if any(name.endswith(MODEL_SUFFIX) for name in os.listdir(entry.path)):
                yield tag
            if depth > 1:
                yield from _folders_with_model(save_dir, tag, depth - 1)


def check_tag(tag: str) -> str:
    """A tag is the name of one folder.

    Raises:
        ValueError: it would leave the folder of checkpoints.
    """
    if not tag or tag in (".", "..") or os.path.isabs(tag) or any(part in ("", ".", "..") for part in tag.split("/")):
        raise ValueError(f"checkpoint tag {tag!r} must name a folder inside the checkpoint folder")
    if tag.startswith(".") or "\0" in tag or "\n" in tag:
        raise ValueError(
            f"checkpoint tag {tag!r}: names with a dot in front are for checkpoints that are being written"
        )
    return tag
