# SPDX-License-Identifier: Apache-2.0
"""``ds_ssh`` and ``ds_bench``, and that every command is installed and starts."""

import argparse
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.launcher import comm_bench, remote_shell
from deepspeed.utils.comms_logging import calc_bw_log
from unit.common import DistributedTest
from unit.launcher.test_launch import TIMEOUT_S, free_port

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="not a source tree")
def test_every_command_is_installed_and_its_function_exists():
    from setuptools.config.pyprojecttoml import load_file

    scripts = load_file(ROOT / "pyproject.toml")["project"]["scripts"]
    names = "deepspeed deepspeed.pt ds ds_report dsr ds_ssh ds_bench ds_elastic ds_grad_check ds_io ds_nvme_tune"
    assert set(scripts) == set(names.split())
    for entry in scripts.values():
        module, _, function = entry.partition(":")
        assert callable(getattr(import_module(module), function))


# ds_ssh


def fake_pdsh(folder):
    (folder / "pdsh").write_text("#!/bin/sh\n")
    (folder / "pdsh").chmod(0o755)


def test_ds_ssh_becomes_pdsh_with_the_hosts_of_the_file(tmp_path, monkeypatch):
    fake_pdsh(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    became = []
    monkeypatch.setattr(os, "execvpe", lambda *call: became.append(call))
    (tmp_path / "hosts").write_text("b slots=1\na slots=2\n")
    remote_shell.main(["-f", str(tmp_path / "hosts"), "ls", "-l"])
    ((program, command, env),) = became
    assert program == "pdsh" and command == ["pdsh", "-S", "-f", "1024", "-w", "b,a", "ls", "-l"]
    assert env["PDSH_RCMD_TYPE"] == "ssh"


def test_ds_ssh_without_pdsh_hostfile_or_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="pdsh is not installed"):
        remote_shell.main(["-f", str(tmp_path / "hosts"), "ls"])
    fake_pdsh(tmp_path)
    remote_shell.main(["-f", str(tmp_path / "hosts"), "ls"])
    assert f"no hostfile at {tmp_path / 'hosts'}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="command"):
        remote_shell.main([])


# ds_bench


def parse(*args):
    return comm_bench.parse_args(list(args))[0]


def test_flags_that_are_not_its_own_are_the_launchers():
    given = ["--num_gpus", "2", "--trials", "2", "--hostfile", "h", "--all-reduce"]
    _, others = comm_bench.parse_args(given)
    assert others == ["--num_gpus", "2", "--hostfile", "h"]
    assert comm_bench._without(given, others) == ["--trials", "2", "--all-reduce"]


@pytest.mark.parametrize(
    "args",
    [["--trials", "0"], ["--maxsize", "-1"], ["--scan", "--minsize", "25"], ["--dtype", "x"], ["--bw-unit", "x"]],
)
def test_bad_command_lines(args, capsys):
    with pytest.raises(SystemExit):
        parse(*args)
    assert args[-2].strip("-") in capsys.readouterr().err


def test_sizes_divide_by_the_ranks_and_fit_in_memory():
    def of(*args, free=1 << 30, ranks=2):
        return list(comm_bench.sizes(parse(*args), free, ranks))

    assert of("--maxsize", "12") == [4096]
    assert of("--maxsize", "12", ranks=3) == [4095]
    assert of("--scan", "--minsize", "10", "--maxsize", "12") == [1024, 2048, 4096]
    # 0.5 of 16 KiB are 2048 floats: the last size fills what there is.
    assert of("--scan", "--mem-factor", "0.5", free=1 << 14) == [1024, 2048]
    assert of("--maxsize", "0", ranks=4) == [4]


def test_row_has_the_bandwidths_of_the_slowest_rank():
    args = parse("--raw", "--bw-unit", "GBps")
    name, nbytes, ms, algorithm, bus = comm_bench._row(args, "all_reduce", 4_000_000, [0.001, 0.002], 4).split("\t")
    assert (name, nbytes, float(ms)) == ("all_reduce", "4000000", 2.0)
    assert float(algorithm) == pytest.approx(2.0) and float(bus) == pytest.approx(2.0 * 2 * 3 / 4)
    gathered = comm_bench._row(args, "all_gather", 1_000_000, [0.002], 4).split("\t")
    assert gathered[1] == "4000000" and float(gathered[3]) == pytest.approx(2.0)
    in_bits = comm_bench._row(parse("--raw"), "all_reduce", 4_000_000, [0.002], 4).split("\t")
    assert float(in_bits[3]) == pytest.approx(calc_bw_log("all_reduce", 4_000_000, 2.0, 4)[0]) == pytest.approx(16.0)


class TestBenchmark(DistributedTest):
    world_size = [2, 3]
    reuse_dist_env = True

    @pytest.mark.parametrize("flags", [(), ("--async-op", "--dtype", "torch.bfloat16", "--raw"), ("--dist", "torch")])
    def test_every_operation_and_size(self, flags):
        if "torch" in flags:  # gloo has no reduce-scatter of its own
            flags += tuple(f"--{name.replace('_', '-')}" for name in comm_bench.OPERATIONS if name != "reduce_scatter")
        args = parse("--trials", "1", "--warmups", "1", "--scan", "--minsize", "3", "--maxsize", "4", *flags)
        lines = []
        comm_bench.run(args, lines.append)
        if dist.get_rank() != 0:
            assert lines == []
            return
        names = [line.split()[0] for line in lines[2:]]
        wanted = [name for name in comm_bench.OPERATIONS if "torch" not in flags or name != "reduce_scatter"]
        assert names == [name for name in wanted for _ in range(2)]

    def test_a_wrong_result_is_an_error(self, monkeypatch):
        monkeypatch.setattr(dist, "all_reduce", lambda tensor, op=None, async_op=False: None)
        args = parse("--all-reduce", "--trials", "1")
        with pytest.raises(RuntimeError, match="all_reduce gave a wrong result"):
            comm_bench.run(args, lambda line: None)


def test_one_rank_leaves_point_to_point_out(monkeypatch):
    printed = []
    args = argparse.Namespace(**vars(parse("--pt2pt")))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op=None: torch.zeros(1))
    comm_bench.run(args, printed.append)
    assert printed[-1] == "pt2pt needs two ranks: left out"


def test_ds_bench_starts_its_ranks_through_the_launcher(tmp_path):
    command = [sys.executable, "-m", "deepspeed.launcher.comm_bench", "--num_gpus", "2", "--all-reduce", "--maxsize"]
    command += ["10", "--master_port", str(free_port()), "--hostfile", str(tmp_path / "none"), "-q"]
    outside = {key: value for key, value in os.environ.items() if key not in comm_bench._RANK_VARIABLES}
    env = {**outside, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    first, _, row = done.stdout.splitlines()
    assert first.startswith("2 ranks, torch.float32") and row.split()[:3] == ["all_reduce", "4.0", "KB"]
