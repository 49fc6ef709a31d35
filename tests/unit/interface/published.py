# SPDX-License-Identifier: Apache-2.0
"""The names that release 0.19.8 publishes for its training core, and how this package compares with them.

``published_names.txt`` holds the facts, a name a line and a class's names indented below it::

    module deepspeed.runtime.utils
      def get_global_norm(norm_list)
      const GIB = 1073741824            ... is not compared: it depends on the moment or machine
      class Kind enum
        const first = 'first'           attribute of a class, or member of an enum
        prop name
        field name = default            of a typed config
        static def make(x)
      from deepspeed.x.y name           a package shows a name of one of its modules
    other deepspeed.moe 17              outside of the training core: that many names, none of them compared
"""

from __future__ import annotations

import ast
import enum
import fnmatch
import functools
import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.runtime import engine_config
from unit.interface import departures

FILE = Path(__file__).with_name("published_names.txt")
_ABSENT = object()
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Name:
    """One published name: ``owner`` is its class, if it has one; ``text`` a signature or a value."""

    module: str
    owner: str
    name: str
    kind: str  # class, def, const, prop, field, from
    text: str = ""

    @property
    def path(self) -> str:
        return ".".join(part for part in (self.module, self.owner, self.name) if part)


@functools.cache
def names() -> tuple[Name, ...]:
    """Every published name of the training core."""
    found, module, owner = [], "", ""
    for line in FILE.read_text().splitlines():
        words = line.split()
        while words[0] in ("abstract", "static") or words[:2] == ["class", "def"]:
            words = words[1:]
        if words[0] == "module":
            module, owner = words[1], ""
        elif words[0] != "other":
            inside = owner if line.startswith("    ") else ""
            found.append(_parse(module, inside, words))
            owner = words[1] if words[0] == "class" else inside
    return tuple(found)


def _parse(module: str, owner: str, words: list[str]) -> Name:
    kind, rest = words[0], " ".join(words[1:])
    if kind == "def":
        name, _, parameters = rest.partition("(")
        return Name(module, owner, name, kind, f"({parameters}")
    if kind in ("const", "field"):
        name, _, value = rest.partition(" = ")
        return Name(module, owner, name, kind, value)
    if kind == "from":
        return Name(module, owner, words[2], kind, words[1])
    return Name(module, owner, words[1], kind)


@functools.cache
def modules() -> tuple[str, ...]:
    """The modules of the training core."""
    return tuple(line.split()[1] for line in FILE.read_text().splitlines() if line.startswith("module "))


@functools.cache
def other_modules() -> dict[str, int]:
    """Modules outside of the training core, and how many names each has."""
    lines = (line.split() for line in FILE.read_text().splitlines() if line.startswith("other "))
    return {module: int(count) for _, module, count in lines}


def find(name: Name) -> Any:
    """The object of this package under a published name.

    Raises:
        ImportError, AttributeError, NotImplementedError: there is none.
    """
    holder = importlib.import_module(name.module)
    if name.owner:
        holder = getattr(holder, name.owner)
    if name.kind == "field":
        return holder.model_fields[name.name] if name.name in holder.model_fields else getattr(holder, name.name)
    return inspect.getattr_static(holder, name.name) if name.kind == "prop" else getattr(holder, name.name)


def is_there(name: Name) -> bool:
    """Whether this package has the name at all (a method that only raises counts)."""
    try:
        find(name)
    except (ImportError, AttributeError, NotImplementedError):
        return False
    return True


def difference(name: Name) -> str:
    """How this package's object departs from the published one, in words; empty if it is compatible."""
    ours = find(name)
    if name.kind == "def":
        return _compare_signatures(name, ours)
    if name.kind == "const":
        value = ours.value if isinstance(ours, enum.Enum) else ours
        return "" if _same_value(name.text, value) else f"is {value!r}, published {name.text}"
    if name.kind == "field":
        default = ours.get_default(call_default_factory=False)
        if ours.default_factory is not None or _same_value(name.text, default):
            return ""
        return f"defaults to {default!r}, published {name.text}"
    if name.kind == "class" and not inspect.isclass(ours):
        return "is no class"
    return ""


