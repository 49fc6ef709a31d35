# SPDX-License-Identifier: Apache-2.0
"""The ds_config: reading it from a dict, a file or a string, and its typed form."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

import hjson
import torch
from pydantic import Field

from deepspeed.comm.config import DeepSpeedCommsConfig
from deepspeed.comm.constants import COMMS_LOGGER
from deepspeed.elasticity.constants import ELASTICITY
from deepspeed.elasticity.elasticity import elastic_batch_sizes, elasticity_enabled
from deepspeed.monitor.config import DeepSpeedMonitorConfig, get_monitor_config
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.profiling.constants import FLOPS_PROFILER
from deepspeed.runtime import constants as const
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT, DeepSpeedActivationCheckpointingConfig
from deepspeed.runtime.batch_config import data_parallel_world_size, resolve_batch_sizes
from deepspeed.runtime.config_checks import (
    check_exclusions,
    check_top_level_keys,
    log_keys_without_effect,
    unsupported_features,
)
from deepspeed.runtime.config_sections import (
    DATA_EFFICIENCY,
    DATA_PARALLEL_SIZE,
    PARALLEL_WRITE,
    PIPELINE,
    SEQUENCE_PARALLEL_SIZE,
    TOP_LEVEL_DTYPES,
    TOP_LEVEL_SCALARS,
    read_key,
    read_whole_section,
    section_of,
)
from deepspeed.runtime.config_utils import (
    DeepSpeedConfigError,
    DeepSpeedConfigModel,
    DeepSpeedConfigTypeError,
    DeepSpeedConfigValueError,
    ScientificNotationEncoder,
    dict_raise_error_on_duplicate_keys,
    distributed_is_initialized,
    dtype_from_name,
    global_rank,
    read_section,
    warn_once_on_rank_0,
)
from deepspeed.runtime.gradients.self_check_config import GRADIENT_CHECK, get_gradient_check_config
from deepspeed.runtime.model_checkpointing.config import get_checkpoint_config
from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from deepspeed.runtime.swap_tensor.constants import AIO
from deepspeed.runtime.tensor_parallel.config import TENSOR_PARALLEL, get_tensor_parallel_config
from deepspeed.runtime.zero.config import ALLGATHER_SIZE_DEPRECATED, ZERO_OPTIMIZATION, get_zero_config
from deepspeed.utils.config import TIMERS, get_timers_config

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

# Values that are never printed.
SECRET_KEYS = ("api_key",)
HIDDEN = "(hidden)"

HYBRID_ENGINE = "hybrid_engine"
KNOWN_TOP_LEVEL_KEYS = (
    *TOP_LEVEL_SCALARS,
    *TOP_LEVEL_DTYPES,
    const.OPTIMIZER,
    const.SCHEDULER,
    const.FP16,
    const.BFLOAT16,
    const.BFLOAT16_OLD,
    const.TORCH_AUTOCAST,
    const.DATA_TYPES,
    const.CHECKPOINT,
    ELASTICITY,
    ZERO_OPTIMIZATION,
    ALLGATHER_SIZE_DEPRECATED,
    ACT_CHKPT,
    AIO,
    COMMS_LOGGER,
    *DeepSpeedMonitorConfig.model_fields,
    FLOPS_PROFILER,
    GRADIENT_CHECK,
    TIMERS,
    HYBRID_ENGINE,
    PIPELINE,
    TENSOR_PARALLEL,
    EXPERT_PARALLEL,
    DATA_EFFICIENCY,
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
    return TOP_LEVEL_SCALARS[key].read(param_dict, key)


def get_expert_parallel_config(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """Section ``expert_parallel``, None when absent."""
    return read_section(param_dict, EXPERT_PARALLEL) or None


def get_torch_autocast_enabled(param_dict: Mapping[str, Any]) -> bool:
    """``torch_autocast.enabled``."""
    return read_key(param_dict, const.TORCH_AUTOCAST, const.TORCH_AUTOCAST_ENABLED)


def get_torch_autocast_dtype(param_dict: Mapping[str, Any]) -> torch.dtype | None:
    """``torch_autocast.dtype``, None when not given. Raises ValueError for an unknown name."""
    return read_key(param_dict, const.TORCH_AUTOCAST, const.TORCH_AUTOCAST_DTYPE)


def get_lower_precision_safe_modules(param_dict: Mapping[str, Any]) -> list[str] | None:
    """Dotted class names whose parameters may be communicated in low precision. Raises ValueError for a non-string."""
    key, where = const.TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES, const.TORCH_AUTOCAST
    names = read_key(param_dict, where, key)
    for name in names or []:
        if not isinstance(name, str):
            raise DeepSpeedConfigValueError(f"Config key '{where}.{key}' must be a list of strings, it has {name!r}")
    return names


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
    return replace(TOP_LEVEL_DTYPES[comm_type], default=comm_data_type_default, nullable=True).read(
        param_dict, comm_type
    )


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
    return {**read_section(param_dict, PIPELINE), **read_whole_section(param_dict, PIPELINE)}


def get_data_efficiency_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Section ``data_efficiency`` as given; types of its keys and of ``data_sampling`` are checked."""
    for path in (DATA_EFFICIENCY, f"{DATA_EFFICIENCY}.data_sampling"):
        read_whole_section(param_dict, path)
    return read_section(param_dict, DATA_EFFICIENCY)


