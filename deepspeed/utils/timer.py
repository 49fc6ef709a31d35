# SPDX-License-Identifier: Apache-2.0
"""Timers of a training step, on the device's clock where it has one, and of throughput."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.utils.logging import log_dist, logger

try:  # adds the host's memory to the throughput report
    import psutil

    PSUTILS_INSTALLED = True
except ImportError:
    psutil = None
    PSUTILS_INSTALLED = False

FORWARD_MICRO_TIMER = "fwd_microstep"
FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_MICRO_TIMER = "bwd_microstep"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_MICRO_TIMER = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_MICRO_TIMER = "step_microstep"
STEP_GLOBAL_TIMER = "step"
TIME_EPSILON = 1e-6

_GIB = 1024**3


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Mean after leaving out the ``trim_percent`` (0 to 0.5) smallest and as many largest values; 0.0 without data.

    Raises:
        ValueError: ``trim_percent`` outside [0, 0.5).
    """
    if not 0.0 <= trim_percent < 0.5:
        raise ValueError(f"trim_percent={trim_percent} must be at least 0 and below 0.5")
    if not data:
        return 0.0
    cut = int(len(data) * trim_percent)
    kept = sorted(data)[cut : len(data) - cut]
    return sum(kept) / len(kept)


class CudaEventTimer:
    """Time between two recorded device events."""

    def __init__(self, start_event: Any, end_event: Any) -> None:
        self.start_event = start_event
        self.end_event = end_event

    def get_elapsed_msec(self) -> float:
        """Milliseconds between the events; waits for the device to reach the later one."""
        self.end_event.synchronize()
        return self.start_event.elapsed_time(self.end_event)


class _Timer:
    """One named stopwatch. Intervals on a device are read from events when somebody asks, so timing never blocks."""

    def __init__(self, name: str, host_clock: bool) -> None:
        self.name_ = name
        self.started_ = False
        self._host_clock = host_clock
        self._start: Any = None
        self._pending: list[CudaEventTimer] = []
        self._milliseconds: list[float] = []

    def _mark(self) -> Any:
        if self._host_clock:
            return time.perf_counter()
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Start an interval.

        Raises:
            AssertionError: an interval is running.
        """
        if self.started_:
            raise AssertionError(f"timer {self.name_!r} is running already: stop it before starting it again")
        self._start = self._mark()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End the interval and add it.

        Args:
            reset: forget earlier intervals.
            record: accepted for compatibility; every interval is recorded.

        Raises:
            AssertionError: no interval is running.
        """
        if not self.started_:
            raise AssertionError(f"timer {self.name_!r} is not running: start it before stopping it")
        end = self._mark()
        if reset:
            self._forget()
        if self._host_clock:
            self._milliseconds.append((end - self._start) * 1e3)
        else:
            self._pending.append(CudaEventTimer(self._start, end))
        self.started_ = False

    def _forget(self) -> None:
        self._pending.clear()
        self._milliseconds.clear()

    def _read(self) -> list[float]:
        self._milliseconds += [interval.get_elapsed_msec() for interval in self._pending]
        self._pending.clear()
        return self._milliseconds

    def reset(self) -> None:
        """Forget everything, also a running interval."""
        self.started_ = False
        self._start = None
        self._forget()

    def elapsed(self, reset: bool = True) -> float:
        """Sum of the intervals in milliseconds; a running one counts up to now and goes on.

        Args:
            reset: forget them afterwards.
        """
        running = self.started_
        if running:
            self.stop()
        total = sum(self._read())
        if reset:
            self._forget()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """Mean of the intervals in milliseconds, without the top and bottom tenth; 0.0 without any."""
        return trim_mean(self._read(), 0.1)


class SynchronizedWallClockTimer:
    """A set of named timers: ``timers("fwd").start()``."""

    Timer = _Timer

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def get_timers(self) -> dict[str, _Timer]:
        """The timers by name."""
        return self.timers

    def __call__(self, name: str) -> _Timer:
        """The timer ``name``, made on first use."""
        if name not in self.timers:
            self.timers[name] = _Timer(name, get_accelerator().use_host_timers())
        return self.timers[name]

    @staticmethod
    def memory_usage() -> str:
        """One line with the device memory in use and its peak."""
        accelerator = get_accelerator()
        used, peak = accelerator.memory_allocated(), accelerator.max_memory_allocated()
        cached, peak_cached = accelerator.memory_cached(), accelerator.max_memory_cached()
        return (
            f" | mem_allocated: {used / _GIB:.4f} GB | max_mem_allocated: {peak / _GIB:.4f} GB"
            f" | cache_allocated: {cached / _GIB:.4f} GB | max_cache_allocated: {peak_cached / _GIB:.4f} GB"
        )

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the line of ``summary``, if there is one, on ``ranks`` ([0]).

        Raises:
            ValueError: ``normalizer`` is not positive.
        """
        text = self.summary(names, normalizer, reset, memory_breakdown)
        if text:
            log_dist(text, ranks=ranks or [0])

    def summary(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True, memory_breakdown: bool = False
    ) -> str:
        """The elapsed milliseconds of the named timers that exist, divided by ``normalizer``; empty without any.

        Args:
            reset: forget the intervals.
            memory_breakdown: add the device memory in use.

        Raises:
            ValueError: ``normalizer`` is not positive.
        """
        _check_normalizer(normalizer)
        fields = [
            f"{name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}"
            for name in names
            if name in self.timers
        ]
        if not fields:
            return ""
        return "time (ms) | " + " | ".join(fields) + (self.memory_usage() if memory_breakdown else "")

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Mean interval in milliseconds, divided by ``normalizer``, of the named timers that exist.

        Raises:
            ValueError: ``normalizer`` is not positive.
        """
        _check_normalizer(normalizer)
        means = {}
        for name in names:
            if name in self.timers:
                means[name] = self.timers[name].mean() / normalizer
                if reset:
                    self.timers[name].reset()
        return means


