# SPDX-License-Identifier: Apache-2.0
"""CSV files of events: names, rows, what a crash and a resumed job do to them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepspeed.monitor import monitor as monitor_module
from deepspeed.monitor.config import CSVConfig
from deepspeed.monitor.csv_monitor import csvMonitor
from deepspeed.utils.logging import logger


def config(folder: Path, job_name: str = "job", enabled: bool = True) -> CSVConfig:
    return CSVConfig(enabled=enabled, output_path=str(folder), job_name=job_name)


def text(folder: Path, name: str = "Train_Samples_lr.csv") -> str:
    return (folder / "job" / name).read_text()


def test_one_file_per_name_and_a_row_per_event(tmp_path):
    monitor = csvMonitor(config(tmp_path))
    monitor.write_events([("Train/Samples/lr", 0.1, 8), ("loss", torch.tensor(2.5), 8)])
    monitor.write_events([("Train/Samples/lr", 1, 16)])
    assert text(tmp_path) == "step,lr\n8,0.1\n16,1\n"
    assert text(tmp_path, "loss.csv") == "step,loss\n8,2.5\n"
    assert len(os.listdir(tmp_path / "job")) == 2


def test_values_come_back_exactly(tmp_path):
    values = [1 / 3, 1e-300, float("inf"), 2**60]
    csvMonitor(config(tmp_path)).write_events([("x", value, i) for i, value in enumerate(values)])
    rows = text(tmp_path, "x.csv").splitlines()[1:]
    assert [float(row.split(",")[1]) for row in rows] == values


def test_a_resumed_job_appends(tmp_path):
    for step in (8, 16):
        monitor = csvMonitor(config(tmp_path))
        monitor.write_events([("Train/Samples/lr", 0.5, step)])
        monitor.close()
    assert text(tmp_path) == "step,lr\n8,0.5\n16,0.5\n"


@pytest.mark.parametrize("torn", ["24,0.1", "24", "24,0.12345"])
def test_a_row_that_a_crash_cut_short_is_removed(tmp_path, torn):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "Train_Samples_lr.csv").write_text("step,lr\n8,0.5\n" + torn)
    csvMonitor(config(tmp_path)).write_events([("Train/Samples/lr", 0.25, 24)])
    assert text(tmp_path) == "step,lr\n8,0.5\n24,0.25\n"


@pytest.mark.parametrize("torn", ["", "st", "step,lr"])
def test_a_file_without_a_whole_header_gets_one(tmp_path, torn):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "Train_Samples_lr.csv").write_text(torn)
    csvMonitor(config(tmp_path)).write_events([("Train/Samples/lr", 0.25, 24)])
    assert text(tmp_path) == "step,lr\n24,0.25\n"


def test_rows_survive_a_process_that_dies_at_once(tmp_path):
    script = (
        "import os\n"
        "from deepspeed.monitor.config import CSVConfig\n"
        "from deepspeed.monitor.csv_monitor import csvMonitor\n"
        f"monitor = csvMonitor(CSVConfig(enabled=True, output_path={str(tmp_path)!r}, job_name='job'))\n"
        "monitor.write_events([('Train/Samples/lr', 0.5, 8)])\n"
        "os._exit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 3
    assert text(tmp_path) == "step,lr\n8,0.5\n"


def test_events_after_close_are_appended(tmp_path):
    monitor = csvMonitor(config(tmp_path))
    for step in (8, 16):
        monitor.write_events([("Train/Samples/lr", 0.5, step)])
        monitor.close()
        monitor.close()
    assert text(tmp_path) == "step,lr\n8,0.5\n16,0.5\n"


def test_two_names_for_one_file_are_refused(tmp_path):
    monitor = csvMonitor(config(tmp_path))
    monitor.write_events([("a/b", 1.0, 1)])
    with pytest.raises(ValueError, match="'a/b' and 'a_b' would share a_b.csv"):
        monitor.write_events([("a_b", 1.0, 1)])


def test_a_file_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "Train_Samples_lr.csv").write_text("epoch,accuracy\n1,0.5\n")
    with pytest.raises(ValueError, match=r"Train_Samples_lr.csv begins with 'epoch,accuracy', not 'step,lr'"):
        csvMonitor(config(tmp_path)).write_events([("Train/Samples/lr", 0.25, 24)])
    assert text(tmp_path) == "epoch,accuracy\n1,0.5\n"


def test_without_an_output_path_files_are_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monitor = csvMonitor(CSVConfig(enabled=True))
    assert monitor.log_dir == str(tmp_path / "csv_monitor" / "DeepSpeedJobName") and Path(monitor.log_dir).is_dir()


@pytest.mark.parametrize("enabled, rank", [(False, 0), (True, 1)])
def test_disabled_or_not_rank_0_nothing_is_made(tmp_path, monkeypatch, enabled, rank):
    monkeypatch.setattr(monitor_module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(monitor_module.dist, "get_rank", lambda: rank)
    monitor = csvMonitor(config(tmp_path / "none", enabled=enabled))
    monitor.write_events([("lr", 0.1, 1)])
    assert monitor.enabled == enabled and not (tmp_path / "none").exists()


def test_two_living_monitors_in_one_folder_warn(tmp_path, capsys):
    first = csvMonitor(config(tmp_path))
    csvMonitor(config(tmp_path, job_name="other"))
    assert capsys.readouterr().err == ""
    second = csvMonitor(config(tmp_path))
    assert "give each its own job_name" in capsys.readouterr().err
    first.close()
    second.close()
    del first, second
    csvMonitor(config(tmp_path))
    assert capsys.readouterr().err == "" and logger.name == "DeepSpeed"
