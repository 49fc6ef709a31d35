# SPDX-License-Identifier: Apache-2.0
"""Config section ``checkpoint`` and the streams that its ``writer`` names."""

from deepspeed.runtime.model_checkpointing.constants import (
    CheckpointDataParallel,
    CheckpointWriterType,
    ValidationMode,
)
from deepspeed.runtime.model_checkpointing.writer_factory import CheckpointWriterFactory

__all__ = ["CheckpointDataParallel", "CheckpointWriterFactory", "CheckpointWriterType", "ValidationMode"]