def get_optimizer_name(param_dict: Mapping[str, Any]) -> str | None:
    """``optimizer.type``, None when absent; our own names come back in lower case."""
    name = read_key(param_dict, const.OPTIMIZER, const.TYPE)
    return name.lower() if name is not None and name.lower() in DEEPSPEED_OPTIMIZERS else name


def get_optimizer_params(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """``optimizer.params``, None when there is no optimizer or it has no params."""
    return read_key(param_dict, const.OPTIMIZER, const.OPTIMIZER_PARAMS)


def get_optimizer_gradient_clipping(param_dict: Mapping[str, Any]) -> float | None:
    """``optimizer.params.max_grad_norm``, which DeepSpeedConfig refuses; None when absent."""
    return (get_optimizer_params(param_dict) or {}).get(const.MAX_GRAD_NORM)


def get_optimizer_legacy_fusion(param_dict: Mapping[str, Any]) -> bool:
    """``optimizer.legacy_fusion``."""
    return read_key(param_dict, const.OPTIMIZER, const.LEGACY_FUSION)


def get_zero_allow_untested_optimizer(param_dict: Mapping[str, Any]) -> bool:
    """``zero_allow_untested_optimizer``."""
    return read_top_level(param_dict, const.ZERO_ALLOW_UNTESTED_OPTIMIZER)


def get_zero_force_ds_cpu_optimizer(param_dict: Mapping[str, Any]) -> bool:
    """``zero_force_ds_cpu_optimizer``."""
    return read_top_level(param_dict, const.ZERO_FORCE_DS_CPU_OPTIMIZER)


def get_scheduler_name(param_dict: Mapping[str, Any]) -> str | None:
    """``scheduler.type``, None when absent."""
    return read_key(param_dict, const.SCHEDULER, const.TYPE)


def get_scheduler_params(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """``scheduler.params``, None when absent."""
    return read_key(param_dict, const.SCHEDULER, const.SCHEDULER_PARAMS)


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
    return section_of(param_dict, const.DATA_TYPES)


def get_checkpoint_tag_validation_mode(checkpoint_params: Mapping[str, Any]) -> str:
    """``checkpoint.tag_validation`` in upper case. Raises DeepSpeedConfigError for an unknown mode."""
    return get_checkpoint_config({const.CHECKPOINT: dict(checkpoint_params)})[const.CHECKPOINT_TAG_VALIDATION]


def get_checkpoint_parallel_write_pipeline(checkpoint_params: Mapping[str, Any]) -> bool:
    """``checkpoint.parallel_write.pipeline_stage``. Raises DeepSpeedConfigError for anything but a boolean."""
    return read_key(
        {const.CHECKPOINT: dict(checkpoint_params)}, PARALLEL_WRITE, const.CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE
    )


def get_dataloader_drop_last(param_dict: Mapping[str, Any]) -> bool:
    """``dataloader_drop_last``."""
    return read_top_level(param_dict, const.DATALOADER_DROP_LAST)


def get_log_level(param_dict: Mapping[str, Any]) -> str | None:
    """``log_level`` in lower case, None when absent."""
    return read_top_level(param_dict, const.LOG_LEVEL)


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

    def __init__(
        self, config: str | os.PathLike[str] | dict[str, Any], mpu: Any = None, mesh_device: Any = None
    ) -> None:
        self._param_dict = load_config(config)
        self.source = "dict" if isinstance(config, dict) else "file" if os.path.isfile(config) else "base64"
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
        log_keys_without_effect(self)

    def _read_batch_sizes(self) -> None:
        source = self._param_dict
        self.sequence_parallel_size: int | None = read_top_level(source, SEQUENCE_PARALLEL_SIZE)
        self.data_parallel_size: int | None = read_top_level(source, DATA_PARALLEL_SIZE)
        self.elasticity_enabled: bool = elasticity_enabled(source)
        world = data_parallel_world_size(self.sequence_parallel_size, self.mpu, self.mesh_device)
        if self.elasticity_enabled:
            ranks = world.value if distributed_is_initialized() else None
            sizes = elastic_batch_sizes(source, ranks)
            self._batch_sizes = resolve_batch_sizes(*sizes, world, "chosen by the section 'elasticity'")
        else:
            keys = (const.TRAIN_BATCH_SIZE, const.TRAIN_MICRO_BATCH_SIZE_PER_GPU, const.GRADIENT_ACCUMULATION_STEPS)
            self._batch_sizes = resolve_batch_sizes(*(self._batch_size(key) for key in keys), world)
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
        self.grad_accum_dtype: torch.dtype | None = read_key(source, const.DATA_TYPES, const.GRAD_ACCUM_DTYPE)
        self.param_dtype: torch.dtype | None = read_key(source, const.DATA_TYPES, const.PARAM_DTYPE)
        self.buffer_dtype: torch.dtype | None = read_key(source, const.DATA_TYPES, const.BUFFER_DTYPE)
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
        self.load_universal_checkpoint: bool = read_key(
            self._param_dict, const.CHECKPOINT, const.LOAD_UNIVERSAL_CHECKPOINT
        )
        self.use_node_local_storage: bool = read_key(
            self._param_dict, const.CHECKPOINT, const.USE_NODE_LOCAL_STORAGE_CHECKPOINT
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
        self.gradient_check_config = get_gradient_check_config(source)
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
        self.data_efficiency_config = get_data_efficiency_config(source)

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
        """Print ``name``, each effective value with its origin (``config_report.describe``), then the user config."""
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
