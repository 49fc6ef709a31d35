# SPDX-License-Identifier: Apache-2.0
"""What the gradient self-check costs: steps with it and steps without it, in turns within one run.

    deepspeed --num_accelerators 2 benchmarks/gradient_check_cost.py --model tiny1000 --stage 2

Every second update is checked, so that a machine that slows down slows both kinds alike. Printed are the medians of
both, in time on the clock and in processor time of the slowest rank, and what follows for one checked update in
``--every``.
"""

import argparse
import statistics
import time

import torch
from models import make_workload

import deepspeed
from deepspeed import comm as dist


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--model", choices=("gpt", "tiny1000"), default="gpt")
    parser.add_argument("--size", choices=("small", "large"), default="small")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=2)
    parser.add_argument("--pairs", type=int, default=20, help="checked updates, and as many unchecked ones")
    parser.add_argument("--warmup", type=int, default=4, help="pairs before them")
    parser.add_argument("--every", type=int, default=100, help="for the growth of the mean step")
    return parser.parse_args()


def make_engine(options: argparse.Namespace, model: torch.nn.Module) -> deepspeed.DeepSpeedEngine:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": options.stage},
        "gradient_check": {"enabled": True, "every": 2},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def slowest(seconds: float, device: torch.device) -> float:
    """Of all ranks."""
    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    deepspeed.init_distributed()
    workload = make_workload(options.model, options.size)
    engine = make_engine(options, workload.build())
    batch = workload.make_batch(engine.global_rank, torch.bfloat16).to(engine.device)
    clock, processor = ([], []), ([], [])
    for update in range(2 * (options.warmup + options.pairs)):
        start = time.perf_counter(), time.process_time()
        engine.backward(engine(batch))
        engine.step()
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        spent = time.perf_counter() - start[0], time.process_time() - start[1]
        if update >= 2 * options.warmup:
            clock[update % 2].append(slowest(spent[0], engine.device))
            processor[update % 2].append(slowest(spent[1], engine.device))
    if engine.global_rank == 0:
        parameters = sum(1 for _ in engine.module.parameters())
        ranks = dist.get_world_size()
        print(f"{options.model} ({options.size}), stage {options.stage}, {ranks} ranks, {parameters} tensors")
        for name, (checked, plain) in (("clock", clock), ("processor", processor)):
            with_it, without = statistics.median(checked), statistics.median(plain)
            growth = (with_it / without - 1.0) / options.every
            print(
                f"{name:>9}: {without * 1e3:.1f} ms without, {with_it * 1e3:.1f} ms with; one in {options.every}:"
                f" mean step {growth:+.2%}"
            )
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
