# SPDX-License-Identifier: Apache-2.0
"""Config section ``checkpoint``: the part that concerns how files are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.config_utils import (
    DeepSpeedConfigValueError,
    check_section_keys,
    read_section,
    read_value,
)
from deepspeed.runtime.model_checkpointing import constants as const

VALID_VALUES: dict[str, list[str]] = {
    const.CHECKPOINT_TAG_VALIDATION: const.CHECKPOINT_TAG_VALIDATION_MODES,
    const.CHECKPOINT_WRITER_TYPE: const.CHECKPOINT_WRITER_TYPES,
    const.CHECKPOINT_DATA_PARALLEL: const.CHECKPOINT_DATA_PARALLEL_UNITS,
}

CHECKPOINT_DEFAULT_DICT: dict[str, Any] = {
    const.CHECKPOINT_TAG_VALIDATION: const.CHECKPOINT_TAG_VALIDATION_DEFAULT,
    const.CHECKPOINT_SERIALIZATION: const.CHECKPOINT_SERIALIZATION_DEFAULT,
    const.CHECKPOINT_WRITER: const.CHECKPOINT_WRITER_DEFAULT,
}

_WRITER_KINDS: dict[str, tuple[str, Any]] = {
    const.CHECKPOINT_WRITER_TYPE: ("str", const.CHECKPOINT_WRITER_TYPE_DEFAULT),
    const.CHECKPOINT_IO_BUFFER_SIZE: ("int", const.CHECKPOINT_IO_BUFFER_SIZE_DEFAULT),
    const.CHECKPOINT_IO_BUFFER_DOUBLE: ("bool", const.CHECKPOINT_IO_BUFFER_DOUBLE_DEFAULT),
    const.CHECKPOINT_IO_STATISTICS: ("bool", const.CHECKPOINT_IO_STATISTICS_DEFAULT),
    const.CHECKPOINT_DATA_PARALLEL: ("str", const.CHECKPOINT_DATA_PARALLEL_DEFAULT),
    const.CHECKPOINT_WRITER_DECOUPLED: ("bool", const.CHECKPOINT_WRITER_DECOUPLED_DEFAULT),
    const.CHECKPOINT_IO_MULTIPLIER: ("int", const.CHECKPOINT_IO_MULTIPLIER_DEFAULT),
}

# Keys of the same section that are read by deepspeed.runtime.config.
_OTHER_KEYS = ("load_universal", "use_node_local_storage", "parallel_write")


def get_checkpoint_writer_config(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """Parse ``checkpoint.writer``; None (plain ``torch.save``) when absent or null. ``io_buffer_size`` is in bytes.

    Raises:
        AssertionError: an unknown writer type or data-parallel unit.
        DeepSpeedConfigError: a wrong type or a misspelt key.
    """
    checkpoint = read_section(param_dict, const.CHECKPOINT)
    if checkpoint.get(const.CHECKPOINT_WRITER) is None:
        return None
    where = f"{const.CHECKPOINT}.{const.CHECKPOINT_WRITER}"
    section = read_section(checkpoint, const.CHECKPOINT_WRITER)
    check_section_keys(section, _WRITER_KINDS, where)
    writer: dict[str, Any] = {}
    for key, (kind, default) in _WRITER_KINDS.items():
        try:
            writer[key] = read_value(section, key, default, kind, where, choices=VALID_VALUES.get(key))
        except DeepSpeedConfigValueError as error:
            raise AssertionError(str(error)) from None
    return writer


def get_checkpoint_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the section ``checkpoint`` into a dict with ``tag_validation``, ``checkpoint_serialization``, ``writer``.

    Raises:
        DeepSpeedConfigError: a tag validation mode that does not exist, a wrong type, a misspelt key.
        AssertionError: an unknown writer type or data-parallel unit.
    """
    section = read_section(param_dict, const.CHECKPOINT)
    check_section_keys(section, [*CHECKPOINT_DEFAULT_DICT, *_OTHER_KEYS], const.CHECKPOINT)
    return {
        const.CHECKPOINT_TAG_VALIDATION: read_value(
            section,
            const.CHECKPOINT_TAG_VALIDATION,
            const.CHECKPOINT_TAG_VALIDATION_DEFAULT,
            "str",
            const.CHECKPOINT,
            choices=const.CHECKPOINT_TAG_VALIDATION_MODES,
        ),
        const.CHECKPOINT_SERIALIZATION: read_value(
            section,
            const.CHECKPOINT_SERIALIZATION,
            const.CHECKPOINT_SERIALIZATION_DEFAULT,
            "bool",
            const.CHECKPOINT,
        ),
        const.CHECKPOINT_WRITER: get_checkpoint_writer_config(param_dict),
    }
