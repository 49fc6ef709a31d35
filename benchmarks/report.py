# SPDX-License-Identifier: Apache-2.0
"""Turn the figures of all rounds into comparisons, a table and a chart."""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from models import Workload

RankFigures = dict[str, Any]
# Dense bf16 peak of one device by its vendor's data sheet, in operations per second.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
# First loss: a relative tolerance. Fall of the loss over the run: a fraction of the reference's fall.
FIRST_LOSS = {"bfloat16": 1e-3, "float32": 1e-5}
LOSS_FALL = {"bfloat16": 0.15, "float32": 0.02}


class DisagreementError(RuntimeError):
    """The contenders did not train the same thing, so their times may not be compared."""


@dataclass(frozen=True)
class Round:
    """One round of one contender: the figures of its ranks in rank order."""

    ranks: list[RankFigures]

    def step_seconds(self) -> float:
        """Median over steps of the slowest rank's step."""
        return median(max(step) for step in zip(*(rank["seconds"] for rank in self.ranks), strict=True))

    def part_seconds(self) -> dict[str, float]:
        """Median over steps of each part of the step, on the slowest rank of each step."""
        names = self.ranks[0]["parts"]
        return {
            name: median(max(s) for s in zip(*(rank["parts"][name] for rank in self.ranks), strict=True))
            for name in names
        }

    def peak_bytes(self) -> int:
        return max(rank["peak_bytes"] for rank in self.ranks)

    def losses(self) -> list[float]:
        """Mean over ranks of the loss of each step."""
        return [mean(step) for step in zip(*(rank["losses"] for rank in self.ranks), strict=True)]


@dataclass(frozen=True)
class Row:
    """One contender on one model, compared with the reference. Seconds and bytes; ratios are dimensionless."""

    contender: str
    seconds: float
    seconds_of_rounds: list[float]
    ratio_in_rounds: float
    ratio_of_medians: float
    parts: dict[str, float]
    peak_bytes: float
    calls: dict[str, int]
    bytes: dict[str, int]
    ring_bytes: float
    samples_per_second: float
    utilisation: float | None
    first_loss: float
    last_loss: float
    exposed_seconds: float
    hook_seconds: float | None
    hook_calls: int
    package: str | None


def disagreements(model: str, dtype: str, reference: str, runs: dict[str, list[Round]]) -> list[str]:
    """What says that the contenders did not train the same thing; empty if nothing does."""
    found = []
    for check in (
        lambda: check_losses(model, dtype, reference, runs),
        lambda: check_collectives(model, runs),
    ):
        try:
            check()
        except DisagreementError as error:
            found.append(str(error))
    return found


def check_losses(model: str, dtype: str, reference: str, runs: dict[str, list[Round]]) -> None:
    """Check that all contenders started from the same loss and brought it down alike.

    Raises:
        DisagreementError: naming the contender, the model and both figures.
    """
    expected = runs[reference][0].losses()
    fall = expected[0] - expected[-1]
    if not fall > FIRST_LOSS[dtype] * abs(expected[0]):
        raise DisagreementError(
            f"{model}: the loss of {reference} went from {expected[0]:.5g} to {expected[-1]:.5g}: too little to tell "
            "training from standing still. Use more steps."
        )
    for contender, rounds in runs.items():
        for number, one in enumerate(rounds):
            losses = one.losses()
            where = f"{model}, {contender}, round {number}"
            if not abs(losses[0] - expected[0]) <= FIRST_LOSS[dtype] * abs(expected[0]):
                raise DisagreementError(f"{where}: first loss {losses[0]:.6g}, {reference} has {expected[0]:.6g}")
            if not abs(losses[0] - losses[-1] - fall) <= LOSS_FALL[dtype] * fall:
                raise DisagreementError(
                    f"{where}: the loss fell by {losses[0] - losses[-1]:.5g} in {len(losses)} steps, "
                    f"that of {reference} by {fall:.5g}"
                )


def check_collectives(model: str, runs: dict[str, list[Round]]) -> None:
    """Check that all ranks of a contender issued the same collectives.

    Raises:
        DisagreementError: naming the contender and both counts.
    """
    for contender, rounds in runs.items():
        first, *others = (rank["collectives"] for rank in rounds[0].ranks)
        for number, other in enumerate(others, start=1):
            if other != first:
                raise DisagreementError(
                    f"{model}, {contender}: collectives of rank 0 {first}, of rank {number} {other}"
                )


def peak_flops(device_name: str | None) -> float | None:
    for key, peak in PEAK_FLOPS.items():
        if device_name is not None and key in device_name:
            return peak
    return None


