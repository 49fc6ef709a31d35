# SPDX-License-Identifier: Apache-2.0
"""What this package adds to a step per parameter: microseconds in forward, backward and step, by number of parameters.

    PYTHONPATH=. python benchmarks/hook_cost.py

The model has next to no arithmetic: parameters of 16 elements, ten to a module, stacked and summed. Engines and the
bare model take turns; what is shown is the difference, divided by the number of parameters. On the CPU the clock is the
process's own processor time (``--clock wall`` for the other): what hooks cost, whoever else uses the machine.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from ranks import HERE, run_ranks
from torch import Tensor, nn

WIDTH = 16
PER_MODULE = 10
PARTS = ("forward", "backward", "step")


@dataclass(frozen=True)
class Task:
    """What one set of ranks measures; ``output`` is the folder for ``rank<N>.json``."""

    parameters: int
    stages: list[int]
    rounds: int
    device: str
    clock: str
    output: str = ""
    zero: dict[str, Any] = field(default_factory=dict)


class Stacked(nn.Module):
    """Ten parameters whose sum is added to the input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((WIDTH,), 1e-3)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack(list(self.weights)).sum(0)


class Pile(nn.Module):
    """``parameters`` parameters, a multiple of ten."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stacked(PER_MODULE) for _ in range(parameters // PER_MODULE))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Bare:
    """The model alone: no optimizer; its step clears gradients, outside of the measured time."""

    def __init__(self, parameters: int, device: torch.device) -> None:
        self.model = Pile(parameters).to(device)
        self.weights = list(self.model.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        pass

    def clear(self) -> None:
        for weight in self.weights:
            weight.grad = None


class Engine:
    """The same model, or another one, in an engine at one stage."""

    def __init__(
        self, parameters: int, device: torch.device, stage: int, zero: dict[str, Any], model: nn.Module | None = None
    ) -> None:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True, "fused": True}},
            "zero_optimization": {"stage": stage} | zero,
        }
        model = Pile(parameters) if model is None else model
        self.engine, *_ = deepspeed.initialize(model=model.to(device), config=config)

    def forward(self, x: Tensor) -> Tensor:
        return self.engine(x)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def clear(self) -> None:
        pass


def one_step(contender: Bare | Engine, x: Tensor, now: Callable[[], float]) -> dict[str, float]:
    """Seconds of the parts of one step."""
    begin = now()
    loss = contender.forward(x)
    forward = now()
    contender.backward(loss)
    backward = now()
    contender.step()
    end = now()
    contender.clear()
    return {"forward": forward - begin, "backward": backward - forward, "step": end - backward}


def measure(task: Task, device: torch.device) -> dict[str, dict[str, float]]:
    """Median seconds of each part of each contender on this rank, in turns within each round."""
    contenders: dict[str, Bare | Engine] = {"bare": Bare(task.parameters, device)}
    for stage in task.stages:
        contenders[f"zero{stage}"] = Engine(task.parameters, device, stage, task.zero)
    x = torch.ones(WIDTH, device=device, requires_grad=True)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() if task.clock == "wall" else time.process_time()

    figures: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    gc.collect()
    gc.disable()  # a collection would fall to whoever happens to run
    for number in range(task.rounds + 2):
        for name, contender in contenders.items():
            seconds = one_step(contender, x, now)
            if number >= 2:
                figures[name].append(seconds)
    return {
        name: {part: median(figure[part] for figure in rounds) for part in PARTS} for name, rounds in figures.items()
    }


def worker(task: Task) -> None:
    torch.set_num_threads(1)
    device = torch.device(task.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    result = measure(task, device)
    Path(task.output, f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def added_per_parameter(ranks: list[dict[str, dict[str, float]]], parameters: int) -> dict[str, dict[str, float]]:
    """Microseconds that each contender adds to the bare model, per parameter; the slowest rank's."""
    bare = {part: max(rank["bare"][part] for rank in ranks) for part in PARTS}
    names = [name for name in ranks[0] if name != "bare"]
    added = {
        name: {part: (max(rank[name][part] for rank in ranks) - bare[part]) / parameters * 1e6 for part in PARTS}
        for name in names
    }
    return {"bare": {part: seconds / parameters * 1e6 for part, seconds in bare.items()}} | added


