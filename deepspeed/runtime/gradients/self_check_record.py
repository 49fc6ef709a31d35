# SPDX-License-Identifier: Apache-2.0
"""What autograd delivered in a window, kept independently of the reducer.

A hook in front of each parameter's AccumulateGrad node sees every contribution alone, before autograd adds it to
``.grad`` and before the reducer's own hook, which runs after that node. The hook of a node does not run in
``torch.autograd.grad``, which accumulates nothing; a tensor hook would. ``test_autograd_facts.py`` and
``test_self_check.py`` pin both.

Three things are kept per parameter: the sum of contributions (fp32, float64 for 64-bit parameters), divided by what
their own backward has to be divided by; the sum of their absolute values, which says how much rounding may change the
sum; and per contribution a sketch of 64 numbers, from which it can be told afterwards which one was lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed.runtime.gradients.autograd_internals import accumulate_grad_nodes
from deepspeed.runtime.gradients.self_check_calls import CALLS, UNSEEN, BackwardCall

SKETCH = 64
MOST_SKETCHES = 64  # contributions of a window that get a sketch of their own


def fold(flat: torch.Tensor) -> torch.Tensor:
    """A linear sketch of a 1-D tensor: element i is added to number i modulo ``SKETCH``."""
    whole = flat.numel() - flat.numel() % SKETCH
    sketch = flat[:whole].view(-1, SKETCH).sum(0) if whole else flat.new_zeros(SKETCH)
    if whole < flat.numel():
        sketch[: flat.numel() - whole] += flat[whole:]
    return sketch


@dataclass(frozen=True)
class CallLabel:
    """A backward of a window: micro-step within the window, position among the window's backwards, route."""

    micro_step: int
    ordinal: int
    route: str

    def __str__(self) -> str:
        return f"micro-step {self.micro_step}, backward {self.ordinal} ({self.route})"


@dataclass
class Sums:
    """Sum of contributions, sum of their absolute values, both 1-D, and how many there were."""

    value: torch.Tensor
    mass: torch.Tensor
    firings: int = 1

    def add(self, other: Sums) -> None:
        self.value += other.value
        self.mass += other.mass
        self.firings += other.firings


class ParameterEntry:
    """The record of one parameter.

    Args:
        name: for messages, and for patterns.
        parameter: the leaf.
        shape: of the whole parameter, which may be partitioned at the moment.
        param_group: index of its group in the optimizer.
    """

    __slots__ = (
        "name", "parameter", "shape", "numel", "param_group", "dtype", "node", "handle", "kept", "fresh", "sketches",
        "fresh_sketches", "most_firings", "edited", "__weakref__",
    )  # fmt: skip

    def __init__(self, name: str, parameter: torch.nn.Parameter, shape: torch.Size, param_group: int) -> None:
        self.name = name
        self.parameter = parameter
        self.shape = shape
        self.numel = shape.numel()
        self.param_group = param_group
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.node: Any = None  # held here: a parameter holds its node weakly, and a new one would lack the hook
        self.handle: torch.utils.hooks.RemovableHandle | None = None
        self.kept: Sums | None = None  # of backwards that have ended
        self.fresh: Sums | None = None  # of the one that is running
        self.sketches: list[tuple[CallLabel, torch.Tensor]] = []
        self.fresh_sketches: list[torch.Tensor] = []
        self.most_firings = 0  # in one backward
        self.edited = False  # the caller wrote the gradient

    @property
    def firings(self) -> int:
        return 0 if self.kept is None else self.kept.firings

    def contribute(self, gradient: torch.Tensor, weight: float) -> None:
        """Add one contribution, in the parameter's shape, any dtype, dense or sparse."""
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        value = (dense.to(self.dtype) * weight).reshape(-1)
        mass = value.abs().to(torch.bfloat16 if self.dtype is torch.float32 else self.dtype)
        if len(self.sketches) + len(self.fresh_sketches) < MOST_SKETCHES:
            self.fresh_sketches.append(fold(value))
        sums = Sums(value, mass)
        if self.fresh is None:
            self.fresh = sums
        else:
            self.fresh.add(sums)

    def commit(self, label: CallLabel) -> None:
        """The backward that delivered what is fresh has ended well."""
        if self.fresh is None:
            return
        self.most_firings = max(self.most_firings, self.fresh.firings)
        if self.kept is None:
            self.kept = self.fresh
        else:
            self.kept.add(self.fresh)
        self.sketches += [(label, sketch) for sketch in self.fresh_sketches]
        self.forget_fresh()

    def forget_fresh(self) -> None:
        """Whatever the running backward has delivered does not count."""
        self.fresh, self.fresh_sketches = None, []

    def clear(self) -> None:
        """Begin a window."""
        self.kept = None
        self.forget_fresh()
        self.sketches = []
        self.most_firings = 0
        self.edited = False


