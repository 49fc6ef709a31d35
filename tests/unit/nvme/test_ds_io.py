# SPDX-License-Identifier: Apache-2.0
"""``ds_io`` on a temporary folder."""

import os
import re

import pytest

from deepspeed.nvme import ds_io_main, io_benchmark
from deepspeed.ops.aio.engines import available_engines

SIZE = 300_001  # no multiple of the block


def run(capsys, folder, *flags):
    ds_io_main(["--folder", str(folder), "--io_size", str(SIZE), "--block_size", "64K", *flags])
    return capsys.readouterr().out


@pytest.mark.parametrize("read", [[], ["--read"]])
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--engine", "aio_basic", "--single_submit"],
        ["--engine", "python", "--queue_depth", "3", "--use_accelerator_pin_memory"],
        ["--engine", "plain", "--io_parallel", "3"],
        ["--io_parallel", "3", "--sequential_requests"],
        ["--engine", "torch_io"],
    ],
)
def test_measures_validates_and_leaves_nothing_behind(capsys, tmp_path, read, flags):
    out = run(capsys, tmp_path, "--validate", "--loops", "2", *read, *flags)
    text = r"^(read|write): \d+\.\d+ GB/s mean.* 1 process\(es\) x (\d+) bytes.*, 2 repetitions$"
    rate = re.search(text, out, re.M)
    assert rate, out
    assert rate.group(1) == ("read" if read else "write") and int(rate.group(2)) == SIZE
    assert os.listdir(tmp_path) == []


def test_says_in_one_line_what_it_measures(capsys, tmp_path):
    def said(*flags):
        return run(capsys, tmp_path, "--loops", "1", *flags).splitlines()[0]

    assert said("--engine", "python", "--queue_depth", "8") == (
        "ds_io: python, 8 requests in flight per thread, 1 thread(s)"
    )
    assert said("--sequential_requests", "--io_parallel", "4").endswith(
        f"{available_engines()[0]}, 1 requests in flight per thread, 1 thread(s)"
    )
    plain = said("--engine", "plain", "--queue_depth", "8")
    assert "pread" in plain and "without effect: --queue_depth" in plain
    assert "torch.save" in said("--engine", "torch_io")


def test_several_processes(capsys, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    mapping = [f"{folder}:0" for folder in folders]
    ds_io_main(["--folder_to_device_mapping", *mapping, "--io_size", "64K", "--validate", "--loops", "1"])
    assert "2 process(es) x 65536 bytes" in capsys.readouterr().out
    assert [os.listdir(folder) for folder in folders] == [[], []]


def test_repetitions_and_files(monkeypatch, tmp_path):
    written = []
    original = io_benchmark._Repetition.write
    monkeypatch.setattr(io_benchmark._Repetition, "write", lambda self: (written.append(self.path), original(self)))
    flags = ["--folder", str(tmp_path), "--io_size", "1K", "--loops", "3", "--warmup_loops", "2"]
    assert len(io_benchmark.measure(io_benchmark.parse_args(flags), 0)) == 3
    assert len(written) == 5 and len(set(written)) == 1
    written.clear()
    flags += ["--different_file_each_iteration", "--include_warmup_time"]
    assert len(io_benchmark.measure(io_benchmark.parse_args(flags), 0)) == 5
    assert len(set(written)) == 5


def test_validation_finds_a_wrong_byte(monkeypatch, tmp_path):
    def flip(file, offset, data):
        os.pwrite(file, bytes([data[0] ^ 1]) + bytes(data[1:]), offset)

    monkeypatch.setattr(io_benchmark, "_write_all", flip)
    args = io_benchmark.parse_args(["--folder", str(tmp_path), "--io_size", "1K", "--validate", "--engine", "plain"])
    with pytest.raises(RuntimeError, match="1 of 1024 bytes"):
        io_benchmark.measure(args, 0)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "text, size", [("4096", 4096), ("64K", 1 << 16), ("64kb", 1 << 16), ("3M", 3 << 20), ("2G", 2 << 30)]
)
def test_sizes(text, size):
    assert io_benchmark.size_of(text) == size


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--io_size", "x"], "no size"),
        (["--io_size", "0"], "no size"),
        (["--io_size", "1K", "--use_gds"], "use_gds"),
        (["--io_size", "1K", "--loops", "0"], "loops"),
        (["--io_size", "1K", "--queue_depth", "0"], "queue_depth"),
        (["--io_size", "1K", "--engine", "magic"], "magic"),
        (["--io_size", "1K", "--folder_to_device_mapping", "a:0"], "either"),
    ],
)
def test_bad_command_lines(capsys, tmp_path, flags, message):
    with pytest.raises(SystemExit):
        io_benchmark.parse_args(["--folder", str(tmp_path), *flags])
    assert message in capsys.readouterr().err


def test_missing_folder(capsys):
    with pytest.raises(SystemExit):
        io_benchmark.parse_args(["--folder", "/nonexistent", "--io_size", "1K"])
    assert "/nonexistent" in capsys.readouterr().err


def test_gpu_needs_an_accelerator(monkeypatch, tmp_path):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    args = io_benchmark.parse_args(["--folder", str(tmp_path), "--io_size", "1K", "--gpu"])
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: _Cpu())
    with pytest.raises(SystemExit, match="accelerator"):
        io_benchmark.measure(args, 0)


class _Cpu:
    def device_name(self):
        return "cpu"
