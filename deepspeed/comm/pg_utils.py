# SPDX-License-Identifier: Apache-2.0
"""Questions about process groups."""

from typing import Any

from deepspeed import comm as dist


def is_parallel(group: Any) -> bool:
    """Whether there is a process group and ``group`` (None: the world) has more than one rank."""
    return dist.is_initialized() and dist.get_world_size(group) > 1
