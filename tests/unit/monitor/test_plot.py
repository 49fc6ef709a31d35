# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed.monitor.plot``: what it reads, what it draws, and what it says when it cannot."""

import subprocess
import sys

import pytest

from deepspeed.monitor import plot
from deepspeed.monitor.config import CSVConfig
from deepspeed.monitor.csv_monitor import csvMonitor


def make_run(folder, job_name="job", names=("Train/Samples/lr", "Train/Samples/train_loss", "mine")):
    monitor = csvMonitor(CSVConfig(enabled=True, output_path=str(folder), job_name=job_name))
    for step in (8, 16, 24):
        monitor.write_events([(name, 1.0 / step, step) for name in names])
    monitor.close()
    return folder / job_name


def test_reads_what_the_monitor_wrote(tmp_path):
    folder = make_run(tmp_path)
    curve = plot.read_curve(folder / "Train_Samples_lr.csv")
    assert (curve.column, curve.steps, curve.values) == ("lr", [8, 16, 24], [1 / 8, 1 / 16, 1 / 24])
    assert curve.x_label == "samples" and plot.read_curve(folder / "mine.csv").x_label == "step"


def test_a_resumed_job_replaces_what_it_repeats(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("step,x\n8,1\n16,2\n24,3\n16,20\n24,30\n32,40\n")
    assert plot.read_curve(path).values == [1.0, 20.0, 30.0, 40.0]


def test_a_row_that_is_being_written_is_left_out(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("step,x\n8,1\n16,0.1")
    assert plot.read_curve(path).steps == [8]


@pytest.mark.parametrize(
    "content, message",
    [
        ("epoch,x\n1,2\n", "does not begin with 'step,<name>'"),
        ("", "does not begin with 'step,<name>'"),
        ("step,x\n8,1\n16,two\n", "line 3: '16,two' is not a step and a number"),
        ("step,x\n8\n", "line 2: '8' is not a step and a number"),
    ],
)
def test_other_files_are_named(tmp_path, content, message):
    path = tmp_path / "x.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        plot.read_curve(path)


def test_the_command_draws_a_panel_per_file(tmp_path, capsys, monkeypatch):
    folder = make_run(tmp_path)
    drawn = []
    draw = plot._draw
    monkeypatch.setattr(plot, "_draw", lambda panel, curve: (drawn.append(curve.column), draw(panel, curve)))
    assert plot.main([str(folder)]) == 0
    assert drawn == ["train_loss", "lr", "mine"]
    assert capsys.readouterr().out.strip() == str(folder / "plot.png")
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_folder_above_and_another_output(tmp_path):
    make_run(tmp_path / "runs")
    assert plot.main([str(tmp_path / "runs"), "-o", str(tmp_path / "mine.png")]) == 0
    assert (tmp_path / "mine.png").stat().st_size > 1000


def test_nothing_to_draw(tmp_path, capsys):
    assert plot.main([str(tmp_path)]) == 1
    assert "holds no CSV files" in capsys.readouterr().err
    make_run(tmp_path, "first")
    make_run(tmp_path, "second")
    assert plot.main([str(tmp_path)]) == 1
    assert "first" in capsys.readouterr().err


def test_without_matplotlib(tmp_path):
    folder = make_run(tmp_path)
    script = (
        "import sys\n"
        "sys.modules['matplotlib'] = sys.modules['matplotlib.figure'] = None\n"
        "from deepspeed.monitor.plot import main\n"
        f"sys.exit(main([{str(folder)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr == "drawing needs the package 'matplotlib': pip install matplotlib\n"
