#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Are the gradients of the installed deepspeed right? One line per graph, call, stage and accumulation.

    python check_engine.py               # two ranks on CPU in bf16, some minutes; --quick: under one
    python check_engine.py --device cuda --ranks 4 --stages 2 3

It needs torch and any release of deepspeed, and uses what releases have in common: ``initialize``, ``backward``,
``step``, the config, ``GatheredParameters``, ``safe_get_full_grad``, ``safe_get_full_fp32_param``; in fp16 ``scale``.
Every case runs in processes of its own, so a crash or a hang ends that case alone.

The reference is plain autograd in float64, in each rank, over the data of all ranks. Two numbers are compared with it,
each as the relative error of the worst parameter over two windows:

- update: the gradient that the optimizer used, as what SGD took off the weights (fp32 masters where there are some).
- accessor: what ``safe_get_full_grad`` gives before the second ``step()``. Not every release has it at every moment,
  and reading may change what happens, so the first window runs without it, and the update decides. At stage 0 in
  16 bits, where releases show no master weights, there is one window, with an update that dwarfs what it is added to.

Exit status: 0 if all is right, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

# Read by the import of deepspeed, here and, through the environment, in the ranks.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if "cuda" in sys.argv else "cpu")

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
CALLS, VERDICTS = ["engine.backward", "loss.backward"], ("right", "WRONG", "error", "hang")


class Net(nn.Module):
    """Encoder, square core, two heads, in shapes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
        self.core = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor, head: int | None = 0) -> Any:
        """Output of one head, or with ``head`` None a pair with that of each."""
        hidden = self.core(self.encoder(x))
        return tuple(h(hidden) for h in self.heads) if head is None else self.heads[head](hidden)


@dataclass
class Batch:
    """Inputs x, y: (8, 5); target: (8, 3); and where in training it belongs."""

    x: Tensor
    y: Tensor
    target: Tensor
    rank: int
    micro_step: int

    def to(self, *where: Any) -> Batch:
        return Batch(*(t.to(*where) for t in (self.x, self.y, self.target)), self.rank, self.micro_step)


def make_batch(case: Case, rank: int, window: int, micro_step: int) -> Batch:
    """Any rank can make any rank's. Rounded to the dtype of the case."""
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * window + micro_step)
    tensors = (torch.randn(8, width, generator=generator).to(DTYPES[case.dtype]) for width in (5, 5, 3))
    return Batch(*tensors, rank, micro_step)


def reentrant(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x.detach().requires_grad_() if x.is_leaf else x, use_reentrant=True)


Call, Losses = Callable[..., Any], Iterator[Any]


