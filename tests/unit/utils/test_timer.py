# SPDX-License-Identifier: Apache-2.0
"""Timers give milliseconds of what ran, and throughput counts the steps after the warm-up."""

import time
import types

import pytest

from deepspeed.utils import timer as timer_module
from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer, trim_mean


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    clock = Clock()
    monkeypatch.setattr(timer_module, "time", clock)
    return clock


@pytest.fixture
def timers(clock, monkeypatch):
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    cpu = CPU_Accelerator()
    monkeypatch.setattr(timer_module, "get_accelerator", lambda: cpu)
    return SynchronizedWallClockTimer()


def interval(timers, clock, name, seconds):
    timers(name).start()
    clock.now += seconds
    timers(name).stop()


def test_elapsed_sums_intervals_in_milliseconds(timers, clock):
    interval(timers, clock, "fwd", 0.5)
    clock.now += 10
    interval(timers, clock, "fwd", 0.25)
    assert timers("fwd").elapsed(reset=False) == pytest.approx(750)
    assert timers("fwd").elapsed(reset=True) == pytest.approx(750)
    assert timers("fwd").elapsed() == 0.0
    assert list(timers.get_timers()) == ["fwd"]


def test_elapsed_of_a_running_timer_goes_on(timers, clock):
    timers("fwd").start()
    clock.now += 1
    assert timers("fwd").elapsed(reset=False) == pytest.approx(1000)
    clock.now += 1
    timers("fwd").stop()
    assert timers("fwd").elapsed() == pytest.approx(2000)


def test_stop_with_reset_keeps_only_the_last(timers, clock):
    interval(timers, clock, "fwd", 1)
    timers("fwd").start()
    clock.now += 2
    timers("fwd").stop(reset=True)
    assert timers("fwd").elapsed() == pytest.approx(2000)


def test_wrong_order_is_refused(timers):
    with pytest.raises(AssertionError, match="'fwd' is not running"):
        timers("fwd").stop()
    timers("fwd").start()
    with pytest.raises(AssertionError, match="'fwd' is running already"):
        timers("fwd").start()


def test_mean_and_normalizer(timers, clock):
    for seconds in (1, 3):
        interval(timers, clock, "step", seconds)
    assert timers.get_mean(["step", "absent"], normalizer=2.0, reset=False) == {"step": pytest.approx(1000)}
    with pytest.raises(ValueError, match="normalizer"):
        timers.get_mean(["step"], normalizer=0.0)


def test_log_line(timers, clock, monkeypatch):
    said = []
    monkeypatch.setattr(timer_module, "log_dist", lambda text, ranks: said.append((text, ranks)))
    interval(timers, clock, "fwd", 0.5)
    timers.log(["fwd", "absent"], normalizer=2, memory_breakdown=True, ranks=[1])
    timers.log(["absent"])
    ((text, ranks),) = said
    assert text.startswith("time (ms) | fwd: 250.00 | mem_allocated") and ranks == [1]


def test_device_intervals_come_from_events(timers, monkeypatch):
    class Event:
        now = 0.0
        synchronized = 0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = Event.now

        def synchronize(self):
            Event.synchronized += 1

        def elapsed_time(self, end):
            return end.at - self.at

    device = types.SimpleNamespace(use_host_timers=lambda: False, Event=Event)
    monkeypatch.setattr(timer_module, "get_accelerator", lambda: device)
    for _ in range(2):
        timers("bwd").start()
        Event.now += 7.0
        timers("bwd").stop()
    assert Event.synchronized == 0  # timing itself never waits for the device
    assert timers("bwd").elapsed() == 14.0 and Event.synchronized == 2


def test_trim_mean():
    assert trim_mean([100.0, *[1.0] * 8, -100.0], 0.1) == 1.0
    assert trim_mean([1.0, 3.0], 0.1) == 2.0
    assert trim_mean([], 0.1) == 0.0
    with pytest.raises(ValueError, match=r"0\.5"):
        trim_mean([1.0], 0.5)


def test_noop_timer_has_the_same_face():
    noop = NoopTimer()
    noop("fwd").start()
    noop("fwd").stop(reset=True, record=True)
    assert noop("fwd").elapsed(reset=False) == noop("fwd").mean() == 0.0
    noop.log(["fwd"])
    assert noop.summary(["fwd"]) == ""
    assert noop.get_mean(["fwd"]) == {} and noop.get_timers() == {}


