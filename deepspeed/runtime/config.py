# SPDX-License-Identifier: Apache-2.0
"""The ds_config: reading it from a dict, a file or a string, and its typed form."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any

import hjson
import torch
from pydantic import Field

from deepspeed.comm.config import DeepSpeedCommsConfig
from deepspeed.comm.constants import COMMS_LOGGER
from deepspeed.monitor.config import DeepSpeedMonitorConfig, get_monitor_config
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.profiling.constants import FLOPS_PROFILER
from deepspeed.runtime import constants as const
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT, DeepSpeedActivationCheckpointingConfig
from deepspeed.runtime.batch_config import data_parallel_world_size, resolve_batch_sizes
from deepspeed.runtime.config_checks import check_exclusions, check_top_level_keys, unsupported_features
from deepspeed.runtime.config_utils import (
    DeepSpeedConfigError,
    DeepSpeedConfigModel,
    DeepSpeedConfigTypeError,
    DeepSpeedConfigValueError,
    ScientificNotationEncoder,
    check_section_keys,
    dict_raise_error_on_duplicate_keys,
    dtype_from_name,
    global_rank,
    read_dtype,
    read_section,
    read_value,
    warn_once_on_rank_0,
)
from deepspeed.runtime.model_checkpointing.config import get_checkpoint_config
from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from deepspeed.runtime.swap_tensor.constants import AIO
from deepspeed.runtime.tensor_parallel.config import TENSOR_PARALLEL, get_tensor_parallel_config
from deepspeed.runtime.zero.config import ALLGATHER_SIZE_DEPRECATED, ZERO_OPTIMIZATION, get_zero_config
from deepspeed.utils.config import TIMERS, get_timers_config
from deepspeed.utils.logging import log_levels

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedConfigTypeError",
    "DeepSpeedConfigValueError",
    "DeepSpeedConfigWriter",
    "DtypeEnum",
    "HybridEngineConfig",
    "load_config",
    "unsupported_features",
]

TENSOR_CORE_ALIGN_SIZE = 8
EXPERT_PARALLEL = "expert_parallel"

ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
MUADAM_OPTIMIZER = "muadam"
MUADAMW_OPTIMIZER = "muadamw"
MUSGD_OPTIMIZER = "musgd"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
DEEPSPEED_OPTIMIZERS = [
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    LAMB_OPTIMIZER,
    MUADAM_OPTIMIZER,
    MUADAMW_OPTIMIZER,
    MUSGD_OPTIMIZER,
    LION_OPTIMIZER,
    MUON_OPTIMIZER,
]

# Keys inside optimizer.params: torch_adam selects torch's own Adam, adam_w_mode decoupled weight decay.
TORCH_ADAM_PARAM = "torch_adam"
ADAM_W_MODE = "adam_w_mode"
ADAM_W_MODE_DEFAULT = True

LOG_LEVELS = tuple(log_levels)

# Spellings allowed for each dtype key.
COMMUNICATION_DTYPE_NAMES = ("fp16", "bf16", "fp32")
DATA_TYPE_NAMES = ("fp32", "fp16", "bf16")
AUTOCAST_DTYPE_NAMES = (
    "torch.float16",
    "fp16",
    "float16",
    "half",
    "torch.bfloat16",
    "bf16",
    "bfloat16",
    "torch.float32",
    "fp32",
    "float32",
    "float",
    "torch.int8",
    "int8",
)

# Values that are never printed.
SECRET_KEYS = ("api_key",)
HIDDEN = "(hidden)"

HYBRID_ENGINE = "hybrid_engine"
PIPELINE = "pipeline"
PIPELINE_DEFAULTS: dict[str, Any] = {
    "stages": "auto",
    "partition": "best",
    "seed_layers": False,
    "activation_checkpoint_interval": 0,
    "pipe_partitioned": True,
    "grad_partitioned": True,
}

# Top-level keys with a single value: type, default, limits.
TOP_LEVEL_SCALARS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    const.TRAIN_BATCH_SIZE: ("int", const.TRAIN_BATCH_SIZE_DEFAULT, {}),
    const.TRAIN_MICRO_BATCH_SIZE_PER_GPU: ("int", const.TRAIN_MICRO_BATCH_SIZE_PER_GPU_DEFAULT, {}),
    const.GRADIENT_ACCUMULATION_STEPS: ("int", const.GRADIENT_ACCUMULATION_STEPS_DEFAULT, {}),
    const.MANAGED_GRADIENT_ACCUMULATION: ("bool", const.MANAGED_GRADIENT_ACCUMULATION_DEFAULT, {}),
    const.STEPS_PER_PRINT: ("number", const.STEPS_PER_PRINT_DEFAULT, {"above": 0}),
    const.DUMP_STATE: ("bool", const.DUMP_STATE_DEFAULT, {}),
    const.DISABLE_PYTHON_GC: ("bool", const.DISABLE_PYTHON_GC_DEFAULT, {}),
    const.DISABLE_ALLGATHER: ("bool", const.DISABLE_ALLGATHER_DEFAULT, {}),
    const.PRESCALE_GRADIENTS: ("bool", const.PRESCALE_GRADIENTS_DEFAULT, {}),
    const.GRADIENT_PREDIVIDE_FACTOR: ("number", const.GRADIENT_PREDIVIDE_FACTOR_DEFAULT, {"above": 0}),
    const.GRADIENT_ALLREDUCE_OP: (
        "str",
        const.GRADIENT_ALLREDUCE_OP_DEFAULT,
        {"choices": const.GRADIENT_ALLREDUCE_OP_SUPPORTED},
    ),
    const.GRADIENT_CLIPPING: ("number", const.GRADIENT_CLIPPING_DEFAULT, {"minimum": 0}),
    const.ZERO_ALLOW_UNTESTED_OPTIMIZER: ("bool", const.ZERO_ALLOW_UNTESTED_OPTIMIZER_DEFAULT, {}),
    const.ZERO_FORCE_DS_CPU_OPTIMIZER: ("bool", const.ZERO_FORCE_DS_CPU_OPTIMIZER_DEFAULT, {}),
    const.DATALOADER_DROP_LAST: ("bool", const.DATALOADER_DROP_LAST_DEFAULT, {}),
    const.WALL_CLOCK_BREAKDOWN: ("bool", const.WALL_CLOCK_BREAKDOWN_DEFAULT, {}),
    const.MEMORY_BREAKDOWN: ("bool", const.MEMORY_BREAKDOWN_DEFAULT, {}),
    const.VOCABULARY_SIZE: ("int", const.VOCABULARY_SIZE_DEFAULT, {"above": 0}),
    const.LOG_LEVEL: ("str", const.LOG_LEVEL_DEFAULT, {"choices": LOG_LEVELS}),
    const.USE_DATA_BEFORE_EXPERT_PARALLEL: ("bool", const.USE_DATA_BEFORE_EXPERT_PARALLEL_DEFAULT, {}),
    "sequence_parallel_size": ("int", None, {"above": 0}),
    "data_parallel_size": ("int", None, {"above": 0}),
}

KNOWN_TOP_LEVEL_KEYS = (
    *TOP_LEVEL_SCALARS,
    const.COMMUNICATION_DATA_TYPE,
    const.SEQ_PARALLEL_COMMUNICATION_DATA_TYPE,
    const.OPTIMIZER,
    const.SCHEDULER,
    const.FP16,
    const.BFLOAT16,
    const.BFLOAT16_OLD,
    const.TORCH_AUTOCAST,
    const.DATA_TYPES,
    const.CHECKPOINT,
    ZERO_OPTIMIZATION,
    ALLGATHER_SIZE_DEPRECATED,
    ACT_CHKPT,
    AIO,
    COMMS_LOGGER,
    *DeepSpeedMonitorConfig.model_fields,
    FLOPS_PROFILER,
    TIMERS,
    HYBRID_ENGINE,
    PIPELINE,
    TENSOR_PARALLEL,
    EXPERT_PARALLEL,
    "data_efficiency",
    "compile",
    "weight_quantization",
    "datastates_ckpt",
    "autotuning",
    "inference",
)


class DtypeEnum(Enum):
    """Dtypes by their short names; also found by any of the names torch knows (``DtypeEnum("torch.half")``)."""

    fp16 = torch.float16
    fp32 = torch.float32
    int8 = torch.int8
    bf16 = torch.bfloat16

    @classmethod
    def _missing_(cls, value: object) -> DtypeEnum | None:
        dtype = dtype_from_name(value)
        return None if dtype is None else cls(dtype)


class HybridEngineConfig(DeepSpeedConfigModel):
    """Config section ``hybrid_engine``: one engine for training and generation."""

    enabled: bool = False
    max_out_tokens: int = Field(512, gt=0)
    inference_tp_size: int = 1
    release_inference_cache: bool = False
    pin_parameters: bool = True
    tp_gather_partition_size: int = 8
    enable_cuda_graph: bool = False


# --------------------------------------------------------------------------------------------------------------------
# Reading the source
# --------------------------------------------------------------------------------------------------------------------


def load_config(config: str | os.PathLike[str] | dict[str, Any]) -> dict[str, Any]:
    """The config as a dict: a dict is returned as it is, not copied.

    Args:
        config: a dict, the path of a JSON or hjson file, or urlsafe base64 of a JSON text.

    Raises:
        TypeError: another type, for example None.
        ValueError: a string that is neither an existing file nor base64 JSON, text that cannot be parsed, or an object
            with a duplicate key.
    """
    if isinstance(config, dict):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(
            f"The DeepSpeed config must be a dict or a path, got {config!r} of type {type(config).__name__}"
        )
    if os.path.isfile(config):
        with open(config, encoding="utf-8") as file:
            text = file.read()
        source = f"file {os.fspath(config)!r}"
        try:
            loaded = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
        except ValueError as error:
            raise ValueError(f"Cannot parse the DeepSpeed config in the {source}: {error}") from error
    else:
        source = "base64 string"
        loaded = _load_base64(os.fspath(config))
    if not isinstance(loaded, dict):
        raise ValueError(f"The DeepSpeed config in the {source} must be a JSON object, got {type(loaded).__name__}")
    return loaded


def _load_base64(config: str) -> Any:
    try:
        text = base64.b64decode(config, altchars=b"-_", validate=True).decode("utf-8")
        return json.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except ValueError as error:
        raise ValueError(
            f"The DeepSpeed config {config!r} is neither an existing file nor a urlsafe base64 JSON string ({error})"
        ) from error


# --------------------------------------------------------------------------------------------------------------------
# Reading single keys. Each takes the whole config dict and returns the typed value or its default.
# --------------------------------------------------------------------------------------------------------------------


def read_top_level(param_dict: Mapping[str, Any], key: str) -> Any:
    """A top-level key of :data:`TOP_LEVEL_SCALARS`, checked, or its default."""
    kind, default, limits = TOP_LEVEL_SCALARS[key]
    return read_value(param_dict, key, default, kind, **limits)


def get_expert_parallel_config(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """Section ``expert_parallel``, None when absent."""
    return read_section(param_dict, EXPERT_PARALLEL) or None


def get_torch_autocast_enabled(param_dict: Mapping[str, Any]) -> bool:
    """``torch_autocast.enabled``."""
    section = _torch_autocast(param_dict)
    default = const.TORCH_AUTOCAST_ENABLED_DEFAULT
    return read_value(section, const.TORCH_AUTOCAST_ENABLED, default, "bool", const.TORCH_AUTOCAST)


def get_torch_autocast_dtype(param_dict: Mapping[str, Any]) -> torch.dtype | None:
    """``torch_autocast.dtype``, None when not given. Raises ValueError for an unknown name."""
    section = _torch_autocast(param_dict)
    return read_dtype(section, const.TORCH_AUTOCAST_DTYPE, None, AUTOCAST_DTYPE_NAMES, const.TORCH_AUTOCAST)


def get_lower_precision_safe_modules(param_dict: Mapping[str, Any]) -> list[str] | None:
    """Dotted class names whose parameters may be communicated in low precision. Raises ValueError for a non-string."""
    key, where = const.TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES, const.TORCH_AUTOCAST
    names = read_value(_torch_autocast(param_dict), key, None, "list", where)
    for name in names or []:
        if not isinstance(name, str):
            raise DeepSpeedConfigValueError(f"Config key '{where}.{key}' must be a list of strings, it has {name!r}")
    return names


def _torch_autocast(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    section = read_section(param_dict, const.TORCH_AUTOCAST)
    known = (
        const.TORCH_AUTOCAST_ENABLED,
        const.TORCH_AUTOCAST_DTYPE,
        const.TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES,
    )
    check_section_keys(section, known, const.TORCH_AUTOCAST)
    return section


def get_gradient_accumulation_steps(param_dict: Mapping[str, Any]) -> int | None:
    """``gradient_accumulation_steps`` as given."""
    return read_top_level(param_dict, const.GRADIENT_ACCUMULATION_STEPS)


def get_managed_gradient_accumulation(param_dict: Mapping[str, Any]) -> bool:
    """``managed_gradient_accumulation``."""
    return read_top_level(param_dict, const.MANAGED_GRADIENT_ACCUMULATION)


def get_communication_data_type(
    param_dict: Mapping[str, Any],
    comm_type: str = const.COMMUNICATION_DATA_TYPE,
    comm_data_type_default: str | None = const.COMMUNICATION_DATA_TYPE_DEFAULT,
) -> torch.dtype | None:
    """Dtype of the key ``comm_type``, None when neither given nor defaulted. Raises ValueError for another name."""
    if param_dict.get(comm_type, comm_data_type_default) is None:
        return None
    return read_dtype(param_dict, comm_type, comm_data_type_default, COMMUNICATION_DTYPE_NAMES)


def get_prescale_gradients(param_dict: Mapping[str, Any]) -> bool:
    """``prescale_gradients``."""
    return read_top_level(param_dict, const.PRESCALE_GRADIENTS)


def get_gradient_predivide_factor(param_dict: Mapping[str, Any]) -> float:
    """``gradient_predivide_factor``."""
    return read_top_level(param_dict, const.GRADIENT_PREDIVIDE_FACTOR)


def get_gradient_allreduce_op(param_dict: Mapping[str, Any]) -> str:
    """``gradient_allreduce_op`` in lower case. Raises ValueError for anything but mean and sum."""
    return read_top_level(param_dict, const.GRADIENT_ALLREDUCE_OP)


def get_steps_per_print(param_dict: Mapping[str, Any]) -> float | None:
    """``steps_per_print``: int, float (also inf) or None (never)."""
    return read_top_level(param_dict, const.STEPS_PER_PRINT)


def get_disable_allgather(param_dict: Mapping[str, Any]) -> bool:
    """``disable_allgather``."""
    return read_top_level(param_dict, const.DISABLE_ALLGATHER)


def get_dump_state(param_dict: Mapping[str, Any]) -> bool:
    """``dump_state``."""
    return read_top_level(param_dict, const.DUMP_STATE)


def get_disable_python_gc(param_dict: Mapping[str, Any]) -> bool:
    """``disable_python_gc``."""
    return read_top_level(param_dict, const.DISABLE_PYTHON_GC)


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """``gradient_clipping``: the largest global gradient norm, 0 for no clipping."""
    return read_top_level(param_dict, const.GRADIENT_CLIPPING)


def get_pipeline_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Section ``pipeline`` over its defaults; unknown keys are kept."""
    return {**PIPELINE_DEFAULTS, **read_section(param_dict, PIPELINE)}


