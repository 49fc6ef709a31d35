# SPDX-License-Identifier: Apache-2.0
from typing import Any

from deepspeed import unbuilt
from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.ops.adam.fused_adam import FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


def __getattr__(name: str) -> Any:
    unbuilt.refuse(__name__, name)
