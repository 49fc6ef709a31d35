# SPDX-License-Identifier: Apache-2.0
"""The DataStates engine belongs to a package of its own that is not supported."""

from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

ENGINE_NAME = "DataStatesCheckpointEngine"


class DataStatesCheckpointEngine(CheckpointEngine):
    """Refused: there is no such engine here.

    Raises:
        NotImplementedError: always.
    """

    def __init__(self, deepspeed_config: Any, rank: int) -> None:
        raise NotImplementedError(
            "the DataStates checkpoint engine (config section 'datastates_ckpt') is not supported; for writing while"
            " training goes on set 'checkpoint': {'writer': {'decoupled': true}}"
        )

    def create(self, info: CheckpointCommitInfo) -> None:
        raise NotImplementedError(ENGINE_NAME)

    def save(self, state_dict: Any, path: str) -> None:
        raise NotImplementedError(ENGINE_NAME)

    def load(self, path: str, map_location: Any = None) -> Any:
        raise NotImplementedError(ENGINE_NAME)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        raise NotImplementedError(ENGINE_NAME)
