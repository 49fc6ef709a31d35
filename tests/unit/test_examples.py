# SPDX-License-Identifier: Apache-2.0
"""The examples, run as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deepspeed

pytestmark = pytest.mark.slow

SHARED_ENCODER = Path(__file__).resolve().parents[2] / "examples" / "shared_encoder" / "train.py"
ZERO_INIT = SHARED_ENCODER.parents[1] / "zero_init" / "train.py"
PATHS = ("encoder, main path only", "encoder, auxiliary only", "encoder, both", "decoder")

# Stands in for an engine whose gradients are 5 % too large.
FAULTY_DEEPSPEED = """
import runpy, sys
import deepspeed.utils
right = deepspeed.utils.safe_get_full_grad
deepspeed.utils.safe_get_full_grad = lambda parameter: 1.05 * right(parameter)
sys.path.insert(0, {folder!r})
runpy.run_path({script!r}, run_name="__main__")
"""

# Holds far more than the model all the time.
HOARDING = """
import runpy
import torch
kept = torch.zeros(10_000_000)
runpy.run_path({script!r}, run_name="__main__")
"""


def run_on_two_ranks(
    script: Path, *arguments: str, needs: tuple[str, ...] = ("sklearn", "matplotlib")
) -> subprocess.CompletedProcess[str]:
    for package in needs:
        pytest.importorskip(package)
    package = str(Path(deepspeed.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return subprocess.run(
        [*command, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


def errors_along(path: str, output: str) -> list[float]:
    """Relative gradient errors in the row of the table: ``engine.backward(loss)``, ``loss.backward()``."""
    (row,) = re.findall(rf"^ +{path} +(\S+) +(\S+) ", output, re.MULTILINE)
    return [float(error) for error in row]


def test_shared_encoder_has_the_right_gradients(tmp_path: Path) -> None:
    plot = tmp_path / "plots" / "loss.png"
    done = run_on_two_ranks(SHARED_ENCODER, "--steps", "4", "--plot", str(plot))
    assert done.returncode == 0, done.stdout + done.stderr
    for path in PATHS:
        assert all(0 < error <= 2e-2 for error in errors_along(path, done.stdout))
    for line in ("reconstruction loss", "agreement loss", "spread loss", "time per optimizer step"):
        assert re.search(rf"^ +{line}.* \d", done.stdout, re.MULTILINE)
    assert len(re.findall(r"^step +\d+/4 .* ETA ", done.stdout, re.MULTILINE)) == 4
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_shared_encoder_fails_on_a_wrong_gradient(tmp_path: Path) -> None:
    wrapper = tmp_path / "faulty.py"
    wrapper.write_text(FAULTY_DEEPSPEED.format(folder=str(SHARED_ENCODER.parent), script=str(SHARED_ENCODER)))
    done = run_on_two_ranks(wrapper, "--steps", "1", "--plot", str(tmp_path / "loss.png"))
    assert done.returncode == 1
    for path in PATHS:
        assert errors_along(path, done.stdout) == pytest.approx([0.05, 0.05], abs=1e-2)
    assert "OFF" in done.stdout


def test_zero_init_stays_within_its_budget() -> None:
    done = run_on_two_ranks(ZERO_INIT, "--width", "256", "--steps", "3", needs=())
    assert done.returncode == 0, done.stdout + done.stderr
    (budget,) = re.findall(r"a rank may take (\d+) MB", done.stdout)
    (most, now) = re.findall(r"at most (\d+) MB of tensors, and holds (\d+) MB now", done.stdout)[0]
    assert 0 < int(now) <= int(most) <= int(budget)
    assert "within the budget, and it learns" in done.stdout


def test_zero_init_reports_more_than_its_budget(tmp_path: Path) -> None:
    wrapper = tmp_path / "hoarding.py"
    wrapper.write_text(HOARDING.format(script=str(ZERO_INIT)))
    done = run_on_two_ranks(wrapper, "--width", "256", "--depth", "1", "--steps", "2", needs=())
    assert done.returncode == 1 and "OVER the budget" in done.stdout, done.stdout + done.stderr