def _compare_signatures(name: Name, ours: Any) -> str:
    published = ast.parse(f"def f{name.text}: pass").body[0].args
    theirs = [argument.arg for argument in [*published.posonlyargs, *published.args]]
    defaults = dict(zip(reversed(theirs), reversed(published.defaults)))
    keyword_only = {a.arg: d for a, d in zip(published.kwonlyargs, published.kw_defaults)}
    if not callable(ours):
        return "cannot be called"
    parameters = list(inspect.signature(ours).parameters.values())
    if theirs[:1] in (["self"], ["cls"]):
        theirs = theirs[1:]
        if parameters and parameters[0].name in ("self", "cls"):
            parameters = parameters[1:]
    if published.vararg is not None:  # takes whatever it is given: there is nothing to compare
        return ""
    return _problems(theirs, {**defaults, **keyword_only}, list(keyword_only), parameters, published.kwarg is not None)


def _problems(
    theirs: list[str],
    defaults: dict[str, ast.expr | None],
    keyword_only: list[str],
    parameters: list[inspect.Parameter],
    any_keyword: bool,
) -> str:
    ours = {parameter.name: parameter for parameter in parameters}
    positional = [p.name for p in parameters if p.kind in _POSITIONAL]
    star = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    keywords = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    problems = []
    for place, argument in enumerate(theirs):
        in_order = place < len(positional) and positional[place] == argument
        if not in_order and not star:
            there = positional[place] if place < len(positional) else "absent"
            problems.append(f"argument {place + 1} is {there}, not {argument}")
    for argument in [*theirs, *keyword_only]:
        if argument not in ours:
            if not keywords:
                problems.append(f"takes no {argument}")
            continue
        problems += _compare_default(argument, defaults.get(argument), ours[argument].default)
    if any_keyword and not keywords:
        problems.append("takes no other keywords")
    extra = [
        p.name
        for p in parameters
        if p.name not in (*theirs, *keyword_only)
        and p.default is inspect.Parameter.empty
        and p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    problems += [f"requires {argument} besides" for argument in extra]
    return "; ".join(problems)


def _compare_default(argument: str, published: ast.expr | None, ours: Any) -> list[str]:
    if published is None:  # what they require may have a default here
        return []
    if ours is inspect.Parameter.empty:
        return [f"{argument} has no default, published {ast.unparse(published)}"]
    if _same_value(ast.unparse(published), ours):
        return []
    return [f"{argument} defaults to {ours!r}, published {ast.unparse(published)}"]


def _same_value(text: str, value: Any) -> bool:
    if text == "..." or (text in ("{}", "[]") and value is None):  # None, where an empty one would be shared
        return True
    if text == "sys.maxsize":
        return value == sys.maxsize
    try:
        published = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return _plain(text) in (_plain(str(value)), _plain(repr(value)), _plain(_display(value)))
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(published, (list, tuple, dict, set)) and isinstance(value, (list, tuple, dict, set, frozenset)):
        return type(published)(value) == published
    return value == published and isinstance(value, bool) == isinstance(published, bool)


def _plain(text: str) -> str:
    return "".join(text.split()).replace('"', "'").rpartition("ReduceOp.")[2]


def _display(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], enum.Enum):
        return "[" + ", ".join(_display(item) for item in value) + "]"
    if inspect.isclass(value) or inspect.isfunction(value):
        return value.__name__
    return f"{type(value).__name__}()"


def refuses(name: Name) -> bool:
    """Whether the name exists only to raise a NotImplementedError."""
    on_engine = (name.module, name.owner) == ("deepspeed.runtime.engine", "DeepSpeedEngine")
    return name.path in departures.REFUSING or (on_engine and name.name in engine_config._UNBUILT)


def reason(table: dict[str, str], path: str) -> str:
    """Of the first pattern that fits; empty if none does."""
    return next((why for pattern, why in table.items() if fnmatch.fnmatchcase(path, pattern)), "")
