# SPDX-License-Identifier: Apache-2.0
"""Config section ``gradient_check``, and the environment variable that overrides it without a change to a script."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from deepspeed.runtime.config_utils import (
    DeepSpeedConfigModel,
    DeepSpeedConfigValueError,
    closest_key,
    read_section,
)

GRADIENT_CHECK = "gradient_check"
ENVIRONMENT = "DS_GRADIENT_CHECK"
ON, OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


class GradientCheckConfig(DeepSpeedConfigModel):
    """Which updates are checked, how closely, for which parameters, and what happens when one is wrong."""

    enabled: bool = False
    every: int = Field(1, ge=1)
    steps: int | None = Field(None, ge=1)
    tolerance: float | None = Field(None, gt=0)
    parameters: list[str] = ["*"]
    on_mismatch: Literal["raise", "warn"] = "raise"


def get_gradient_check_config(param_dict: Mapping[str, Any]) -> GradientCheckConfig:
    """Section ``gradient_check``, with what ``DS_GRADIENT_CHECK`` says instead.

    The variable is ``1`` (switched on), ``0`` (switched off) or ``key=value,key=value`` with the keys of the section;
    patterns of parameters are separated by ``|``. Without the variable, or where it is empty, the section holds.

    Raises:
        pydantic.ValidationError: an unknown key of the section, or a value that is not allowed.
        DeepSpeedConfigValueError: the variable cannot be read.
    """
    section = dict(read_section(param_dict, GRADIENT_CHECK))
    text = os.environ.get(ENVIRONMENT, "").strip()
    if text:
        section.update(_from_environment(text))
    return GradientCheckConfig(**section)


def _from_environment(text: str) -> dict[str, Any]:
    if text.lower() in OFF:
        return {"enabled": False}
    values: dict[str, Any] = {"enabled": True}
    for part in [] if text.lower() in ON else text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or key not in GradientCheckConfig.model_fields:
            near = closest_key(key, GradientCheckConfig.model_fields)
            advice = f"; did you mean {near!r}?" if near else ""
            raise DeepSpeedConfigValueError(
                f"environment variable {ENVIRONMENT}={text!r}: {part!r} is not key=value with a key of the config"
                f" section {GRADIENT_CHECK!r} ({', '.join(GradientCheckConfig.model_fields)}){advice}. Write 1, 0 or"
                " for example every=100,on_mismatch=warn,parameters=encoder.*|head.*"
            )
        values[key] = value.split("|") if key == "parameters" else value
    return values
