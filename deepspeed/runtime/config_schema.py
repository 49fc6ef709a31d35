# SPDX-License-Identifier: Apache-2.0
"""Every config key as data, read off the types: the source of ``docs/config.md`` and of the JSON schema for editors."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import torch
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.comm.constants import COMMS_LOGGER
from deepspeed.elasticity.constants import ELASTICITY
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.profiling.config import _KINDS as FLOPS_PROFILER_KINDS
from deepspeed.profiling.constants import FLOPS_PROFILER
from deepspeed.runtime import constants as const
from deepspeed.runtime.activation_checkpointing.config import (
    ACT_CHKPT,
    ACT_CHKPT_DEFAULT,
    ACT_CHKPT_NUMBER_CHECKPOINTS,
)
from deepspeed.runtime.config import HYBRID_ENGINE, HybridEngineConfig
from deepspeed.runtime.config_checks import _UNSUPPORTED
from deepspeed.runtime.config_descriptions import CHECKPOINT_OPTIONS, DESCRIPTIONS, NO_EFFECT, OPTION_OF
from deepspeed.runtime.config_sections import (
    DATA_EFFICIENCY,
    PIPELINE,
    SECTIONS,
    TOLERATED_KEYS,
    TOP_LEVEL_DTYPES,
    TOP_LEVEL_SCALARS,
)
from deepspeed.runtime.config_utils import AUTO, DeepSpeedConfigModel, KeySpec
from deepspeed.runtime.engine_config import _UNBUILT
from deepspeed.runtime.gradients.self_check_config import GRADIENT_CHECK, GradientCheckConfig
from deepspeed.runtime.model_checkpointing.config import _WRITER_KINDS, CHECKPOINT_DEFAULT_DICT, VALID_VALUES
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.swap_tensor.constants import AIO
from deepspeed.runtime.tensor_parallel.config import TENSOR_PARALLEL, TPTrainingConfig
from deepspeed.runtime.zero.config import ALLGATHER_SIZE_DEPRECATED, ZERO_OPTIMIZATION, DeepSpeedZeroConfig
from deepspeed.utils.config import TIMERS, DeepSpeedThroughputTimerConfig

SECTION = "section"

# Sections that are dicts without a fixed set of keys here.
FREE_SECTIONS = ("compile", "weight_quantization", "autotuning", "expert_parallel", "inference")
# Sections in which unknown keys are kept for whoever reads them.
OPEN_SECTIONS = (PIPELINE, f"{TENSOR_PARALLEL}.tp")
LEAF_MODULE = f"{ZERO_OPTIMIZATION}.leaf_module"
BATCH_KEYS = (const.TRAIN_BATCH_SIZE, const.TRAIN_MICRO_BATCH_SIZE_PER_GPU, const.GRADIENT_ACCUMULATION_STEPS)

TYPED_SECTIONS: dict[str, type[DeepSpeedConfigModel]] = {
    const.FP16: DeepSpeedFP16Config,
    const.BFLOAT16: DeepSpeedBF16Config,
    ZERO_OPTIMIZATION: DeepSpeedZeroConfig,
    COMMS_LOGGER: CommsLoggerConfig,
    **{name: field.annotation for name, field in DeepSpeedMonitorConfig.model_fields.items()},
    f"{TIMERS}.throughput": DeepSpeedThroughputTimerConfig,
    GRADIENT_CHECK: GradientCheckConfig,
    HYBRID_ENGINE: HybridEngineConfig,
    TENSOR_PARALLEL: TPTrainingConfig,
}


@dataclass(frozen=True)
class Key:
    """One config key.

    Attributes:
        path: dotted path from the top of the config.
        kind: ``bool``, ``int``, ``number``, ``str``, ``list``, ``dict``, ``any`` or ``section``.
        default: value when absent.
        nullable: whether ``null`` is accepted.
        choices: the allowed strings or numbers, None when free.
        minimum, above, maximum: limits; ``above`` is exclusive.
        aliases: other names of the same key in the same section.
        any_case: whether strings are compared without regard to case.
    """

    path: str
    kind: str
    default: Any = None
    nullable: bool = False
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    aliases: tuple[str, ...] = ()
    any_case: bool = False

    @property
    def section(self) -> str:
        """Path of the section, empty at top level."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The key itself."""
        return self.path.rpartition(".")[2]

    @property
    def takes_auto(self) -> bool:
        """Whether the value ``"auto"`` is accepted, meaning the default."""
        return self.path not in BATCH_KEYS

    @property
    def description(self) -> str:
        """One or two sentences."""
        return DESCRIPTIONS[self.path]


