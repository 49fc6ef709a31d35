# SPDX-License-Identifier: Apache-2.0
"""Config section ``activation_checkpointing``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.config_utils import DeepSpeedConfigObject, check_section_keys, read_section, read_value

ACT_CHKPT_PARTITION_ACTIVATIONS = "partition_activations"
ACT_CHKPT_PARTITION_ACTIVATIONS_DEFAULT = False
ACT_CHKPT_NUMBER_CHECKPOINTS = "number_checkpoints"
ACT_CHKPT_NUMBER_CHECKPOINTS_DEFAULT = None
ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION = "contiguous_memory_optimization"
ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION_DEFAULT = False
ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY = "synchronize_checkpoint_boundary"
ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY_DEFAULT = False
ACT_CHKPT_PROFILE = "profile"
ACT_CHKPT_PROFILE_DEFAULT = False
ACT_CHKPT_CPU_CHECKPOINTING = "cpu_checkpointing"
ACT_CHKPT_CPU_CHECKPOINTING_DEFAULT = False
ACT_CHKPT = "activation_checkpointing"

ACT_CHKPT_DEFAULT: dict[str, Any] = {
    ACT_CHKPT_PARTITION_ACTIVATIONS: ACT_CHKPT_PARTITION_ACTIVATIONS_DEFAULT,
    ACT_CHKPT_NUMBER_CHECKPOINTS: ACT_CHKPT_NUMBER_CHECKPOINTS_DEFAULT,
    ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION: ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION_DEFAULT,
    ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY: ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY_DEFAULT,
    ACT_CHKPT_PROFILE: ACT_CHKPT_PROFILE_DEFAULT,
    ACT_CHKPT_CPU_CHECKPOINTING: ACT_CHKPT_CPU_CHECKPOINTING_DEFAULT,
}


class DeepSpeedActivationCheckpointingConfig(DeepSpeedConfigObject):
    """How ``deepspeed.checkpointing`` stores activations.

    Unknown keys are ignored unless they look like a misspelling (DeepSpeedConfigError).
    """

    partition_activations: bool
    number_checkpoints: int | None
    contiguous_memory_optimization: bool
    synchronize_checkpoint_boundary: bool
    profile: bool
    cpu_checkpointing: bool

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        section = read_section(param_dict, ACT_CHKPT)
        check_section_keys(section, ACT_CHKPT_DEFAULT, ACT_CHKPT)
        for key, default in ACT_CHKPT_DEFAULT.items():
            kind = "int" if key == ACT_CHKPT_NUMBER_CHECKPOINTS else "bool"
            setattr(self, key, read_value(section, key, default, kind, ACT_CHKPT))

    def asks_for_anything(self) -> bool:
        """Whether any value is not the default."""
        return any(getattr(self, key) != default for key, default in ACT_CHKPT_DEFAULT.items())
