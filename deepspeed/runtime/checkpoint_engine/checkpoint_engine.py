# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint engine does: one of those built here, or one that a user sets as ``engine.checkpoint_engine``."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.checkpoint import storage


@dataclass
class CheckpointCommitInfo:
    """Which checkpoint is being written.

    ``save_latest`` says whether ``save_dir/latest`` will name it.
    """

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """Writes the files of one rank.

    One checkpoint is ``create``, ``save`` for each file, ``commit``. Folders, renaming and ``latest`` are the
    training engine's: it acts when every rank's ``commit`` has returned.

    Args:
        config_params: the parsed configuration, a ``DeepSpeedConfig``.
    """

    def __init__(self, config_params: Any = None) -> None:
        self.config_params = config_params
        self._commit_info: CheckpointCommitInfo | None = None

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """A checkpoint begins."""

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> None:
        """Write one file. Tensors may be the live ones: what counts are their values during this call.

        Raises:
            OSError: it cannot be written. An engine that writes later raises at ``commit``.
        """

    def save_resting(
        self, state_dict: Any, path: str, rests: Callable[[torch.Tensor], bool]
    ) -> Callable[[], None] | None:
        """As ``save``, of tensors some of which stay as they are until the returned function was called and has
        returned; None: they need not.

        Args:
            rests: whether a tensor is one of them.
        """
        self.save(state_dict, path)
        return None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder and those above it."""
        os.makedirs(path, exist_ok=exist_ok)

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """Contents of a file, with tensors on the host or where ``map_location`` says (as for ``torch.load``).

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: it is damaged, or not trusted (``DS_TRUST_CHECKPOINTS``).
        """

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return True when everything saved since ``create`` is on the disk; wait for it if need be.

        Raises:
            OSError, RuntimeError: what went wrong in writing.
        """

    def begin_commit(self, info: CheckpointCommitInfo) -> None:
        """All files of the checkpoint were handed over by ``save``."""

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether this data-parallel rank writes the file of weights that all of them could write."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Whether ``save`` returns before its file is on the disk."""
        return False

    def is_writing(self) -> bool:
        """Whether ``commit`` would have to wait."""
        return False

    def writes_files(self) -> bool:
        """Whether a checkpoint is there after ``commit``; False for measurements."""
        return True

    def set_commit_info(self, info: CheckpointCommitInfo) -> None:
        """Note which checkpoint waits for its ``commit``."""
        self._commit_info = info

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """The checkpoint that waits for its ``commit``; None without one."""
        return self._commit_info

    def cleanup(self) -> None:
        """Wait for what is being written and give memory back. May be called more than once."""

    def preserves_storage_sharing(self) -> bool:
        """Whether tensors that share memory (tied weights) are one tensor in the file too."""
        return True


def load_to(path: str, map_location: Any) -> Any:
    """Contents of a file, read safely; see ``CheckpointEngine.load``."""
    return storage.read_tensors(
        path, storage.checkpoints_are_trusted(), "cpu" if map_location is None else map_location
    )
