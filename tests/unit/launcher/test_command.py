# SPDX-License-Identifier: Apache-2.0
"""The ``deepspeed`` and ``ds_report`` commands from the outside."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from deepspeed import env_report, git_version_info
from deepspeed.git_version_info import version
from deepspeed.launcher.runner import DLTS_HOSTFILE
from deepspeed.ops.op_builder import QuantizerBuilder, TransformerBuilder
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from unit.launcher.test_launch import ANNOUNCE, TIMEOUT_S, free_port, runs


def deepspeed(folder, text, *flags, user_args=()):
    script = folder / "script.py"
    script.write_text(text)
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(folder / "none")]
    command += ["--master_port", str(free_port()), *flags, str(script), *user_args]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def test_ranks_on_cpu_as_many_as_asked_for_and_the_exit_status(tmp_path):
    said = "f\"{os.environ['RANK']} {os.environ['WORLD_SIZE']} {sys.argv[1:]}\\n\""
    # in one write: the ranks' output is not buffered, and pieces of lines could mix
    text = f"import os, sys; os.write(1, {said}.encode()); sys.exit(3)"
    process = deepspeed(
        tmp_path, text, "--num_accelerators", "3", "--log_level", "error", user_args=["--num_gpus", "1"]
    )
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 3
    # The first failure ends the others, so not every rank need have come as far as printing.
    lines = out.splitlines()
    assert lines and all(line.startswith(("0 3", "1 3", "2 3")) for line in lines)
    assert all(line.endswith("'--num_gpus', '1']") for line in lines)


def test_sigterm_to_the_command_ends_the_ranks(tmp_path):
    process = deepspeed(tmp_path, ANNOUNCE + "say(f'pid{rank}', os.getpid()); time.sleep(600)", "--num_gpus", "2")
    deadline = time.monotonic() + TIMEOUT_S
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    while not all(path.exists() for path in files):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert not any(runs(int(path.read_text())) for path in files)


def test_quiet_when_all_is_well(tmp_path):
    # With the default hostfile: that there is none is normal and not worth a word.
    process = deepspeed(tmp_path, "print('only this')", "--hostfile", DLTS_HOSTFILE, "--num_gpus", "1")
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (0, "only this\n")
    assert "launcher" not in err  # torch may have something to say about its surroundings


def test_report_names_versions_and_ops():
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "deepspeed.env_report"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    for text in (f"{version} (commit", "cpu_adam", "accelerator             cpu"):
        assert text in done.stdout
    assert "\033" not in done.stdout  # no colours into a pipe


def test_report_without_ops(capsys):
    env_report.main(hide_operator_status=True)
    printed = capsys.readouterr().out
    assert "cpu_adam" not in printed and version in printed


def test_op_without_a_kernel_says_so_by_name():
    assert ALL_OPS["transformer"].is_compatible() is False
    for builder in (TransformerBuilder(), QuantizerBuilder()):
        with pytest.raises(NotImplementedError, match=builder.name):
            builder.load()


def test_git_version_info_has_what_the_interface_names():
    assert set(git_version_info.installed_ops) == set(ALL_OPS)
    assert git_version_info.torch_info["version"] == ".".join(torch.__version__.split(".")[:2])
    assert git_version_info.accelerator_name and git_version_info.git_hash and git_version_info.git_branch
    with pytest.raises(AttributeError, match="nonsense"):
        _ = git_version_info.nonsense
