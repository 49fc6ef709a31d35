# SPDX-License-Identifier: Apache-2.0
"""FLOPs, parameters and latency of a model, module by module, from hooks that exist only while a profile runs.

Counts are those of torch's own counter: matrix products, convolutions and attention, two FLOPs for a
multiply-accumulate. They are taken at the entry and exit of each module, so a module's figures include its children
and all of its calls. Calls within a backward (recomputation of checkpointed forwards) belong to the backward.
"""

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.profiling.flops_profiler import report
from deepspeed.profiling.flops_profiler.number_format import (
    DEFAULT_PRECISION,
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from deepspeed.profiling.flops_profiler.op_counter import MODULE_HOOK_MAPPING, OpCounter
from deepspeed.runtime.gradients import autograd_internals as autograd

__all__ = [
    "DEFAULT_PRECISION",
    "MODULE_HOOK_MAPPING",
    "FlopsProfiler",
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "get_module_duration",
    "get_module_flops",
    "get_module_macs",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
    "wrapFunc",
]

BACKWARD_PER_FORWARD = 2.0  # of matrix products: a gradient of the input and one of the weight


def parameter_numel(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter: a partitioned one (ZeRO-3) says so itself, its data may be empty."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


@dataclass(eq=False)
class ModuleRecord:
    """What one module, with its children, took in all its calls."""

    flops: int = 0
    macs: int = 0
    seconds: float = 0.0
    calls: int = 0
    active: int = 0  # calls of this module that are running, within one another
    start: tuple[int, int, float] = (0, 0, 0.0)

    def clear(self) -> None:
        self.flops = self.macs = self.calls = 0
        self.seconds = 0.0


_records: "weakref.WeakKeyDictionary[nn.Module, ModuleRecord]" = weakref.WeakKeyDictionary()
_counting: "list[FlopsProfiler]" = []  # those whose model runs now


class FlopsProfiler:
    """Profile of the forward of one model, and of its backward where that is shown to it.

    ::

        profiler = FlopsProfiler(model)
        profiler.start_profile()
        model(batch)
        profiler.stop_profile()
        profiler.print_model_profile()
        profiler.end_profile()

    Operations count while ``model`` or one of its submodules runs; what the caller computes around it does not.

    Args:
        model: its parameters may be partitioned (ZeRO-3).
        ds_engine: the engine around it, for the report.
        recompute_fwd_factor: share of the forward that the backward computes again, for the *estimate* of a backward
            that was not measured: ``(2 + recompute_fwd_factor) * forward``.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.ds_engine = None if ds_engine is None else weakref.proxy(ds_engine)
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self.counts_operations = True
        self.takes_time = True
        self.phase_seconds: dict[str, float] = {}  # of a training step, for the report
        self.records: dict[nn.Module, ModuleRecord] = {}
        self._handles: list[Any] = []
        self._depth = 0
        self._clear_totals()

    def _clear_totals(self) -> None:
        self._counter = OpCounter()
        self._backward = OpCounter()
        self._backward_seen = False
        self._adjustment = (0, 0)  # FLOPs and MACs to add to the counter's
        self._unseen_flops = 0  # of operators that the counter cannot see into
        self._ignored_starts: list[tuple[int, int]] = []
        self.total = ModuleRecord()
        self.phase_seconds.clear()

    # ------------------------------------------------------------------ life

    def start_profile(self, ignore_list: Iterable[type[nn.Module]] | None = None) -> None:
        """Put hooks on all modules and count from zero.

        Args:
            ignore_list: module classes that are left out, with their children.
        """
        self.stop_profile()
        ignored = tuple(ignore_list or ())
        self.records = {}
        self._clear_totals()
        self._watch(self.model, ignored)
        _records.update(self.records)
        self.started = True

    def _watch(self, module: nn.Module, ignored: tuple[type[nn.Module], ...]) -> None:
        if module in self.records:
            return  # reached before by another name
        if isinstance(module, ignored):
            enter, leave = self._enter_ignored, self._leave_ignored
        else:
            self.records[module] = ModuleRecord()
            enter, leave = self._enter, self._leave
            for child in module.children():
                self._watch(child, ignored)
        # First in and last out, so that what other hooks do belongs to the module.
        self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
        self._handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))

    def stop_profile(self) -> None:
        """Remove the hooks; the figures stay.

        Raises:
            RuntimeError: called while the model runs.
        """
        if self._depth:
            raise RuntimeError("stop_profile() while the model runs: call it after the forward has returned")
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.started = False

    def reset_profile(self) -> None:
        """Set all figures to zero."""
        for record in self.records.values():
            record.clear()
        self._clear_totals()

    def end_profile(self) -> None:
        """Remove the hooks and forget the figures."""
        self.stop_profile()
        for module, record in self.records.items():
            if _records.get(module) is record:
                del _records[module]
        self.records = {}
        self._clear_totals()

    # ------------------------------------------------------------------ hooks

    def _now(self) -> float:
        if not self.takes_time:
            return 0.0
        accelerator = get_accelerator()
        if not accelerator.is_synchronized_device():
            accelerator.synchronize()
        return time.perf_counter()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if autograd.current_graph_task_id() != autograd.NO_GRAPH_TASK:
            return
        if self._depth == 0:
            _counting.append(self)
            self.total.start = (*self.counted(), self._now())
            if self.counts_operations:
                self._counter.__enter__()
        self._depth += 1
        record = self.records[module]
        record.active += 1
        if record.active == 1:
            record.start = (*self.counted(), self._now())

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, _: Any) -> None:
        record = self.records[module]
        if record.active == 0:
            return  # its entry was not counted
        formula = next(
            (MODULE_HOOK_MAPPING[base] for base in type(module).__mro__ if base in MODULE_HOOK_MAPPING), None
        )
        if formula is not None and self.counts_operations:
            flops = formula(module, *args, **kwargs)
            self.replace_count(record.start[:2], flops, flops // 2)
        record.active -= 1
        if record.active == 0:
            self._close(record)
        self._depth -= 1
        if self._depth == 0:
            if self.counts_operations:
                self._counter.__exit__(None, None, None)
            self._close(self.total)
            _counting.remove(self)

    def _close(self, record: ModuleRecord) -> None:
        flops, macs, seconds = record.start
        now = self._now()
        counted = self.counted()
        record.flops += counted[0] - flops
        record.macs += counted[1] - macs
        record.seconds += now - seconds
        record.calls += 1 if self.counts_operations else 0

    def _enter_ignored(self, module: nn.Module, _: Any) -> None:
        self._ignored_starts.append(self.counted())

    def _leave_ignored(self, module: nn.Module, *_: Any) -> None:
        if self._ignored_starts:
            start, now = self._ignored_starts.pop(), self.counted()
            self._adjustment = tuple(a + s - n for a, s, n in zip(self._adjustment, start, now))

    def counted(self) -> tuple[int, int]:
        """FLOPs and MACs of all calls so far, also of one that runs."""
        flops = self._counter.flops
        return flops + self._adjustment[0], flops // 2 + self._adjustment[1]

    def replace_count(self, start: tuple[int, int], flops: int, macs: int) -> None:
        """Let what ran since ``start`` (a value of ``counted``) be ``flops`` and ``macs``, whatever the counter saw."""
        now = self.counted()
        unseen = flops - (now[0] - start[0])
        self._unseen_flops += unseen
        self._adjustment = (self._adjustment[0] + unseen, self._adjustment[1] + macs - (now[1] - start[1]))

    @contextmanager
    def counting_backward(self) -> Iterator[None]:
        """Count the operations of a backward that runs in this block."""
        if not self.started or self._backward.counting:
            yield
            return
        with self._backward:
            yield
        self._backward_seen = True

    # ------------------------------------------------------------------ figures

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """FLOPs of all forwards on this rank, two for a multiply-accumulate."""
        return flops_to_string(self.total.flops) if as_string else self.total.flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiply-accumulates of all forwards on this rank."""
        return macs_to_string(self.total.macs) if as_string else self.total.macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds of all forwards, the profiler's own work included."""
        return duration_to_string(self.total.seconds) if as_string else self.total.seconds

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Elements of all parameters of the model, each counted once and whole, also where partitioned."""
        params = module_params(self.model)
        return params_to_string(params) if as_string else params

    def get_backward_flops(self) -> tuple[float, bool]:
        """FLOPs of all backwards on this rank, and whether they were measured (else: estimated from the forward).

        Measured ones include recomputed forwards. What the counter could not see in forward counts twice here.
        """
        if self._backward_seen:
            return self._backward.flops + BACKWARD_PER_FORWARD * self._unseen_flops, True
        return (BACKWARD_PER_FORWARD + self.recompute_fwd_factor) * self.total.flops, False

    def is_expert_tensor_parallelism_enabled(self) -> bool:
        """Whether a module splits its experts over tensor-parallel ranks. Mixture-of-experts modules say so."""
        return any(getattr(module, "enable_expert_tensor_parallelism", False) for module in self.model.modules())

    # ------------------------------------------------------------------ report

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print totals, the heaviest module classes and, if ``detailed``, the tree of modules.

        Args:
            profile_step: number of the step, for the title.
            module_depth: deepest level shown, 0 for the model alone; -1: all.
            top_modules: how many module classes per level.
            detailed: show the tree.
            output_file: write there, replacing it, instead of to the standard output.
        """
        text = report.model_report(self, profile_step, module_depth, top_modules, detailed)
        if output_file is None:
            print(text, flush=True)
        else:
            report.write(text, output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the ``top_modules`` heaviest module classes of the level ``module_depth``, or of each level (-1)."""
        print(report.aggregated_report(self, module_depth, top_modules), flush=True)


def _formula_of(module: nn.Module) -> Callable[..., int] | None:
    return next((MODULE_HOOK_MAPPING[base] for base in type(module).__mro__ if base in MODULE_HOOK_MAPPING), None)


def module_params(module: nn.Module) -> int:
    """Elements of the parameters of a module and its children, each counted once."""
    return sum(parameter_numel(parameter) for parameter in module.parameters())


def get_module_flops(module: nn.Module) -> int:
    """Forward FLOPs of a module with its children in the profile that was started last; 0 without one."""
    return _records[module].flops if module in _records else 0


def get_module_macs(module: nn.Module) -> int:
    """Forward multiply-accumulates of a module with its children, as ``get_module_flops``."""
    return _records[module].macs if module in _records else 0


def get_module_duration(module: nn.Module) -> float:
    """Seconds of a module's calls with its children, as ``get_module_flops``."""
    return _records[module].seconds if module in _records else 0.0


def wrapFunc(func: Callable[..., Any], funcFlopCompute: Callable[..., tuple[int, int]]) -> Callable[..., Any]:
    """``func`` that counts as ``funcFlopCompute`` says while a profiled model runs; for kernels no counter sees into.

    Args:
        func: called with whatever the wrapper is called with.
        funcFlopCompute: takes the same arguments and returns (FLOPs, MACs).
    """

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        profilers = [p for p in _counting if p.counts_operations]
        if not profilers:
            return func(*args, **kwargs)
        starts = [profiler.counted() for profiler in profilers]
        result = func(*args, **kwargs)
        flops, macs = funcFlopCompute(*args, **kwargs)
        for profiler, start in zip(profilers, starts):
            profiler.replace_count(start, flops, macs)
        return result

    return call


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = [],
    kwargs: dict[str, Any] = {},  # noqa: B006 - the interface's default; never changed
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Iterable[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """FLOPs, multiply-accumulates and parameters of one forward of ``model``.

    The model runs ``warm_up`` times, once more for the time if it is printed, and once for the counts; in the grad mode
    and training mode that it is called in.

    Args:
        model: any module.
        input_shape: call it with one tensor of ones of this shape, in the device and dtype of the parameters.
        args: or else positional arguments of the call.
        kwargs: and keyword arguments.
        print_profile: print the report; ``detailed``, ``module_depth``, ``top_modules`` and ``output_file`` as in
            ``FlopsProfiler.print_model_profile``.
        warm_up: forwards before.
        as_string: return text.
        ignore_modules: module classes that are left out.
        mode: "forward", or "generate" to profile ``model.generate``.

    Returns:
        (FLOPs, MACs, parameters), as numbers or text.

    Raises:
        ValueError: neither or both of ``input_shape`` and arguments, or another ``mode``.
    """
    if mode not in ("forward", "generate"):
        raise ValueError(f"mode={mode!r} must be 'forward' or 'generate'")
    if (input_shape is None) == (not args and not kwargs):
        raise ValueError("give the model's input: either input_shape, or args and kwargs")
    if input_shape is not None:
        args = [_ones_for(model, input_shape)]
    run = functools.partial(model if mode == "forward" else model.generate, *args, **kwargs)
    for _ in range(warm_up):
        run()
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_modules)
    try:
        if print_profile:
            profiler.counts_operations = False
            run()
        profiler.counts_operations, profiler.takes_time = True, False
        run()
        profiler.stop_profile()
        figures = (profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params)
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
        return tuple(figure(as_string=as_string) for figure in figures)
    finally:
        profiler.end_profile()


def _ones_for(model: nn.Module, shape: Sequence[int]) -> torch.Tensor:
    first = next(model.parameters(), None)
    if first is None:
        return torch.ones(tuple(shape))
    return torch.ones(tuple(shape), dtype=first.dtype, device=first.device)
