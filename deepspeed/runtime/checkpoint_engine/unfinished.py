# SPDX-License-Identifier: Apache-2.0
"""The one save of this process whose files may still be on their way to the disk.

While training goes on, all ranks agree on when it is complete: at a boundary step when all have written, at the latest
at the next save or load. At the end of an engine or of the program nobody can be asked any more, as ranks end when they
like and process groups may be gone: there the rank that renames waits for the files themselves, which get their names
when they are on the disk.
"""

import atexit
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deepspeed.checkpoint import files, storage
from deepspeed.checkpoint.agreement import together
from deepspeed.checkpoint.storage import CheckpointError
from deepspeed.comm.control import ControlChannel
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import DEFAULT_CHECKPOINT_TIMEOUT_SECONDS
from deepspeed.utils.logging import log_dist, logger

FAILED = ".failed"
_LOOK_EVERY_SECONDS = 0.05


@dataclass
class UnfinishedSave:
    """All files were handed to ``writer``; what follows is to wait for them and to make the checkpoint appear.

    Args:
        info: which checkpoint.
        writer: has this rank's files.
        staging: folder that the files are written to.
        rank: this rank.
        leads: whether this rank makes and renames folders, alone or one of several with folders of their own.
        finish: give the folder its name, given sizes of files.
        abandon: delete the folder.
        owner: the training engine, for ``poll``.
        own: names of this rank's files.
        by_rank: names of the files of each rank, none of those with another folder.
    """

    info: CheckpointCommitInfo
    writer: CheckpointEngine
    staging: str
    rank: int
    leads: bool
    finish: Callable[[dict[str, int]], None]
    abandon: Callable[[], None]
    owner: int
    own: list[str] = field(default_factory=list)
    by_rank: list[list[str]] = field(default_factory=list)

    def _sizes(self, names: list[str]) -> dict[str, int]:
        return {name: os.path.getsize(os.path.join(self.staging, name)) for name in names}

    def _commit(self) -> dict[str, int]:
        self.writer.commit(self.info)
        return self._sizes(self.own)

    def _move_latest(self) -> None:
        storage.write_text(os.path.join(self.info.save_dir, files.LATEST), self.info.tag)

    def complete(self, channel: ControlChannel) -> None:
        """Wait for the files of all ranks, then make the checkpoint appear. Collective.

        Raises:
            CheckpointError: on every rank, when some rank could not write; what existed is untouched.
        """
        what = f"save {self.info.tag!r}"
        try:
            sizes = together(channel, self._commit, what)
            by_rank = channel.gather(sizes, "sizes of files")
            here = {name: by_rank[rank][name] for rank, names in enumerate(self.by_rank) for name in names}
            together(channel, lambda: self.finish(here) if self.leads else None, what)
        except CheckpointError:
            if self.leads:
                self.abandon()
            raise
        if self.info.save_latest:
            latest = os.path.join(self.info.save_dir, files.LATEST)
            together(channel, lambda: self._move_latest() if self.leads else None, f"write {latest}")
        log_dist(f"saved checkpoint {os.path.join(self.info.save_dir, self.info.tag)}", ranks=[0])

    def complete_alone(self, patience: float = DEFAULT_CHECKPOINT_TIMEOUT_SECONDS) -> None:
        """The same without asking other ranks: the one that renames waits for their files to appear.

        Args:
            patience: seconds without any new byte after which it gives up.

        Raises:
            CheckpointError: files of some rank did not come, or could not be written; what existed is untouched.
        """
        try:
            self.writer.commit(self.info)
        except (OSError, RuntimeError) as error:
            self._leave_word(error)
            message = f"checkpoint {self.info.tag} could not be written ({type(error).__name__}: {error})"
            raise CheckpointError(f"{message}. Checkpoints that existed are untouched") from error
        if not self.leads:
            return
        names = [name for of_rank in self.by_rank for name in of_rank]
        missing = self._missing_after(names, patience)
        if missing:
            raise CheckpointError(
                f"checkpoint {self.info.tag}: {missing} of other ranks did not get written into {self.staging}; the"
                " checkpoint is not complete and was not made the latest. Checkpoints that existed are untouched"
            )
        self.finish(self._sizes(names))
        if self.info.save_latest:
            self._move_latest()

    def _leave_word(self, error: BaseException) -> None:
        """Spare the rank that renames the wait."""
        try:
            storage.write_text(os.path.join(self.staging, f"rank{self.rank}{FAILED}"), str(error))
        except OSError as second:
            logger.error(f"checkpoint {self.info.tag}: {second}")

    def _missing_after(self, names: list[str], patience: float) -> list[str]:
        """Files that are not there once nothing new comes any more."""
        seen, since = -1, time.monotonic()
        while True:
            there = {entry.name: entry.stat().st_size for entry in os.scandir(self.staging)}
            missing = [name for name in names if name not in there]
            if not missing or any(name.endswith(FAILED) for name in there):
                return missing
            if sum(there.values()) != seen:
                seen, since = sum(there.values()), time.monotonic()
            elif time.monotonic() - since > patience:
                return missing
            time.sleep(_LOOK_EVERY_SECONDS)


_current: list[UnfinishedSave] = []  # one at most
# A forked child has none of the threads that write, and must not give a name to what they have not finished.
os.register_at_fork(after_in_child=_current.clear)


def add(save: UnfinishedSave) -> None:
    """From now on the functions below take care of it. There is no other one: ``finish`` was called before."""
    _current.append(save)


def poll(make_channel: Callable[[], ControlChannel], owner: int) -> None:
    """Complete the save of ``owner`` if all ranks have written their files. Collective where there is one.

    Raises:
        CheckpointError: on every rank, when some rank could not write.
    """
    if not _current or _current[0].owner != owner:
        return
    channel = make_channel()
    (writing,) = channel.all_reduce_max([int(_current[0].writer.is_writing())], "whether the checkpoint is written")
    if not writing:
        _current.pop().complete(channel)


def finish(channel: ControlChannel) -> None:
    """Wait until there is no unfinished save. Collective where there is one.

    Raises:
        CheckpointError: on every rank, when some rank could not write.
    """
    if _current:
        _current.pop().complete(channel)


def finish_alone(owner: int | None = None) -> None:
    """The same where other ranks cannot be asked; ``owner`` None: whoever saved.

    Raises:
        CheckpointError: files did not come.
    """
    if _current and owner in (None, _current[0].owner):
        _current.pop().complete_alone()


@atexit.register
def _finish_at_exit() -> None:
    try:
        finish_alone()
    except (CheckpointError, OSError) as error:  # there is no caller any more
        logger.error(str(error))