def all_keys() -> list[Key]:
    """Every config key, section by section, in the order of the types."""
    keys = [_from_spec(name, spec) for name, spec in {**TOP_LEVEL_SCALARS, **TOP_LEVEL_DTYPES}.items()]
    keys.append(Key(ALLGATHER_SIZE_DEPRECATED, "int", None, minimum=0))
    keys.append(Key("datastates_ckpt", "any", False, nullable=True))
    keys += [Key(name, "dict", {}, nullable=True) for name in FREE_SECTIONS]
    for path in (const.OPTIMIZER, const.SCHEDULER):
        keys += _from_table(path)
    keys += _from_model(const.FP16, DeepSpeedFP16Config) + _from_model(const.BFLOAT16, DeepSpeedBF16Config)
    keys += _from_table(const.TORCH_AUTOCAST) + _from_table(const.DATA_TYPES)
    keys += _from_model(ZERO_OPTIMIZATION, DeepSpeedZeroConfig)
    keys += _activation_checkpointing() + _aio() + _checkpoint()
    for path, model in TYPED_SECTIONS.items():
        if path not in (const.FP16, const.BFLOAT16, ZERO_OPTIMIZATION):
            keys += _from_model(path, model)
    keys += [
        _from_spec(f"{FLOPS_PROFILER}.{name}", KeySpec(kind, default))
        for name, (kind, default) in FLOPS_PROFILER_KINDS.items()
    ]
    for path in (PIPELINE, DATA_EFFICIENCY, f"{DATA_EFFICIENCY}.data_sampling", ELASTICITY):
        keys += _from_table(path)
    return keys


def _from_table(path: str) -> list[Key]:
    return [_from_spec(f"{path}.{name}", spec) for name, spec in SECTIONS[path].items()]


def _from_spec(path: str, spec: KeySpec) -> Key:
    return Key(
        path,
        "str" if spec.kind == "dtype" else spec.kind,
        spec.default,
        nullable=spec.nullable or spec.default is None,
        choices=spec.choices,
        minimum=spec.minimum,
        above=spec.above,
        any_case=spec.choices is not None,
    )


def _activation_checkpointing() -> list[Key]:
    return [
        _from_spec(f"{ACT_CHKPT}.{name}", KeySpec("int" if name == ACT_CHKPT_NUMBER_CHECKPOINTS else "bool", default))
        for name, default in ACT_CHKPT_DEFAULT.items()
    ]


def _aio() -> list[Key]:
    return [
        _from_spec(
            f"{AIO}.{name}",
            KeySpec("bool", default) if isinstance(default, bool) else KeySpec("int", default, minimum=1),
        )
        for name, default in AIO_DEFAULT_DICT.items()
    ]


def _checkpoint() -> list[Key]:
    section, writer = const.CHECKPOINT, f"{const.CHECKPOINT}.writer"
    keys = []
    for name, default in CHECKPOINT_DEFAULT_DICT.items():
        if f"{section}.{name}" != writer:
            kind = "bool" if isinstance(default, bool) else "str"
            keys.append(_from_spec(f"{section}.{name}", KeySpec(kind, default, choices=_choices(name))))
    keys += _from_table(section)
    keys += _from_table(f"{section}.{const.CHECKPOINT_PARALLEL_WRITE}")
    keys.append(Key(writer, SECTION, None, nullable=True))
    keys += [
        _from_spec(f"{writer}.{name}", KeySpec(kind, default, choices=_choices(name)))
        for name, (kind, default) in _WRITER_KINDS.items()
    ]
    return keys


def _choices(name: str) -> tuple[str, ...] | None:
    return tuple(VALID_VALUES[name]) if name in VALID_VALUES else None


# --------------------------------------------------------------------------------------------------------------------
# pydantic sections
# --------------------------------------------------------------------------------------------------------------------

_KINDS: dict[Any, str] = {bool: "bool", int: "int", float: "number", str: "str", Path: "str", Any: "any"}


def _from_model(path: str, model: type[BaseModel]) -> list[Key]:
    keys: list[Key] = []
    inner: list[Key] = []
    for name, field in model.model_fields.items():
        key = f"{path}.{field.alias or name}"
        section = _section_class(field.annotation)
        if section is not None:
            keys.append(Key(key, SECTION, field.default, _nullable(field.annotation), aliases=_aliases(name, field)))
            inner += _from_model(key, section)
        else:
            keys.append(_from_field(key, name, field))
    return keys + inner


