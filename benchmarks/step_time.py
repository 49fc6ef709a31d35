# SPDX-License-Identifier: Apache-2.0
"""Time one training step of this package against plain torch (DDP and FSDP2).

    PYTHONPATH=. python benchmarks/step_time.py --ranks 2

Each contender runs in its own processes. Contenders take turns within a round, so that a machine that slows
down slows all of them, and each ratio is taken between two runs of the same round. See README.md.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from backends import NAMES, PEER_NAMES
from models import MODELS, make_workload
from ranks import HERE, own_paths, run_ranks
from report import Round, Row, compare, disagreements, format_reuse, format_table, plot
from worker import Task


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes per contender; on CUDA one per GPU")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt", "tiny1000"])
    parser.add_argument("--size", choices=("small", "large"), default="small")
    parser.add_argument(
        "--contenders", nargs="+", choices=NAMES + PEER_NAMES, help="the first is the base; default: all there are"
    )
    parser.add_argument(
        "--peer",
        type=Path,
        help="another installed package deepspeed: its environment's folder or interpreter, or a site-packages folder",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="timed steps per round")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, help="torch threads per rank; default cores // ranks")
    parser.add_argument("--bucket", type=int, help="elements per reduce and all-gather bucket of this package")
    parser.add_argument("--zero", type=json.loads, default={}, help="JSON merged into zero_optimization")
    parser.add_argument(
        "--adamw", choices=("fused", "foreach"), default="fused", help="torch's AdamW, for ddp and fsdp2"
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plot", type=Path, help="write a bar chart here (needs matplotlib)")
    options = parser.parse_args(arguments)
    if options.contenders is None:
        options.contenders = [*NAMES, *(PEER_NAMES if options.peer else ())]
    if options.peer is None and set(options.contenders) & set(PEER_NAMES):
        parser.error(f"contenders {', '.join(PEER_NAMES)} need --peer")
    if options.peer is not None:
        peer_python(options.peer)
    for name in ("ranks", "rounds", "steps", "warmup"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cuda" and options.ranks > torch.cuda.device_count():
        parser.error(f"--ranks {options.ranks} needs as many GPUs, found {torch.cuda.device_count()}")
    if options.threads is None:
        options.threads = max(1, len(os.sched_getaffinity(0)) // options.ranks)
    return options


def peer_python(path: Path | None) -> tuple[str, list[str]]:
    """Interpreter and folders in front of its path that give the package of ``--peer``; None: this package.

    Raises:
        FileNotFoundError: there is neither an interpreter nor an importable package at ``path``.
    """
    if path is None:
        return sys.executable, own_paths()
    for python in (path, path / "bin" / "python"):
        if python.is_file():
            return str(python), []
    if (path / "deepspeed").is_dir():
        return sys.executable, [str(path)]
    raise FileNotFoundError(
        f"--peer {path}: neither a Python interpreter, nor an environment with bin/python, nor a folder with deepspeed/"
    )


def run_round(task: Task, ranks: int, peer: Path | None) -> Round:
    """Run one set of processes and return their figures.

    Raises:
        RuntimeError: a rank failed; carries the end of its output.
    """
    python, paths = peer_python(peer if task.contender in PEER_NAMES else None)
    what = f"{task.model}, {task.contender}"
    return Round(
        run_ranks(
            HERE / "worker.py",
            asdict(task),
            ranks,
            device=task.device,
            threads=task.threads,
            what=what,
            python=python,
            paths=paths,
        )
    )


def run_model(model: str, options: argparse.Namespace, faults: list[str]) -> dict[str, list[Round]]:
    """Run all rounds of all contenders on one model. One whose ranks fail is left out, with an entry in ``faults``."""
    runs: dict[str, list[Round]] = {contender: [] for contender in options.contenders}
    for number in range(options.rounds):
        for contender, rounds in list(runs.items()):
            task = Task(
                contender=contender,
                model=model,
                size=options.size,
                dtype=options.dtype,
                device=options.device,
                threads=options.threads,
                warmup=options.warmup,
                steps=options.steps,
                output="",
                detail=number == 0,
                bucket=options.bucket,
                zero=options.zero,
                adamw=options.adamw,
            )
            try:
                rounds.append(run_round(task, options.ranks, options.peer))
            except RuntimeError as error:
                faults.append(str(error))
                del runs[contender]
                continue
            seconds = rounds[-1].step_seconds()
            print(f"{model} round {number} {contender}: {seconds * 1e3:.1f} ms", file=sys.stderr, flush=True)
    return runs


def describe(options: argparse.Namespace) -> dict[str, Any]:
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    device = torch.cuda.get_device_name(0) if options.device == "cuda" else "cpu"
    return settings | {"torch": torch.__version__, "device_name": device, "cores": len(os.sched_getaffinity(0))}


def main() -> None:
    options = parse_arguments()
    settings = describe(options)
    print(
        f"torch {settings['torch']}, {settings['device_name']}, {options.ranks} rank(s) x {options.threads} thread(s), "
        f"{options.dtype}, {options.rounds} rounds x {options.steps} steps"
    )
    reference = options.contenders[0]
    tables: dict[str, list[Row]] = {}
    faults: list[str] = []
    for model in options.models:
        workload = make_workload(model, options.size)
        runs = run_model(model, options, faults)
        if reference not in runs:
            faults.append(f"{model}: nothing to compare with, since {reference} failed")
            continue
        tables[model] = compare(workload, options.dtype, reference, runs)
        parameters = runs[reference][0].ranks[0]["parameters"]
        title = f"\n{model} ({options.size}, {parameters / 1e6:.2f} M parameters)"
        print(format_table(title, reference, workload.sample_name, tables[model]), flush=True)
        faults += disagreements(model, options.dtype, reference, runs)
    if "gpt" in tables and "reused" in tables:
        print("\n" + format_reuse(tables["gpt"], tables["reused"]), flush=True)
    if options.json:
        rows = {model: [asdict(row) for row in rows] for model, rows in tables.items()}
        figures = {"settings": settings, "models": rows, "faults": faults}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.plot and tables:
        plot(options.plot, tables)
    if faults:
        sys.exit("\n".join(["\nThe figures above may not be compared:", *faults]))


if __name__ == "__main__":
    main()
