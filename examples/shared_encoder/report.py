# SPDX-License-Identifier: Apache-2.0
"""What the demo prints: progress lines while it trains, the tables at the end."""

import statistics
import time
from dataclasses import dataclass, field

from task import ALL_TERMS


@dataclass
class Curves:
    """What one run leaves behind: a value per optimizer step, and the gradient error at the steps that were checked."""

    losses: list[dict[str, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    error_steps: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def final(self, term: str) -> float:
        """Mean of a loss term over the last tenth of the steps."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return statistics.fmean(losses[term] for losses in last)

    def milliseconds(self) -> float:
        """Median time of an optimizer step."""
        return 1e3 * statistics.median(self.seconds)


@dataclass
class PathErrors:
    """A row of the gradient table: relative errors along one path. ``ddp`` is None where DDP cannot take that path."""

    path: str
    engine_backward: float
    loss_backward: float
    ddp: float | None

    def within(self, limit: float) -> bool:
        """Whether DeepSpeed's errors are. Not the same as none being above: a NaN is not."""
        return self.engine_backward <= limit and self.loss_backward <= limit


class Progress:
    """About ten lines over the run, on rank 0."""

    def __init__(self, steps: int, silent: bool) -> None:
        self.steps, self.silent = steps, silent
        self.every = max(1, steps // 10)
        self.started = time.perf_counter()
        if not silent:
            print(f"Loss terms: {', '.join(ALL_TERMS)}", flush=True)

    def show(self, step: int, lr: float, ours: Curves, ddp: Curves) -> None:
        done = step + 1
        if self.silent or (done % self.every and done != self.steps):
            return
        eta = (time.perf_counter() - self.started) / done * (self.steps - done)
        losses = " | ".join(
            f"{name} " + " ".join(f"{run.losses[-1][term]:.3f}" for term in ALL_TERMS)
            for name, run in (("DeepSpeed", ours), ("DDP", ddp))
        )
        error = f"gradient error {ours.errors[-1]:.1e}"
        print(f"step {done:4d}/{self.steps}  lr {lr:.1e}  {losses}  {error}  ETA {eta:.0f} s", flush=True)


def gradient_table(rows: list[PathErrors], limit: float) -> str:
    lines = [
        "Gradient of one window against float64 autograd: |difference| / |reference|",
        f"  {'path through the graph':<28}{'engine.backward(loss)':>23}{'loss.backward()':>17}{'plain DDP':>11}",
    ]
    for row in rows:
        verdict = "ok" if row.within(limit) else f"OFF, limit {limit:g}"
        ddp = "-" if row.ddp is None else f"{row.ddp:.1e}"
        lines.append(f"  {row.path:<28}{row.engine_backward:>23.1e}{row.loss_backward:>17.1e}{ddp:>11}   {verdict}")
    return "\n".join(lines)


def training_table(ours_name: str, ours: Curves, ddp: Curves) -> str:
    lines = [f"{'Training':<32}{ours_name:>19}{'plain DDP':>13}"]
    lines += [
        f"  {term + ' loss, at the end':<30}{ours.final(term):>19.4f}{ddp.final(term):>13.4f}" for term in ALL_TERMS
    ]
    lines.append(f"  {'gradient error, largest seen':<30}{max(ours.errors):>19.1e}{max(ddp.errors):>13.1e}")
    lines.append(f"  {'time per optimizer step':<30}{ours.milliseconds():>16.1f} ms{ddp.milliseconds():>10.1f} ms")
    return "\n".join(lines)
