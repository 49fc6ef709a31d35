# SPDX-License-Identifier: Apache-2.0
"""A step of an engine done again in plain torch, for ``ds_grad_check --against ddp``.

From each forward of the engine in a checked window its inputs, the state of the random number generators and the
autocast that is on are kept, and from each backward the gradients that arrive at that forward's outputs. When the
window ends, the forwards run again on a copy of the model (whole weights, made when the window began) without any
engine, those gradients are sent backward, and the result is averaged over ranks plainly, as DDP does.

What this cannot see is a gradient that does not come through an output of the engine's forward: a branch through
``engine.module``, a submodule or a parameter itself, a gradient penalty, a tensor that the model hands out beside its
outputs. So the graph of each backward is followed from its root, and where a path reaches a parameter without passing
such an output, that parameter is reported as *bypassed*, not as right or wrong.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed.runtime.gradients.self_check import GradientCheck, Observer
from deepspeed.runtime.gradients.self_check_calls import CALLS, BackwardCall
from deepspeed.runtime.gradients.self_check_compare import Comparator, Comparison
from deepspeed.runtime.gradients.self_check_record import ParameterEntry, WindowRecord
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.runtime.utils import tensors_in
from deepspeed.runtime.zero.partition_parameters import GatheredParameters


def map_tensors(function: Any, item: Any) -> Any:
    """``item`` with each tensor in nested tuples, lists and dicts replaced by ``function`` of it."""
    if isinstance(item, torch.Tensor):
        return function(item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(map_tensors(function, value) for value in item))
    if isinstance(item, (tuple, list)):
        return type(item)(map_tensors(function, value) for value in item)
    if isinstance(item, dict):
        return type(item)((key, map_tensors(function, value)) for key, value in item.items())
    return item


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf with the tensor's values, which nobody else changes."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class RandomState:
    """The random number generators of Python, numpy (where it is loaded) and torch, as they are now."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Put them back."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


@contextmanager
def as_it_was() -> Iterator[None]:
    """Random numbers go on outside as if nothing had run inside."""
    before = RandomState()
    try:
        yield
    finally:
        before.restore()


class AutocastState:
    """What ``torch.autocast`` is on, by device type."""

    def __init__(self) -> None:
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        self._on = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
        }  # the engine's own autocast comes on top, by its config

    def again(self) -> AbstractContextManager[Any]:
        """Context in which the same is on."""
        stack = ExitStack()
        for kind, (enabled, dtype) in self._on.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        return stack


@dataclass(eq=False)
class ForwardRun:
    """One forward of the engine.

    Attributes:
        arrived: gradients at the outputs (position to gradient) by backward.
        nodes: the graph's ends: node and index of each output.
    """

    args: Any
    kwargs: Any
    random_state: RandomState
    autocast: AutocastState
    training: list[bool]
    requires_grad: list[bool]
    arrived: dict[BackwardCall, dict[int, torch.Tensor]] = field(default_factory=dict)
    nodes: list[tuple[Any, int]] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)

    def note(self, position: int, gradient: torch.Tensor) -> None:
        """Hook of an output. In ``torch.autograd.grad`` no call of backward is running, and nothing counts."""
        if CALLS.current is not None:
            self.arrived.setdefault(CALLS.current, {})[position] = gradient.detach().clone()


