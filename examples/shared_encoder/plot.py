# SPDX-License-Identifier: Apache-2.0
"""``loss.png``: the loss terms of both runs over the steps, and the error of their gradients."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # draws into files (Agg) without a display, unlike pyplot
from report import Curves
from task import ALL_TERMS


def save_plot(path: Path, ours_name: str, ours: Curves, ddp: Curves, held_steps: int, limit: float) -> None:
    """Write the figure to ``path``; its folder is made where it is missing."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    losses, errors = figure.subplots(1, 2)
    draw_losses(losses, ours_name, ours, ddp)
    draw_errors(errors, ours_name, ours, ddp, limit)
    for axes in (losses, errors):
        axes.axvspan(0, held_steps, color="0.92", zorder=0)
        axes.text(
            held_steps / 2, 0.98, "LR 0", transform=axes.get_xaxis_transform(), ha="center", va="top", color="0.4"
        )
        axes.set_xlabel("optimizer step")
        axes.set_xlim(0, len(ours.losses))
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def draw_losses(axes: Axes, ours_name: str, ours: Curves, ddp: Curves) -> None:
    """DDP as a broad pale line, DeepSpeed as a thin dark one: where they agree, the thin lies inside the broad."""
    for color, term in zip(("tab:blue", "tab:orange", "tab:green"), ALL_TERMS, strict=True):
        axes.plot([step[term] for step in ddp.losses], color=color, linewidth=6, alpha=0.3)
        axes.plot([step[term] for step in ours.losses], color=color, linewidth=1.5, label=term)
    axes.plot([], [], color="0.3", linewidth=1.5, label=ours_name)
    axes.plot([], [], color="0.3", linewidth=6, alpha=0.3, label="plain DDP")
    axes.set(title="Loss terms", ylabel="mean over the window (rank 0)", ylim=(0, 1.2 * axes.get_ylim()[1]))
    axes.legend(loc="upper right")


def draw_errors(axes: Axes, ours_name: str, ours: Curves, ddp: Curves, limit: float) -> None:
    axes.plot(ddp.error_steps, ddp.errors, color="0.6", linewidth=6, alpha=0.5, label="plain DDP")
    axes.plot(ours.error_steps, ours.errors, color="tab:red", marker="o", markersize=4, label=ours_name)
    axes.axhline(limit, color="black", linestyle="--", label=f"limit {limit:g}")
    axes.set(
        title="Gradient against float64 autograd", ylabel="relative error, all parameters as one vector", yscale="log"
    )
    axes.set_ylim(top=20 * max(limit, *ours.errors))  # room for the legend
    axes.legend(loc="upper right")
