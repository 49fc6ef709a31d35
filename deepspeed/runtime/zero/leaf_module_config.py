# SPDX-License-Identifier: Apache-2.0
"""Config section ``zero_optimization.leaf_module``: modules that ZeRO-3 gathers as one unit."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from deepspeed.runtime.config_utils import DeepSpeedConfigModel

# Mixture-of-experts blocks of transformers: which experts run differs per rank and step, so their parameters cannot be
# fetched expert by expert in an order that all ranks share.
DEFAULT_LEAF_MODULE_CLASSES: list[str] = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """Leaf modules by class path, by module name and by ending of the module name; a single string is a list of one."""

    classes: list[str] = Field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_CLASSES))
    names: list[str] = Field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_NAMES))
    name_suffixes: list[str] = Field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_NAME_SUFFIXES))

    @field_validator("classes", "names", "name_suffixes", mode="before")
    @classmethod
    def _as_list_without_duplicates(cls, value: Any) -> Any:
        if value is None:
            return []
        if isinstance(value, str):
            return [value]
        if not isinstance(value, (list, tuple)):
            return value
        unique: list[Any] = []
        for item in value:
            if item not in unique:
                unique.append(item)
        return unique
