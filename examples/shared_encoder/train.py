# SPDX-License-Identifier: Apache-2.0
"""An encoder that runs twice per step, trained with DeepSpeed and with plain torch DDP side by side.

    deepspeed --num_accelerators 2 examples/shared_encoder/train.py

The main path goes through ``engine(x)``, an auxiliary one past it through ``engine.module.encoder(...)``; one loss
joins them. Gradients are compared with float64 autograd along each path. Exit status 1 if one is off.
"""

import argparse
import copy
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plot import save_plot
from reference import reference_gradients, relative_error
from report import Curves, PathErrors, Progress, gradient_table, training_table
from runs import CLIP, PEAK_LR, DdpRun, DeepSpeedRun
from task import ACCUMULATION, ALL_TERMS, AUXILIARY_TERMS, MAIN_TERMS, MICRO_BATCH, Autoencoder, DigitShards
from torch import nn

import deepspeed
from deepspeed.accelerator import get_accelerator

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Rounding alone stays well below these; a lost, doubled or unscaled contribution is far above.
LIMITS = {"bf16": 2e-2, "fp32": 1e-4}
CHECKS = 25  # how often the gradients are looked at during training

# What a gradient is compared on: the terms that make up the loss, and the part of the model.
PATHS = (
    ("encoder, main path only", MAIN_TERMS, "encoder"),
    ("encoder, auxiliary only", AUXILIARY_TERMS, "encoder"),
    ("encoder, both", ALL_TERMS, "encoder"),
    ("decoder", ALL_TERMS, "decoder"),
)


def main() -> int:
    options = parse_options()
    deepspeed.init_distributed()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    torch.manual_seed(0)  # the same initial weights on every rank and in both runs
    device = torch.device(get_accelerator().current_device_name())
    data = DigitShards(dist.get_world_size(), DTYPES[options.dtype], device)
    model = Autoencoder().to(device, DTYPES[options.dtype])

    rows = check_paths(model, data, options)
    ours, ddp = train(model, data, options)

    limit = LIMITS[options.dtype]
    passed = all(row.within(limit) for row in rows) and all(error <= limit for error in ours.errors)
    if dist.get_rank() == 0:
        name = f"DeepSpeed ZeRO-{options.stage}"
        save_plot(options.plot, name, ours, ddp, held_steps(options.steps), limit)
        print(f"\n{gradient_table(rows, limit)}\n\n{training_table(name, ours, ddp)}\n\nPlot: {options.plot}")
        print(f"DeepSpeed's gradients are {'right' if passed else 'OFF'} (limit {limit:g})", flush=True)
    dist.barrier()  # a launcher stops all ranks as soon as one has failed: let rank 0 finish its report
    dist.destroy_process_group()
    return 0 if passed else 1


def train(model: nn.Module, data: DigitShards, options: argparse.Namespace) -> tuple[Curves, Curves]:
    """Train both runs step by step on the same data from the same weights."""

    held = held_steps(options.steps)

    def schedule(step: int) -> float:
        """0 for a while, then a straight line up to 1."""
        return min(1.0, max(0, step - held) / (3 * held))

    ours = DeepSpeedRun(copy.deepcopy(model), schedule, config_for(options))
    ddp = DdpRun(copy.deepcopy(model), schedule)
    our_curves, ddp_curves = Curves(), Curves()
    progress = Progress(options.steps, silent=dist.get_rank() != 0)
    for step in range(options.steps):
        check = step % max(1, options.steps // CHECKS) == 0
        train_step(ours, data, step, our_curves, check)
        train_step(ddp, data, step, ddp_curves, check)
        progress.show(step, PEAK_LR * schedule(step), our_curves, ddp_curves)
    return our_curves, ddp_curves


def train_step(run: DeepSpeedRun | DdpRun, data: DigitShards, step: int, curves: Curves, check: bool) -> None:
    """One optimizer step: accumulate a window, look at its gradient now and then, update."""
    window = data.window(step, dist.get_rank())
    started = now()
    losses = run.accumulate(window, ALL_TERMS)
    paused = now()
    if check:
        expected = reference_gradients(run.model, data.all_windows(step), ALL_TERMS)
        curves.errors.append(relative_error(run.gradients(), expected))
        curves.error_steps.append(step)
    resumed = now()
    run.update()
    curves.seconds.append(now() - resumed + paused - started)
    curves.losses.append(losses)


def check_paths(model: nn.Module, data: DigitShards, options: argparse.Namespace) -> list[PathErrors]:
    """Gradient error of a window along each path, for both ways to call backward. The LR stays at 0."""
    ours = DeepSpeedRun(copy.deepcopy(model), lambda step: 0.0, config_for(options))
    ddp = DdpRun(copy.deepcopy(model), lambda step: 0.0)

    def error(run: DeepSpeedRun | DdpRun, terms: tuple[str, ...], part: str, **form: bool) -> float:
        run.accumulate(data.window(0, dist.get_rank()), terms, **form)
        found = relative_error(run.gradients(), reference_gradients(run.model, data.all_windows(0), terms), part)
        run.update()
        return found

    return [
        PathErrors(
            path,
            engine_backward=error(ours, terms, part, through_engine=True),
            loss_backward=error(ours, terms, part, through_engine=False),
            # DDP waits for every parameter, and the auxiliary terms alone leave out the decoder.
            ddp=None if terms == AUXILIARY_TERMS else error(ddp, terms, part),
        )
        for path, terms, part in PATHS
    ]


def config_for(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": options.stage},
        "bf16": {"enabled": options.dtype == "bf16"},
    }


def held_steps(steps: int) -> int:
    """Steps at the start with LR 0."""
    return max(1, steps // 10)


def now() -> float:
    get_accelerator().synchronize()
    return time.perf_counter()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DeepSpeed and plain DDP on an encoder that runs twice per step")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps (default 150)")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2), default=2, help="ZeRO stage (default 2)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="of weights and data (default bf16)")
    parser.add_argument("--plot", type=Path, default=Path("loss.png"), help="where the plot goes (default loss.png)")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher passes it on
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    return options


if __name__ == "__main__":
    sys.exit(main())