def _section_class(annotation: Any) -> type[BaseModel] | None:
    for part in _parts(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _parts(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return tuple(p for p in get_args(annotation) if p is not type(None)) if is_union else (annotation,)


def _nullable(annotation: Any) -> bool:
    return type(None) in get_args(annotation) or annotation is Any


def _aliases(name: str, field: FieldInfo) -> tuple[str, ...]:
    return (name,) if field.alias and field.alias != name else ()


def _from_field(path: str, name: str, field: FieldInfo) -> Key:
    (annotation,) = _parts(field.annotation)
    choices: tuple[Any, ...] | None = None
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        choices = tuple(dict.fromkeys(member.value for member in annotation))
    elif get_origin(annotation) is Literal:
        choices = get_args(annotation)
    limits = {limit: value for item in field.metadata for limit, value in _limits(item)}
    return Key(
        path,
        _kind(annotation, choices),
        _plain(field.get_default(call_default_factory=True)),
        nullable=_nullable(field.annotation),
        choices=choices,
        aliases=_aliases(name, field),
        **limits,
    )


def _limits(metadata: Any) -> list[tuple[str, float]]:
    names = {"ge": "minimum", "gt": "above", "le": "maximum"}
    return [(names[name], getattr(metadata, name)) for name in names if hasattr(metadata, name)]


def _kind(annotation: Any, choices: tuple[Any, ...] | None) -> str:
    if choices is not None:
        return "int" if all(isinstance(choice, int) for choice in choices) else "str"
    if annotation is torch.dtype:
        return "str"
    base = get_origin(annotation) or annotation
    if base in (list, tuple):
        return "list"
    return "dict" if base is dict else _KINDS[annotation]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value)
    return value.value if isinstance(value, Enum) else value


# --------------------------------------------------------------------------------------------------------------------
# What a key does here
# --------------------------------------------------------------------------------------------------------------------


def missing_feature(path: str) -> str | None:
    """The feature that the key switches on or is an option of, as ``config_checks`` names it, if it is not built."""
    refused = {name: what for name, what, _ in _UNSUPPORTED}
    if path == f"{const.DATA_TYPES}.{const.KEEP_IN_FP32_MODULES}":
        return None if path not in refused else "a list of modules"
    for prefix in _prefixes(path):
        for name in (prefix, OPTION_OF.get(prefix)):
            if name in refused:
                return refused[name]
    return "checkpoints" if path in CHECKPOINT_OPTIONS and "save_checkpoint" in _UNBUILT else None


def no_effect(path: str) -> str | None:
    """Why the key changes nothing, whatever else the config says; None where it may."""
    return next((NO_EFFECT[prefix] for prefix in _prefixes(path) if prefix in NO_EFFECT), None)


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


# --------------------------------------------------------------------------------------------------------------------
# JSON schema
# --------------------------------------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a ds_config.

    It is stricter than the parser in one point, so that an editor marks what nothing reads: unknown keys are refused
    everywhere, save those with a dot or a dollar sign and those that a section keeps for other readers.
    """
    root = _object("")
    for key in all_keys():
        properties = _section_schema(root, key.section)["properties"]
        form = {} if key.kind == SECTION else _value_schema(key)
        for name in (key.name, *key.aliases):
            if key.kind != SECTION:
                properties[name] = form
                continue
            target = _section_schema(root, f"{key.section}.{name}")
            target["description"] = key.description
            if key.nullable:
                target["type"] = ["object", "null"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "DeepSpeed config",
        **_with_old_names(root),
    }


def _object(path: str) -> dict[str, Any]:
    tolerated: dict[str, Any] = {name: {} for name in TOLERATED_KEYS.get(path, ())}
    schema: dict[str, Any] = {"type": "object", "properties": tolerated}
    if path and "." not in path:
        schema["type"] = ["object", "null"]  # as if absent
    if path in OPEN_SECTIONS:
        return schema
    return {**schema, "patternProperties": {r"[.]|^\$": {}}, "additionalProperties": False}


def _section_schema(root: dict[str, Any], path: str) -> dict[str, Any]:
    node, walked = root, []
    for name in path.split(".") if path else ():
        walked.append(name)
        node = node["properties"].setdefault(name, _object(".".join(walked)))
    return node


def _with_old_names(root: dict[str, Any]) -> dict[str, Any]:
    """Also allow the deprecated spellings ``bfloat16`` and a boolean ``zero_optimization``."""
    properties = root["properties"]
    zero = properties[ZERO_OPTIMIZATION]
    properties[const.BFLOAT16_OLD] = {**properties[const.BFLOAT16], "deprecated": True}
    properties[ZERO_OPTIMIZATION] = {"anyOf": [zero, {"type": "boolean", "deprecated": True}]}
    return root


_JSON_TYPES = {
    "bool": "boolean",
    "int": "integer",
    "number": "number",
    "str": "string",
    "list": "array",
    "dict": "object",
}


def _value_schema(key: Key) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": key.description}
    if _is_json(key.default):
        schema["default"] = key.default
    if key.kind == "any":
        return schema
    forms: list[dict[str, Any]] = []
    if key.choices is not None:
        forms.append({"enum": list(key.choices)})
        if key.any_case:
            forms.append({"type": "string", "pattern": "^(" + "|".join(map(_any_case, key.choices)) + ")$"})
    else:
        limits = {"minimum": key.minimum, "exclusiveMinimum": key.above, "maximum": key.maximum}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        forms.append({"type": _JSON_TYPES[key.kind], **given})
    if key.section == LEAF_MODULE:
        forms.append({"type": "string"})  # one name stands for a list of one
    if key.nullable:
        forms.append({"type": "null"})
    if key.takes_auto:
        forms.append({"const": AUTO})
    return {**schema, **(forms[0] if len(forms) == 1 else {"anyOf": forms})}


def _any_case(text: str) -> str:
    return "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else re.escape(c) for c in text)


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_json(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
