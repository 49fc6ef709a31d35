# SPDX-License-Identifier: Apache-2.0

from typing import Any

from deepspeed import unbuilt


def __getattr__(name: str) -> Any:
    unbuilt.refuse(__name__, name)
