# SPDX-License-Identifier: Apache-2.0
"""Config sections ``tensorboard``, ``wandb``, ``csv_monitor`` and ``comet``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from deepspeed.runtime.config_utils import DeepSpeedConfigModel, read_section

DEFAULT_JOB_NAME = "DeepSpeedJobName"


class TensorBoardConfig(DeepSpeedConfigModel):
    """TensorBoard event files under ``output_path/job_name``."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = DEFAULT_JOB_NAME


class WandbConfig(DeepSpeedConfigModel):
    """Weights & Biases run."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class CSVConfig(DeepSpeedConfigModel):
    """One CSV file per event name under ``output_path/job_name``."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = DEFAULT_JOB_NAME


class CometConfig(DeepSpeedConfigModel):
    """Comet experiment; metrics are logged every ``samples_log_interval`` samples."""

    enabled: bool = False
    samples_log_interval: int = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """All monitors; ``enabled`` says whether any of them is."""

    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    comet: CometConfig = Field(default_factory=CometConfig)
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    csv_monitor: CSVConfig = Field(default_factory=CSVConfig)

    def check_enabled(self) -> bool:
        """Whether at least one monitor is enabled."""
        return any(monitor.enabled for monitor in (self.tensorboard, self.comet, self.wandb, self.csv_monitor))

    @property
    def enabled(self) -> bool:
        """Same as :meth:`check_enabled`."""
        return self.check_enabled()


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Parse the monitor sections, which stand at top level.

    Raises:
        pydantic.ValidationError: an unknown key or a value that is not allowed.
    """
    return DeepSpeedMonitorConfig(**{key: read_section(param_dict, key) for key in DeepSpeedMonitorConfig.model_fields})
