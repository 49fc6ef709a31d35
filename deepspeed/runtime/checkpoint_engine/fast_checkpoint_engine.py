# SPDX-License-Identifier: Apache-2.0
"""Writing through large buffers (``checkpoint.writer``), at once."""

from typing import Any

from deepspeed.checkpoint import storage
from deepspeed.checkpoint.block_stream import Steady
from deepspeed.checkpoint.host_copies import writable_state
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine, load_to
from deepspeed.runtime.model_checkpointing.constants import CHECKPOINT_WRITER_TYPE, CheckpointWriterType
from deepspeed.runtime.model_checkpointing.writer_factory import CheckpointWriterFactory


class FastCheckpointEngine(CheckpointEngine):
    """Files are on the disk when ``save`` returns.

    Args:
        config_params: a ``DeepSpeedConfig`` with a section ``checkpoint.writer``.
        dp_writer_config: must be None; each rank writes its own file.
        optimize_dp_state: without meaning here.
    """

    def __init__(self, config_params: Any, dp_writer_config: Any = None, optimize_dp_state: bool = False) -> None:
        super().__init__(config_params)
        self._optimize_dp_state = optimize_dp_state
        writer = config_params.checkpoint_config["writer"]
        self._writers = CheckpointWriterFactory(writer, config_params.aio_config, dp_writer_config)
        self._mock = writer[CHECKPOINT_WRITER_TYPE] == CheckpointWriterType.MOCK

    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def save(self, state_dict: Any, path: str) -> None:
        self.write(writable_state(state_dict), path)

    def write(self, content: Any, path: str, steady: Steady | None = None) -> None:
        """Write what is in host memory already and does not change.

        Args:
            steady: memory that is known to stay as it is while this runs.
        """
        storage.write_tensors(path, content, self._open, keep=not self._mock, steady=steady)

    def _open(self, path: str) -> Any:
        return self._writers.create_writer(path, self._optimize_dp_state)

    def load(self, path: str, map_location: Any = None) -> Any:
        return load_to(path, map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True

    def cleanup(self) -> None:
        self._writers.release_writer()

    def writes_files(self) -> bool:
        return not self._mock