class Graphs:
    """Each is what happens in one micro-step: ``call`` is the engine, ``m`` its bare module, ``b`` the batch. A loss
    that it yields is sent backward before it goes on; ``(loss, True)`` keeps the graph."""

    def plain(call: Call, m: Net, b: Batch) -> Losses:
        yield mse_loss(call(b.x), b.target)

    def branch_around_engine(call: Call, m: Net, b: Batch) -> Losses:
        yield mse_loss(call(b.x), b.target) + mse_loss(m(b.y), b.target)

    def encoder_twice(call: Call, m: Net, b: Batch) -> Losses:
        yield mse_loss(call(b.x), b.target) + m.encoder(b.y).square().mean()

    def two_losses_of_one_graph(call: Call, m: Net, b: Batch) -> Losses:
        first, second = call(b.x, head=None)
        other = second.square().mean()
        yield mse_loss(first, b.target), True
        yield other

    def two_forwards_one_loss(call: Call, m: Net, b: Batch) -> Losses:
        yield mse_loss(call(b.x) * call(b.y), b.target)

    def two_forwards_two_losses(call: Call, m: Net, b: Batch) -> Losses:
        first, second = mse_loss(call(b.x), b.target), mse_loss(call(b.y), b.target)
        yield first
        yield second

    def head_in_first_micro_step(call: Call, m: Net, b: Batch) -> Losses:
        yield mse_loss(call(b.x, head=1 if b.micro_step == 0 else 0), b.target)

    def head_on_one_rank(call: Call, m: Net, b: Batch) -> Losses:
        first, second = call(b.x, head=None)
        yield mse_loss(first, b.target) + (mse_loss(second, b.target) if b.rank == 0 else 0.0)

    def one_use_checkpointed(call: Call, m: Net, b: Batch) -> Losses:
        yield mse_loss(call(b.x), b.target) + reentrant(m.encoder, b.y).square().mean()

    def both_uses_checkpointed(call: Call, m: Net, b: Batch) -> Losses:
        hidden = reentrant(m.encoder, b.x) * reentrant(m.encoder, b.y)
        yield mse_loss(call(b.x), b.target) + hidden.square().mean()

    def nested_checkpoints(call: Call, m: Net, b: Batch) -> Losses:
        def region(x: Tensor) -> Tensor:
            return m.core(checkpoint(m.core, m.encoder(x), use_reentrant=True))

        yield mse_loss(call(b.x), b.target) + reentrant(region, b.y).square().mean()

    def gradient_penalty(call: Call, m: Net, b: Batch) -> Losses:
        x = b.x.clone().requires_grad_()
        out = call(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        yield mse_loss(out, b.target) + slope.square().mean()


GRAPHS: dict[str, Callable[..., Losses]] = {n: f for n, f in vars(Graphs).items() if not n.startswith("_")}
QUICK = ["branch_around_engine", "two_losses_of_one_graph", "head_in_first_micro_step", "nested_checkpoints"]


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    graph: str
    call: str  # "engine.backward" or "loss.backward"
    stage: int
    accumulation: int
    dtype: str

    @property
    def rate(self) -> float:
        """Of learning. Large where the weights are seen in 16 bits only, so that their rounding is of the update."""
        return 1024.0 if self.stage == 0 and self.dtype != "fp32" else 0.125


def run_rank(case: Case, rank: int, port: int, options: argparse.Namespace, folder: str) -> None:
    """Body of a rank's process: leaves what it measured, or what it raised, in a file."""
    os.setpgrp()  # so that it is ended with what it may have started, a compiler for instance
    log = os.open(f"{folder}/log{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        result = measure(case, rank, options)
    except BaseException as error:  # noqa: BLE001 - whatever a release raises is the result of the case
        traceback.print_exc()
        result = {"raised": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    Path(folder, f"partial{rank}").write_text(json.dumps(result))
    Path(folder, f"partial{rank}").rename(Path(folder, f"result{rank}"))
    # Not through exit handlers: they may wait for a rank that has failed.
    os._exit("raised" in result)


def measure(case: Case, rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train two windows. The worst error of their updates, and that of the accessor, None where there is none."""
    deepspeed.init_distributed(dist_backend="nccl" if options.device == "cuda" else "gloo")
    torch.manual_seed(7)
    model = Net()
    exact = copy.deepcopy(model).double()
    engine = make_engine(model, case, options.zero)
    updates, accessors, remark = [], [], ""
    for window in range(2 if case.rate < 1.0 else 1):
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())), torch.no_grad():
            for wide, weight in zip(exact.parameters(), engine.module.parameters()):
                wide.copy_(weight)
        expected = reference(exact, case, options.ranks, window)
        before = masters(engine, case)
        train_micro_steps(engine, case, rank, window)
        if window == 1:
            shown, remark = accessor(engine)
            accessors += [worst_error(shown, expected)] if shown else []
        engine.step()
        updates.append(worst_error([(b - a) / case.rate for b, a in zip(before, masters(engine, case))], expected))
    return {"update": max(updates), "accessor": max(accessors, default=None), "remark": remark}


def make_engine(model: nn.Module, case: Case, zero: dict[str, Any]) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": case.accumulation,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0, **zero},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": case.dtype == "bf16"},
        "fp16": {"enabled": case.dtype == "fp16", "loss_scale": 256.0},
    }
    sgd = torch.optim.SGD(model.parameters(), lr=case.rate)
    return deepspeed.initialize(model=model, optimizer=sgd, config=config)[0]


def train_micro_steps(engine: Any, case: Case, rank: int, window: int) -> None:
    """A window of training without its last ``step()``."""
    for micro_step in range(case.accumulation):
        if micro_step:
            engine.step()
        batch = make_batch(case, rank, window, micro_step).to(engine.device)
        for loss, keep in losses_of(case, engine, engine.module, batch):
            if case.call == "engine.backward":
                engine.backward(loss, **{"retain_graph": True} if keep else {})
            else:
                (engine.scale(loss) if case.dtype == "fp16" else loss).backward(retain_graph=keep)


def losses_of(case: Case, call: Call, module: Net, batch: Batch) -> Iterator[tuple[Tensor, bool]]:
    items = GRAPHS[case.graph](call, module, batch)
    return (item if isinstance(item, tuple) else (item, False) for item in items)


def masters(engine: Any, case: Case) -> list[Tensor]:
    """Copies of the weights as the optimizer has them. Collective."""
    weights = (p if case.stage == 0 else safe_get_full_fp32_param(p) for p in engine.module.parameters())
    return [weight.detach().double().cpu().clone() for weight in weights]


def accessor(engine: Any) -> tuple[list[Tensor], str]:
    """The gradients that ``safe_get_full_grad`` shows, or none and why. Collective."""
    try:
        return [safe_get_full_grad(parameter).clone() for parameter in engine.module.parameters()], ""
    except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        # A release may refuse to answer, which is no fault of its update.
        return [], f"but safe_get_full_grad: {type(error).__name__} or None"


def reference(exact: Net, case: Case, ranks: int, window: int) -> list[Tensor]:
    """Mean over ranks and micro-steps of the gradients of plain autograd in float64; zeros for what was not used."""
    exact.zero_grad(set_to_none=True)
    for rank in range(ranks):
        for micro_step in range(case.accumulation):
            batch = make_batch(case, rank, window, micro_step).to(torch.float64)
            for loss, keep in losses_of(case, exact, exact, batch):
                loss.backward(retain_graph=keep)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in exact.parameters()]
    return [grad / (ranks * case.accumulation) for grad in grads]


def worst_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """``|actual - expected| / |expected|`` of the worst parameter. One that should be zero: infinite if it is not."""
    if not any(value.norm() > 0 for value in expected):
        raise ValueError("the reference vanishes: the comparison would prove nothing")
    worst = 0.0
    for value, goal in zip(actual, expected):
        off, size = (value.double().cpu() - goal).norm().item(), goal.norm().item()
        error = off / size if size else 0.0 if off < 1e-6 else math.inf
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


# ------------------------------------------------------------------------------------------- all cases, and the table


def run_case(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of a case, wait for them, end what is left of them. The line of the table."""
    deadline = time.monotonic() + options.timeout
    with tempfile.TemporaryDirectory(prefix="check_engine-") as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context(options.start_method)
        ranks = [context.Process(target=run_rank, args=(case, r, port, options, folder)) for r in range(options.ranks)]
        for process in ranks:
            process.start()
        try:
            while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
                if any(process.exitcode for process in ranks):  # the others may wait for it for ever
                    deadline = min(deadline, time.monotonic() + 2.0)
                time.sleep(0.02)
        finally:
            hanging = [rank for rank, process in enumerate(ranks) if process.is_alive()]
            for process in ranks:
                process.kill()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
        files = sorted(Path(folder).glob("result*"), key=lambda path: path.stat().st_mtime_ns)
        results = [json.loads(path.read_text()) for path in files]
        for path in sorted(Path(folder).glob("log*")) if options.logs else []:
            print(f"--- {case}, {path.name}\n{path.read_text(errors='replace')}", file=sys.stderr)
    return {**vars(case), **judge(case, results, hanging, options)}


def judge(case: Case, results: list[dict[str, Any]], hanging: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Verdict over what the ranks left, in the order in which it came, and those that had to be ended."""
    raised = [result["raised"] for result in results if "raised" in result]
    if raised:  # the first one, but rather a cause than a connection that broke because of it
        return {"verdict": "error", "remark": min(raised, key=lambda text: "gloo" in text or "NCCL" in text)[:110]}
    if len(results) < options.ranks:
        verdict = "hang" if len(results) + len(hanging) == options.ranks else "error"
        return {"verdict": verdict, "remark": f"ranks {hanging} had to be ended, {len(results)} were done"}
    errors = {key: max((r[key] for r in results if r[key] is not None), default=None) for key in ("update", "accessor")}
    remark = next((r["remark"] for r in results if r["remark"]), "")
    off = [key for key, error in errors.items() if error is not None and error > TOLERANCE[case.dtype]]
    if "update" in off:
        return {"verdict": "WRONG", "remark": "silent", **errors}
    return {"verdict": "right", "remark": "but safe_get_full_grad is off" if off else remark, **errors}


def text_of(line: dict[str, Any]) -> str:
    errors = (line.get("update"), line.get("accessor"))
    numbers = " ".join(f"{'-' if e is None else f'{e:.1e}' if e < 0.01 else f'{e:.2f}':>8}" for e in errors)
    where = "{graph:<24} {call:<15} {stage:>5} {accumulation:>5} {dtype:>5}".format(**line)
    return f"{where} {numbers}  {line['verdict']}{': ' * bool(line['remark'])}{line['remark']}"


def cases_of(options: argparse.Namespace) -> Iterator[Case]:
    """Besides accumulation 2: a long one of the plain graph, and none where two losses share a graph."""
    for graph in options.graphs:
        extra = {} if options.quick else {"plain": [8], "two_losses_of_one_graph": [1]}
        for accumulation in options.accumulation or [2, *extra.get(graph, [])]:
            for stage in options.stages:
                # At stage 3 ranks have to use the same modules.
                if stage < 3 or graph != "head_on_one_rank":
                    yield from (Case(graph, call, stage, accumulation, options.dtype) for call in options.calls)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, metavar="NAME", help=f"of {', '.join(GRAPHS)}")
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=CALLS)
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=range(4))
    parser.add_argument("--accumulation", nargs="+", type=int, help="micro-steps per window (2, for some also 1 or 8)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cpu: gloo; cuda: NCCL")
    parser.add_argument("--zero", type=json.loads, default={"overlap_comm": True}, help="of the config, in JSON")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for a case before it counts as a hang")
    parser.add_argument("--quick", action="store_true", help="only four graphs")
    parser.add_argument("--logs", action="store_true", help="show what the ranks printed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    options = parser.parse_args(arguments)
    options.graphs = options.graphs or (QUICK if options.quick else list(GRAPHS))
    # A process that has seen a GPU cannot be forked. The fork server imports torch and deepspeed once for all cases.
    options.start_method = "spawn" if options.device == "cuda" else "forkserver"
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch._dynamo", "deepspeed"])
    print(f"{'graph':<24} {'call':<15} stage accum dtype   update accessor  verdict", flush=True)
    lines = []
    for case in cases_of(options):
        lines.append(run_case(case, options))
        print(text_of(lines[-1]), flush=True)
    counts = {verdict: sum(line["verdict"] == verdict for line in lines) for verdict in VERDICTS}
    print(f"deepspeed {deepspeed.__version__}, torch {torch.__version__}, {options.ranks} ranks on {options.device}: ")
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if options.json:
        options.json.write_text(json.dumps(lines, indent=1))
    return int(counts["right"] < len(lines))


if __name__ == "__main__":
    sys.exit(main())
