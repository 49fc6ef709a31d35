# SPDX-License-Identifier: Apache-2.0
"""The checkpoint engine that a configuration asks for."""

from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.datastates_checkpoint_engine import DataStatesCheckpointEngine
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import DecoupledCheckpointEngine
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.model_checkpointing.constants import CHECKPOINT_WRITER_DECOUPLED


def create_checkpoint_engine(
    config_params: Any,
    groups: Any = None,
    zero_stage: int = 0,
    has_moe_layers: bool = False,
    optimize_dp_state: bool = False,
) -> CheckpointEngine:
    """Make the engine of ``checkpoint.writer``; plain ``torch.save`` without that section.

    Args:
        config_params: a ``DeepSpeedConfig``, or None for the default.
        groups, zero_stage, has_moe_layers: without meaning here, since each rank writes its own files.
        optimize_dp_state: handed on to the engine.

    Raises:
        NotImplementedError: DataStates, or a writer option that does not exist here.
    """
    if config_params is None:
        return TorchCheckpointEngine()
    if config_params._param_dict.get("datastates_ckpt"):
        return DataStatesCheckpointEngine(config_params, 0)
    writer = config_params.checkpoint_config["writer"]
    if writer is None:
        return TorchCheckpointEngine(config_params)
    kind = DecoupledCheckpointEngine if writer[CHECKPOINT_WRITER_DECOUPLED] else FastCheckpointEngine
    return kind(config_params, None, optimize_dp_state)
