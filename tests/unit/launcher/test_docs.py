# SPDX-License-Identifier: Apache-2.0
"""What docs/launching.md tells users of torchrun, Slurm and Kubernetes runs as it stands there."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from deepspeed.launcher import runner
from unit.launcher.test_launch import TIMEOUT_S

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "launching.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not a source tree")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def test_the_script_runs_under_torchrun(tmp_path):
    (script,) = blocks("python")
    (tmp_path / "train.py").write_text(script)
    torchrun, *words = shlex.split(blocks("sh")[0])
    assert torchrun == "torchrun" and "--standalone" in words
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # ranks share one output: their lines may run into each other
    assert sorted(re.findall(r"rank \d of \d", done.stdout)) == ["rank 0 of 2", "rank 1 of 2"], done.stdout


def test_torchrun_understands_the_commands_for_several_hosts():
    (job,) = blocks("yaml")
    in_pod = re.search(r"torchrun.*train\.py", job, re.S).group()
    for command in (blocks("sh")[1], in_pod.replace("$JOB_COMPLETION_INDEX", "1")):
        torchrun, *words = shlex.split(command)
        args = get_args_parser().parse_args(words)
        assert (torchrun, args.nnodes, args.nproc_per_node, args.training_script) == ("torchrun", "2", "8", "train.py")


SHOW = """
import json, os
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
json.dump({name: os.environ[name] for name in names}, open("rank" + os.environ["RANK"], "w"))
"""


def test_the_slurm_script_gives_each_rank_its_environment(tmp_path):
    (script,) = (text for text in blocks("sh") if "SBATCH" in text)
    programs = {
        "scontrol": "echo first; echo second",
        "srun": 'shift; for rank in 0 1 2 3; do SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 2)) "$@" || exit 1; done',
        "python": f'exec {shlex.quote(sys.executable)} "$@"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").write_text(SHOW)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "first,second"}
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, timeout=TIMEOUT_S, check=True)
    for rank in range(4):
        found = json.loads((tmp_path / f"rank{rank}").read_text())
        assert found == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "WORLD_SIZE": "4",
            "MASTER_ADDR": "first",
            "MASTER_PORT": "29500",
        }


def test_every_launcher_and_flag_on_the_page_exists():
    page = PAGE.read_text(encoding="utf-8")
    for name in runner.LAUNCHER_CLASSES:
        assert f"`{name}`" in page, name
    lines = [line.split("#")[0].strip() for line in page.splitlines() if line.startswith("    deepspeed ")]
    assert len(lines) > 10
    for line in lines:
        args = runner.parse_args(shlex.split(line)[1:])
        assert args.user_script in ("train.py", "package.train", "./program")