def _check_normalizer(normalizer: float) -> None:
    if not normalizer > 0.0:
        raise ValueError(f"normalizer={normalizer} must be positive")


class NoopTimer:
    """Stands in for :class:`SynchronizedWallClockTimer` and does nothing."""

    class Timer:
        """Stands in for one timer."""

        def start(self) -> None:
            pass

        def stop(self, reset: bool = False, record: bool = False) -> None:
            pass

        def reset(self) -> None:
            pass

        def elapsed(self, reset: bool = True) -> float:
            return 0.0

        def mean(self) -> float:
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> "NoopTimer.Timer":
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        return {}

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        pass

    def summary(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True, memory_breakdown: bool = False
    ) -> str:
        return ""

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        return {}


class ThroughputTimer:
    """Samples per second of training steps.

    Args:
        config: has ``enabled`` and ``synchronized``: wait for the device at both ends of each micro-step that is
            measured. So that this does not slow down training, only steps that are reported are measured then.
        batch_size: samples of a global step.
        start_step: first global step that counts; those before warm up.
        steps_per_output: report every so many global steps; None or inf: never.
        monitor_memory: add the host's memory to the report (needs psutil).
        logging_fn: where reports go; default: the package logger, level INFO.

    Raises:
        ImportError: ``monitor_memory`` without psutil.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: float | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        if monitor_memory and not PSUTILS_INSTALLED:
            raise ImportError("ThroughputTimer(monitor_memory=True) needs psutil: install it or leave the option off")
        self.config = config
        self.batch_size = max(1, 1 if batch_size is None else batch_size)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logger.info if logging_fn is None else logging_fn
        self.initialized = False
        self.started = False
        self.start_time = 0.0
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self.step_elapsed_time = 0.0
        self._measured_samples = 0

    def update_epoch_count(self) -> None:
        """A new epoch begins: micro-steps are counted afresh."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def _measures(self) -> bool:
        """Whether the present global step is measured."""
        if self.global_step_count < self.start_step:
            return False
        every = self.steps_per_output
        if not self.config.synchronized or not every or math.isinf(every):
            return True
        return (self.global_step_count + 1) % every == 0

    def _now(self) -> float:
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.perf_counter()

    def start(self) -> None:
        """A micro-step begins."""
        if not self.config.enabled:
            return
        self.initialized = True
        self.started = True
        if self._measures():
            self.start_time = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """A micro-step ends.

        Args:
            global_step: it was the last one of an optimizer step.
            report_speed: report if ``steps_per_output`` says so.
        """
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        if self.start_time > 0.0:
            duration = self._now() - self.start_time
            self.start_time = 0.0
            self.total_elapsed_time += duration
            self.step_elapsed_time += duration
        if global_step:
            self.global_step_count += 1
            if self.step_elapsed_time > 0.0:
                self._measured_samples += self.batch_size
            step_seconds, self.step_elapsed_time = self.step_elapsed_time, 0.0
            if report_speed and step_seconds > 0.0 and self._reports_now():
                self._report(step_seconds)

    def _reports_now(self) -> bool:
        every = self.steps_per_output
        return bool(every) and self.global_step_count % every == 0

    def _report(self, step_seconds: float) -> None:
        accelerator = get_accelerator()
        text = (
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
            f"CurrSamplesPerSec={self.batch_size / (step_seconds + TIME_EPSILON)}, "
            f"MemAllocated={round(accelerator.memory_allocated() / _GIB, 2)}GB, "
            f"MaxMemAllocated={round(accelerator.max_memory_allocated() / _GIB, 2)}GB"
        )
        if self.monitor_memory:
            memory = psutil.virtual_memory()
            text += f", HostMemUsed={round(memory.used / _GIB, 2)}GB ({memory.percent}%)"
        self.logging(text)

    def avg_samples_per_sec(self) -> float:
        """Samples per second over the steps that were measured; minus infinity before the first."""
        seconds = self.total_elapsed_time - self.step_elapsed_time
        return self._measured_samples / seconds if self._measured_samples and seconds > 0.0 else float("-inf")
