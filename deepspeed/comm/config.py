# SPDX-License-Identifier: Apache-2.0
"""Config section ``comms_logger``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.comm import constants as const
from deepspeed.runtime.config_utils import DeepSpeedConfigModel, read_section


class CommsLoggerConfig(DeepSpeedConfigModel):
    """Logging of collectives: all of them (``prof_all``) or those named in ``prof_ops``."""

    enabled: bool = const.COMMS_LOGGER_ENABLED_DEFAULT
    prof_all: bool = const.COMMS_LOGGER_PROF_ALL_DEFAULT
    prof_ops: list = const.COMMS_LOGGER_PROF_OPS_DEFAULT
    verbose: bool = const.COMMS_LOGGER_VERBOSE_DEFAULT
    debug: bool = const.COMMS_LOGGER_DEBUG_DEFAULT


class DeepSpeedCommsConfig:
    """Communication part of a ds_config.

    Attributes:
        comms_logger_enabled: whether the section ``comms_logger`` is present.
        comms_logger: its content, the defaults (disabled) when absent.
    """

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.comms_logger_enabled: bool = const.COMMS_LOGGER in ds_config
        self.comms_logger = CommsLoggerConfig(**read_section(ds_config, const.COMMS_LOGGER))
