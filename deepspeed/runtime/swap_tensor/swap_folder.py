# SPDX-License-Identifier: Apache-2.0
"""A folder for the files of one process, which is gone when the process is.

A lock beside the folder says that its owner lives. Locks end with their process, also one that was killed, and count
across containers; so the next run on the same path knows which folders nobody owns any more, and removes them.
"""

import fcntl
import os
import shutil
import socket
import uuid
import weakref
from pathlib import Path

from deepspeed.utils.logging import logger

PREFIX = "deepspeed_swap_"
LOCK = ".lock"


class SwapFolder:
    """``<nvme_path>/deepspeed_swap_<host>_<process>_rank<rank>_<random>``, with a lock held on ``<folder>.lock``.

    Args:
        nvme_path: must exist: where a disk is not mounted, a folder of its name would be on another disk.
        key: of the config, for messages.

    Raises:
        FileNotFoundError: ``nvme_path`` does not exist.
        NotADirectoryError: it is no folder.
        OSError: nothing can be made in it.
    """

    def __init__(self, nvme_path: str | os.PathLike, rank: int, key: str) -> None:
        root = Path(nvme_path)
        if not root.exists():
            raise FileNotFoundError(
                f"{key} {str(root)!r} does not exist on {socket.gethostname()} (rank {rank}). Mount the disk or make"
                " the folder first; it is not made here, since on a host without the disk it would fill another one"
            )
        if not root.is_dir():
            raise NotADirectoryError(f"{key} {str(root)!r} is not a folder")
        remove_stale(root)
        name = f"{PREFIX}{socket.gethostname()}_{os.getpid()}_rank{rank}_{uuid.uuid4().hex[:8]}"
        self.path = root / name
        lock_path = root / (name + LOCK)
        try:
            lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise OSError(error.errno, f"{key}: nothing can be made here, {error.strerror}", str(root)) from error
        # also at exit of the program
        self._remove = weakref.finalize(self, _remove_own, self.path, lock_path, lock, os.getpid())

    def remove(self) -> None:
        """Remove the folder and all in it. May be called again."""
        self._remove()


def _remove_own(folder: Path, lock_path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child ends before its parent
        return
    shutil.rmtree(folder, ignore_errors=True)  # what cannot be removed is for the next run to remove
    lock_path.unlink(missing_ok=True)
    os.close(lock)


def remove_stale(root: Path) -> None:
    """Remove the folders in ``root`` whose process ended without doing so."""
    for folder in sorted(root.glob(f"{PREFIX}*")):
        if folder.name.endswith(LOCK) or not folder.is_dir():
            continue
        lock_path = root / (folder.name + LOCK)
        try:
            lock = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            lock = None  # removed by its owner or by another process that cleans up here
        except PermissionError:
            continue  # another user's
        if lock is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                continue  # its owner lives
        logger.warning(f"{folder}: its process is gone, the files of its offloaded state are removed")
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock_path.unlink(missing_ok=True)
            os.close(lock)