def config(enabled=True, synchronized=True):
    return types.SimpleNamespace(enabled=enabled, synchronized=synchronized)


def step(throughput, clock, seconds, micro_steps=1):
    for micro_step in range(micro_steps):
        throughput.start()
        clock.now += seconds / micro_steps
        throughput.stop(global_step=micro_step == micro_steps - 1)


def test_throughput_leaves_out_the_warm_up(timers, clock):
    throughput = ThroughputTimer(config(), batch_size=8, start_step=2)
    for _ in range(2):
        step(throughput, clock, 50.0, micro_steps=2)
    assert throughput.avg_samples_per_sec() == float("-inf")
    for _ in range(4):
        step(throughput, clock, 2.0, micro_steps=2)
    assert throughput.avg_samples_per_sec() == pytest.approx(4.0)
    assert throughput.global_step_count == 6 and throughput.micro_step_count == 12
    throughput.update_epoch_count()
    assert throughput.epoch_count == 1 and throughput.micro_step_count == 0


@pytest.mark.parametrize("every, reports", [(2, 2), (None, 0), (float("inf"), 0)])
def test_throughput_reports(timers, clock, every, reports):
    said = []
    throughput = ThroughputTimer(config(), 8, start_step=0, steps_per_output=every, logging_fn=said.append)
    for _ in range(4):
        step(throughput, clock, 2.0)
    assert len(said) == reports
    if said:
        assert "global_step=2, RunningAvgSamplesPerSec=4.0, CurrSamplesPerSec=3.99" in said[0]


@pytest.mark.parametrize("synchronized", [True, False])
def test_throughput_synchronises_only_when_asked(monkeypatch, synchronized):
    waits = []
    device = types.SimpleNamespace(synchronize=lambda: waits.append(time.time()))
    monkeypatch.setattr(timer_module, "get_accelerator", lambda: device)
    throughput = ThroughputTimer(config(synchronized=synchronized), 1, start_step=0)
    throughput.start()
    throughput.stop(global_step=True)
    assert len(waits) == (2 if synchronized else 0)


def test_a_synchronised_throughput_measures_only_what_it_reports(timers, clock, monkeypatch):
    waits, said = [], []
    device = types.SimpleNamespace(
        synchronize=lambda: waits.append(clock.now), memory_allocated=lambda: 0, max_memory_allocated=lambda: 0
    )
    monkeypatch.setattr(timer_module, "get_accelerator", lambda: device)
    throughput = ThroughputTimer(config(), 8, start_step=2, steps_per_output=3, logging_fn=said.append)
    for seconds in (50, 50, 4, 50, 50, 2):  # the first report falls on the first step after the warm-up
        step(throughput, clock, seconds, micro_steps=2)
    assert len(waits) == 2 * 2 * 2 and len(said) == 2
    assert "RunningAvgSamplesPerSec=2.0, CurrSamplesPerSec=1.99" in said[0]
    assert throughput.avg_samples_per_sec() == pytest.approx(16 / 6) and "CurrSamplesPerSec=3.99" in said[1]
    throughput.config = config(synchronized=False)
    step(throughput, clock, 1.0)
    assert len(waits) == 8 and throughput.avg_samples_per_sec() == pytest.approx(24 / 7)


def test_throughput_of_windows_of_different_size(timers, clock):
    throughput = ThroughputTimer(config(), batch_size=8, start_step=0)
    step(throughput, clock, 1.0)
    throughput.batch_size = 24
    throughput.start()
    clock.now += 3.0
    assert throughput.avg_samples_per_sec() == pytest.approx(8.0)
    throughput.stop(global_step=False)
    assert throughput.avg_samples_per_sec() == pytest.approx(8.0)  # half a window does not count yet
    throughput.start()
    throughput.stop(global_step=True)
    assert throughput.avg_samples_per_sec() == pytest.approx(32 / 4)


def test_disabled_throughput_does_nothing(clock):
    throughput = ThroughputTimer(config(enabled=False), 8)
    step(throughput, clock, 1.0)
    assert throughput.global_step_count == 0 and not throughput.initialized


def test_memory_monitoring_without_psutil(monkeypatch):
    monkeypatch.setattr(timer_module, "PSUTILS_INSTALLED", False)
    with pytest.raises(ImportError, match="psutil"):
        ThroughputTimer(config(), 8, monitor_memory=True)
