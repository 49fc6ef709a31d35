# SPDX-License-Identifier: Apache-2.0
"""Type, default and limits of every config key that is not a field of a pydantic section, in one table per section.

The readers in ``config.py``, the printed report, ``docs/config.md`` and the JSON schema all read these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.elasticity import constants as elastic
from deepspeed.runtime import constants as const
from deepspeed.runtime.config_utils import AUTO, KeySpec, check_section_keys, read_section
from deepspeed.utils.logging import log_levels

SEQUENCE_PARALLEL_SIZE = "sequence_parallel_size"
DATA_PARALLEL_SIZE = "data_parallel_size"
PIPELINE = "pipeline"
DATA_EFFICIENCY = "data_efficiency"
PARALLEL_WRITE = f"{const.CHECKPOINT}.{const.CHECKPOINT_PARALLEL_WRITE}"

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

# Top-level keys with a single value.
TOP_LEVEL_SCALARS: dict[str, KeySpec] = {
    const.TRAIN_BATCH_SIZE: KeySpec("int", const.TRAIN_BATCH_SIZE_DEFAULT),
    const.TRAIN_MICRO_BATCH_SIZE_PER_GPU: KeySpec("int", const.TRAIN_MICRO_BATCH_SIZE_PER_GPU_DEFAULT),
    const.GRADIENT_ACCUMULATION_STEPS: KeySpec("int", const.GRADIENT_ACCUMULATION_STEPS_DEFAULT),
    const.MANAGED_GRADIENT_ACCUMULATION: KeySpec("bool", const.MANAGED_GRADIENT_ACCUMULATION_DEFAULT),
    const.STEPS_PER_PRINT: KeySpec("number", const.STEPS_PER_PRINT_DEFAULT, above=0),
    const.DUMP_STATE: KeySpec("bool", const.DUMP_STATE_DEFAULT),
    const.DISABLE_PYTHON_GC: KeySpec("bool", const.DISABLE_PYTHON_GC_DEFAULT),
    const.DISABLE_ALLGATHER: KeySpec("bool", const.DISABLE_ALLGATHER_DEFAULT),
    const.PRESCALE_GRADIENTS: KeySpec("bool", const.PRESCALE_GRADIENTS_DEFAULT),
    const.GRADIENT_PREDIVIDE_FACTOR: KeySpec("number", const.GRADIENT_PREDIVIDE_FACTOR_DEFAULT, above=0),
    const.GRADIENT_ALLREDUCE_OP: KeySpec(
        "str", const.GRADIENT_ALLREDUCE_OP_DEFAULT, choices=const.GRADIENT_ALLREDUCE_OP_SUPPORTED
    ),
    const.GRADIENT_CLIPPING: KeySpec("number", const.GRADIENT_CLIPPING_DEFAULT, minimum=0),
    const.ZERO_ALLOW_UNTESTED_OPTIMIZER: KeySpec("bool", const.ZERO_ALLOW_UNTESTED_OPTIMIZER_DEFAULT),
    const.ZERO_FORCE_DS_CPU_OPTIMIZER: KeySpec("bool", const.ZERO_FORCE_DS_CPU_OPTIMIZER_DEFAULT),
    const.DATALOADER_DROP_LAST: KeySpec("bool", const.DATALOADER_DROP_LAST_DEFAULT),
    const.WALL_CLOCK_BREAKDOWN: KeySpec("bool", const.WALL_CLOCK_BREAKDOWN_DEFAULT),
    const.MEMORY_BREAKDOWN: KeySpec("bool", const.MEMORY_BREAKDOWN_DEFAULT),
    const.VOCABULARY_SIZE: KeySpec("int", const.VOCABULARY_SIZE_DEFAULT, above=0),
    const.LOG_LEVEL: KeySpec("str", const.LOG_LEVEL_DEFAULT, choices=LOG_LEVELS),
    const.USE_DATA_BEFORE_EXPERT_PARALLEL: KeySpec("bool", const.USE_DATA_BEFORE_EXPERT_PARALLEL_DEFAULT),
    SEQUENCE_PARALLEL_SIZE: KeySpec("int", None, above=0),
    DATA_PARALLEL_SIZE: KeySpec("int", None, above=0),
}

TOP_LEVEL_DTYPES: dict[str, KeySpec] = {
    const.COMMUNICATION_DATA_TYPE: KeySpec(
        "dtype", const.COMMUNICATION_DATA_TYPE_DEFAULT, choices=COMMUNICATION_DTYPE_NAMES
    ),
    const.SEQ_PARALLEL_COMMUNICATION_DATA_TYPE: KeySpec(
        "dtype", const.SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_DEFAULT, choices=COMMUNICATION_DTYPE_NAMES, nullable=True
    ),
}

# Sections whose unknown keys are ignored, unless they look like a misspelling.
SECTIONS: dict[str, dict[str, KeySpec]] = {
    const.OPTIMIZER: {
        const.TYPE: KeySpec("str", const.OPTIMIZER_TYPE_DEFAULT),
        const.OPTIMIZER_PARAMS: KeySpec("dict", None),
        const.LEGACY_FUSION: KeySpec("bool", const.LEGACY_FUSION_DEFAULT),
    },
    const.SCHEDULER: {
        const.TYPE: KeySpec("str", const.SCHEDULER_TYPE_DEFAULT),
        const.SCHEDULER_PARAMS: KeySpec("dict", None),
    },
    const.TORCH_AUTOCAST: {
        const.TORCH_AUTOCAST_ENABLED: KeySpec("bool", const.TORCH_AUTOCAST_ENABLED_DEFAULT),
        const.TORCH_AUTOCAST_DTYPE: KeySpec("dtype", None, choices=AUTOCAST_DTYPE_NAMES),
        const.TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES: KeySpec("list", None),
    },
    const.DATA_TYPES: {
        const.GRAD_ACCUM_DTYPE: KeySpec("dtype", const.GRAD_ACCUM_DTYPE_DEFAULT, choices=DATA_TYPE_NAMES),
        const.PARAM_DTYPE: KeySpec("dtype", const.PARAM_DTYPE_DEFAULT, choices=DATA_TYPE_NAMES),
        const.BUFFER_DTYPE: KeySpec("dtype", const.BUFFER_DTYPE_DEFAULT, choices=DATA_TYPE_NAMES),
        const.KEEP_IN_FP32_MODULES: KeySpec("list", const.KEEP_IN_FP32_MODULES_DEFAULT),
    },
    const.CHECKPOINT: {
        const.LOAD_UNIVERSAL_CHECKPOINT: KeySpec("bool", const.LOAD_UNIVERSAL_CHECKPOINT_DEFAULT),
        const.USE_NODE_LOCAL_STORAGE_CHECKPOINT: KeySpec("bool", const.USE_NODE_LOCAL_STORAGE_CHECKPOINT_DEFAULT),
    },
    PARALLEL_WRITE: {
        const.CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE: KeySpec(
            "bool", const.CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE_DEFAULT
        ),
    },
    PIPELINE: {
        "stages": KeySpec("int", AUTO, above=0),
        "partition": KeySpec("str", "best"),
        "seed_layers": KeySpec("bool", False),
        "activation_checkpoint_interval": KeySpec("int", 0, minimum=0),
        "pipe_partitioned": KeySpec("bool", True),
        "grad_partitioned": KeySpec("bool", True),
    },
    DATA_EFFICIENCY: {
        "enabled": KeySpec("bool", False),
        "seed": KeySpec("int", 1234),
        "data_routing": KeySpec("dict", {}),
    },
    f"{DATA_EFFICIENCY}.data_sampling": {
        "enabled": KeySpec("bool", False),
        "num_epochs": KeySpec("int", 1000, above=0),
        "num_workers": KeySpec("int", 0, minimum=0),
        "pin_memory": KeySpec("bool", False),
        "curriculum_learning": KeySpec("dict", {}),
        "dynamic_batching": KeySpec("dict", {}),
    },
    elastic.ELASTICITY: {
        elastic.ENABLED: KeySpec("bool", elastic.ENABLED_DEFAULT),
        elastic.MAX_ACCEPTABLE_BATCH_SIZE: KeySpec("int", elastic.MAX_ACCEPTABLE_BATCH_SIZE_DEFAULT, above=0),
        elastic.MICRO_BATCHES: KeySpec("list", elastic.MICRO_BATCHES_DEFAULT),
        elastic.MIN_GPUS: KeySpec("int", elastic.MIN_GPUS_DEFAULT, above=0),
        elastic.MAX_GPUS: KeySpec("int", elastic.MAX_GPUS_DEFAULT, above=0),
        elastic.NUM_GPUS_PER_NODE: KeySpec("int", elastic.NUM_GPUS_PER_NODE_DEFAULT, above=0),
        elastic.MODEL_PARALLEL_SIZE: KeySpec("int", elastic.MODEL_PARALLEL_SIZE_DEFAULT, above=0),
        elastic.MIN_TIME: KeySpec("number", elastic.MIN_TIME_DEFAULT, minimum=0),
        elastic.VERSION: KeySpec("number", elastic.VERSION_DEFAULT, above=0),
        elastic.PREFER_LARGER_BATCH: KeySpec("bool", elastic.PREFER_LARGER_BATCH_DEFAULT),
        elastic.IGNORE_NON_ELASTIC_BATCH_INFO: KeySpec("bool", elastic.IGNORE_NON_ELASTIC_BATCH_INFO_DEFAULT),
    },
}

# Keys that other readers or other libraries know in these sections: accepted, but not read here.
TOLERATED_KEYS: dict[str, tuple[str, ...]] = {
    const.OPTIMIZER: ("torch_adam",),
    "aio": ("thread_count",),
}

# Sections inside a section, and keys of the same section that another module reads.
_OTHER_KEYS: dict[str, tuple[str, ...]] = {
    DATA_EFFICIENCY: ("data_sampling",),
    const.CHECKPOINT: (
        const.CHECKPOINT_TAG_VALIDATION,
        "checkpoint_serialization",
        "writer",
        const.CHECKPOINT_PARALLEL_WRITE,
    ),
}


def section_of(param_dict: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The dict at the dotted ``path``, empty when absent. Its keys are checked against the table of that section.

    Raises:
        DeepSpeedConfigError: not a dict (also a TypeError), or a misspelt key.
    """
    section: Mapping[str, Any] = param_dict
    for name in path.split("."):
        section = read_section(section, name)
    known = (*SECTIONS[path], *_OTHER_KEYS.get(path, ()), *TOLERATED_KEYS.get(path, ()))
    check_section_keys(section, known, path)
    return dict(section)


def read_key(param_dict: Mapping[str, Any], path: str, key: str) -> Any:
    """One key of the section at ``path``, checked, or its default.

    Raises:
        DeepSpeedConfigError: as :func:`section_of`, and for a wrong type or value (also TypeError, ValueError).
    """
    return SECTIONS[path][key].read(section_of(param_dict, path), key, path)


def read_whole_section(param_dict: Mapping[str, Any], path: str) -> dict[str, Any]:
    """All keys of the section at ``path``, checked, with defaults.

    Raises:
        DeepSpeedConfigError: as :func:`read_key`.
    """
    section = section_of(param_dict, path)
    return {key: spec.read(section, key, path) for key, spec in SECTIONS[path].items()}
