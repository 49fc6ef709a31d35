# SPDX-License-Identifier: Apache-2.0
"""The examples for these libraries, run as their first lines say, on 2 ranks without a GPU. Their exit status tells
whether the loss has halved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import deepspeed

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# lightning's strategy insists on its accelerator for CUDA
LIGHTNING_ON_HOST = """
import os, runpy, sys
from integration.test_lightning import host_accelerator
main = runpy.run_path({script!r})["main"]
options = dict(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
sys.exit(main(3, accelerator=host_accelerator(), devices=int(os.environ["WORLD_SIZE"]), **options))
"""


def run_on_two_ranks(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(deepspeed.__file__).parents[1]), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    environment["DS_ACCELERATOR"] = "cpu"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return subprocess.run(
        [*launcher, *command], env=environment, capture_output=True, text=True, timeout=300, cwd=folder
    )


@pytest.mark.parametrize("library", ["accelerate", "transformers"])
def test_example(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    done = run_on_two_ranks(tmp_path, str(EXAMPLES / library / "train.py"), "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loss" in done.stdout
    # The libraries keep the engine until torch is taken apart.
    assert "Exception ignored" not in done.stderr, done.stderr


def test_lightning_example(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    driver = tmp_path / "on_host.py"
    driver.write_text(LIGHTNING_ON_HOST.format(script=str(EXAMPLES / "lightning" / "train.py")))
    done = run_on_two_ranks(tmp_path, str(driver))
    assert done.returncode == 0, done.stdout + done.stderr
