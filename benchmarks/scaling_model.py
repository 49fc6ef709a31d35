# SPDX-License-Identifier: Apache-2.0
"""What a step costs as a function of parameters, buckets, ranks and link: a model in plain functions.

    PYTHONPATH=. python benchmarks/scaling_model.py              # the step up to 1,024 ranks, and the best bucket sizes
    PYTHONPATH=. python benchmarks/scaling_model.py --check      # the cost per parameter, byte and bucket, against runs

Nothing runs without ``--check``: constants are those of ``MACHINES`` and ``LINKS``, which say where they come from.
"""

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from hook_cost import Engine
from ranks import HERE, run_ranks
from torch import Tensor, nn

from deepspeed.runtime.gradients.layout import FEW_ELEMENTS

SLOTS = 2  # communication buffers of the package: a bucket waits until the one before the last has landed


# ------------------------------------------------------------------ the model


@dataclass(frozen=True)
class Link:
    """How ranks are connected.

    Attributes:
        bandwidth: bytes per second that one rank sends in a ring.
        hop: seconds from one rank of the ring to the next.
        call: seconds that a collective costs whatever its size.
    """

    bandwidth: float
    hop: float
    call: float


@dataclass(frozen=True)
class Machine:
    """One rank. Seconds per parameter tensor (``hook`` in backward, ``touch`` in the rest of the step), per element of
    the rank's own shard (``update``), and how many ranks share the fast link."""

    hook: float
    touch: float
    update: float
    ranks_per_node: int


@dataclass(frozen=True)
class Model:
    """What is trained: elements, parameter tensors, seconds of forward and backward alone, bytes per element."""

    elements: float
    tensors: int
    forward: float
    backward: float
    itemsize: int = 2


# Not measured: NVLink and InfiniBand by data sheet (450 GB/s and 400 Gb/s per GPU) less a fifth; hops and calls are of
# the order that is usual for NCCL.
LINKS = {"within a node": Link(360e9, 1.5e-6, 10e-6), "between nodes": Link(40e9, 4e-6, 20e-6)}
# One H200. The update moves 28 bytes per element at three quarters of the memory's 4.8 TB/s; hook and touch are the
# CPU's figures of hook_cost.py, rounded. Forward and backward are what is left of the step measured on one rank, 54 ms.
MACHINES = {"h200": Machine(hook=4e-6, touch=1e-6, update=8e-12, ranks_per_node=8)}
MODELS = {"gpt-0.94b": Model(0.94e9, 115, forward=15.5e-3, backward=30.5e-3)}


def link_of(ranks: int, machine: Machine) -> Link:
    """The link that bounds a ring over so many ranks."""
    return LINKS["within a node" if ranks <= machine.ranks_per_node else "between nodes"]


def collective_seconds(kind: str, size: float, ranks: int, link: Link) -> float:
    """Seconds of a collective over a full buffer of ``size`` bytes, as a ring.

    Args:
        kind: "all_reduce", "reduce_scatter", "all_gather", or "reduce" (a pipelined chain to one rank).
    """
    if ranks == 1:
        return 0.0
    share = (ranks - 1) / ranks
    if kind == "all_reduce":
        return link.call + 2 * (ranks - 1) * link.hop + 2 * share * size / link.bandwidth
    if kind == "reduce":
        return link.call + (ranks - 1) * link.hop + size / link.bandwidth
    if kind in ("reduce_scatter", "all_gather"):
        return link.call + (ranks - 1) * link.hop + share * size / link.bandwidth
    raise ValueError(f"unknown collective {kind!r}")


def buckets_of(stage: int, elements: float, bucket: float, ranks: int) -> tuple[str, list[float]]:
    """The collective of a bucket, and the elements of each: as ``runtime/gradients/layout.py`` cuts one flat group."""
    if stage in (1, 2):
        if elements <= bucket:
            return "reduce_scatter", [elements]
        shard = elements / ranks
        if 2 * shard <= bucket and shard < FEW_ELEMENTS * ranks:
            count = math.ceil(elements / bucket)
            return "all_reduce", [elements / count] * count
        each = math.ceil(shard / bucket)
        return "reduce", [shard / each] * (each * ranks)
    count = math.ceil(elements / bucket)
    return ("all_reduce" if stage == 0 else "reduce_scatter"), [elements / count] * count


def pipeline_end(ready: Sequence[float], durations: Sequence[float], slots: int = SLOTS) -> float:
    """When the last bucket has landed: one after the other, each from when it is ready and ``slots`` before it have
    landed. A bucket that has to wait for a buffer holds up those that become ready after it as well."""
    ends: list[float] = []
    delay = 0.0  # by which backward is behind, since it waited for buffers
    for position, (moment, duration) in enumerate(zip(ready, durations, strict=True)):
        filled = moment + delay
        if position >= slots and ends[position - slots] > filled:
            delay += ends[position - slots] - filled
            filled = ends[position - slots]
        ends.append(max(filled, ends[-1] if ends else 0.0) + duration)
    return max(ends[-1], ready[-1] + delay) if ends else 0.0


