# SPDX-License-Identifier: Apache-2.0
"""How the files of a checkpoint are written: at once, through large buffers, or while training goes on."""

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.checkpoint_engine.datastates_checkpoint_engine import DataStatesCheckpointEngine
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import DecoupledCheckpointEngine
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.utils import create_checkpoint_engine

__all__ = [
    "CheckpointCommitInfo",
    "CheckpointEngine",
    "DataStatesCheckpointEngine",
    "DecoupledCheckpointEngine",
    "FastCheckpointEngine",
    "TorchCheckpointEngine",
    "create_checkpoint_engine",
]
