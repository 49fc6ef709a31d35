# SPDX-License-Identifier: Apache-2.0
"""Writing while training goes on (``checkpoint.writer.decoupled``)."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from deepspeed.checkpoint.host_copies import HostBuffers
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine

ENGINE_NAME = "DecoupledCheckpointEngine"
# How long the rank that renames waits at the end of the program for files of other ranks, without seeing them grow.
DEFAULT_CHECKPOINT_TIMEOUT_SECONDS = 300


class DecoupledCheckpointEngine(CheckpointEngine):
    """``save`` copies to host memory and returns; a thread writes the copies. What rests until the next step is copied
    beside training, by threads that give way to it; what they did not come to, the step copies with all of its own.

    The thread is not a daemon: the interpreter does not end before the files are on the disk.

    Args:
        config_params, dp_writer_config, optimize_dp_state: as for ``FastCheckpointEngine``, which writes.
    """

    def __init__(self, config_params: Any, dp_writer_config: Any = None, optimize_dp_state: bool = False) -> None:
        super().__init__(config_params)
        self._writer = FastCheckpointEngine(config_params, dp_writer_config, optimize_dp_state)
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._queue: list[tuple[Any, str, bool]] = []  # contents, path, whether some of them rest
        self._fault: BaseException | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        """A checkpoint begins; one that is being written is waited for, and what went wrong with it is raised."""
        self._join()
        self._fault = None
        self.set_commit_info(info)

    def save(self, state_dict: Any, path: str) -> None:
        self._queue.append((self._buffers.snapshot(state_dict), path, False))

    def save_resting(
        self, state_dict: Any, path: str, rests: Callable[[torch.Tensor], bool]
    ) -> Callable[[], None] | None:
        self._queue.append((self._buffers.snapshot(state_dict, rests), path, True))
        return self._await_copies

    def _await_copies(self) -> None:
        if self._thread is not None:  # else the checkpoint has been given up
            self._buffers.settle(torch.get_num_threads())

    def begin_commit(self, info: CheckpointCommitInfo) -> None:
        """Write what was handed over, from now on."""
        self._buffers.wait()
        self._thread = threading.Thread(target=self._write_all, name="checkpoint writer")
        self._thread.start()

    def _write_all(self) -> None:
        try:
            if not self._buffers.copies_beside:
                self._buffers.settle()
            while self._queue:
                content, path, rests = self._queue.pop(0)
                if rests:
                    self._buffers.settle()
                    self._buffers.check_rest()
                self._writer.write(content, path, self._buffers.steady())
        except BaseException as error:  # noqa: BLE001 - the caller of commit() gets it
            self._fault = error

    def load(self, path: str, map_location: Any = None) -> Any:
        return self._writer.load(path, map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        if self._thread is None and self._queue:
            self.begin_commit(info)
        self._join()
        self._commit_info = None
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        return True

    def _join(self) -> None:
        if self._thread is not None:
            self._await_copies()
            self._thread.join()
            self._thread = None
        self._queue.clear()
        self._buffers.release()

    def is_decoupled(self) -> bool:
        return True

    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def writes_files(self) -> bool:
        return self._writer.writes_files()

    def cleanup(self) -> None:
        self._join()
        self._buffers = HostBuffers()
        self._writer.cleanup()