def _named_section(param_dict: Mapping[str, Any], name: str, known: tuple[str, ...]) -> dict[str, Any]:
    section = read_section(param_dict, name)
    check_section_keys(section, known, name)
    return section


def _optimizer(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    return _named_section(
        param_dict, const.OPTIMIZER, (const.TYPE, const.OPTIMIZER_PARAMS, const.LEGACY_FUSION, "torch_adam")
    )


def get_optimizer_name(param_dict: Mapping[str, Any]) -> str | None:
    """``optimizer.type``, None when absent; our own names come back in lower case."""
    default = const.OPTIMIZER_TYPE_DEFAULT
    name = read_value(_optimizer(param_dict), const.TYPE, default, "str", const.OPTIMIZER)
    return name.lower() if name is not None and name.lower() in DEEPSPEED_OPTIMIZERS else name


def get_optimizer_params(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """``optimizer.params``, None when there is no optimizer or it has no params."""
    return read_value(_optimizer(param_dict), const.OPTIMIZER_PARAMS, None, "dict", const.OPTIMIZER)


def get_optimizer_gradient_clipping(param_dict: Mapping[str, Any]) -> float | None:
    """``optimizer.params.max_grad_norm``, which DeepSpeedConfig refuses; None when absent."""
    return (get_optimizer_params(param_dict) or {}).get(const.MAX_GRAD_NORM)


def get_optimizer_legacy_fusion(param_dict: Mapping[str, Any]) -> bool:
    """``optimizer.legacy_fusion``."""
    default = const.LEGACY_FUSION_DEFAULT
    return read_value(_optimizer(param_dict), const.LEGACY_FUSION, default, "bool", const.OPTIMIZER)


def get_zero_allow_untested_optimizer(param_dict: Mapping[str, Any]) -> bool:
    """``zero_allow_untested_optimizer``."""
    return read_top_level(param_dict, const.ZERO_ALLOW_UNTESTED_OPTIMIZER)


def get_zero_force_ds_cpu_optimizer(param_dict: Mapping[str, Any]) -> bool:
    """``zero_force_ds_cpu_optimizer``."""
    return read_top_level(param_dict, const.ZERO_FORCE_DS_CPU_OPTIMIZER)


def get_scheduler_name(param_dict: Mapping[str, Any]) -> str | None:
    """``scheduler.type``, None when absent."""
    section = _named_section(param_dict, const.SCHEDULER, (const.TYPE, const.SCHEDULER_PARAMS))
    return read_value(section, const.TYPE, const.SCHEDULER_TYPE_DEFAULT, "str", const.SCHEDULER)


def get_scheduler_params(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """``scheduler.params``, None when absent."""
    section = _named_section(param_dict, const.SCHEDULER, (const.TYPE, const.SCHEDULER_PARAMS))
    return read_value(section, const.SCHEDULER_PARAMS, None, "dict", const.SCHEDULER)


def get_train_batch_size(param_dict: Mapping[str, Any]) -> int | None:
    """``train_batch_size`` as given."""
    return read_top_level(param_dict, const.TRAIN_BATCH_SIZE)


def get_train_micro_batch_size_per_gpu(param_dict: Mapping[str, Any]) -> int | None:
    """``train_micro_batch_size_per_gpu`` as given."""
    return read_top_level(param_dict, const.TRAIN_MICRO_BATCH_SIZE_PER_GPU)


def get_wall_clock_breakdown(param_dict: Mapping[str, Any]) -> bool:
    """``wall_clock_breakdown``."""
    return read_top_level(param_dict, const.WALL_CLOCK_BREAKDOWN)


def get_memory_breakdown(param_dict: Mapping[str, Any]) -> bool:
    """``memory_breakdown``."""
    return read_top_level(param_dict, const.MEMORY_BREAKDOWN)


def get_hybrid_engine_config(param_dict: Mapping[str, Any]) -> HybridEngineConfig:
    """Section ``hybrid_engine``."""
    return HybridEngineConfig(**read_section(param_dict, HYBRID_ENGINE))


def get_expert_data_topo_config(param_dict: Mapping[str, Any]) -> bool:
    """``use_data_before_expert_parallelism``."""
    return read_top_level(param_dict, const.USE_DATA_BEFORE_EXPERT_PARALLEL)


def get_checkpoint_params(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Section ``checkpoint`` as given."""
    return read_section(param_dict, const.CHECKPOINT)


def get_data_types_params(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Section ``data_types`` as given."""
    known = (const.GRAD_ACCUM_DTYPE, const.PARAM_DTYPE, const.BUFFER_DTYPE, const.KEEP_IN_FP32_MODULES)
    return _named_section(param_dict, const.DATA_TYPES, known)


def get_checkpoint_tag_validation_mode(checkpoint_params: Mapping[str, Any]) -> str:
    """``checkpoint.tag_validation`` in upper case. Raises DeepSpeedConfigError for an unknown mode."""
    return get_checkpoint_config({const.CHECKPOINT: dict(checkpoint_params)})[const.CHECKPOINT_TAG_VALIDATION]


def get_checkpoint_parallel_write_pipeline(checkpoint_params: Mapping[str, Any]) -> bool:
    """``checkpoint.parallel_write.pipeline_stage``. Raises DeepSpeedConfigError for anything but a boolean."""
    where = f"{const.CHECKPOINT}.{const.CHECKPOINT_PARALLEL_WRITE}"
    section = read_section(checkpoint_params, const.CHECKPOINT_PARALLEL_WRITE)
    key, default = (
        const.CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE,
        const.CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE_DEFAULT,
    )
    check_section_keys(section, [key], where)
    return read_value(section, key, default, "bool", where)


def get_dataloader_drop_last(param_dict: Mapping[str, Any]) -> bool:
    """``dataloader_drop_last``."""
    return read_top_level(param_dict, const.DATALOADER_DROP_LAST)


def get_log_level(param_dict: Mapping[str, Any]) -> str | None:
    """``log_level`` in lower case, None when absent."""
    return read_top_level(param_dict, const.LOG_LEVEL)


def _get_data_type(param_dict: Mapping[str, Any], key: str, default: str | None) -> torch.dtype | None:
    return read_dtype(get_data_types_params(param_dict), key, default, DATA_TYPE_NAMES, const.DATA_TYPES)


def get_keep_in_fp32_modules(param_dict: Mapping[str, Any]) -> str | list[str]:
    """``data_types.keep_in_fp32_modules``: "auto" or a list of names. Raises DeepSpeedConfigError for another value."""
    value = get_data_types_params(param_dict).get(const.KEEP_IN_FP32_MODULES, const.KEEP_IN_FP32_MODULES_DEFAULT)
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    if not is_list and value != const.KEEP_IN_FP32_MODULES_DEFAULT:
        raise DeepSpeedConfigTypeError(
            f"Config key 'data_types.{const.KEEP_IN_FP32_MODULES}' must be 'auto' or a list of strings, got {value!r}"
        )
    return value


# --------------------------------------------------------------------------------------------------------------------
# The typed config
# --------------------------------------------------------------------------------------------------------------------


class DeepSpeedConfig:
    """A ds_config with types, defaults and consistent batch sizes.

    Args:
        config: a dict (kept by reference), the path of a JSON or hjson file, or urlsafe base64 of a JSON text.
        mpu: model-parallel unit that knows the data-parallel world size.
        mesh_device: device mesh with a dimension ``data_parallel``.

    Raises:
        TypeError, ValueError: the source cannot be read, see :func:`load_config`.
        DeepSpeedConfigError: removed or misspelt keys; values of a wrong type (also TypeError) or out of range (also
            ValueError).
        pydantic.ValidationError: unknown keys or values inside a pydantic section.
        AssertionError: batch sizes that do not agree, keys that exclude each other.
    """

    def __init__(self, config: str | dict[str, Any], mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict = load_config(config)
        self.mpu = mpu
        self.mesh_device = mesh_device
        self.global_rank = global_rank()
        check_top_level_keys(self._param_dict, KNOWN_TOP_LEVEL_KEYS)
        self._read_batch_sizes()
        self._read_precision()
        self._read_gradient_options()
        self._read_optimizer_and_scheduler()
        self._read_checkpoint()
        self._read_diagnostics()
        self._read_parallelism()
        check_exclusions(self)
        self._warn_about_slow_choices()

    def _read_batch_sizes(self) -> None:
        source = self._param_dict
        self.sequence_parallel_size: int | None = read_top_level(source, "sequence_parallel_size")
        self.data_parallel_size: int | None = read_top_level(source, "data_parallel_size")
        self._batch_sizes = resolve_batch_sizes(
            self._batch_size(const.TRAIN_BATCH_SIZE),
            self._batch_size(const.TRAIN_MICRO_BATCH_SIZE_PER_GPU),
            self._batch_size(const.GRADIENT_ACCUMULATION_STEPS),
            data_parallel_world_size(self.sequence_parallel_size, self.mpu, self.mesh_device),
        )
        self.train_batch_size: int = self._batch_sizes.train.value
        self.train_micro_batch_size_per_gpu: int = self._batch_sizes.micro.value
        self.gradient_accumulation_steps: int = self._batch_sizes.gas.value
        self.world_size: int = self._batch_sizes.world.value
        self.managed_gradient_accumulation = get_managed_gradient_accumulation(source)
        self.dataloader_drop_last = get_dataloader_drop_last(source)

    def _batch_size(self, key: str) -> int | None:
        # Unlike elsewhere there is no default to fall back to: a client library was to fill in the number and did not.
        if self._param_dict.get(key) == "auto":
            raise DeepSpeedConfigTypeError(
                f"Config key {key!r} must be an integer > 0, got 'auto': replace it by a number or leave it out"
            )
        return read_top_level(self._param_dict, key)

    def _read_precision(self) -> None:
        source = self._param_dict
        self.float16_config = get_float16_config(source)
        self.bfloat16_config = get_bfloat16_config(source)
        self.torch_autocast_enabled = get_torch_autocast_enabled(source)
        self.torch_autocast_dtype = get_torch_autocast_dtype(source)
        self.torch_autocast_lower_precision_safe_modules = get_lower_precision_safe_modules(source)
        self.grad_accum_dtype = _get_data_type(source, const.GRAD_ACCUM_DTYPE, const.GRAD_ACCUM_DTYPE_DEFAULT)
        self.param_dtype = _get_data_type(source, const.PARAM_DTYPE, const.PARAM_DTYPE_DEFAULT)
        self.buffer_dtype = _get_data_type(source, const.BUFFER_DTYPE, const.BUFFER_DTYPE_DEFAULT)
        self.keep_in_fp32_modules = get_keep_in_fp32_modules(source)

    def _read_gradient_options(self) -> None:
        source = self._param_dict
        self.zero_config = get_zero_config(source)
        self.zero_optimization_stage: int = self.zero_config.stage
        self.zero_enabled: bool = self.zero_optimization_stage > 0
        self.communication_data_type = get_communication_data_type(source)
        self.seq_parallel_communication_data_type = get_communication_data_type(
            source,
            const.SEQ_PARALLEL_COMMUNICATION_DATA_TYPE,
            const.SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_DEFAULT,
        )
        self.prescale_gradients = get_prescale_gradients(source)
        self.gradient_predivide_factor = get_gradient_predivide_factor(source)
        self.gradient_allreduce_op = get_gradient_allreduce_op(source)
        self.gradient_clipping = get_gradient_clipping(source)
        self.disable_allgather = get_disable_allgather(source)

    def _read_optimizer_and_scheduler(self) -> None:
        source = self._param_dict
        self.optimizer_name = get_optimizer_name(source)
        self.optimizer_params = get_optimizer_params(source)
        self.optimizer_legacy_fusion = get_optimizer_legacy_fusion(source)
        self.scheduler_name = get_scheduler_name(source)
        self.scheduler_params = get_scheduler_params(source)
        self.zero_allow_untested_optimizer = get_zero_allow_untested_optimizer(source)
        self.zero_force_ds_cpu_optimizer = get_zero_force_ds_cpu_optimizer(source)

    def _read_checkpoint(self) -> None:
        section = get_checkpoint_params(self._param_dict)
        self.checkpoint_config = get_checkpoint_config(self._param_dict)
        mode = self.checkpoint_config[const.CHECKPOINT_TAG_VALIDATION]
        self.checkpoint_tag_validation_enabled: bool = mode != const.ValidationMode.IGNORE
        self.checkpoint_tag_validation_fail: bool = mode == const.ValidationMode.FAIL
        self.load_universal_checkpoint: bool = read_value(
            section, const.LOAD_UNIVERSAL_CHECKPOINT, const.LOAD_UNIVERSAL_CHECKPOINT_DEFAULT, "bool", const.CHECKPOINT
        )
        self.use_node_local_storage: bool = read_value(
            section,
            const.USE_NODE_LOCAL_STORAGE_CHECKPOINT,
            const.USE_NODE_LOCAL_STORAGE_CHECKPOINT_DEFAULT,
            "bool",
            const.CHECKPOINT,
        )
        self.checkpoint_parallel_write_pipeline = get_checkpoint_parallel_write_pipeline(section)
        self.aio_config = get_aio_config(self._param_dict)

    def _read_diagnostics(self) -> None:
        source = self._param_dict
        self.steps_per_print = get_steps_per_print(source)
        self.dump_state = get_dump_state(source)
        self.disable_python_gc = get_disable_python_gc(source)
        self.memory_breakdown = get_memory_breakdown(source)
        self.log_level = get_log_level(source)
        self.vocabulary_size: int | None = read_top_level(source, const.VOCABULARY_SIZE)
        self.comms_config = DeepSpeedCommsConfig(source)
        self.monitor_config = get_monitor_config(source)
        self.timers_config = get_timers_config(source)
        self.activation_checkpointing_config = DeepSpeedActivationCheckpointingConfig(source)
        self.flops_profiler_config = DeepSpeedFlopsProfilerConfig(source)
        # The flops profiler prints times per phase, which only the timers behind this key take.
        self.wall_clock_breakdown: bool = get_wall_clock_breakdown(source) or self.flops_profiler_config.enabled

    def _read_parallelism(self) -> None:
        source = self._param_dict
        self.pipeline = get_pipeline_config(source)
        self.hybrid_engine = get_hybrid_engine_config(source)
        self.tensor_parallel_config = get_tensor_parallel_config(source)
        self.expert_parallel_config = get_expert_parallel_config(source)
        self.use_data_before_expert_parallel_ = get_expert_data_topo_config(source)
        self.compile_config = read_section(source, "compile")
        self.data_efficiency_config = read_section(source, "data_efficiency")

    def _warn_about_slow_choices(self) -> None:
        size = self.vocabulary_size
        if size and size % TENSOR_CORE_ALIGN_SIZE:
            warn_once_on_rank_0(
                f"'vocabulary_size' {size} is not a multiple of {TENSOR_CORE_ALIGN_SIZE}: matrix units may stay unused"
            )

    def print_user_config(self) -> None:
        """Print the config as the user gave it, on rank 0."""
        if self.global_rank == 0:
            text = json.dumps(
                _without_secrets(self._param_dict), sort_keys=True, indent=4, cls=ScientificNotationEncoder
            )
            print(f"user config = {text}")

    def print(self, name: str) -> None:
        """Print ``name``, then each effective value with its origin (user, default, derived), then the user config."""
        if self.global_rank == 0:
            from deepspeed.runtime.config_report import describe  # which reads this module

            print(f"{name}:")
            print("\n".join(f"  {line}" for line in describe(self)))
        self.print_user_config()


def _without_secrets(section: dict[str, Any]) -> dict[str, Any]:
    return {
        key: HIDDEN if key in SECRET_KEYS and value else _without_secrets(value) if isinstance(value, dict) else value
        for key, value in section.items()
    }


class DeepSpeedConfigWriter:
    """Builds a config dict key by key and writes it as JSON."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = {} if data is None else data

    def add_config(self, key: str, value: Any) -> None:
        """Set one top-level key."""
        self.data[key] = value

    def load_config(self, filename: str | os.PathLike[str]) -> None:
        """Replace the content by that of a JSON or hjson file. Raises ValueError for duplicate keys."""
        with open(filename, encoding="utf-8") as file:
            self.data = hjson.loads(file.read(), object_pairs_hook=dict_raise_error_on_duplicate_keys)

    def write_config(self, filename: str | os.PathLike[str]) -> None:
        """Write the content as JSON."""
        with open(filename, "w", encoding="utf-8") as file:
            json.dump(self.data, file)


if __name__ == "__main__":
    # Not defined here: run as a script this file is a second copy of the module that the package has imported.
    from deepspeed.runtime.config_report import main

    sys.exit(main())
