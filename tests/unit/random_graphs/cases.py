# SPDX-License-Identifier: Apache-2.0
"""A case as data: model, call sequence and config. Printed as text, and as Python that makes it again.

A *program* says how data goes through the model: nested tuples whose first entry names what is done,

==================================  ===================================================================================
``("block", i)``                    through block ``i``; blocks are shared between all programs
``("chain", p, q, ...)``            one after the other
``("branches", p, q, ...)``         the sum of branches from one input
``("reentrant", p)``                under ``torch.utils.checkpoint(use_reentrant=True)``
``("nonreentrant", p)``             under ``torch.utils.checkpoint(use_reentrant=False)``
``("detached", p)``                 added without a graph: ``p`` runs and its parameters get no gradient from it
``("cut", p)``                      added, with a graph that ends before ``p``
``("on_ranks", (r, ...), p)``       on some ranks only, others pass by
``("fail",)``                       raises
==================================  ===================================================================================
"""

from __future__ import annotations

import textwrap
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

import torch

Program = tuple[Any, ...]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 64.0  # of fp16 cases
INPUT = -1  # an aborted backward dies where the gradient of its input is known
GAIN = -1  # the parameter that every output uses, where otherwise a block's first one is meant


@dataclass(frozen=True)
class Forward:
    """One forward: by which door (engine, module, submodule, parameter) and what it does there."""

    route: str
    program: Program
    index: int = 0  # position in the micro-step, which seeds the data
    input_requires_grad: bool = True

    def __str__(self) -> str:
        plain = "" if self.input_requires_grad else ", input without grad"
        return f"out{self.index} = {self.route}: {render(self.program)}{plain}"


@dataclass(frozen=True)
class Backward:
    """One backward over outputs of the micro-step's forwards.

    ``kind``: engine (``engine.backward(loss)``), loss (``loss.backward()``), scale (``engine.scale(loss).backward()``),
    output (``out.backward(g)``), inputs (``loss.backward(inputs=some parameters)``).
    """

    kind: str = "engine"
    outputs: tuple[int, ...] = (0,)
    retain: bool = False
    scale_wrt_gas: bool = True
    ranks: tuple[int, ...] | None = None  # None: all
    penalty: bool = False  # the loss has a gradient penalty by torch.autograd.grad(create_graph=True)
    inputs_seed: int = 0
    aborted: bool = False  # dies of an exception, so that nothing of it may count
    aborted_at: int = INPUT  # or the number of a block: where the gradient of its first parameter is known

    def __str__(self) -> str:
        notes = [f"outputs {list(self.outputs)}"]
        notes += ["retain_graph"] * self.retain + ["scale_wrt_gas=False"] * (not self.scale_wrt_gas)
        if self.aborted:
            notes.append("aborted at " + ("the input" if self.aborted_at == INPUT else f"block {self.aborted_at}"))
        notes += ["gradient penalty"] * self.penalty
        notes += [f"only ranks {list(self.ranks)}"] if self.ranks is not None else []
        return f"{self.kind} backward, {', '.join(notes)}"


@dataclass(frozen=True)
class MicroStep:
    """Forwards, then backwards (or each forward just before its first use), then ``engine.step()``."""

    forwards: tuple[Forward, ...]
    backwards: tuple[Backward, ...]
    lazy_forwards: bool = False  # each just before its first use
    deferred_by: str = ""  # no_sync or coalesce_grad_reduction around it
    zero_grad_after: bool = False
    failing: tuple[Forward, ...] = ()  # forwards that raise, before all others
    reduced_after: bool = False  # engine.allreduce_gradients() after the backwards


@dataclass(frozen=True)
class Edit:
    """The gradient so far is changed by hand before the ``step()`` of a micro-step.

    ``how``: scale or set (through the accessors), published (``.grad`` of stage 0 is multiplied in place).
    """

    micro_step: int
    block: int = GAIN
    how: str = "scale"
    value: float = 2.0

    def __str__(self) -> str:
        what = "gain" if self.block == GAIN else f"block {self.block}"
        return f"micro-step {self.micro_step}: gradient of {what}, {self.how} {self.value}"


@dataclass(frozen=True)
class Window:
    """The micro-steps up to one update of the weights."""

    micro_steps: tuple[MicroStep, ...]
    frozen_blocks: tuple[int, ...] = ()  # do not require grad during this window
    read_by: str = "update"  # gradient taken from the change of the weights, or from the accessor before the last step
    edits: tuple[Edit, ...] = ()
    may_refuse: bool = False  # a backward is aborted where it reduces: step() may refuse the window