def step_parts(model: Model, machine: Machine, ranks: int, stage: int, bucket: float) -> dict[str, float]:
    """Seconds of the parts of a step: forward, backward, hooks, exposed (communication that backward does not cover),
    update, gather (weights after the update, or stage 3's that forward does not cover)."""
    link = link_of(ranks, machine)
    kind, sizes = buckets_of(stage, model.elements, bucket, ranks)
    hooks = model.tensors * machine.hook
    busy = model.backward + hooks
    covered = 0.0
    ready, durations = [], []
    for size in sizes:
        covered += size
        ready.append(busy * covered / model.elements)
        durations.append(collective_seconds(kind, size * model.itemsize, ranks, link))
    exposed = pipeline_end(ready, durations) - busy if ranks > 1 else 0.0
    own = model.elements if stage == 0 else model.elements / ranks
    gathered = collective_seconds("all_gather", model.elements * model.itemsize, ranks, link)
    # stage 3 gathers in forward and again in backward, mostly beside the arithmetic
    gather = 0.0 if stage == 0 else gathered
    if stage == 3:
        gather = max(0.0, gathered - model.forward) + max(0.0, gathered - model.backward)
    update = own * machine.update + model.tensors * machine.touch
    return {
        "forward": model.forward,
        "backward": model.backward,
        "hooks": hooks,
        "exposed": exposed,
        "update": update,
        "gather": gather,
    }


def step_seconds(model: Model, machine: Machine, ranks: int, stage: int, bucket: float) -> float:
    return sum(step_parts(model, machine, ranks, stage, bucket).values())


BUCKETS = tuple(float(f"{digit}e{power}") for power in range(5, 10) for digit in (1, 2, 5))


def best_bucket(model: Model, machine: Machine, ranks: int, stage: int) -> float:
    """The bucket size of ``BUCKETS`` (elements) with the shortest step; of equal ones the smallest."""
    return min(BUCKETS, key=lambda bucket: (step_seconds(model, machine, ranks, stage, bucket), bucket))


# ------------------------------------------------------------------ against runs


@dataclass(frozen=True)
class Case:
    """A small step on CPU: so many tensors of so many elements, in so many buckets."""

    tensors: int
    elements: int
    buckets: int

    @property
    def total(self) -> int:
        return self.tensors * self.elements


# The constants come from the first, the others are predicted.
FITTED = (Case(20, 64, 1), Case(2000, 64, 1), Case(100, 65536, 1), Case(400, 1024, 100))
PREDICTED = (Case(1000, 64, 1), Case(400, 1024, 25), Case(200, 16384, 20), Case(1000, 8192, 50))
TOLERANCE = 0.35  # relative, of a predicted step


@dataclass(frozen=True)
class Task:
    """What a set of ranks measures; ``output`` is the folder for ``rank<N>.json``."""

    cases: list[dict[str, int]]
    stage: int
    rounds: int
    output: str = ""


