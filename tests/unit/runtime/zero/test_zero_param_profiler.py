# SPDX-License-Identifier: Apache-2.0
"""Counts and times of parameter fetches."""

import logging
import time

import pytest

from deepspeed.runtime.zero.partitioned_param_profiler import PartitionedParameterProfiler
from deepspeed.utils.logging import logger
from deepspeed.utils.timer import SynchronizedWallClockTimer


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger=logger.name)
    return caplog


def test_events_are_counted_and_timed(log):
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
    assert "fetch: 2 times, 7 elements" in log.text and "gather: 1 times, 5 elements" in log.text
    profiler.reset_events()
    assert profiler.event_counters == {} and timers("fetch").elapsed() == 0
    log.clear()
    profiler.log_events()
    assert log.text == ""


def test_events_out_of_order():
    profiler = PartitionedParameterProfiler(SynchronizedWallClockTimer())
    with pytest.raises(AssertionError, match="'fetch' is not running"):
        profiler.stop_event("fetch", 1)
    assert profiler.event_counters == {}
    profiler.start_event("fetch")
    with pytest.raises(AssertionError, match="'fetch' is running already"):
        profiler.start_event("fetch")


def test_without_timers(log):
    profiler = PartitionedParameterProfiler(None)
    profiler.start_event("fetch")
    profiler.stop_event("fetch", 1)
    profiler.log_events()
    profiler.reset_events()
    assert profiler.event_counters == {} and log.text == ""