class Replay(Observer):
    """Does the checked windows of one engine again.

    Attributes:
        results: per checked window, a comparison of each parameter with what the engine stepped with.
        bypassed: per checked window, names of parameters that a gradient reached around the engine's forward.
        impossible: why nothing could be done again, empty otherwise.
    """

    def __init__(self, engine: Any, check: GradientCheck) -> None:
        self.engine = engine
        self.check = check
        self.results: list[list[Comparison]] = []
        self.bypassed: list[set[str]] = []
        self.impossible = ""
        self._module: torch.nn.Module | None = None
        self._runs: list[ForwardRun] = []
        self._around: set[str] = set()
        self._recording = False
        self._inside = 0
        engine.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        engine.register_forward_hook(self._after_forward, always_call=True)
        for module in engine.module.modules():
            module.register_forward_pre_hook(_ModuleWatch(self))

    # ------------------------------------------------------------------ recording

    def on_window(self, check: GradientCheck, checked: bool) -> None:
        if check is not self.check:
            return
        self._forget()
        self._recording = checked
        CALLS.before_call.pop(self, None)
        if not checked:
            return
        CALLS.before_call[self] = self._follow
        CALLS.watch(self)
        with as_it_was():
            self._module = self._copy()

    def _copy(self) -> torch.nn.Module | None:
        try:
            with GatheredParameters(list(self.engine.module.parameters())):
                return copy.deepcopy(self.engine.module)
        except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
            self.impossible = f"the model cannot be copied ({type(error).__name__}: {error})"
            return None

    def _forget(self) -> None:
        for run in self._runs:
            for handle in run.handles:
                handle.remove()
        self._runs = []
        self._around = set()
        self._module = None

    def on_drop(self, check: GradientCheck) -> None:
        if check is self.check:
            for run in self._runs:
                run.arrived.clear()
            self._around = set()

    def _before_forward(self, _: Any, args: Any, kwargs: Any) -> None:
        self._inside += 1
        if self._recording and torch.is_grad_enabled() and CALLS.current is None:
            module = self.engine.module
            self._runs.append(
                ForwardRun(
                    map_tensors(own_copy, args),
                    map_tensors(own_copy, kwargs),
                    RandomState(),
                    AutocastState(),
                    [part.training for part in module.modules()],
                    [parameter.requires_grad for parameter in module.parameters()],
                )
            )

    def _after_forward(self, _: Any, args: Any, output: Any) -> None:
        self._inside -= 1
        if not self._recording or not torch.is_grad_enabled() or CALLS.current is not None or not self._runs:
            return
        run = self._runs[-1]
        for position, tensor in enumerate(tensors_in(output, dataclass_fields=True)):
            if tensor.grad_fn is not None:
                run.nodes.append((tensor.grad_fn, tensor.output_nr))
                run.handles.append(tensor.register_hook(lambda g, at=position: run.note(at, g)))

    def called_around(self, module: torch.nn.Module) -> None:
        """A module ran outside of the engine's forward and of any backward."""
        if self._recording and module.training and CALLS.current is None:
            names = {parameter: name for name, parameter in self.engine.module.named_parameters()}
            self._around |= {names[p] for p in module.parameters(recurse=False) if p in names}

    def _follow(self, roots: Sequence[torch.Tensor]) -> None:
        """A backward begins: find the parameters that it reaches without passing an output of a recorded forward."""
        if not self._recording:
            return
        known = {end for run in self._runs for end in run.nodes}
        several = {node for node, _ in known}  # their other outputs are followed one by one
        names = {entry.node: entry.name for entry in self.check.record.entries}
        ends = [(root.grad_fn, root.output_nr) for root in roots if root.grad_fn is not None]
        seen = set()
        while ends:
            end = ends.pop()
            node = end[0]
            if end in known or node in seen or end in seen:
                continue
            seen.add(end if node in several else node)
            if node in names:
                self._around.add(names[node])
            ends += [(after, index) for after, index in node.next_functions if after is not None]

    def on_call_end(self, call: BackwardCall, completed: bool) -> None:
        """What an aborted backward delivered does not count."""
        if not completed:
            for run in self._runs:
                run.arrived.pop(call, None)

    # ------------------------------------------------------------------ doing it again

    def on_compare(self, check: GradientCheck, comparator: Comparator) -> None:
        if check is not self.check or self._module is None or self.impossible:
            return
        self._recording = False
        parameters = dict(self._module.named_parameters())
        entries = [
            ParameterEntry(entry.name, parameters[entry.name], entry.shape, entry.param_group)
            for entry in check.record.entries
        ]
        record = WindowRecord(entries, check.accumulation_steps, lambda: 0)
        record.attach()
        try:
            with as_it_was(), torch.enable_grad():
                for run in self._runs:
                    self._run_again(self._module, run)
            self.results.append(comparator.of(entries).run())
        finally:
            record.detach()
        self.bypassed.append(set(self._around))

    def _run_again(self, module: torch.nn.Module, run: ForwardRun) -> None:
        for part, training in zip(module.modules(), run.training):
            part.training = training
        for parameter, requires_grad in zip(module.parameters(), run.requires_grad):
            parameter.requires_grad_(requires_grad)
        run.random_state.restore()
        with run.autocast.again(), autocast_if_enabled(self.engine):
            output = module(*run.args, **run.kwargs)
        tensors = list(tensors_in(output, dataclass_fields=True))
        for number, (call, arrived) in enumerate(run.arrived.items()):
            outputs = [tensors[position] for position in arrived]
            with CALLS.repeating(call):
                last = number == len(run.arrived) - 1
                torch.autograd.backward(outputs, list(arrived.values()), retain_graph=not last)
        for parameter in module.parameters():
            parameter.grad = None


class _ModuleWatch:
    """Forward pre-hook of a module of the model: tells of calls around the engine."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        if not self._replay._inside:
            self._replay.called_around(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _silent


def _silent(*_: Any) -> None:
    """The hook of a copied module."""
