# SPDX-License-Identifier: Apache-2.0
"""A training step with an offloaded optimizer beside its floors: bytes over the measured host link, bytes over the
measured host memory. One rank, one CUDA device.

    PYTHONPATH=. python benchmarks/offload_step.py --out result.json
    PYTHONPATH=. python benchmarks/offload_step.py --nvme /local_nvme    # state and weights in files too
"""

import argparse
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from models import GPT, GPTConfig
from torch.profiler import ProfilerActivity, profile

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.profiling.memory import memory_breakdown
from deepspeed.runtime.gradients.host_memory import HostMemory
from deepspeed.runtime.parameter_handover import logical_shape

SHAPE = GPTConfig(hidden=1024, layers=12, heads=16, vocab=32000, sequence=1024, batch=8)  # 0.22 B parameters
GRADIENT, MOMENTS_AND_MASTER, WEIGHT = 4, 12, 2  # bytes per parameter


def seconds(call: Callable[[], None], repeats: int = 10) -> float:
    """Median time of a call, the device waited for."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def bandwidths() -> dict[str, float]:
    """GB/s of the link in each direction, and of host memory (read and written bytes of a copy)."""
    numel = 1 << 26
    host, device = HostMemory().zeros(numel, torch.float32), torch.zeros(numel, device="cuda")
    other = torch.zeros(numel)
    ordinary = torch.ones(numel)
    nbytes = host.nbytes
    return {
        "to_host": nbytes / seconds(lambda: host.copy_(device, non_blocking=True)) / 1e9,
        "to_device": nbytes / seconds(lambda: device.copy_(host, non_blocking=True)) / 1e9,
        "host_copy": 2 * nbytes / seconds(lambda: other.copy_(ordinary)) / 1e9,
    }


def disk_bandwidths(folder: str) -> dict[str, float]:
    """GB/s of a gigabyte written and read around the page cache by four threads, 8 MiB at a time."""
    size, block, path = 1 << 30, 8 << 20, Path(folder) / "bandwidth.tmp"
    found = {}
    for name, flags, call in (("to_disk", os.O_WRONLY | os.O_CREAT, os.pwritev), ("from_disk", os.O_RDONLY, os.preadv)):
        file = os.open(path, flags | os.O_DIRECT, 0o600)

        def lane(first: int) -> None:
            buffer = mmap.mmap(-1, block)  # begins at a page
            for begin in range(first * block, size, 4 * block):
                if call(file, [buffer], begin) != block:  # noqa: B023 - called within this turn of the loop
                    raise OSError(f"{path}: a short transfer at byte {begin}")

        begin = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lane, range(4)))
        found[name] = size / (time.perf_counter() - begin) / 1e9
        os.close(file)
    path.unlink()
    return found


def make(stage: int, zero: dict[str, Any]) -> Any:
    """An engine; without offload with the fused optimizer of torch."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    offloaded = "offload_optimizer" in zero
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-4) if offloaded else None
    config = {
        "train_micro_batch_size_per_gpu": SHAPE.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000_000, "overlap_comm": True, **zero},
        **({} if offloaded else {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}),
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def measure(engine: Any, steps: int) -> dict[str, Any]:
    """Times of the parts of a step in ms (device waited for between them), of a whole step, and memory in MiB."""
    tokens = torch.randint(SHAPE.vocab, (SHAPE.batch, SHAPE.sequence + 1), device="cuda")
    parts: dict[str, list[float]] = {"forward": [], "backward": [], "step": [], "whole": []}
    losses = []
    for number in range(steps + 3):
        marks = [time.perf_counter()]
        for call in ("forward", "backward", "step"):
            if call == "forward":
                loss = engine(tokens)
            elif call == "backward":
                engine.backward(loss)
            else:
                engine.step()
            torch.cuda.synchronize()
            marks.append(time.perf_counter())
        losses.append(loss.item())
        if number >= 3:
            for name, begin, end in zip(parts, marks, marks[1:]):
                parts[name].append(1e3 * (end - begin))

    def whole() -> None:
        engine.backward(engine(tokens))
        engine.step()

    torch.cuda.reset_peak_memory_stats()
    parts["whole"] = [1e3 * seconds(whole, steps)]
    found = memory_breakdown(engine)
    return {name: statistics.median(values) for name, values in parts.items()} | {
        "first loss": losses[0],
        "last loss": losses[-1],
        "peak MiB": torch.cuda.max_memory_allocated() / 2**20,
        "host bytes per parameter": found.on_host / sum(logical_shape(p).numel() for p in engine.module.parameters()),
    }


