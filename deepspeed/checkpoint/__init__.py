# SPDX-License-Identifier: Apache-2.0
"""Reading and writing the files of checkpoints."""

from typing import Any

from deepspeed import unbuilt

_LAZY = ("SubparamShape", "enable_universal_checkpoint")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from deepspeed.checkpoint import universal_checkpoint

        return getattr(universal_checkpoint, name)
    unbuilt.refuse(__name__, name)
