# SPDX-License-Identifier: Apache-2.0
"""Counts and times of parameter fetches."""

import time

import pytest

from deepspeed.runtime.zero.partitioned_param_profiler import PartitionedParameterProfiler
from deepspeed.utils.timer import SynchronizedWallClockTimer


def test_events_are_counted_and_timed(capsys):
    timers = SynchronizedWallClockTimer()
    profiler = PartitionedParameterProfiler(timers)
    for numel in (3, 4):
        profiler.start_event("fetch")
        time.sleep(0.01)
        profiler.stop_event("fetch", numel)
    profiler.start_event("gather")
    profiler.stop_event("gather", 5)
    assert {name: (each.count, each.num_elem) for name, each in profiler.event_counters.items()} == {
        "fetch": (2, 7),
        "gather": (1, 5),
    }
    assert timers("fetch").elapsed(reset=False) >= 20
    profiler.log_events()
    text = capsys.readouterr().out
    assert "fetch: 2 times, 7 elements" in text and "gather: 1 times, 5 elements" in text
    profiler.reset_events()
    assert profiler.event_counters == {} and timers("fetch").elapsed() == 0
    capsys.readouterr()
    profiler.log_events()
    assert capsys.readouterr().out == ""


def test_events_out_of_order():
    profiler = PartitionedParameterProfiler(SynchronizedWallClockTimer())
    with pytest.raises(AssertionError, match="'fetch' is not running"):
        profiler.stop_event("fetch", 1)
    assert profiler.event_counters == {}
    profiler.start_event("fetch")
    with pytest.raises(AssertionError, match="'fetch' is running already"):
        profiler.start_event("fetch")


def test_without_timers(capsys):
    profiler = PartitionedParameterProfiler(None)
    profiler.start_event("fetch")
    profiler.stop_event("fetch", 1)
    profiler.log_events()
    profiler.reset_events()
    assert profiler.event_counters == {} and capsys.readouterr().out == ""
