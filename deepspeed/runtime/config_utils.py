# SPDX-License-Identifier: Apache-2.0
"""Building blocks of the typed configuration: the pydantic base class, typed readers of hand-parsed keys, errors."""

from __future__ import annotations

import inspect
import json
import logging
import math
import numbers
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as torch_dist
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_serializer, field_validator, model_validator
from pydantic_core import PydanticCustomError

from deepspeed.utils.logging import log_dist_once

# Means "let somebody else fill this in". A value that is still "auto" when it reaches us means "use the default".
AUTO = "auto"


class DeepSpeedConfigError(Exception):
    """The configuration cannot be used as written."""


class DeepSpeedConfigTypeError(DeepSpeedConfigError, TypeError):
    """A configuration value has the wrong type."""


class DeepSpeedConfigValueError(DeepSpeedConfigError, ValueError):
    """A configuration value has the right type but is not allowed."""


# --------------------------------------------------------------------------------------------------------------------
# Rank and world size. Configs are also read before the process group exists (tools, zero.Init), hence the fallbacks.
# --------------------------------------------------------------------------------------------------------------------


def distributed_is_initialized() -> bool:
    """Whether a default process group exists."""
    return torch_dist.is_available() and torch_dist.is_initialized()


def global_rank() -> int:
    """Rank in the default process group; before it exists, what the launcher put into ``RANK``, else 0."""
    if distributed_is_initialized():
        return torch_dist.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def world_size() -> int:
    """Size of the default process group, 1 before it exists."""
    return torch_dist.get_world_size() if distributed_is_initialized() else 1


def warn_once_on_rank_0(message: str) -> None:
    """Log ``message`` as a warning on rank 0, once per process: a config is often read several times in one run."""
    log_dist_once(message, ranks=[0], level=logging.WARNING)


# --------------------------------------------------------------------------------------------------------------------
# Misspelt keys
# --------------------------------------------------------------------------------------------------------------------


def edit_distance(a: str, b: str) -> int:
    """Number of characters to insert, delete, substitute or swap with their neighbour to turn ``a`` into ``b``."""
    before_previous: list[int] = []
    previous: list[int] = []
    row = list(range(len(b) + 1))
    for i, char_a in enumerate(a, start=1):
        before_previous, previous, row = previous, row, [i]
        for j, char_b in enumerate(b, start=1):
            row.append(min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (char_a != char_b)))
            if i > 1 and j > 1 and char_a == b[j - 2] and a[i - 2] == char_b:
                row[j] = min(row[j], before_previous[j - 2] + 1)
    return row[-1]


def closest_key(key: str, known: Iterable[str]) -> str | None:
    """The known key that ``key`` is most likely a misspelling of, or None when no known key is close.

    Close means: equal but for case, dashes and underscores; one edit away (two for names of nine characters and more);
    or the beginning of exactly one known key (``gradient_clip``).
    """
    # "zero_optimization.reduce_bucket_size" and the like are written by client libraries for their own use.
    if "." in key:
        return None
    plain = _plain(key)
    candidates = {name: edit_distance(plain, _plain(name)) for name in known}
    if not candidates:
        return None
    best = min(candidates, key=lambda name: candidates[name])
    allowed = 2 if len(plain) >= 9 else 1 if len(plain) >= 4 else 0
    if candidates[best] <= allowed:
        return best
    begun = [name for name in candidates if len(plain) >= 8 and _plain(name).startswith(plain)]
    return begun[0] if len(begun) == 1 else None


def _plain(key: str) -> str:
    return key.lower().replace("_", "").replace("-", "").replace(" ", "")


