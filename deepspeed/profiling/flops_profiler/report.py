# SPDX-License-Identifier: Apache-2.0
"""The text of a flops profile."""

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from deepspeed.profiling.flops_profiler.number_format import (
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)

if TYPE_CHECKING:
    from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, ModuleRecord

_WHAT_COUNTS = (
    "FLOPs are those of matrix products, convolutions and attention, 2 per multiply-accumulate (MAC); other operations"
    " count 0."
)
_WHAT_TIME_IS = (
    "Latencies were taken while operations were counted, which slows each of them: compare modules by them, and take\n"
    "absolute times from wall_clock_breakdown."
)


def model_report(
    profiler: "FlopsProfiler", profile_step: int, module_depth: int, top_modules: int, detailed: bool
) -> str:
    """The whole report; arguments as in ``FlopsProfiler.print_model_profile``."""
    title = f" flops profile of step {profile_step} "
    parts = [title.center(100, "-"), _WHAT_COUNTS]
    if profiler.takes_time:
        parts.append(_WHAT_TIME_IS)
    rows = _totals(profiler)
    width = max(len(name) for name, _ in rows)
    parts += ["", *(f"{name.ljust(width)}  {value}" for name, value in rows)]
    parts += ["", aggregated_report(profiler, module_depth, top_modules)]
    if detailed:
        parts += [
            "",
            "modules, each with its children, shares of the whole in parentheses:",
            *_tree(profiler, module_depth),
        ]
    parts.append("-" * 100)
    return "\n".join(parts)


def _totals(profiler: "FlopsProfiler") -> list[tuple[str, str]]:
    total = profiler.total
    backward, measured = profiler.get_backward_flops()
    rows = _engine_facts(profiler.ds_engine) if profiler.ds_engine is not None else []
    rows += [
        ("parameters of the model", profiler.get_total_params(as_string=True)),
        ("forward calls", str(total.calls)),
        ("forward MACs", macs_to_string(total.macs)),
        ("forward FLOPs", flops_to_string(total.flops)),
        (f"backward FLOPs ({'measured' if measured else 'estimated'})", flops_to_string(backward)),
        ("forward latency", duration_to_string(total.seconds)),
        ("forward FLOPs per second", _per_second(total.flops, total.seconds)),
    ]
    phases = profiler.phase_seconds
    for phase, seconds in phases.items():
        rows.append((f"latency of {phase}", duration_to_string(seconds)))
    if phases:
        rows.append(("FLOPs per second of the step", _per_second(total.flops + backward, sum(phases.values()))))
    return rows


def _engine_facts(engine: Any) -> list[tuple[str, str]]:
    return [
        ("ranks", str(engine.world_size)),
        ("data-parallel ranks", str(engine.dp_world_size)),
        ("micro-batch per rank", str(engine.train_micro_batch_size_per_gpu())),
        ("micro-steps in the step", str(engine.gradient_accumulation_steps())),
    ]


def _per_second(flops: float, seconds: float) -> str:
    return flops_to_string(flops / seconds) if seconds > 0 else "-"


# ---------------------------------------------------------------------------------- by class and level


def _levels(profiler: "FlopsProfiler") -> list[list[nn.Module]]:
    """Watched modules by their distance from the model, each once, at its first place."""
    levels, present, seen = [], [profiler.model], {profiler.model}
    while present:
        levels.append(present)
        following = []
        for module in present:
            for child in module.children():
                if child in profiler.records and child not in seen:
                    seen.add(child)
                    following.append(child)
        present = following
    return levels


def aggregated_report(profiler: "FlopsProfiler", module_depth: int, top_modules: int) -> str:
    """The heaviest module classes by parameters, MACs and latency, of one level or of each (-1)."""
    levels = _levels(profiler)
    chosen = range(len(levels)) if module_depth < 0 else [min(module_depth, len(levels) - 1)]
    lines = [f"heaviest module classes (at most {top_modules}) by level:"]
    for level in chosen:
        measures: list[tuple[str, Callable[[nn.Module], float], Callable[[float], str]]] = [
            ("params", _module_params, params_to_string),
            ("MACs", lambda module: profiler.records[module].macs, macs_to_string),
            ("latency", lambda module: profiler.records[module].seconds, duration_to_string),
        ]
        lines.append(f"level {level}:")
        for name, measure, to_text in measures:
            by_class: dict[str, float] = {}
            for module in levels[level]:
                if module in profiler.records:
                    by_class[type(module).__name__] = by_class.get(type(module).__name__, 0) + measure(module)
            heaviest = sorted(by_class.items(), key=lambda item: -item[1])[: max(top_modules, 0)]
            lines.append(f"    {name.ljust(8)}" + ", ".join(f"{kind} {to_text(value)}" for kind, value in heaviest))
    return "\n".join(lines)


def _module_params(module: nn.Module) -> int:
    from deepspeed.profiling.flops_profiler.profiler import module_params

    return module_params(module)


# ---------------------------------------------------------------------------------- tree


def _tree(profiler: "FlopsProfiler", module_depth: int) -> Iterator[str]:
    whole_params = _module_params(profiler.model)
    shown: dict[nn.Module, str] = {}

    def lines(name: str, module: nn.Module, depth: int) -> Iterator[str]:
        own_name = name.rsplit(".", 1)[-1]
        head = "    " * depth + (f"({own_name}) " if own_name else "") + type(module).__name__
        if module not in profiler.records:
            yield f"{head}: ignored"
            return
        if module in shown:
            yield f"{head}: counted at {shown[module]}"
            return
        shown[module] = name or type(module).__name__
        yield f"{head}: {_figures(profiler, profiler.records[module], _module_params(module), whole_params)}"
        if module_depth < 0 or depth < module_depth:
            for child_name, child in module._modules.items():
                if child is not None:
                    yield from lines(f"{name}.{child_name}" if name else child_name, child, depth + 1)

    return lines("", profiler.model, 0)


def _figures(profiler: "FlopsProfiler", record: "ModuleRecord", params: int, whole_params: int) -> str:
    total = profiler.total
    fields = [
        f"{params_to_string(params)} params ({_share(params, whole_params)})",
        f"{number_to_string(record.macs)} MACs ({_share(record.macs, total.macs)})",
        f"{duration_to_string(record.seconds)} ({_share(record.seconds, total.seconds)})",
        _per_second(record.flops, record.seconds),
    ]
    if record.calls != 1:
        fields.append(f"{record.calls} calls")
    return ", ".join(fields)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def write(text: str, path: str) -> None:
    """Write ``text`` to ``path``, making its folder."""
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text + "\n")
