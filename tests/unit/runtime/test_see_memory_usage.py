# SPDX-License-Identifier: Apache-2.0
"""What ``see_memory_usage`` prints, and when."""

import contextlib
import io
import re

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import see_memory_usage
from unit.common import DistributedTest


def test_nothing_unless_forced(capsys):
    see_memory_usage("quiet")
    assert capsys.readouterr().out == ""


def test_figures(capsys):
    kept = torch.ones(40_000_000)
    see_memory_usage("after building", force=True)
    text = capsys.readouterr().out
    assert "after building: device allocated" in text
    numbers = [float(each) for each in re.findall(r"(\d+\.\d+) (?:GiB|of)", text)]
    allocated, peak, reserved, process, free, total = numbers
    assert process >= kept.nbytes / 2**30 and total > free > 0
    if get_accelerator().device_name() == "cpu":
        assert allocated == pytest.approx(process, abs=0.02) and peak >= allocated and reserved > 0


def test_peak_starts_afresh(capsys):
    spike = torch.ones(80_000_000)
    see_memory_usage("high", force=True)
    del spike
    see_memory_usage("still high", force=True)
    capsys.readouterr()
    see_memory_usage("low", force=True)
    allocated, peak = (float(each) for each in re.findall(r"(?:allocated|peak) (\d+\.\d+)", capsys.readouterr().out))
    assert peak == pytest.approx(allocated, abs=0.1)


class TestRanks(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("ranks", [None, [1], [0, 1], []])
    def test_only_the_chosen_ranks_log(self, ranks):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            see_memory_usage("now", force=True, **({} if ranks is None else {"ranks": ranks}))
        assert ("now: device" in printed.getvalue()) == (dist.get_rank() in (ranks if ranks is not None else [0]))
