# SPDX-License-Identifier: Apache-2.0
"""Steps of several contenders in turns within one process: for models whose step is the host's.

    PYTHONPATH=. python benchmarks/in_turns.py --ranks 2 --model tiny1000

A host that changes its speed by the second, or a core slower than another's, is felt by all contenders alike, where
``step_time.py`` runs each in processes of its own. A ratio is taken between two steps of the same turn. Memory is not
measured: all models are there together. The status is 1 if the contenders did not train alike.
"""

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from backends import NAMES, Contender, Options, make_contender, warm_process
from models import MODELS, build_model, make_workload
from ranks import HERE, run_ranks
from report import DisagreementError, Round, check_losses
from worker import Clock, join_ranks, run_step


@dataclass(frozen=True)
class Task:
    """What one set of ranks measures; ``output`` is the folder for ``rank<N>.json``."""

    contenders: list[str]
    model: str
    size: str
    dtype: str
    device: str
    threads: int
    warmup: int
    turns: int
    output: str = ""


def build(task: Task, device: torch.device) -> tuple[dict[str, Contender], torch.Tensor]:
    """All contenders, each around a model of its own with the same weights, and the batch of this rank."""
    workload = make_workload(task.model, task.size)
    dtype = getattr(torch, task.dtype)
    batch = workload.make_batch(dist.get_rank(), dtype).to(device)
    options = Options(dtype, workload.lr, batch.shape[0])
    contenders = {}
    for name in task.contenders:
        warm_process(name, device)
        contenders[name] = make_contender(name, build_model(workload, device, dtype), options)
    return contenders, batch


def measure(task: Task, device: torch.device) -> dict[str, dict[str, list[float]]]:
    """Of each contender the ``seconds`` of its timed steps and the ``losses`` of all."""
    contenders, batch = build(task, device)
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in contenders}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    clock = Clock(device)
    for turn in range(-task.warmup, task.turns):
        for name, contender in contenders.items():
            dist.barrier()
            clock.lap()
            losses[name].append(run_step(contender, batch))
            elapsed = clock.lap()
            if turn >= 0:
                seconds[name].append(elapsed)
    return {
        name: {"seconds": seconds[name], "losses": torch.stack(losses[name]).float().tolist()} for name in contenders
    }


def run_as_rank(task: Task) -> None:
    found = measure(task, join_ranks(task.device, task.threads))
    Path(task.output, f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def slowest(ranks: list[dict[str, dict[str, list[float]]]]) -> dict[str, list[float]]:
    """Of each step, the time of the slowest rank."""
    return {
        name: [max(step) for step in zip(*(rank[name]["seconds"] for rank in ranks), strict=True)] for name in ranks[0]
    }


def ratios(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Of each contender, its step to that of the first contender in the same turn."""
    base = next(iter(seconds.values()))
    return {name: [a / b for a, b in zip(steps, base, strict=True)] for name, steps in seconds.items()}


def show(seconds: dict[str, list[float]]) -> str:
    """A line for each contender: its median step, and median and quartiles of its ratio to the first."""
    lines = [f"{'':<12}{'step, ms':>10}{'to ' + next(iter(seconds)):>10}{'quartiles':>16}"]
    for name, ratio in ratios(seconds).items():
        low, _, high = quantiles(ratio, n=4)
        step = median(seconds[name]) * 1e3
        lines.append(f"{name:<12}{step:>10.1f}{median(ratio):>10.3f}{low:>9.3f}-{high:.3f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--model", choices=MODELS, default="tiny1000")
    parser.add_argument("--size", choices=("small", "large"), default="small")
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=["ddp", "zero1", "zero2", "zero3"])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3, help="turns before them")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write all times here, in seconds")
    options = parser.parse_args(arguments)
    if options.turns < 2 or options.warmup < 0:
        parser.error(f"--turns must be at least 2 and --warmup at least 0, got {options.turns} and {options.warmup}")
    threads = max(1, len(os.sched_getaffinity(0)) // options.ranks)
    settings: dict[str, Any] = {
        name: getattr(options, name) for name in ("contenders", "model", "size", "dtype", "device", "warmup", "turns")
    }
    task = Task(threads=threads, **settings)
    found = run_ranks(
        HERE / Path(__file__).name, asdict(task), options.ranks, device=task.device, threads=threads, what=task.model
    )
    seconds = slowest(found)
    print(f"{task.model} ({task.size}), torch {torch.__version__}, {task.device}, {options.ranks} rank(s)")
    print(show(seconds))
    if options.json:
        options.json.write_text(json.dumps(asdict(task) | {"ranks": options.ranks, "seconds": seconds}))
    runs = {name: [Round([rank[name] for rank in found])] for name in task.contenders}
    try:
        check_losses(task.model, task.dtype, task.contenders[0], runs)
    except DisagreementError as error:
        print(f"The figures above may not be compared: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        run_as_rank(Task(**json.loads(sys.argv[1])))
    else:
        sys.exit(main())
