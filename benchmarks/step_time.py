# SPDX-License-Identifier: Apache-2.0
"""Time one training step of this package against plain torch (DDP and FSDP2).

    PYTHONPATH=. python benchmarks/step_time.py --ranks 2

Each contender runs in its own processes. Contenders take turns within a round, so that a machine that slows
down slows all of them, and each ratio is taken between two runs of the same round. See README.md.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from backends import NAMES
from models import make_workload
from report import Round, Row, check_collectives, check_losses, compare, format_table, plot
from worker import Task

HERE = Path(__file__).resolve().parent
LOG_TAIL = 4000
TIMEOUT_SECONDS = 1800


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes per contender; on CUDA one per GPU")
    parser.add_argument("--models", nargs="+", choices=("gpt", "tiny1000"), default=["gpt", "tiny1000"])
    parser.add_argument("--size", choices=("small", "large"), default="small")
    parser.add_argument(
        "--contenders", nargs="+", choices=NAMES, default=list(NAMES[:-1]), help="the first is the base"
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environment(rank: int, ranks: int, port: int, task: Task) -> dict[str, str]:
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    # Without this the package would choose a GPU where there is one, whatever --device says.
    hide_gpus = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if task.device == "cpu" else {}
    return (
        os.environ
        | hide_gpus
        | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(task.threads),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            # torch renames its collectives from release to release and warns of it on every rank.
            "PYTHONWARNINGS": "ignore::FutureWarning",
        }
    )


def wait_for_all(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all ranks have ended; return the first rank that failed, None if none did.

    A rank whose peer has died waits for it in a collective, so the others are ended as soon as one fails.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        while True:
            codes = [process.poll() for process in processes]
            for rank, code in enumerate(codes):
                if code not in (None, 0):
                    return rank
            if all(code == 0 for code in codes):
                return None
            if time.monotonic() > deadline:
                return codes.index(None)
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def run_round(task: Task, ranks: int) -> Round:
    """Run one set of processes and return their figures.

    Raises:
        RuntimeError: a rank failed; carries the end of its output.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        task = replace(task, output=folder)
        logs = [Path(folder, f"rank{rank}.log") for rank in range(ranks)]
        processes = []
        for rank, log in enumerate(logs):
            environment = rank_environment(rank, ranks, port, task)
            command = [sys.executable, str(HERE / "worker.py"), task.to_json()]
            with log.open("wb") as stream:
                processes.append(subprocess.Popen(command, env=environment, stdout=stream, stderr=stream))
        failed = wait_for_all(processes)
        if failed is not None:
            code = processes[failed].returncode
            tail = logs[failed].read_text(errors="replace")[-LOG_TAIL:]
            raise RuntimeError(f"{task.model}, {task.contender}: rank {failed} ended with {code}:\n{tail}")
        return Round([json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(ranks)])


def run_model(model: str, options: argparse.Namespace) -> dict[str, list[Round]]:
    """Run all rounds of all contenders on one model."""
    runs: dict[str, list[Round]] = {contender: [] for contender in options.contenders}
    for number in range(options.rounds):
        for contender, rounds in runs.items():
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
            rounds.append(run_round(task, options.ranks))
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
    for model in options.models:
        workload = make_workload(model, options.size)
        runs = run_model(model, options)
        check_losses(model, options.dtype, reference, runs)
        check_collectives(model, runs)
        tables[model] = compare(workload, options.dtype, reference, runs)
        parameters = runs[reference][0].ranks[0]["parameters"]
        title = f"\n{model} ({options.size}, {parameters / 1e6:.2f} M parameters)"
        print(format_table(title, reference, workload.sample_name, tables[model]), flush=True)
    if options.json:
        rows = {model: [asdict(row) for row in rows] for model, rows in tables.items()}
        options.json.write_text(json.dumps({"settings": settings, "models": rows}, indent=1) + "\n")
    if options.plot:
        plot(options.plot, tables)


if __name__ == "__main__":
    main()