@dataclass(eq=False)
class WindowRecord:
    """The records of all checked parameters of one engine, and the hooks that fill them.

    Args:
        entries: in the same order on every rank.
        accumulation_steps: asked for at each contribution.
        micro_step: position of the present micro-step within its window.
    """

    entries: list[ParameterEntry]
    accumulation_steps: Callable[[], int]
    micro_step: Callable[[], int]
    attached: bool = False
    labels: list[CallLabel] = field(default_factory=list)
    _touched: dict[ParameterEntry, None] = field(default_factory=dict)

    @torch.no_grad()
    def attach(self) -> None:
        """Set the hooks. Between backwards."""
        if self.attached:
            return
        self.attached = True
        for entry in self.entries:
            entry.node = _node_of(entry)
            entry.handle = entry.node.register_prehook(_Prehook(self, entry))
        CALLS.watch(self)

    def detach(self) -> None:
        """Remove the hooks and forget what was recorded."""
        CALLS.ignore(self)
        self.clear()
        for entry in self.entries:
            if entry.handle is not None:
                entry.handle.remove()
            entry.handle = entry.node = None
        self.attached = False

    def clear(self) -> None:
        """Forget the contributions of this window."""
        for entry in self.entries:
            entry.clear()
        self.labels = []
        self._touched = {}

    @torch.no_grad()
    def on_contribution(self, entry: ParameterEntry, gradient: torch.Tensor) -> None:
        """autograd is about to add ``gradient`` to ``.grad``."""
        call = CALLS.current
        seen = call or BackwardCall(UNSEEN)
        divisor = seen.factor * (self.accumulation_steps() if seen.scale_wrt_gas else 1)
        entry.contribute(gradient, 1.0 / divisor)
        self._touched[entry] = None
        if call is None:
            self.on_call_end(seen, True)

    @torch.no_grad()
    def on_call_end(self, call: BackwardCall, completed: bool) -> None:
        """A backward has returned, and counts; or has raised, and none of it may count."""
        if not self._touched:
            return
        label = CallLabel(self.micro_step(), len(self.labels), call.route)
        if completed:
            self.labels.append(label)
        for entry in self._touched:
            if completed:
                entry.commit(label)
            entry.forget_fresh()
        self._touched = {}

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        held: Iterable[torch.Tensor] = (tensor for entry in self.entries for tensor in _tensors_of(entry))
        return sum(tensor.nbytes for tensor in held)


class _Prehook:
    """In front of one AccumulateGrad node. Weak: a node keeps its hooks alive, and the record keeps its nodes."""

    __slots__ = ("_record", "_entry")

    def __init__(self, record: WindowRecord, entry: ParameterEntry) -> None:
        self._record = weakref.ref(record)
        self._entry = weakref.ref(entry)

    def __call__(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        record, entry = self._record(), self._entry()
        if record is not None and entry is not None and gradients[0] is not None:
            record.on_contribution(entry, gradients[0])


def _node_of(entry: ParameterEntry) -> Any:
    """The AccumulateGrad node that every graph of the parameter will use, also while it is frozen or partitioned: the
    node expects gradients of the shape that the parameter has when the node is made."""
    parameter = entry.parameter
    data, frozen = parameter.data, not parameter.requires_grad
    if parameter.shape != entry.shape:
        parameter.data = torch.empty((), dtype=data.dtype, device=data.device).expand(entry.shape)
    if frozen:
        parameter.requires_grad_(True)
    (node,) = accumulate_grad_nodes([parameter])
    if frozen:
        parameter.requires_grad_(False)
    if data.shape != entry.shape:
        parameter.data = data
    return node


def _tensors_of(entry: ParameterEntry) -> Iterator[torch.Tensor]:
    for sums in (entry.kept, entry.fresh):
        if sums is not None:
            yield from (sums.value, sums.mass)
    yield from (sketch for _, sketch in entry.sketches)