@dataclass(frozen=True)
class Case:
    """Everything about one case. ``config`` holds what differs from a run's own base (``running.full_config``)."""

    blocks: tuple[tuple[str, int], ...]  # kind and a size, or for ties the block tied to
    windows: tuple[Window, ...] = ()
    world_size: int = 1
    config: dict[str, Any] = field(default_factory=dict, hash=False)
    dtype: str = "fp32"
    width: int = 3
    seed: int = 0
    frozen_blocks: tuple[int, ...] = ()
    two_groups: bool = False
    boundary_by_hand: bool = False
    delayed: bool = False  # what a collective delivers is not there before it was waited for
    jitter: bool = False  # each rank is late by another time at each collective

    @property
    def steps(self) -> int:
        return self.config.get("gradient_accumulation_steps", 1)

    @property
    def zero(self) -> dict[str, Any]:
        return self.config.get("zero_optimization", {})

    @property
    def stage(self) -> int:
        return self.zero.get("stage", 0)

    @property
    def managed(self) -> bool:
        return self.config.get("managed_gradient_accumulation", True)

    def describe(self) -> str:
        """All of it as text."""
        lines = [
            f"case with seed {self.seed}: {self.world_size} ranks, {self.dtype}, width {self.width}"
            + ", two parameter groups" * self.two_groups
            + ", boundary set by hand" * self.boundary_by_hand
            + ", delayed transport" * self.delayed
            + ", jitter" * self.jitter,
            f"  blocks: {', '.join(f'{i}={kind}({size})' for i, (kind, size) in enumerate(self.blocks))}"
            f"; frozen: {list(self.frozen_blocks)}",
            f"  config: {self.config}",
        ]
        for w, window in enumerate(self.windows):
            frozen = f", blocks {list(window.frozen_blocks)} frozen" if window.frozen_blocks else ""
            refused = ", may be refused" * window.may_refuse
            lines.append(f"  window {w}, gradient read by {window.read_by}{frozen}{refused}")
            for m, step in enumerate(window.micro_steps):
                lines.append(
                    f"    micro-step {m}"
                    + f" in {step.deferred_by}" * bool(step.deferred_by)
                    + ", forwards just before use" * step.lazy_forwards
                    + ", then allreduce_gradients()" * step.reduced_after
                    + ", then zero_grad()" * step.zero_grad_after
                )
                lines += [f"      raises: {forward}" for forward in step.failing]
                lines += [f"      {action}" for action in (*step.forwards, *step.backwards)]
            lines += [f"    edit at {edit}" for edit in window.edits]
        return "\n".join(lines)


def render(program: Program) -> str:
    """A program as text."""
    kind, *rest = program
    if kind in ("block", "parameter"):
        return f"{kind}{rest[0]}"
    ranks = f"{list(rest.pop(0))}: " if kind == "on_ranks" else ""
    return f"{kind}({ranks}{', '.join(render(part) for part in rest)})"


def contains(program: Program, kind: str) -> bool:
    """Whether ``kind`` occurs in a program."""
    return program[0] == kind or any(isinstance(part, tuple) and part and contains(part, kind) for part in program[1:])


def blocks_with_gradient(program: Program) -> set[int]:
    """Blocks that a program runs on every rank, with a graph."""
    kind, *rest = program
    if kind == "block":
        return {rest[0]}
    if kind in ("chain", "branches", "reentrant", "nonreentrant"):
        return set().union(*(blocks_with_gradient(part) for part in rest))
    return set()


def as_python(value: Any) -> str:
    """An expression that makes ``value`` again, without what is as by default."""
    if is_dataclass(value):
        return f"{type(value).__name__}({', '.join(_arguments(value))})"
    if isinstance(value, tuple):
        return f"({', '.join(map(as_python, value))}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_python(key)}: {as_python(own)}" for key, own in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _arguments(value: Any) -> list[str]:
    parts, positional = [], True
    for item in fields(value):
        own = getattr(value, item.name)
        if own == (item.default if item.default_factory is MISSING else item.default_factory()):
            positional = False
        else:
            parts.append(as_python(own) if positional else f"{item.name}={as_python(own)}")
    return parts


def as_script(case: Case, comment: str) -> str:
    """A program that runs the case alone and fails where it fails.

    Args:
        comment: what went wrong, in paragraphs.
    """
    lines = ["# SPDX-License-Identifier: Apache-2.0"]
    for paragraph in comment.splitlines():
        lines += textwrap.wrap(paragraph, 118, initial_indent="# ", subsequent_indent="# ", break_long_words=False)
    lines.append("from unit.random_graphs import *")
    lines.append("from unit.random_graphs.searching import run_alone")
    lines.append("")
    lines.append("case = Case(")
    for item in fields(case):
        own = getattr(case, item.name)
        if item.name == "windows":
            lines.append("    windows=(")
            for window in own:
                _, *rest = _arguments(window)
                lines.append("        Window((")
                lines += [f"            {as_python(step)}," for step in window.micro_steps]
                lines.append(f"        ){''.join(f', {part}' for part in rest)}),")
            lines.append("    ),")
        elif own != (item.default if item.default_factory is MISSING else item.default_factory()):
            lines.append(f"    {item.name}={as_python(own)},")
    lines += [")", "", 'if __name__ == "__main__":', "    run_alone(case)", ""]
    return "\n".join(lines)
