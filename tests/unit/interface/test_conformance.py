# SPDX-License-Identifier: Apache-2.0
"""Every published name of the training core exists with a compatible signature, or raises by name and is listed."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

import deepspeed
from deepspeed import unbuilt
from deepspeed.runtime import engine_config
from deepspeed.runtime.engine import DeepSpeedEngine
from unit.interface import coverage, departures, published
from unit.interface.published import Name

REASONS = (ImportError, AttributeError, NotImplementedError)
DOCS = Path(deepspeed.__file__).parents[1] / "docs"


def test_every_name_is_compatible_or_listed() -> None:
    problems = []
    for name in published.names():
        state, why = coverage.state_of(name)
        if state == coverage.ABSENT and not why:
            problems.append(f"{name.path} is missing")
        elif state in (coverage.BUILT, coverage.DIFFERS) and published.difference(name) and not why:
            problems.append(f"{name.path} {published.difference(name)}")
    assert problems == [], f"{len(problems)} names; build them, or list them with a reason in departures.py"
    assert len(published.names()) > 3000


def test_departures_are_all_true() -> None:
    def used(table: dict[str, str], paths: set[str]) -> list[str]:
        first = {next((p for p in table if published.reason({p: "x"}, path)), "") for path in paths}
        return sorted(set(table) - first)

    absent = {n.path for n in published.names() if coverage.state_of(n)[0] == coverage.ABSENT}
    different = {n.path for n in published.names() if coverage.state_of(n)[0] == coverage.DIFFERS}
    assert used(departures.ABSENT, absent) == [], "nothing is absent there any more"
    assert used(departures.DIFFERING, different) == [], "nothing differs there any more"
    known = {name.path for name in published.names()}
    assert set(departures.REFUSING) <= known
    assert {f"deepspeed.runtime.engine.DeepSpeedEngine.{name}" for name in engine_config._UNBUILT} <= known


@pytest.mark.parametrize("state", [coverage.REFUSES, coverage.ABSENT])
def test_what_is_missing_raises_by_name(state: str) -> None:
    silent = []
    for name in published.names():
        if coverage.state_of(name)[0] != state or published.refuses(name) or name.kind == "field":
            continue
        if name.owner and not published.is_there(Name(name.module, "", name.owner, "class")):
            continue  # the class itself is asked for
        try:
            published.find(name)
        except REASONS as reason:
            said = str(reason)
            if not any(word in said for word in (name.name, name.module, *_missing_parents(name.module))):
                silent.append(f"{name.path}: {reason}")
        else:
            if not name.owner:
                silent.append(name.path)
    assert silent == []


def _missing_parents(module: str) -> list[str]:
    return [missing for missing in unbuilt.MODULES if module.startswith(f"{missing}.")]


def test_what_refuses_says_so_when_called() -> None:
    for path, words in departures.REFUSING.items():
        name = next(name for name in published.names() if name.path == path)
        function = published.find(name)
        required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        arguments = [None for p in required if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        with pytest.raises(NotImplementedError, match=words):
            function(*arguments)
    for method in engine_config._UNBUILT:
        with pytest.raises(NotImplementedError, match=rf"engine\.{method}: .* is not built"):
            getattr(DeepSpeedEngine, method)(None)


def test_missing_modules_name_their_feature() -> None:
    for module, feature in unbuilt.MODULES.items():
        with pytest.raises(ModuleNotFoundError) as caught:
            importlib.import_module(module)
        assert module in str(caught.value) and feature in str(caught.value) and caught.value.name == module
    for module, names in unbuilt.NAMES.items():
        for name, feature in names.items():
            with pytest.raises(unbuilt.UnbuiltFeatureError, match=rf"{module}\.{name}: {feature}"):
                getattr(importlib.import_module(module), name)
            with pytest.raises(ImportError, match=name):
                exec(f"from {module} import {name}")
    for module in published.other_modules():
        with pytest.raises(ModuleNotFoundError, match="is not built yet"):
            importlib.import_module(module)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'deepspeed.no_such_thing'$"):
        importlib.import_module("deepspeed.no_such_thing")


def test_the_page_is_up_to_date() -> None:
    assert (DOCS / "coverage.md").read_text() == coverage.page(), (
        "run: PYTHONPATH=.:tests python -m unit.interface.coverage > docs/coverage.md"
    )


# ------------------------------------------------------------------ the comparison itself


@pytest.mark.parametrize(
    ("text", "ours", "problem"),
    [
        ("(a, b=1)", lambda a, b=1: None, ""),
        ("(a, b=1)", lambda a, b=1, c=2: None, ""),
        ("(a, b=1)", lambda *args, **kwargs: None, ""),
        ("(a, b)", lambda b, a: None, "argument 1 is b, not a"),
        ("(a, b=1)", lambda a, b=2: None, "b defaults to 2, published 1"),
        ("(a, b=1)", lambda a, b: None, "b has no default"),
        ("(a, b=True)", lambda a, b=1: None, "b defaults to 1, published True"),
        ("(a)", lambda a, c: None, "requires c besides"),
        ("(a, *, k=0)", lambda a: None, "takes no k"),
        ("(a, **kwargs)", lambda a: None, "takes no other keywords"),
        ("(*args, **kwargs)", lambda loss: None, ""),
    ],
)
def test_signatures_are_compared(text: str, ours: object, problem: str) -> None:
    found = published._compare_signatures(Name("m", "", "f", "def", text), ours)
    assert problem in found and bool(problem) == bool(found)
