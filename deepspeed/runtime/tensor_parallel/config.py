# SPDX-License-Identifier: Apache-2.0
"""Config section ``tensor_parallel``."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal

import torch
from pydantic import Field, field_validator

from deepspeed.runtime.config_utils import DeepSpeedConfigModel, dtype_from_name, read_section

TENSOR_PARALLEL = "tensor_parallel"


class AUTOTP_MODE(Enum):  # The name is part of the interface.
    """What automatic tensor parallelism is used for."""

    TRAINING = "TRAINING"
    INFERENCE = "INFERENCE"


class TPConfig(DeepSpeedConfigModel):
    """Tensor-parallel group."""

    tp_size: int = 1
    tp_grain_size: int = 1
    mpu: Any = None
    tp_group: Any = None


class TPTrainingConfig(DeepSpeedConfigModel):
    """Automatic tensor parallelism in training; ``autotp_size`` 0 switches it off."""

    dtype: torch.dtype = torch.float16
    autotp_size: int = 0
    tp_overlap_comm: bool = False
    vocab_parallel_lm_head: bool | None = None
    vocab_parallel_ce_backend: Literal["torch", "liger"] = "torch"
    tensor_parallel: TPConfig = Field(default_factory=TPConfig, alias="tp")
    injection_policy_tuple: tuple | None = None
    partition_config: dict[str, Any] | None = None
    preset_model: str | None = None
    keep_module_on_host: bool = False
    replace_with_kernel_inject: bool = Field(False, alias="kernel_inject")

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype_by_name(cls, value: Any) -> Any:
        return value if isinstance(value, torch.dtype) else dtype_from_name(value) or value


def get_tensor_parallel_config(ds_config: Mapping[str, Any]) -> TPTrainingConfig:
    """Parse the section ``tensor_parallel``.

    Raises:
        pydantic.ValidationError: an unknown key or a value that is not allowed.
    """
    return TPTrainingConfig(**read_section(ds_config, TENSOR_PARALLEL))
