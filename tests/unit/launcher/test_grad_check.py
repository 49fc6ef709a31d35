# SPDX-License-Identifier: Apache-2.0
"""``ds_grad_check``: whose options are whose, what is printed, and the exit status; with real ranks and without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.launcher import grad_check, grad_check_rank
from deepspeed.runtime.config_utils import DeepSpeedConfigValueError
from deepspeed.runtime.gradients.self_check import OBSERVERS
from deepspeed.runtime.gradients.self_check_config import get_gradient_check_config
from unit.common import DistributedTest
from unit.launcher.test_launch import TIMEOUT_S, free_port

ROOT = Path(__file__).resolve().parents[3]

# One engine, dropout, a loss with a branch around the engine, both kinds of backward; it would train for ever.
SCRIPT = """
import argparse, itertools, sys, torch, deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--around", action="store_true")
parser.add_argument("--broken", action="store_true")
parser.add_argument("--updates", type=int, default=10**9)
parser.add_argument("--steps", help="not the command's")
options = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(5, 3))
config = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": options.stage},
}
engine = deepspeed.initialize(model=model, config=config)[0]
if options.broken:
    type(engine._stepper.reducer)._unit = lambda self: 1.0
torch.manual_seed(engine.global_rank)
try:
    for micro_step in range(2 * options.updates):
        loss = engine(torch.randn(4, 6)).square().mean()
        if options.around:
            loss = loss + engine.module[3](torch.randn(4, 5)).square().mean()
        engine.backward(loss) if micro_step % 2 else loss.backward()
        engine.step()
finally:
    print("script cleaned up", flush=True)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grad_check") / "train.py"
    path.write_text(SCRIPT)
    return path


def test_options_are_told_apart() -> None:
    words = [
        "--steps",
        "5",
        "--num_gpus",
        "2",
        "--against",
        "ddp",
        "--master_port",
        "1",
        "train.py",
        "--steps",
        "7",
        "x",
    ]
    own, launcher, script = grad_check.split_arguments(words)
    assert (own.steps, own.against) == (5, "ddp")
    assert launcher == ["--num_gpus", "2", "--master_port", "1"] and script == ["train.py", "--steps", "7", "x"]
    program = grad_check.rank_arguments(own, False, script)
    options = grad_check_rank.parse(["--local_rank=1", *program])
    assert (options.steps, options.against, options.local_rank) == (5, "ddp", "1")
    assert options.script == "train.py" and options.arguments == ["--steps", "7", "x"]
    for wrong in (["--steps", "0", "train.py"], ["--no_python", "train.py"], []):
        with pytest.raises(SystemExit) as end:
            grad_check.split_arguments(wrong)
        assert end.value.code == 2


def test_the_environment_switches_the_check_on(monkeypatch: pytest.MonkeyPatch) -> None:
    own, _, _ = grad_check.split_arguments(["--tolerance", "0.01", "--parameters", "a.*|b", "train.py"])
    monkeypatch.setenv("DS_GRADIENT_CHECK", grad_check.environment_value(own))
    config = get_gradient_check_config({"gradient_check": {"enabled": False, "every": 9}})
    assert (config.enabled, config.steps, config.every, config.on_mismatch) == (True, 3, 1, "warn")
    assert config.parameters == ["a.*", "b"] and config.tolerance == 0.01
    monkeypatch.setenv("DS_GRADIENT_CHECK", "1")
    assert get_gradient_check_config({"gradient_check": {"every": 9}}).every == 9
    monkeypatch.setenv("DS_GRADIENT_CHECK", "0")
    assert not get_gradient_check_config({"gradient_check": {"enabled": True}}).enabled
    monkeypatch.setenv("DS_GRADIENT_CHECK", "evry=3")
    with pytest.raises(DeepSpeedConfigValueError, match="did you mean 'every'"):
        get_gradient_check_config({})


class TestInRanks(DistributedTest):
    """Ranks that another launcher started; the script runs within them."""

    world_size = 2
    reuse_dist_env = True

    def run(self, script: Path, *arguments: str, against: bool = True) -> str:
        words = ["--steps=2", *["--against=ddp"] * against, "--", str(script), *arguments]
        options = grad_check_rank.parse(words)
        session = grad_check_rank.Session(options.steps, against)
        OBSERVERS.append(session)
        try:
            self.went_well = grad_check_rank.run(options)
        finally:
            OBSERVERS.remove(session)
        self.status = grad_check_rank.status_of(session.engines)
        return "\n".join(grad_check_rank.summary(session.engines))

    def test_right_bypassed_and_wrong(self, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DS_GRADIENT_CHECK", "steps=2,on_mismatch=warn")
        row = r"\n  0 +4 +53 +{error} +\S+ +[\w.]+ +{verdict}(?=\n|$)"
        for stage in ("0", "3"):
            text = self.run(script, "--stage", stage)
            assert (self.status, self.went_well) == (0, True)
            assert "2 updates checked; 2 ranks, ZeRO stage " + stage in text
            found = re.findall(row.format(error=r"\d\.\de-\d\d|0\.0e\+00", verdict="right"), text)
            assert len(found) == 2, text
        text = self.run(script, "--around")
        assert self.status == 0 and "right, 4 bypassed" in text
        assert "bypassed: gradients of 3.bias, 3.weight come around engine.forward" in text
        monkeypatch.setattr("deepspeed.runtime.gradients.reducer.GradientReducer._unit", lambda self: 1.0)
        text = self.run(script)
        assert self.status == 1 and len(re.findall(row.format(error=r"1\.0e\+00", verdict="WRONG"), text)) == 2, text
        assert "wrong in updates 1, 2" in text
        monkeypatch.undo()

    def test_scripts_that_end_early_or_fail(self, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DS_GRADIENT_CHECK", "steps=2,on_mismatch=warn")
        text = self.run(script, "--updates", "1", against=False)
        assert (self.status, self.went_well) == (0, True) and "1 updates checked" in text
        self.run(script, "--updates", "0", against=False)
        assert (self.status, self.went_well) == (grad_check_rank.UNCHECKED, True)
        self.run(script, "--no-such-option", against=False)
        assert (self.status, self.went_well) == (grad_check_rank.UNCHECKED, False)


def test_the_command(script: Path) -> None:
    """Through the launcher, as users start it."""
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "deepspeed.launcher.grad_check", "--num_gpus", "1", "--steps", "1", "--quiet"]
    command += [f"--master_port={free_port()}", str(script), "--broken"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False)
    assert done.returncode == 1, done.stderr
    assert "script cleaned up" in done.stdout and "WRONG" in done.stdout
    assert "gradient_accumulation_steps=2 had not happened" in done.stdout + done.stderr
