# SPDX-License-Identifier: Apache-2.0
"""Steps that are observed, apart from those that are timed: exposed communication, and time in parameters' hooks.

Nothing of the observed package is changed: hooks are wrapped where torch keeps them, waits where torch defines them.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Intervals = Sequence[tuple[float, float]]
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # dicts of a tensor that autograd reads at each call


class Clock:
    """Seconds spent in the functions that are ``timed``, and how often they are called; one inside another counts
    once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._depth = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self._depth += 1
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - begin

        return call


# ------------------------------------------------------------------ time in hooks


class HookClock(Clock):
    """Seconds spent in Python hooks of parameters while ``installed``; hooks inside hooks count once."""

    @contextmanager
    def installed(self, parameters: Iterable[Tensor]) -> Iterator["HookClock"]:
        """Put a clock around every hook that the parameters have now, in place, and take it away at the end."""
        tables = [hooks for tensor in parameters for name in HOOKS if (hooks := getattr(tensor, name, None))]
        former = [dict(table) for table in tables]
        for table in tables:
            for key, hook in table.items():
                table[key] = self.timed(hook)
        try:
            yield self
        finally:
            for table, hooks in zip(tables, former, strict=True):
                table.update(hooks)


# ------------------------------------------------------------------ exposed communication


def merged(intervals: Intervals) -> list[tuple[float, float]]:
    """The union of intervals as disjoint ones, in order."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def uncovered(intervals: Intervals, cover: Intervals) -> float:
    """How much of the union of ``intervals`` lies in none of ``cover``."""
    total = 0.0
    covers = merged(cover)
    first = 0
    for begin, end in merged(intervals):
        while first < len(covers) and covers[first][1] <= begin:
            first += 1
        place = first
        while place < len(covers) and covers[place][0] < end:
            total += max(0.0, covers[place][0] - begin)
            begin = max(begin, covers[place][1])
            place += 1
        total += max(0.0, end - begin)
    return total


def exposed_in_trace(trace: dict[str, Any]) -> float:
    """Seconds in which a device ran kernels of communication and no other, by a trace of torch's profiler."""
    communication, compute = [], []
    for event in trace["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            interval = (event["ts"], event["ts"] + event["dur"])
            (communication if "nccl" in event["name"].lower() else compute).append(interval)
    return uncovered(communication, compute) * 1e-6


def exposed_on_cuda(step: Callable[[], Any]) -> float:
    """Seconds of one step in which the device communicates and does nothing else. The first profile of a process is
    thrown away: starting the profiler delays what the host launches."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for _ in range(2):
        with torch.profiler.profile(activities=activities) as profiler:
            step()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return exposed_in_trace(json.loads(path.read_text()))


class WaitClock(Clock):
    """Seconds in which this thread waits for handles of collectives, or in collectives that return when they are done.

    Waits inside C++ code, as in DDP's reducer, are not seen.
    """

    @contextmanager
    def installed(self) -> Iterator["WaitClock"]:
        former = dist.Work.wait
        dist.Work.wait = self.timed(former)
        try:
            yield self
        finally:
            dist.Work.wait = former


def median_seconds(step: Callable[[], Any], steps: int) -> float:
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return median(seconds)


def exposed_on_cpu(contender: Any, step: Callable[[], Any], steps: int) -> float:
    """Seconds of a step that wait for communication.

    Where the contender can leave gradients where they are (DDP, which waits in C++), the difference that makes, in
    turns. It trains apart on each rank by that, so that nothing may be measured after it. Elsewhere the time in which
    the rank's main thread waits for handles.
    """
    if contender.without_sync() is None:
        waited = []
        for _ in range(steps):
            with WaitClock().installed() as clock:
                step()
            waited.append(clock.seconds)
        return median(waited)
    differences = []
    for _ in range(steps):
        with contender.without_sync():
            alone = median_seconds(step, 1)
        dist.barrier()
        differences.append(median_seconds(step, 1) - alone)
        dist.barrier()
    return max(0.0, median(differences))


def observe(contender: Any, forward_loss: Callable[[], Tensor], device: torch.device, steps: int) -> dict[str, Any]:
    """What ``steps`` observed steps show, on this rank.

    Returns:
        ``hook_seconds``: wall time per backward in Python hooks of parameters (None where there are none: those of
        DDP are C++); ``hook_calls``: how many ran; ``exposed_seconds``: see above.
    """

    def backward_and_step(clock: HookClock | None = None) -> None:
        loss = forward_loss()
        with clock.installed(contender.trained()) if clock else nullcontext():
            contender.backward(loss)
        contender.step()

    clocks = [HookClock() for _ in range(steps)]
    for clock in clocks:
        backward_and_step(clock)
    calls = clocks[0].calls
    figures: dict[str, Any] = {
        "hook_calls": calls,
        "hook_seconds": median(clock.seconds for clock in clocks) if calls else None,
    }
    if device.type == "cuda":
        torch.cuda.synchronize()
        figures["exposed_seconds"] = exposed_on_cuda(backward_and_step)
    else:
        figures["exposed_seconds"] = exposed_on_cpu(contender, backward_and_step, steps)
    return figures
