# SPDX-License-Identifier: Apache-2.0
"""One AdamW step of this package, of torch foreach and of torch fused, beside a plain copy of the same bytes, in turns.

python benchmarks/optimizer_step.py [--device cuda] [--numel 100e6] [--tensors 1] [--mixed] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

# Bytes of memory that one element's step reads and writes: weight, two moments (each read and written) and gradient in
# fp32; with --mixed a bf16 gradient, and a bf16 weight that is written. What else a contender moves counts against it.
BYTES = {False: 3 * 8 + 4, True: 3 * 8 + 2 + 2}
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1}
CACHE_BYTES = 256 << 20


@dataclass
class Tensors:
    """What one contender steps."""

    masters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    low: list[torch.Tensor]


def make_tensors(args: argparse.Namespace) -> Tensors:
    """The same for every contender."""
    generator = torch.Generator(device=args.device).manual_seed(0)
    sizes = [args.numel // args.tensors] * args.tensors

    def draw() -> list[torch.Tensor]:
        return [torch.randn(size, device=args.device, generator=generator) for size in sizes]

    masters, gradients = draw(), draw()
    if not args.mixed:
        return Tensors(masters, gradients, [])
    return Tensors(masters, [g.bfloat16() for g in gradients], [m.bfloat16() for m in masters])


def ours(tensors: Tensors) -> Callable[[], object]:
    """The optimizer of this package for the device; with low-precision weights its step over flat tensors."""
    kind = FusedAdam if tensors.masters[0].is_cuda else DeepSpeedCPUAdam
    optimizer = kind(tensors.masters, **SETTINGS)
    if not tensors.low:
        return _plain_step(optimizer, tensors)

    def step() -> None:
        for master, gradient, low in zip(tensors.masters, tensors.gradients, tensors.low):
            optimizer.step_flat(master, gradient, optimizer.state[master], optimizer.param_groups[0], low)

    return step


def torchs(tensors: Tensors, **kwargs: Any) -> Callable[[], object]:
    """torch.optim.AdamW, with the conversions that it needs around it."""
    optimizer = torch.optim.AdamW(tensors.masters, **SETTINGS, **kwargs)
    if not tensors.low:
        return _plain_step(optimizer, tensors)

    def step() -> None:
        for master, gradient in zip(tensors.masters, tensors.gradients):
            master.grad = gradient.float()
        optimizer.step()
        torch._foreach_copy_(tensors.low, tensors.masters)

    return step


def _plain_step(optimizer: torch.optim.Optimizer, tensors: Tensors) -> Callable[[], object]:
    for master, gradient in zip(tensors.masters, tensors.gradients):
        master.grad = gradient
    return optimizer.step


def plain_copy(args: argparse.Namespace) -> Callable[[], object]:
    """Copies so much that as many bytes are read and written together as by a step."""
    numel = args.numel * BYTES[args.mixed] // 8
    source = torch.ones(numel, device=args.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def timed(action: Callable[[], object], device: str, steps: int) -> float:
    """Seconds of one call, over ``steps`` of them."""
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            action()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / steps
    start = time.perf_counter()
    for _ in range(steps):
        action()
    return (time.perf_counter() - start) / steps


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per step of each contender in each round.

    Raises:
        SystemExit: the contenders' weights differ after the same steps: then one of them does not do the work.
    """
    tensors = {name: make_tensors(args) for name in ("ours", "torch fused", "torch foreach")}
    actions = {
        "copy": plain_copy(args),
        "ours": ours(tensors["ours"]),
        "torch fused": torchs(tensors["torch fused"], fused=True),
        "torch foreach": torchs(tensors["torch foreach"], foreach=True),
    }
    for action in actions.values():
        timed(action, args.device, 2)  # state is made, kernels are compiled, pages are touched
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(args.rounds):
        for name, action in actions.items():
            times[name].append(timed(action, args.device, args.steps))
    for name in ("torch fused", "torch foreach"):
        for one, other in zip(tensors["ours"].masters, tensors[name].masters):
            difference = (one - other).abs().max().item()
            if not difference < 1e-4:
                raise SystemExit(f"weights of ours and {name} differ by {difference:.1e}: the figures mean nothing")
    return times


def report(times: dict[str, list[float]], args: argparse.Namespace) -> dict[str, Any]:
    """Figures of each contender: ms and GB/s at the median and at best, and ratios of rates round by round."""
    moved = args.numel // args.tensors * args.tensors * BYTES[args.mixed]
    rows = {}
    for name, seconds in times.items():
        rows[name] = {
            "ms_median": statistics.median(seconds) * 1e3,
            "ms_best": min(seconds) * 1e3,
            "gb_s_median": moved / statistics.median(seconds) / 1e9,
            "gb_s_best": moved / min(seconds) / 1e9,
            "of_copy": statistics.median(c / s for c, s in zip(times["copy"], seconds)),
            "of_torch_fused": statistics.median(c / s for c, s in zip(times["torch fused"], seconds)),
        }
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    load = os.getloadavg()[0]
    return {
        "device": device,
        "torch": torch.__version__,
        "numel": args.numel,
        "tensors": args.tensors,
        "mixed": args.mixed,
        "bytes_per_step": moved,
        "load_average": load,
        "contenders": rows,
    }


def table(result: dict[str, Any]) -> str:
    kind = "fp32 weights and moments, bf16 gradient, bf16 weight written" if result["mixed"] else "all fp32"
    lines = [
        f"{result['device']}, torch {result['torch']}, load {result['load_average']:.1f}: {result['numel'] / 1e6:g} M "
        f"elements in {result['tensors']} tensor(s), {kind}; {result['bytes_per_step'] / 1e9:.2f} GB each",
        f"{'':<15}{'ms median':>11}{'ms best':>10}{'GB/s median':>13}{'GB/s best':>11}{'/copy':>8}{'/fused':>8}",
    ]
    for name, row in result["contenders"].items():
        lines.append(
            f"{name:<15}{row['ms_median']:>11.2f}{row['ms_best']:>10.2f}{row['gb_s_median']:>13.1f}"
            f"{row['gb_s_best']:>11.1f}{row['of_copy']:>8.2f}{row['of_torch_fused']:>8.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--numel", type=lambda text: int(float(text)), default=32_000_000, help="elements in all")
    parser.add_argument("--tensors", type=int, default=1, help="tensors that they are in")
    parser.add_argument("--mixed", action="store_true", help="bf16 gradients in, bf16 weights out")
    parser.add_argument("--threads", type=int, default=0, help="of torch on CPU (default: as torch chooses)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="in each round")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.numel * BYTES[args.mixed] < CACHE_BYTES:
        print("so few elements may stay in a cache: the figures are not those of memory", file=sys.stderr)
    with torch.no_grad():
        result = report(measure(args), args)
    print(table(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