def overlap(engine: Any, trace: str | None) -> dict[str, float]:
    """Of one profiled step: ms of copies in each direction, and the part of them during which kernels run."""
    tokens = torch.randint(SHAPE.vocab, (SHAPE.batch, SHAPE.sequence + 1), device="cuda")
    # Recording what the processor does as well would slow it down so far that the device waits for it.
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        engine.backward(engine(tokens))
        engine.step()
        torch.cuda.synchronize()
    kernels, copies = [], {"DtoH": [], "HtoD": []}
    for event in recorded.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        span = (event.time_range.start, event.time_range.end)
        kind = next((kind for kind in copies if kind in event.name), None)
        if kind is not None:
            copies[kind].append(span)
        elif not event.name.startswith(("Mem", "deepspeed")):
            kernels.append(span)
    if trace:
        recorded.export_chrome_trace(trace)
    result = {"kernels ms": sum(end - begin for begin, end in _merged(kernels)) / 1e3}
    for kind, spans in copies.items():
        total = sum(end - begin for begin, end in spans)
        result[f"{kind} ms"] = total / 1e3
        result[f"{kind} beside kernels"] = _common(_merged(kernels), _merged(spans)) / total if total else 0.0
    return result


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    result: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def _common(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float:
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        total += max(0.0, end - begin)
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


CONTENDERS = {
    "stage 2": (2, {}),
    "stage 2, optimizer": (2, {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 20_000_000}),
    "stage 2, optimizer, one group": (2, {"offload_optimizer": {"device": "cpu"}}),
    "stage 3": (3, {}),
    "stage 3, optimizer": (3, {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 20_000_000}),
    "stage 3, half of it": (3, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "sub_group_size": 20_000_000}),
    "stage 3, optimizer, weights": (
        3,
        {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}, "sub_group_size": 20_000_000},
    ),
}


def in_files(folder: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """Contenders whose state is in files in ``folder``."""
    optimizer = {
        "device": "nvme", "nvme_path": folder, "buffer_count": 9, "pipeline_read": True, "pipeline_write": True
    }  # fmt: skip
    weights = {"device": "nvme", "nvme_path": folder, "buffer_count": 5, "buffer_size": 40_000_000, "max_in_cpu": 0}
    groups = {"sub_group_size": 20_000_000}
    return {
        "stage 2, optimizer in files": (2, {"offload_optimizer": optimizer, **groups}),
        "stage 3, optimizer and weights in files": (
            3,
            {"offload_optimizer": optimizer, "offload_param": weights, **groups},
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", nargs="*", help="contenders; default all", choices=list(CONTENDERS))
    parser.add_argument("--nvme", help="folder on a disk: measure what keeps state in files too, with --disk-steps")
    parser.add_argument("--disk-steps", type=int, default=2)
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("--trace", help="chrome trace of a step of stage 2 with the optimizer offloaded")
    arguments = parser.parse_args()
    for name, value in {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511",
    }.items():  # fmt: skip
        os.environ.setdefault(name, value)
    link = bandwidths()
    numel = sum(parameter.numel() for parameter in GPT(SHAPE).parameters())
    traffic = 2 * MOMENTS_AND_MASTER + GRADIENT + WEIGHT
    results: dict[str, Any] = {
        "parameters": numel,
        "threads": torch.get_num_threads(),
        "GB/s": link,
        "floor ms": {
            "gradients to the host": 1e3 * GRADIENT * numel / link["to_host"] / 1e9,
            "weights to the device": 1e3 * WEIGHT * numel / link["to_device"] / 1e9,
            "update in host memory": 1e3 * traffic * numel / link["host_copy"] / 1e9,
            "norm in host memory": 1e3 * GRADIENT * numel / link["host_copy"] / 1e9,
        },
    }
    print(json.dumps(results, indent=1), flush=True)
    contenders = {name: CONTENDERS[name] for name in CONTENDERS if arguments.only is None or name in arguments.only}
    if arguments.nvme:
        disk = disk_bandwidths(arguments.nvme)
        results["disk GB/s"] = disk
        state = 1e3 * MOMENTS_AND_MASTER * numel / 1e9
        results["disk floor ms"] = {
            "state read, then written": state / disk["from_disk"] + state / disk["to_disk"],
            "the slower of both": max(state / disk["from_disk"], state / disk["to_disk"]),
        }
        print(json.dumps({name: results[name] for name in ("disk GB/s", "disk floor ms")}, indent=1), flush=True)
        contenders |= in_files(arguments.nvme)
    for name, (stage, zero) in contenders.items():
        engine = make(stage, zero)
        results[name] = measure(engine, arguments.disk_steps if name.endswith("files") else arguments.steps)
        if "optimizer" in name and not name.endswith("files"):
            results[name]["trace"] = overlap(engine, arguments.trace if name == "stage 2, optimizer" else None)
        print(name, json.dumps(results[name], indent=1), flush=True)
        engine.destroy()
        del engine
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
