# SPDX-License-Identifier: Apache-2.0
"""Config sections ``fp16`` and ``bf16``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import field_validator, model_validator

from deepspeed.runtime import constants as const
from deepspeed.runtime.config_utils import DeepSpeedConfigModel, read_section, warn_once_on_rank_0
from deepspeed.runtime.constants import BFLOAT16, BFLOAT16_OLD, FP16

__all__ = [
    "BFLOAT16",
    "BFLOAT16_OLD",
    "FP16",
    "DeepSpeedBF16Config",
    "DeepSpeedFP16Config",
    "get_bfloat16_config",
    "get_float16_config",
]


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """bfloat16 training. With ``check_grad_overflow`` a step with non-finite gradients is skipped."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """float16 training. ``loss_scale`` 0 means dynamic loss scaling, starting at ``2 ** initial_scale_power``."""

    enabled: bool = const.FP16_ENABLED_DEFAULT
    auto_cast: bool = const.FP16_AUTO_CAST_DEFAULT
    loss_scale: float = const.FP16_LOSS_SCALE_DEFAULT
    initial_scale_power: int = const.FP16_INITIAL_SCALE_POWER_DEFAULT
    loss_scale_window: int = const.FP16_LOSS_SCALE_WINDOW_DEFAULT
    hysteresis: int = const.FP16_HYSTERESIS_DEFAULT
    consecutive_hysteresis: bool = const.FP16_CONSECUTIVE_HYSTERESIS_DEFAULT
    min_loss_scale: int = const.FP16_MIN_LOSS_SCALE_DEFAULT
    fp16_master_weights_and_grads: bool = const.FP16_MASTER_WEIGHTS_AND_GRADS_DEFAULT

    @field_validator("loss_scale")
    @classmethod
    def _loss_scale_is_finite(cls, value: float) -> float:
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"loss_scale must be finite and >= 0 (0 = dynamic), got {value!r}")
        return value

    @model_validator(mode="after")
    def _dynamic_scale_is_usable(self) -> DeepSpeedFP16Config:
        if self.enabled and self.loss_scale == 0:
            for name in ("loss_scale_window", "min_loss_scale"):
                if getattr(self, name) <= 0:
                    raise ValueError(f"{name} must be > 0 with dynamic loss scaling, got {getattr(self, name)}")
        return self

    def initial_dynamic_scale(self) -> float:
        """First loss scale of dynamic loss scaling."""
        return 2**self.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Arguments of the dynamic loss scaler."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """Parse the section ``bf16``, also accepted under its old name ``bfloat16``.

    Raises:
        AssertionError: both names are given and say different things.
        pydantic.ValidationError: an unknown key or a value that is not allowed.
    """
    if BFLOAT16_OLD not in param_dict:
        return DeepSpeedBF16Config(**read_section(param_dict, BFLOAT16))
    old = read_section(param_dict, BFLOAT16_OLD)
    if BFLOAT16 in param_dict and read_section(param_dict, BFLOAT16) != old:
        raise AssertionError(
            f"The config has both {BFLOAT16!r} ({param_dict[BFLOAT16]!r}) and its old name {BFLOAT16_OLD!r} ({old!r}): "
            f"remove {BFLOAT16_OLD!r}"
        )
    warn_once_on_rank_0(f"Config section {BFLOAT16_OLD!r} is deprecated, use {BFLOAT16!r} instead")
    return DeepSpeedBF16Config(**old)


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """Parse the section ``fp16``.

    Raises:
        pydantic.ValidationError: an unknown key or a value that is not allowed.
    """
    return DeepSpeedFP16Config(**read_section(param_dict, FP16))
