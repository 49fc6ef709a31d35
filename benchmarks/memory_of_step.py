# SPDX-License-Identifier: Apache-2.0
"""Bytes of tensors that one rank holds at the peak of a step, without a GPU: every allocation on the CPU is counted.

    PYTHONPATH=. python benchmarks/memory_of_step.py --plot memory.png

Contenders are those of ``step_time.py``; this package's rule for memory of devices is set for the CPU. The allocator's
cache, fragments and workspaces of kernels, which a GPU adds, are not in it.
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from backends import NAMES, Contender, Options, Zero, make_contender
from models import GPT, GPTConfig, gpt_workload
from ranks import HERE, run_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

DEFAULT = GPTConfig(hidden=512, layers=16, heads=8, vocab=8000, sequence=512, batch=4)


@dataclass(frozen=True)
class Task:
    """What one set of ranks measures; ``output`` is the folder for ``rank<N>.json``."""

    contender: str
    bucket: int | None
    model: dict[str, Any]
    zero: dict[str, Any]
    output: str = ""


def zero_as_on_a_device(model: nn.Module, options: Options, stage: int) -> Contender:
    """This package with what it takes on a GPU: the rule for memory of devices, and the optimizer."""
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.runtime.gradients import transport

    transport.HOLDING.clear()
    return Zero(model, options, stage, FusedAdam(model.parameters(), lr=options.lr))


def live_bytes() -> int:
    """Of all storages that Python can reach. A tensor that wraps others has none, and those are found by themselves."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and not (found.is_meta or is_traceable_wrapper_subclass(found)):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def step(contender: Contender, batch: torch.Tensor) -> None:
    contender.backward(contender.forward(batch))
    contender.step()


def most_allocated(contender: Contender, batch: torch.Tensor) -> int:
    """The most bytes that a step has allocated, and not yet freed, since it began."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as observed:
        step(contender, batch)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        observed.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]")


def measure(task: Task) -> dict[str, int]:
    """Bytes ``between`` steps, allocated ``within`` one, and parameters."""
    config = GPTConfig(**task.model)
    torch.manual_seed(0)
    model = GPT(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    options = Options(torch.bfloat16, 1e-4, config.batch, task.bucket, task.zero)
    if task.contender.startswith("zero"):
        contender: Contender = zero_as_on_a_device(model, options, int(task.contender[-1]))
    else:
        contender = make_contender(task.contender, model, options)
    del model
    batch = gpt_workload(config).make_batch(dist.get_rank(), torch.bfloat16)
    for _ in range(2):
        step(contender, batch)
    return {"between": live_bytes(), "within": most_allocated(contender, batch), "parameters": parameters}


def run_as_rank(task: Task) -> None:
    dist.init_process_group("gloo")
    found = measure(task)
    Path(task.output, f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def show(rows: dict[str, dict[str, int]]) -> str:
    mib = 1 << 20
    lines = [f"{'':<12}{'between steps':>14}{'within one':>12}{'peak, MiB':>12}"]
    for name, row in rows.items():
        peak = row["between"] + row["within"]
        lines.append(f"{name:<12}{row['between'] / mib:>14.0f}{row['within'] / mib:>12.0f}{peak / mib:>12.0f}")
    return "\n".join(lines)


def plot(rows: dict[str, dict[str, int]], path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    names = list(rows)
    between = [row["between"] / 2**20 for row in rows.values()]
    axes.bar(names, between, label="between steps")
    axes.bar(names, [row["within"] / 2**20 for row in rows.values()], bottom=between, label="within a step")
    axes.set_ylabel("MiB on one rank")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["ddp", "fsdp2-keep", "fsdp2", "zero1", "zero2", "zero3"]
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=default)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--bucket", type=int, help="elements per bucket of this package; else its default")
    parser.add_argument("--zero", type=json.loads, default={}, help="more of this package's zero_optimization, as JSON")
    for name in ("hidden", "layers", "vocab", "sequence", "batch"):
        parser.add_argument(f"--{name}", type=int, default=getattr(DEFAULT, name))
    parser.add_argument("--json", help="file for the figures, in bytes")
    parser.add_argument("--plot", help="file for a picture; needs matplotlib")
    options = parser.parse_args(arguments)
    sizes = {name: getattr(options, name) for name in ("hidden", "layers", "vocab", "sequence", "batch")}
    rows = {}
    for name in options.contenders:
        task = Task(name, options.bucket, asdict(DEFAULT) | sizes, options.zero)
        found = run_ranks(HERE / Path(__file__).name, asdict(task), options.ranks, what=name)
        rows[name] = max(found, key=lambda row: row["between"] + row["within"])
        print(f"{name} measured", file=sys.stderr, flush=True)
    print(show(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    if options.plot:
        plot(rows, options.plot)
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        run_as_rank(Task(**json.loads(sys.argv[1])))
    else:
        sys.exit(main())
