# SPDX-License-Identifier: Apache-2.0
"""The default: ``torch.save``, at once."""

from typing import Any

from deepspeed.checkpoint import storage
from deepspeed.checkpoint.block_stream import Blocks, BlockStream
from deepspeed.checkpoint.host_copies import writable_state
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine, load_to

ENGINE_NAME = "TorchCheckpointEngine"


class TorchCheckpointEngine(CheckpointEngine):
    """Files are on the disk when ``save`` returns."""

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self._blocks = Blocks()

    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def save(self, state_dict: Any, path: str) -> None:
        storage.write_tensors(path, writable_state(state_dict), lambda part: BlockStream(part, self._blocks))

    def load(self, path: str, map_location: Any = None) -> Any:
        return load_to(path, map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True

    def cleanup(self) -> None:
        self._blocks.clear()