def compare(workload: Workload, dtype: str, reference: str, runs: dict[str, list[Round]]) -> list[Row]:
    """Return one row per contender, in the order of ``runs``."""
    reference_rounds = [one.step_seconds() for one in runs[reference]]
    rows = []
    for contender, rounds in runs.items():
        seconds_of_rounds = [one.step_seconds() for one in rounds]
        seconds = median(seconds_of_rounds)
        parts = [one.part_seconds() for one in rounds]
        figures = rounds[0].ranks[0]
        peak = peak_flops(figures.get("device_name")) if dtype == "bfloat16" else None
        rows.append(
            Row(
                contender=contender,
                seconds=seconds,
                seconds_of_rounds=seconds_of_rounds,
                ratio_in_rounds=median(a / b for a, b in zip(seconds_of_rounds, reference_rounds, strict=True)),
                ratio_of_medians=seconds / median(reference_rounds),
                parts={name: median(part[name] for part in parts) for name in parts[0]},
                peak_bytes=median(one.peak_bytes() for one in rounds),
                calls=figures["collectives"]["calls"],
                bytes=figures["collectives"]["bytes"],
                ring_bytes=figures["collectives"]["ring_bytes"],
                samples_per_second=workload.samples * len(rounds[0].ranks) / seconds,
                utilisation=workload.flops / seconds / peak if peak and workload.flops else None,
                first_loss=rounds[0].losses()[0],
                last_loss=rounds[0].losses()[-1],
                exposed_seconds=max(rank["exposed_seconds"] for rank in rounds[0].ranks),
                hook_seconds=figures["hook_seconds"],
                hook_calls=figures["hook_calls"],
                package=figures.get("package"),
            )
        )
    return rows


def format_table(title: str, reference: str, sample_name: str, rows: list[Row]) -> str:
    """Return the rows as fixed-width text."""
    show_utilisation = any(row.utilisation is not None for row in rows)
    head = ["contender", "step ms", "(rounds)", f"/{reference}", "of medians", "forward", "backward", "step"]
    head += ["exposed", "hooks", "peak MiB", "calls", "MB", "ring MB", f"{sample_name}/s", "loss"]
    head += ["MFU"] if show_utilisation else []
    lines = [head]
    for row in rows:
        line = [row.contender, f"{row.seconds * 1e3:.1f}"]
        line.append(f"{min(row.seconds_of_rounds) * 1e3:.1f}-{max(row.seconds_of_rounds) * 1e3:.1f}")
        line += [f"{row.ratio_in_rounds:.3f}", f"{row.ratio_of_medians:.3f}"]
        line += [f"{row.parts[name] * 1e3:.1f}" for name in ("forward", "backward", "step")]
        line += [f"{row.exposed_seconds * 1e3:.1f}"]
        line += ["-" if row.hook_seconds is None else f"{row.hook_seconds * 1e3:.1f}"]
        line += [f"{row.peak_bytes / 2**20:.1f}", str(sum(row.calls.values()))]
        line += [f"{sum(row.bytes.values()) / 1e6:.2f}", f"{row.ring_bytes / 1e6:.2f}"]
        line += [f"{row.samples_per_second:.0f}", f"{row.first_loss:.4f}>{row.last_loss:.4f}"]
        if show_utilisation:
            line.append("-" if row.utilisation is None else f"{row.utilisation:.1%}")
        lines.append(line)
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [title]
    for line in lines:
        cells = [line[0].ljust(widths[0])] + [
            cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)
        ]
        text.append("  ".join(cells).rstrip())
    text.append("collectives per step: " + "; ".join(f"{row.contender}: {format_calls(row)}" for row in rows))
    text += [f"{row.contender}: package {row.package}" for row in rows if row.contender.startswith("peer-")]
    return "\n".join(text)


def format_reuse(once: list[Row], twice: list[Row]) -> str:
    """What it costs that all blocks run twice: the ratio of plain torch is the extra arithmetic alone."""
    lines = ["blocks that run twice against once: step, and collectives of one step"]
    second = {row.contender: row for row in twice}
    for row in once:
        if row.contender in second:
            other = second[row.contender]
            calls = f"{sum(row.calls.values())} -> {sum(other.calls.values())}"
            lines.append(f"  {row.contender:12s} x{other.seconds / row.seconds:.3f}   {calls}")
    return "\n".join(lines)


def format_calls(row: Row) -> str:
    if not row.calls:
        return "none"
    return ", ".join(f"{count} {name} ({row.bytes[name] / 1e6:.3g} MB)" for name, count in sorted(row.calls.items()))


def plot(path: Path, tables: dict[str, list[Row]]) -> None:
    """Draw one panel per model: a bar per contender, a whisker from the fastest to the slowest round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(tables), figsize=(5 * len(tables), 4), squeeze=False)
    for panel, (model, rows) in zip(panels[0], tables.items(), strict=True):
        heights = [row.seconds * 1e3 for row in rows]
        below = [(row.seconds - min(row.seconds_of_rounds)) * 1e3 for row in rows]
        above = [(max(row.seconds_of_rounds) - row.seconds) * 1e3 for row in rows]
        bars = panel.bar([row.contender for row in rows], heights, yerr=[below, above], capsize=3, color="#4878a8")
        panel.bar_label(bars, [f"{row.ratio_in_rounds:.2f}" for row in rows], label_type="center", color="white")
        panel.set_title(f"{model} (in the bars: ratio to {rows[0].contender})")
        panel.set_ylabel("step, ms")
        panel.tick_params(axis="x", rotation=30)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
