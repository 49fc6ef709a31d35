# SPDX-License-Identifier: Apache-2.0
"""The stand-alone checker finds this package right, and says so of nothing that is not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deepspeed

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "gradient_check" / "check_engine.py"

# Ranks import it too, as their main module, so the engine is broken there. A fault per stage; stage 1 stays right in
# one of the two calls.
FAULTY = """
import os, signal, sys, time
sys.path.insert(0, {folder!r})
import check_engine
from deepspeed import DeepSpeedEngine

backward, step = DeepSpeedEngine.backward, DeepSpeedEngine.step

def faulty_backward(engine, loss, **options):
    return backward(engine, loss * 1.05, **options)

def faulty_step(engine, *args, **options):
    stage = engine.zero_optimization_stage()
    if stage == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    if stage == 2 and os.environ["RANK"] == "1":
        raise ArithmeticError("broken on purpose")
    if stage == 3:
        time.sleep(600)
    return step(engine, *args, **options)

DeepSpeedEngine.backward, DeepSpeedEngine.step = faulty_backward, faulty_step

if __name__ == "__main__":
    common = ["--graphs", "plain", "--accumulation", "2"]
    one_call = [*common, "--calls", "loss.backward"]
    print("exits", [
        check_engine.main([*one_call, "--stages", "1"]),
        check_engine.main([*common, "--stages", "1"]),
        check_engine.main([*one_call, "--stages", "0", "2"]),
        check_engine.main([*one_call, "--stages", "3", "--timeout", "3"]),
    ])
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    package = str(Path(deepspeed.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
    environment.pop("DS_ACCELERATOR", None)
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)


def test_all_is_right_here() -> None:
    done = run(str(SCRIPT), "--quick", "--stages", "2", "--calls", "loss.backward")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^\w+ +loss\.backward +2 +2 +bf16 +(\S+) +(\S+)  right$", done.stdout, re.MULTILINE)
    assert len(rows) == 4
    assert all(0 < float(error) <= 2e-2 for row in rows for error in row)
    assert "4 right, 0 WRONG, 0 error, 0 hang" in done.stdout


def test_faults_are_told_from_each_other(tmp_path: Path) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY.format(folder=str(SCRIPT.parent)))
    done = run(str(script))
    assert "exits [0, 1, 1, 1]" in done.stdout, done.stdout + done.stderr
    verdicts = re.findall(r"^plain +(\S+) +(\d) +2 +bf16 +(\S+) +\S+  (.+)$", done.stdout, re.MULTILINE)
    assert [(call, stage, verdict) for call, stage, _, verdict in verdicts] == [
        ("loss.backward", "1", "right"),
        ("engine.backward", "1", "WRONG: silent"),
        ("loss.backward", "1", "right"),
        ("loss.backward", "0", "error: ranks [] had to be ended, 0 were done"),
        ("loss.backward", "2", "error: ArithmeticError: broken on purpose"),
        ("loss.backward", "3", "hang: ranks [0, 1] had to be ended, 0 were done"),
    ]
    assert abs(float(verdicts[1][2]) - 0.05) < 0.015