Figures = dict[int, dict[int, dict[str, dict[str, float]]]]  # by ranks, parameters, contender, part


def format_tables(figures: Figures) -> str:
    lines = []
    for ranks, by_parameters in figures.items():
        names = list(next(iter(by_parameters.values())))
        for part in PARTS:
            lines.append(f"\n{part}, {ranks} rank(s): us per parameter (bare: all of it; others: added to it)")
            lines.append("parameters".rjust(11) + "".join(name.rjust(9) for name in names))
            for parameters, added in by_parameters.items():
                lines.append(f"{parameters:11d}" + "".join(f"{added[name][part]:9.2f}" for name in names))
        smallest, largest = min(p for p in by_parameters if p >= 1000 or len(by_parameters) < 3), max(by_parameters)
        ratios = "".join(
            f"  {name} {by_parameters[largest][name]['backward'] / by_parameters[smallest][name]['backward']:.2f}"
            for name in names
        )
        lines.append(f"backward, {largest} against {smallest} parameters (1 is linear):{ratios}")
    return "\n".join(lines)


def plot(path: Path, figures: Figures) -> None:
    """Added microseconds of a backward per parameter over the number of parameters, one panel per number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(figures), figsize=(5 * len(figures), 4), squeeze=False, sharey=True)
    for panel, (ranks, by_parameters) in zip(panels[0], figures.items(), strict=True):
        counts = list(by_parameters)
        for name in (name for name in by_parameters[counts[0]] if name != "bare"):
            panel.plot(counts, [by_parameters[count][name]["backward"] for count in counts], marker="o", label=name)
        panel.axhline(10, color="grey", linestyle="--", linewidth=1)
        panel.set_xscale("log")
        panel.set_ylim(bottom=0)
        panel.set_title(f"added to a backward, {ranks} rank(s)")
        panel.set_xlabel("parameters")
        panel.legend()
    panels[0][0].set_ylabel("us per parameter")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stages", type=int, nargs="+", choices=(0, 1, 2, 3), default=[0, 1, 2, 3])
    parser.add_argument("--parameters", type=int, nargs="+", default=[100, 1000, 5000, 20000])
    parser.add_argument("--rounds", type=int, default=15, help="steps of each contender, in turns, after two")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clock", choices=("wall", "cpu"), help="default: cpu on the CPU, wall on CUDA")
    parser.add_argument("--zero", type=json.loads, default={}, help="JSON merged into zero_optimization")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plot", type=Path, help="write a chart here (needs matplotlib)")
    options = parser.parse_args(arguments)
    options.clock = options.clock or ("wall" if options.device == "cuda" else "cpu")
    for count in options.parameters:
        if count < PER_MODULE or count % PER_MODULE:
            parser.error(f"--parameters must be multiples of {PER_MODULE}, got {count}")
    return options


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        worker(Task(**json.loads(sys.argv[1])))
        return
    options = parse_arguments()
    figures: Figures = {}
    for ranks in options.ranks:
        figures[ranks] = {}
        for parameters in options.parameters:
            task = Task(parameters, options.stages, options.rounds, options.device, options.clock, zero=options.zero)
            written = run_ranks(HERE / "hook_cost.py", asdict(task), ranks, device=options.device)
            figures[ranks][parameters] = added_per_parameter(written, parameters)
            print(f"{ranks} rank(s), {parameters} parameters", file=sys.stderr, flush=True)
    print(
        f"torch {torch.__version__}, {options.device}, {options.clock} time, load {os.getloadavg()[0]:.1f}"
        + format_tables(figures)
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.plot:
        plot(options.plot, figures)


if __name__ == "__main__":
    main()
