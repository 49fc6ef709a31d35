# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed.monitor.plot FOLDER``: all CSV files of a run in one PNG, a panel each."""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIRST = ("train_loss", "lr", "grad_norm")  # panels that come first; the others follow by name
COLUMNS = 3
PANEL_INCHES = (4.2, 2.8)


@dataclass(frozen=True)
class Curve:
    """One event over its steps; ``file`` is the name of its file without ``.csv``, ``column`` that of its values."""

    file: str
    column: str
    steps: list[int]
    values: list[float]

    @property
    def x_label(self) -> str:
        """Events of the engine are over samples; what steps others use is theirs to know."""
        return "samples" if self.file.startswith("Train_Samples_") else "step"


def read_curve(path: Path) -> Curve:
    """Read a file of ``csv_monitor``.

    A row that does not go forward in steps replaces those from its step on: there a job was resumed from an earlier
    checkpoint. A last line without its end is one that is being written, and left out.

    Raises:
        ValueError: the file is not one of ``csv_monitor``; with the line.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = list(csv.reader(line for line in lines if line.endswith("\n")))
    if not rows or len(rows[0]) != 2 or rows[0][0] != "step":
        raise ValueError(f"{path} does not begin with 'step,<name>' and is no file of csv_monitor")
    steps: list[int] = []
    values: list[float] = []
    for number, row in enumerate(rows[1:], start=2):
        try:
            step, value = int(row[0]), float(row[1])
        except (ValueError, IndexError):
            raise ValueError(f"{path}, line {number}: {','.join(row)!r} is not a step and a number") from None
        while steps and steps[-1] >= step:
            steps.pop()
            values.pop()
        steps.append(step)
        values.append(value)
    return Curve(path.stem, rows[0][1], steps, values)


def run_folder(folder: Path) -> Path:
    """The folder that holds the CSV files: the given one, or the only one below it that does.

    Raises:
        FileNotFoundError: there is none.
        ValueError: there are several.
    """
    if any(folder.glob("*.csv")):
        return folder
    below = sorted({path.parent for path in folder.glob("*/*.csv")})
    if not below:
        raise FileNotFoundError(
            f"{folder} holds no CSV files: give the folder <output_path>/<job_name> of the config's 'csv_monitor', and"
            " see that it says 'enabled': true and that a step was taken"
        )
    if len(below) > 1:
        raise ValueError(f"{folder} holds several runs, choose one: {', '.join(map(str, below))}")
    return below[0]


def save_plot(curves: Sequence[Curve], path: Path, title: str = "") -> None:
    """Draw the curves into a PNG at ``path``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # draws into files without a display, unlike pyplot
    except ImportError as error:
        raise ImportError("drawing needs the package 'matplotlib': pip install matplotlib", name=error.name) from error
    columns = min(COLUMNS, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for panel, curve in zip(panels, curves):
        _draw(panel, curve)
    for panel in list(figure.axes)[len(curves) :]:
        panel.remove()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _draw(panel: Axes, curve: Curve) -> None:
    marker = "." if len(curve.steps) < 50 else None  # a single point is no line
    panel.plot(curve.steps, curve.values, linewidth=1.2, marker=marker)
    panel.set(title=curve.column, xlabel=curve.x_label)
    panel.grid(alpha=0.3)


def _order(curve: Curve) -> tuple[int, str]:
    return (FIRST.index(curve.column) if curve.column in FIRST else len(FIRST), curve.file)


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns its exit status: 1 with one line on stderr when there is nothing to draw or to draw with."""
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed.monitor.plot", description="Draw the CSV files of a run into one PNG."
    )
    parser.add_argument("folder", type=Path, help="<output_path>/<job_name> of the config's csv_monitor")
    parser.add_argument("-o", "--output", type=Path, help="the PNG; default: plot.png in the folder")
    parsed = parser.parse_args(arguments)
    try:
        folder = run_folder(parsed.folder)
        curves = sorted((read_curve(path) for path in folder.glob("*.csv")), key=_order)
        output = parsed.output or folder / "plot.png"
        save_plot(curves, output, title=folder.name)
    except (ImportError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
