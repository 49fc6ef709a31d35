# SPDX-License-Identifier: Apache-2.0
"""Config sections ``zero_optimization.offload_param`` and ``zero_optimization.offload_optimizer``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from pydantic import Field, model_validator

from deepspeed.runtime.config_utils import DeepSpeedConfigModel


class OffloadDeviceEnum(str, Enum):
    """Where offloaded state lives."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


def _require_nvme_path(section: str, device: str, nvme_path: Path | None) -> None:
    if device == OffloadDeviceEnum.nvme and nvme_path is None:
        raise ValueError(f"{section}.device is 'nvme' but {section}.nvme_path, the folder to swap to, is not given")


class DeepSpeedZeroOffloadParamConfig(DeepSpeedConfigModel):
    """Offload of partitioned parameters (stage 3). Counts are buffers, sizes are elements."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = Field(5, ge=0)
    buffer_size: int = Field(int(1e8), ge=0)
    max_in_cpu: int = Field(int(1e9), ge=0)
    pin_memory: bool = True

    @model_validator(mode="after")
    def nvme_path_given(self) -> DeepSpeedZeroOffloadParamConfig:
        """nvme needs a folder."""
        _require_nvme_path("offload_param", self.device, self.nvme_path)
        return self


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel):
    """Offload of optimizer states and of the optimizer step.

    ``ratio`` is the part of the parameters updated on the CPU (stage 3), ``cpuadam_cores_perc`` the part of the cores
    that super_offload gives to CPU Adam.
    """

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = Field(4, ge=0)
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = Field(1.0, ge=0.0, le=1.0)
    super_offload: bool = False
    cpuadam_cores_perc: float = Field(0.8, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def nvme_path_given(self) -> DeepSpeedZeroOffloadOptimizerConfig:
        """nvme needs a folder."""
        _require_nvme_path("offload_optimizer", self.device, self.nvme_path)
        return self

    @property
    def pipeline(self) -> bool:
        """Whether swapping overlaps the optimizer step in either direction."""
        return self.pipeline_read or self.pipeline_write


class OffloadStateTypeEnum(str, Enum):
    """Kinds of state that ``engine.offload_states`` can move: lp is the model dtype, hp the master dtype."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
