# SPDX-License-Identifier: Apache-2.0
"""Config section ``timers``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.config_utils import DeepSpeedConfigModel, check_section_keys, read_section

TIMERS = "timers"
TIMERS_THROUGHPUT = "throughput"


class DeepSpeedThroughputTimerConfig(DeepSpeedConfigModel):
    """Throughput timer; ``synchronized`` waits for the device at each reading."""

    enabled: bool = True
    synchronized: bool = True


def get_timers_config(param_dict: Mapping[str, Any]) -> DeepSpeedThroughputTimerConfig:
    """Parse ``timers.throughput``.

    Raises:
        pydantic.ValidationError: an unknown key or a value that is not allowed.
    """
    timers = read_section(param_dict, TIMERS)
    check_section_keys(timers, [TIMERS_THROUGHPUT], TIMERS)
    return DeepSpeedThroughputTimerConfig(**read_section(timers, TIMERS_THROUGHPUT))
