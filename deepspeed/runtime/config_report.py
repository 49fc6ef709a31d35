# SPDX-License-Identifier: Apache-2.0
"""Effective values of a config and where each comes from, for ``DeepSpeedConfig.print`` and the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import BaseModel

from deepspeed.comm.constants import COMMS_LOGGER
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.profiling.constants import FLOPS_PROFILER
from deepspeed.runtime import constants as const
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT
from deepspeed.runtime.config import HIDDEN, HYBRID_ENGINE, SECRET_KEYS, DeepSpeedConfig, read_top_level
from deepspeed.runtime.config_checks import keys_without_effect, unsupported_features
from deepspeed.runtime.config_sections import (
    PIPELINE,
    SECTIONS,
    TOP_LEVEL_DTYPES,
    TOP_LEVEL_SCALARS,
    read_whole_section,
)
from deepspeed.runtime.config_utils import AUTO
from deepspeed.runtime.gradients.self_check_config import GRADIENT_CHECK
from deepspeed.runtime.swap_tensor.constants import AIO
from deepspeed.runtime.tensor_parallel.config import TENSOR_PARALLEL
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
from deepspeed.utils.config import TIMERS

DEFAULT, DERIVED = "default", "derived"


def describe(config: DeepSpeedConfig) -> list[str]:
    """One line ``key = value  (origin)`` per effective value.

    The origin is what the config was given as (``file``, ``dict``, ``base64``), ``auto`` (given as "auto", hence the
    default), ``default``, or ``derived`` (with the reason).
    """
    lines = []
    for key, value in sorted(_effective_values(config).items()):
        if isinstance(value, tuple):
            value, origin = value
        else:
            origin = _origin(config, key)
        if value is not None and key.rsplit(".", 1)[-1] in SECRET_KEYS:
            value = HIDDEN
        text = str(value) if isinstance(value, (torch.dtype, os.PathLike)) else json.dumps(value, default=str)
        lines.append(f"{key} = {text}  ({origin})")
    return lines


def _origin(config: DeepSpeedConfig, dotted: str) -> str:
    node: Any = config._param_dict
    for part in dotted.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return DEFAULT
        node = node[part]
    return AUTO if isinstance(node, str) and node == AUTO else config.source


def _effective_values(config: DeepSpeedConfig) -> dict[str, Any]:
    """Value by dotted path, as ``(value, origin)`` where the place in the given dict does not tell the origin."""
    values: dict[str, Any] = {key: read_top_level(config._param_dict, key) for key in TOP_LEVEL_SCALARS}
    values.update({key: getattr(config, key) for key in TOP_LEVEL_DTYPES})
    values.update(_batch_sizes(config))
    if config.flops_profiler_config.enabled:
        values[const.WALL_CLOCK_BREAKDOWN] = (config.wall_clock_breakdown, f"{DERIVED}: flops_profiler.enabled")
    for path in SECTIONS:
        values.update(_named(path, read_whole_section(config._param_dict, path)))
    values[f"{const.OPTIMIZER}.{const.TYPE}"] = config.optimizer_name  # in its canonical spelling
    values.update(_named(const.CHECKPOINT, config.checkpoint_config))
    values.update(_named(AIO, config.aio_config))
    values.update(_named(FLOPS_PROFILER, config.flops_profiler_config.repr()))
    values.update(_named(ACT_CHKPT, config.activation_checkpointing_config.repr()))
    values.update(_named(PIPELINE, config.pipeline))
    for name, section in (
        (const.FP16, config.float16_config),
        (const.BFLOAT16, config.bfloat16_config),
        (ZERO_OPTIMIZATION, config.zero_config),
        (COMMS_LOGGER, config.comms_config.comms_logger),
        (f"{TIMERS}.throughput", config.timers_config),
        (GRADIENT_CHECK, config.gradient_check_config),
        (HYBRID_ENGINE, config.hybrid_engine),
        (TENSOR_PARALLEL, config.tensor_parallel_config),
        *((monitor, getattr(config.monitor_config, monitor)) for monitor in DeepSpeedMonitorConfig.model_fields),
    ):
        values.update(_model_values(name, section, config))
    return values


def _batch_sizes(config: DeepSpeedConfig) -> dict[str, tuple[int, str]]:
    sizes = config._batch_sizes
    values = {}
    for key, number in (
        (const.TRAIN_BATCH_SIZE, sizes.train),
        (const.TRAIN_MICRO_BATCH_SIZE_PER_GPU, sizes.micro),
        (const.GRADIENT_ACCUMULATION_STEPS, sizes.gas),
    ):
        origin, value = _origin(config, key), getattr(config, key)
        if value != number.value:
            origin = f"{DERIVED}: changed after the config was read"
        elif origin == DEFAULT:
            origin = DEFAULT if number.source == DEFAULT else f"{DERIVED}: {number.source}"
        values[key] = (value, origin)
    return values


def _named(path: str, section: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in section.items():
        values.update(_named(f"{path}.{key}", value) if key == "writer" and value else {f"{path}.{key}": value})
    return values


def _model_values(name: str, model: BaseModel, config: DeepSpeedConfig) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field, info in type(model).model_fields.items():
        value = getattr(model, field)
        key = f"{name}.{info.alias or field}"
        if isinstance(value, BaseModel):
            values.update(_model_values(key, value, config))
            continue
        origin = next((o for o in (_origin(config, key), _origin(config, f"{name}.{field}")) if o != DEFAULT), DEFAULT)
        if origin == DEFAULT and field in model.model_fields_set:
            origin = f"{config.source}, by its old name"
        elif origin == DEFAULT and value != info.get_default(call_default_factory=True):
            origin = DERIVED
        values[key] = (value, origin)
    return values


def main(arguments: list[str] | None = None) -> int:
    """``python -m deepspeed.runtime.config_report FILE``, or ``--docs`` or ``--schema``. Returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m deepspeed.runtime.config_report",
        description="Print the effective values of a config and where each comes from.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("file", nargs="?", help="JSON or hjson file, or base64 of JSON")
    what.add_argument("--docs", action="store_true", help="print the page of all config keys (docs/config.md)")
    what.add_argument("--schema", action="store_true", help="print a JSON schema for editors")
    chosen = parser.parse_args(arguments)
    # Imported here: they read this package's config module, and only these options need them.
    from deepspeed.runtime import config_docs, config_schema

    if chosen.docs:
        print(config_docs.render(), end="")
    elif chosen.schema:
        print(json.dumps(config_schema.json_schema(), indent=2))
    else:
        _report(DeepSpeedConfig(chosen.file))
    return 0


def _report(config: DeepSpeedConfig) -> None:
    print("\n".join(describe(config)))
    for key in keys_without_effect(config):
        print(f"NO EFFECT {key}")
    for feature in unsupported_features(config):
        print(f"NOT SUPPORTED {feature}")


if __name__ == "__main__":
    sys.exit(main())
