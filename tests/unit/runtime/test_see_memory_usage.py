# SPDX-License-Identifier: Apache-2.0
"""What ``see_memory_usage`` logs, and when."""

import logging
import re

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import see_memory_usage
from deepspeed.utils.logging import logger
from unit.common import DistributedTest


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger=logger.name)
    return caplog


def test_nothing_unless_forced(log):
    see_memory_usage("quiet")
    assert log.text == ""


def test_figures(log):
    kept = torch.ones(40_000_000)
    see_memory_usage("after building", force=True)
    assert "after building: device allocated" in log.text
    numbers = [float(each) for each in re.findall(r"(\d+\.\d+) (?:GiB|of)", log.text)]
    allocated, peak, reserved, process, free, total = numbers
    assert process >= kept.nbytes / 2**30 and total > free > 0
    if get_accelerator().device_name() == "cpu":
        assert allocated == pytest.approx(process, abs=0.02) and peak >= allocated and reserved > 0


def test_peak_starts_afresh(log):
    spike = torch.ones(80_000_000)
    see_memory_usage("high", force=True)
    del spike
    see_memory_usage("still high", force=True)
    log.clear()
    see_memory_usage("low", force=True)
    allocated, peak = (float(each) for each in re.findall(r"(?:allocated|peak) (\d+\.\d+)", log.text))
    assert peak == pytest.approx(allocated, abs=0.1)


class TestRanks(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("ranks", [None, [1], [0, 1], []])
    def test_only_the_chosen_ranks_log(self, ranks):
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        see_memory_usage("now", force=True, **({} if ranks is None else {"ranks": ranks}))
        logger.removeHandler(handler)
        assert len(lines) == (dist.get_rank() in (ranks if ranks is not None else [0]))