def check_section_keys(section: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Refuse a misspelt key in a section that ignores unknown keys.

    Raises:
        DeepSpeedConfigError: a key that is not in ``known`` is close to one that is.
    """
    known = list(known)
    for key in section:
        suggestion = None if key in known else closest_key(str(key), known)
        if suggestion is not None:
            raise DeepSpeedConfigError(
                f"Unknown key {key!r} in the config section {where!r}: did you mean {suggestion!r}?"
            )


def without_auto(params: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the entries whose value is still ``"auto"``: they take their default."""
    return {key: value for key, value in params.items() if not (isinstance(value, str) and value == AUTO)}


def constructor_arguments(cls: type, params: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The config section ``where`` as keyword arguments of ``cls``, whose first argument comes from elsewhere.

    Raises:
        DeepSpeedConfigTypeError: an argument that ``cls`` does not take, or one that it needs is missing.
    """
    kept = without_auto(params)
    _, *arguments = inspect.signature(cls).parameters.values()
    if any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments):
        return kept
    names = [argument.name for argument in arguments]
    for key in kept:
        if key not in names:
            near = closest_key(key, names)
            advice = f"did you mean {near!r}?" if near else f"it takes {', '.join(names)}"
            raise DeepSpeedConfigTypeError(f"Config key '{where}.{key}' is no argument of {cls.__name__}: {advice}")
    missing = [a.name for a in arguments if a.default is inspect.Parameter.empty and a.name not in kept]
    if missing:
        raise DeepSpeedConfigTypeError(f"{cls.__name__} needs {', '.join(f'{where}.{name!s}' for name in missing)}")
    return kept


# --------------------------------------------------------------------------------------------------------------------
# pydantic sections
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeprecatedKey:
    """How a deprecated key of a section is forwarded.

    Attributes:
        new_key: field that takes the value, None when the key no longer does anything.
        convert: turns the old value into the new one.
        advice: what to write instead, for keys without a successor of their own.
    """

    new_key: str | None
    convert: Callable[[Any], Any] = lambda value: value
    advice: str = ""


class DeepSpeedConfigModel(BaseModel):
    """Base of all config sections with a fixed set of keys.

    - A value ``"auto"`` is dropped before validation, that is, it means "use the default" (not with ``strict=True``).
    - Deprecated keys (``deprecated_keys``) warn and are forwarded to their successor.
    - Keys may be written by alias or by field name; unknown keys are errors.
    - Integers may be written as integral floats (``5e8``). Enum members are stored as plain values.
    - Assignments after construction are validated as well.

    Raises:
        pydantic.ValidationError: a value or key is not allowed.
        AssertionError: a deprecated key is given together with its successor.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    deprecated_keys: ClassVar[Mapping[str, DeprecatedKey]] = {}

    def __init__(self, strict: bool = False, **data: Any) -> None:
        if not strict:
            data = {key: value for key, value in data.items() if not (isinstance(value, str) and value == AUTO)}
        super().__init__(**self._forward_deprecated_keys(data))

    @classmethod
    def _forward_deprecated_keys(cls, data: dict[str, Any]) -> dict[str, Any]:
        for old, forward in cls.deprecated_keys.items():
            if data.get(old) is None:
                continue
            if forward.new_key is None:
                warn_once_on_rank_0(f"Config key {old!r} ({cls.__name__}) is deprecated and ignored; {forward.advice}")
                continue
            alias = cls.model_fields[forward.new_key].alias or forward.new_key
            both = [key for key in (alias, forward.new_key) if data.get(key) is not None]
            if both:
                raise AssertionError(
                    f"Config key {old!r} ({cls.__name__}) is the deprecated name of {alias!r} and both are given "
                    f"({old}={data[old]!r}, {both[0]}={data[both[0]]!r}): remove {old!r}"
                )
            warn_once_on_rank_0(f"Config key {old!r} ({cls.__name__}) is deprecated, use {alias!r} instead")
            data = {**data, forward.new_key: forward.convert(data[old])}
            if alias != forward.new_key:
                data.pop(alias, None)
        return data

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        """Name the nearest valid key; pydantic alone would only say that the key is not permitted."""
        if not isinstance(data, dict):
            return data
        known: dict[str, str] = {}
        for name, field in cls.model_fields.items():
            known[name] = name
            known[field.alias or name] = name
        unknown = [str(key) for key in data if key not in known]
        listed = sorted(field.alias or name for name, field in cls.model_fields.items())
        if unknown:
            near = closest_key(unknown[0], known)
            raise PydanticCustomError(
                "extra_forbidden",
                "Unknown key '{key}' ({section}): {advice}",
                {
                    "key": unknown[0],
                    "section": cls.__name__,
                    "advice": f"did you mean '{near}'?" if near else f"valid keys are {', '.join(listed)}",
                },
            )
        twice = [name for name, count in Counter(known[key] for key in data).items() if count > 1]
        if twice:
            alias = cls.model_fields[twice[0]].alias
            raise PydanticCustomError(
                "given_twice", "'{name}' and '{alias}' are the same key: give one", {"name": twice[0], "alias": alias}
            )
        return data

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """``stage: true`` would pass as 1, since a bool is an int."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and isinstance(kind, type) and issubclass(kind, (int, float)) and kind is not bool:
            raise ValueError(f"must be a number, got {value!r}")
        return value

    @field_serializer("*", when_used="json", check_fields=False)
    def serialize_torch_dtype(self, value: Any) -> Any:
        """JSON form of a field: a torch dtype becomes its name, everything else is left to pydantic."""
        return str(value) if isinstance(value, torch.dtype) else value

    def set_derived(self, name: str, value: Any) -> None:
        """Store a value computed from other fields, without re-running validation or marking it as set by the user."""
        self.__dict__[name] = value


def get_config_default(config: type[DeepSpeedConfigModel], field_name: str) -> Any:
    """Default of one field of a config section.

    Raises:
        AssertionError: the section has no such field, or the field has no default.
    """
    if field_name not in config.model_fields:
        raise AssertionError(f"{config.__name__} has no field {field_name!r}; it has {sorted(config.model_fields)}")
    field = config.model_fields[field_name]
    if field.is_required():
        raise AssertionError(f"{config.__name__}.{field_name} is required and has no default")
    return field.get_default(call_default_factory=True)


class DeepSpeedConfigObject:
    """Base of the hand-parsed sections: plain attributes, printed as JSON."""

    def repr(self) -> dict[str, Any]:
        """All attributes as a dict."""
        return self.__dict__

    def __repr__(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True, indent=4, cls=ScientificNotationEncoder)


# --------------------------------------------------------------------------------------------------------------------
# Typed reading of single keys
# --------------------------------------------------------------------------------------------------------------------


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """``param_dict[param_name]`` or the default."""
    return param_dict.get(param_name, param_default_value)


def get_list_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """``param_dict[param_name]`` or the default, for list values."""
    return param_dict.get(param_name, param_default_value)


def get_dict_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """``param_dict[param_name]`` or the default, for dict values."""
    return param_dict.get(param_name, param_default_value)


def read_value(section: Mapping[str, Any], key: str, default: Any, kind: str, where: str = "", **limits: Any) -> Any:
    """Read one hand-parsed key and check its type.

    An absent key and ``"auto"`` give the default. ``null`` is accepted where the default is null.

    Args:
        section: the dict that holds the key.
        key: its name.
        default: value when absent.
        kind: ``bool``, ``int``, ``number``, ``str``, ``dict`` or ``list``.
        where: name of the section, empty at top level; for messages.
        limits: ``minimum`` (inclusive), ``above`` (exclusive) and ``choices`` (case-insensitive strings; the value
            comes back in the spelling of the choice).

    Raises:
        DeepSpeedConfigTypeError: wrong type (also a ``TypeError``).
        DeepSpeedConfigValueError: not within the limits (also a ``ValueError``).
    """
    value = section.get(key, default)
    if key not in section or (isinstance(value, str) and value == AUTO):
        return default
    if value is None and default is None:
        return None
    name = f"{where}.{key}" if where else key
    convert = _CONVERTERS[kind]
    converted = convert(value)
    if converted is None:
        raise DeepSpeedConfigTypeError(
            f"Config key {name!r} must be {_KIND_NAMES[kind]}, got {value!r} of type {type(value).__name__}"
        )
    return _within_limits(name, kind, value, converted, **limits)


def _within_limits(
    name: str,
    kind: str,
    value: Any,
    converted: Any,
    minimum: float | None = None,
    above: float | None = None,
    choices: Iterable[str] | None = None,
) -> Any:
    if minimum is not None and not converted >= minimum:
        raise DeepSpeedConfigValueError(f"Config key {name!r} must be {_KIND_NAMES[kind]} >= {minimum}, got {value!r}")
    if above is not None and not converted > above:
        raise DeepSpeedConfigValueError(f"Config key {name!r} must be {_KIND_NAMES[kind]} > {above}, got {value!r}")
    if choices is None:
        return converted
    for choice in choices:
        if choice.lower() == converted.lower():
            return choice
    raise DeepSpeedConfigValueError(f"Config key {name!r} must be one of {list(choices)}, got {value!r}")


def read_section(param_dict: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The section ``key`` as a dict, empty when absent or null.

    Raises:
        DeepSpeedConfigTypeError: the section is not a dict.
    """
    value = param_dict.get(key)
    if value is None or (isinstance(value, str) and value == AUTO):
        return {}
    if not isinstance(value, dict):
        raise DeepSpeedConfigTypeError(
            f"Config section {key!r} must be a dict (a JSON object), got {value!r} of type {type(value).__name__}"
        )
    return value


@dataclass(frozen=True)
class KeySpec:
    """Type, default and limits of one hand-parsed key.

    Attributes:
        kind: as in :func:`read_value`, or ``dtype``: the name of a torch dtype, one of ``choices``.
        default: value when the key is absent or ``"auto"``; a dtype by its name.
        minimum: smallest value, inclusive.
        above: largest value that is too small.
        choices: allowed strings, in any case.
        nullable: accept ``null`` although the default is something else.
    """

    kind: str
    default: Any = None
    minimum: float | None = None
    above: float | None = None
    choices: tuple[str, ...] | None = None
    nullable: bool = False

    def read(self, section: Mapping[str, Any], key: str, where: str = "") -> Any:
        """The checked value of ``section[key]``, a ``torch.dtype`` for dtypes.

        Raises:
            DeepSpeedConfigTypeError, DeepSpeedConfigValueError: as :func:`read_value`.
        """
        if self.nullable and key in section and section[key] is None:
            return None
        limits = {"minimum": self.minimum, "above": self.above, "choices": self.choices}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        if self.kind == "dtype":
            return dtype_from_name(read_value(section, key, self.default, "str", where, **given))
        default = dict(self.default) if isinstance(self.default, dict) else self.default
        return read_value(section, key, default, self.kind, where, **given)


def _as_bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _as_int(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    return int(value) if math.isfinite(value) and int(value) == value else None


def _as_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
        return None
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _instance_of(kind: type) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, kind) else None


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "bool": _as_bool,
    "int": _as_int,
    "number": _as_number,
    "str": _instance_of(str),
    "dict": _instance_of(dict),
    "list": _instance_of(list),
}
_KIND_NAMES = {
    "bool": "a boolean (true or false)",
    "int": "an integer",
    "number": "a number",
    "str": "a string",
    "dict": "a dict (a JSON object)",
    "list": "a list",
}

_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


def dtype_from_name(name: Any) -> torch.dtype | None:
    """The torch dtype called ``name`` (``fp16``, ``float16``, ``torch.float16``, ``half`` ...), None if unknown."""
    return _DTYPES.get(name.lower().removeprefix("torch.")) if isinstance(name, str) else None


# --------------------------------------------------------------------------------------------------------------------
# JSON
# --------------------------------------------------------------------------------------------------------------------


def dict_raise_error_on_duplicate_keys(ordered_pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """``object_pairs_hook`` that refuses a key given twice in one object; JSON would keep the last one.

    Raises:
        ValueError: naming the duplicate keys.
    """
    pairs = list(ordered_pairs)
    result = dict(pairs)
    if len(result) != len(pairs):
        duplicates = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise ValueError(f"Duplicate keys in the DeepSpeed config: {duplicates}")
    return result


class pp_int(int):  # The name is part of the interface.
    """An int that prints with thousands separators, or as ``custom_print_str``."""

    custom_print_str: str | None

    def __new__(cls, val: int, custom_print_str: str | None = None) -> pp_int:
        instance = super().__new__(cls, val)
        instance.custom_print_str = custom_print_str
        return instance

    def __repr__(self) -> str:
        return self.custom_print_str or f"{int(self):,}"


class ScientificNotationEncoder(json.JSONEncoder):
    """Writes large round numbers (above 1e3, up to seven digits) in scientific notation, everything else as JSON."""

    def iterencode(self, o: Any, _one_shot: bool = False, level: int = 0) -> Iterator[str]:
        """Yield the encoded text of ``o`` in one piece; ``level`` is the nesting depth, for the indentation."""
        yield self._encode(o, level)

    def _encode(self, o: Any, level: int) -> str:
        if isinstance(o, bool) or o is None or isinstance(o, str):
            return json.dumps(o)
        if isinstance(o, (int, float)):
            short = f"{o:e}"
            return short if math.isfinite(o) and o > 1e3 and float(short) == o else json.dumps(o)
        indent = self.indent if isinstance(self.indent, int) else 2
        inner, outer = " " * indent * (level + 1), " " * indent * level
        if isinstance(o, Mapping):
            keys = sorted(o) if self.sort_keys else list(o)
            items = [f"{inner}{json.dumps(str(key))}: {self._encode(o[key], level + 1)}" for key in keys]
            return "{\n" + ",\n".join(items) + f"\n{outer}}}" if items else "{}"
        if isinstance(o, (list, tuple)):
            return "[" + ", ".join(self._encode(item, level + 1) for item in o) + "]"
        return json.dumps(str(o))