class Tensors(nn.Module):
    """Parameters without arithmetic worth the name: each is used once."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((case.elements,), 1e-3)) for _ in range(case.tensors))

    def forward(self, x: Tensor) -> Tensor:
        return sum(torch.dot(weight, weight) for weight in self.weights) * x.sum()


def measured(case: Case, stage: int, rounds: int) -> float:
    """The shortest of ``rounds`` steps, in seconds: other work on the machine only adds."""
    bucket = max(1, -(-case.total // case.buckets))
    zero = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    engine = Engine(case.tensors, torch.device("cpu"), stage, zero, Tensors(case))
    x = torch.ones(1)
    best = math.inf
    for _ in range(rounds + 2):
        dist.barrier()
        begin = time.perf_counter()
        engine.backward(engine.forward(x))
        engine.step()
        best = min(best, time.perf_counter() - begin)
    engine.engine.destroy()
    return best


def worker(task: Task) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gc.disable()
    result = {"seconds": [measured(Case(**case), task.stage, task.rounds) for case in task.cases]}
    Path(task.output, f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def terms(case: Case) -> list[float]:
    """What a step is linear in: a constant, tensors, elements, buckets."""
    return [1.0, float(case.tensors), float(case.total), float(case.buckets)]


def fitted(cases: Sequence[Case], seconds: Sequence[float]) -> list[float]:
    """Seconds per step, per tensor, per element and per bucket, by least squares of relative errors."""
    rows = torch.tensor([terms(case) for case in cases], dtype=torch.float64)
    values = torch.tensor(seconds, dtype=torch.float64)
    scale = 1.0 / values
    return torch.linalg.lstsq(rows * scale[:, None], (values * scale)[:, None]).solution[:, 0].tolist()


def predicted(case: Case, constants: Sequence[float]) -> float:
    return sum(constant * term for constant, term in zip(constants, terms(case), strict=True))


def check(ranks: int, stage: int, rounds: int) -> Iterator[str]:
    """Run the small cases; lines of a table, and SystemExit where a prediction is off by more than ``TOLERANCE``."""
    cases = FITTED + PREDICTED
    task = Task([asdict(case) for case in cases], stage, rounds)
    written = run_ranks(HERE / "scaling_model.py", asdict(task), ranks)
    seconds = [max(rank["seconds"][i] for rank in written) for i in range(len(cases))]
    constants = fitted(FITTED, seconds[: len(FITTED)])
    yield f"{ranks} rank(s), stage {stage}, load {os.getloadavg()[0]:.1f}; constants: " + ", ".join(
        f"{value * 1e6:.3g} us per {name}" for name, value in zip(("step", "tensor", "element", "bucket"), constants)
    )
    off = []
    for case, measured_seconds in zip(cases, seconds, strict=True):
        guess = predicted(case, constants)
        kind = "fitted" if case in FITTED else "predicted"
        yield (
            f"  {case.tensors:5d} x {case.elements:6d} elements, {case.buckets:4d} buckets: measured"
            f" {measured_seconds * 1e3:7.2f} ms, {kind} {guess * 1e3:7.2f} ms"
        )
        if kind == "predicted" and not abs(guess / measured_seconds - 1.0) <= TOLERANCE:
            off.append(f"{case}: {guess / measured_seconds:.2f} of what was measured")
    if off:
        raise SystemExit(f"predictions are off by more than {TOLERANCE:.0%}:\n" + "\n".join(off))


# ------------------------------------------------------------------ tables


RANKS = (1, 2, 8, 16, 64, 256, 1024)


def format_table(model: Model, machine: Machine, stages: Sequence[int], bucket: float) -> str:
    lines = [f"step in ms, buckets of {bucket:.0e} elements; in brackets with the best size"]
    lines.append("ranks".rjust(6) + "".join(f"stage {stage}".rjust(26) for stage in stages))
    for ranks in RANKS:
        cells = []
        for stage in stages:
            best = best_bucket(model, machine, ranks, stage)
            at_best = step_seconds(model, machine, ranks, stage, best)
            now = step_seconds(model, machine, ranks, stage, bucket)
            cells.append(f"{now * 1e3:.1f} ({at_best * 1e3:.1f} at {best:.0e})".rjust(26))
        lines.append(f"{ranks:6d}" + "".join(cells))
    return "\n".join(lines)


def plot(path: Path, model: Model, machine: Machine, stages: Sequence[int]) -> None:
    """The step over bucket sizes, a line per number of ranks, a panel per stage."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(stages), figsize=(5 * len(stages), 4), squeeze=False, sharey=True)
    for panel, stage in zip(panels[0], stages, strict=True):
        for ranks in RANKS[1:]:
            steps = [step_seconds(model, machine, ranks, stage, bucket) * 1e3 for bucket in BUCKETS]
            panel.plot(BUCKETS, steps, label=f"{ranks} ranks")
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_title(f"stage {stage}")
        panel.set_xlabel("elements of a bucket")
    panels[0][0].set_ylabel("step, ms")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="gpt-0.94b")
    parser.add_argument("--machine", choices=tuple(MACHINES), default="h200")
    parser.add_argument("--stages", type=int, nargs="+", choices=(0, 1, 2, 3), default=[0, 2, 3])
    parser.add_argument("--bucket", type=float, default=5e8, help="elements")
    parser.add_argument("--check", action="store_true", help="compare with small runs on this machine's CPU")
    parser.add_argument("--ranks", type=int, default=2, help="of the check")
    parser.add_argument("--rounds", type=int, default=30, help="of the check")
    parser.add_argument("--plot", type=Path, help="write a chart here (needs matplotlib)")
    return parser.parse_args(arguments)


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        worker(Task(**json.loads(sys.argv[1])))
        return
    options = parse_arguments()
    model, machine = MODELS[options.model], MACHINES[options.machine]
    if options.check:
        for line in check(options.ranks, 2, options.rounds):
            print(line, flush=True)
        return
    print(format_table(model, machine, options.stages, options.bucket))
    if options.plot:
        plot(options.plot, model, machine, options.stages)


if __name__ == "__main__":
    main()
