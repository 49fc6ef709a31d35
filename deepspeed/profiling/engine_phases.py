# SPDX-License-Identifier: Apache-2.0
"""What is observed of the phases of a training step: timers, profiler ranges, the flops profile, memory.

With all of it off, entering a phase is two checks.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.profiling.memory import print_memory_breakdown
from deepspeed.runtime.constants import WALL_CLOCK_BREAKDOWN
from deepspeed.utils import nvtx, timer
from deepspeed.utils.comms_logging import print_rank_0
from deepspeed.utils.logging import logger

if TYPE_CHECKING:
    from deepspeed.profiling.flops_profiler import FlopsProfiler
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine


@dataclass(frozen=True)
class Phase:
    """A part of a training step, and the names of its timers: per micro-step and per optimizer step."""

    name: str
    micro_timer: str
    global_timer: str


FORWARD = Phase("forward", timer.FORWARD_MICRO_TIMER, timer.FORWARD_GLOBAL_TIMER)
BACKWARD = Phase("backward", timer.BACKWARD_MICRO_TIMER, timer.BACKWARD_GLOBAL_TIMER)
AUTOGRAD = Phase("autograd", timer.BACKWARD_INNER_MICRO_TIMER, timer.BACKWARD_INNER_GLOBAL_TIMER)
SWEEP = Phase("sweep", timer.BACKWARD_REDUCE_MICRO_TIMER, timer.BACKWARD_REDUCE_GLOBAL_TIMER)
STEP = Phase("step", timer.STEP_MICRO_TIMER, timer.STEP_GLOBAL_TIMER)
PHASES = (FORWARD, BACKWARD, AUTOGRAD, SWEEP, STEP)
_PROFILED = (FORWARD, BACKWARD, STEP)  # the others lie within these

_UNOBSERVED: AbstractContextManager[None] = nullcontext()


class EngineTimers:
    """Names of the timers that an engine runs.

    Args:
        enable_micro_timers: those that are reported per micro-step.
        enable_global_timers: those that are reported per optimizer step.
    """

    def __init__(self, enable_micro_timers: bool, enable_global_timers: bool) -> None:
        self.micro_timers = [phase.micro_timer for phase in PHASES] if enable_micro_timers else []
        self.global_timers = [phase.global_timer for phase in PHASES] if enable_global_timers else []

    def active_timers(self) -> list[str]:
        """All of them."""
        return [*self.micro_timers, *self.global_timers]


class EnginePhases:
    """Observes one engine, which passes itself: holding it here would keep it alive.

    Args:
        config: keys ``wall_clock_breakdown``, ``memory_breakdown``, ``flops_profiler`` and ``steps_per_print``.
        rank: global rank; the flops profile is that of rank 0.
    """

    def __init__(self, config: "DeepSpeedConfig", rank: int) -> None:
        timed = config.wall_clock_breakdown
        self.timers = timer.SynchronizedWallClockTimer() if timed else timer.NoopTimer()
        self.names = EngineTimers(timed, timed)
        self.flops_profiler: FlopsProfiler | None = None
        self._active = frozenset(self.names.active_timers())
        self._prints_times = config._param_dict.get(WALL_CLOCK_BREAKDOWN) is True
        self._memory = config.memory_breakdown
        self._every = config.steps_per_print
        self._flops = config.flops_profiler_config
        self._profile_due = self._flops.enabled and rank == 0
        self._micro_steps = self._steps = 0  # since the timers' last report
        self._observing = timed or self._memory or self._profile_due
        if self._prints_times:
            nvtx.request_ranges()

    def phase(self, phase: Phase, engine: "DeepSpeedEngine") -> AbstractContextManager[None]:
        """Context around a phase of ``engine``."""
        if self._observing or nvtx.ranges_wanted():
            return self._observed(phase, engine)
        return _UNOBSERVED

    @contextmanager
    def _observed(self, phase: Phase, engine: "DeepSpeedEngine") -> Iterator[None]:
        if phase is FORWARD and self._profile_due:
            self._start_profile_if_due(engine)
        steps = engine.global_steps
        try:
            with ExitStack() as stack:
                stack.enter_context(nvtx.profiler_range(f"deepspeed.{phase.name} ({type(engine.module).__name__})"))
                if self._active:
                    stack.enter_context(self._timed(phase))
                if self.profiling:
                    stack.enter_context(self._profiled(phase))
                yield
        except BaseException:
            self._drop_profile()  # half a step is no profile, and no hook may stay
            raise
        if phase is STEP:
            self._step_taken(engine, engine.global_steps != steps)

    @contextmanager
    def _timed(self, phase: Phase) -> Iterator[None]:
        timers = [self.timers(name) for name in (phase.micro_timer, phase.global_timer)]
        for each in timers:
            each.start()
        try:
            yield
        finally:
            for each in timers:
                each.stop()

    def _step_taken(self, engine: "DeepSpeedEngine", boundary: bool) -> None:
        self._micro_steps += 1
        if not boundary:
            return
        self._steps += 1
        if self.profiling:
            self._print_profile(engine)
        if engine.global_steps % (self._every or 1) == 0:
            if self._active:
                self._print_timers()
            if self._memory:
                print_memory_breakdown(engine)

    def _print_timers(self) -> None:
        """Milliseconds per micro-step and per optimizer step, means since the last report. The timers start afresh also
        where only the flops profiler has switched them on, so that intervals do not pile up."""
        per_micro_step = self.timers.summary(self.names.micro_timers, self._micro_steps)
        per_step = self.timers.summary(self.names.global_timers, self._steps)
        if self._prints_times:
            print_rank_0(f"{per_micro_step}\n{per_step}")
        self._micro_steps = self._steps = 0

    # ------------------------------------------------------------------ flops profile

    @property
    def profiling(self) -> bool:
        """Whether a flops profile runs."""
        return self.flops_profiler is not None and self.flops_profiler.started

    def _start_profile_if_due(self, engine: "DeepSpeedEngine") -> None:
        if engine.global_steps < self._flops.profile_step or not torch.is_grad_enabled():
            return
        self._profile_due = False
        if engine.global_steps > self._flops.profile_step:
            logger.warning("flops_profiler: step %d had passed when training began", self._flops.profile_step)
            return
        from deepspeed.profiling.flops_profiler import FlopsProfiler

        self.flops_profiler = FlopsProfiler(engine.module, engine, self._flops.recompute_fwd_factor)
        self.flops_profiler.start_profile()

    @contextmanager
    def _profiled(self, phase: Phase) -> Iterator[None]:
        if phase is AUTOGRAD:
            with self.flops_profiler.counting_backward():
                yield
            return
        start = _device_time()
        yield
        if phase in _PROFILED:
            seconds = self.flops_profiler.phase_seconds
            seconds[phase.name] = seconds.get(phase.name, 0.0) + _device_time() - start

    def _print_profile(self, engine: "DeepSpeedEngine") -> None:
        self.flops_profiler.stop_profile()
        section = self._flops
        self.flops_profiler.print_model_profile(
            section.profile_step, section.module_depth, section.top_modules, section.detailed, section.output_file
        )

    def _drop_profile(self) -> None:
        if self.profiling:
            self.flops_profiler.end_profile()

    def close(self) -> None:
        """Remove what a profile has put on the model, and its figures."""
        if self.flops_profiler is not None:
            self.flops_profiler.end_profile()
        self._profile_due = False


def _device_time() -> float:
    """Seconds, after everything launched on the device."""
    get_accelerator().synchronize()
    return perf_counter()
