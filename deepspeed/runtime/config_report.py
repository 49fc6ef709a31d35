# SPDX-License-Identifier: Apache-2.0
"""Effective values of a config and where each comes from, for ``DeepSpeedConfig.print`` and the command line."""

from __future__ import annotations

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
from deepspeed.runtime.config import HIDDEN, SECRET_KEYS, TOP_LEVEL_SCALARS, DeepSpeedConfig, read_top_level
from deepspeed.runtime.config_checks import unsupported_features
from deepspeed.runtime.swap_tensor.constants import AIO
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
from deepspeed.utils.config import TIMERS


def describe(config: DeepSpeedConfig) -> list[str]:
    """One line ``key = value  (origin)`` per effective value; origin is user, default or derived (with the reason)."""
    given = config._param_dict
    lines = []
    for key, value in sorted(_effective_values(config).items()):
        if isinstance(value, tuple):
            value, origin = value
        else:
            origin = _origin(given, key)
        if value is not None and key.rsplit(".", 1)[-1] in SECRET_KEYS:
            value = HIDDEN
        text = str(value) if isinstance(value, (torch.dtype, os.PathLike)) else json.dumps(value, default=str)
        lines.append(f"{key} = {text}  ({origin})")
    return lines


def _origin(given: Mapping[str, Any], dotted: str) -> str:
    node: Any = given
    for part in dotted.split("."):
        if not isinstance(node, Mapping) or part not in node or node[part] == "auto":
            return "default"
        node = node[part]
    return "user"


def _effective_values(config: DeepSpeedConfig) -> dict[str, Any]:
    given = config._param_dict
    values: dict[str, Any] = {}
    for key in TOP_LEVEL_SCALARS:
        values[key] = read_top_level(given, key)
    sizes = config._batch_sizes
    for key, number in (
        (const.TRAIN_BATCH_SIZE, sizes.train),
        (const.TRAIN_MICRO_BATCH_SIZE_PER_GPU, sizes.micro),
        (const.GRADIENT_ACCUMULATION_STEPS, sizes.gas),
    ):
        origin = "user" if _origin(given, key) == "user" else f"derived: {number.source}"
        value = getattr(config, key)
        values[key] = (value, origin if value == number.value else "derived: changed after the config was read")
    values[const.COMMUNICATION_DATA_TYPE] = config.communication_data_type
    values[const.SEQ_PARALLEL_COMMUNICATION_DATA_TYPE] = config.seq_parallel_communication_data_type
    if config.flops_profiler_config.enabled:
        values[const.WALL_CLOCK_BREAKDOWN] = (config.wall_clock_breakdown, "derived: flops_profiler.enabled")
    for key in (const.GRAD_ACCUM_DTYPE, const.PARAM_DTYPE, const.BUFFER_DTYPE, const.KEEP_IN_FP32_MODULES):
        values[f"{const.DATA_TYPES}.{key}"] = getattr(config, key)
    values[f"{const.OPTIMIZER}.type"] = config.optimizer_name
    values[f"{const.OPTIMIZER}.params"] = config.optimizer_params
    values[f"{const.OPTIMIZER}.{const.LEGACY_FUSION}"] = config.optimizer_legacy_fusion
    values[f"{const.SCHEDULER}.type"] = config.scheduler_name
    values[f"{const.SCHEDULER}.params"] = config.scheduler_params
    autocast = const.TORCH_AUTOCAST
    modules = config.torch_autocast_lower_precision_safe_modules
    values[f"{autocast}.{const.TORCH_AUTOCAST_ENABLED}"] = config.torch_autocast_enabled
    values[f"{autocast}.{const.TORCH_AUTOCAST_DTYPE}"] = config.torch_autocast_dtype
    values[f"{autocast}.{const.TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES}"] = modules
    for name, section in (
        (const.FP16, config.float16_config),
        (const.BFLOAT16, config.bfloat16_config),
        (ZERO_OPTIMIZATION, config.zero_config),
        (COMMS_LOGGER, config.comms_config.comms_logger),
        (f"{TIMERS}.throughput", config.timers_config),
        *((monitor, getattr(config.monitor_config, monitor)) for monitor in DeepSpeedMonitorConfig.model_fields),
    ):
        values.update(_model_values(name, section, given))
    for name, plain in (
        (AIO, config.aio_config),
        (const.CHECKPOINT, config.checkpoint_config),
        (
            const.CHECKPOINT,
            {
                const.LOAD_UNIVERSAL_CHECKPOINT: config.load_universal_checkpoint,
                const.USE_NODE_LOCAL_STORAGE_CHECKPOINT: config.use_node_local_storage,
            },
        ),
        (FLOPS_PROFILER, config.flops_profiler_config.repr()),
        (ACT_CHKPT, config.activation_checkpointing_config.repr()),
    ):
        values.update({f"{name}.{key}": value for key, value in plain.items()})
    return values


def _model_values(name: str, model: BaseModel, given: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field, info in type(model).model_fields.items():
        value = getattr(model, field)
        key = f"{name}.{info.alias or field}"
        if isinstance(value, BaseModel):
            values.update(_model_values(key, value, given))
        elif field in model.model_fields_set:
            values[key] = (value, "user")
        elif value != info.get_default(call_default_factory=True):
            values[key] = (value, "derived")
        else:
            values[key] = (value, "default")
    return values


def main(arguments: list[str] | None = None) -> int:
    """``python -m deepspeed.runtime.config_report FILE``: print the effective values of a config and their origin."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1:
        print("usage: python -m deepspeed.runtime.config_report FILE", file=sys.stderr)
        return 2
    config = DeepSpeedConfig(arguments[0])
    print("\n".join(describe(config)))
    for feature in unsupported_features(config):
        print(f"NOT SUPPORTED {feature}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
