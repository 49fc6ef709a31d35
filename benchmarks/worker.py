# SPDX-License-Identifier: Apache-2.0
"""One rank of one contender in one round: build, warm up, time, and write the figures as JSON.

Started by step_time.py with the task as its only argument and the ranks in the environment.
"""

import gc
import json
import os
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from backends import PEER, Contender, Options, make_contender, warm_process
from collectives import CollectiveCounter
from models import build_model, make_workload
from observe import observe
from torch import Tensor


@dataclass(frozen=True)
class Task:
    """What one set of processes measures.

    Attributes:
        output: folder for the ``rank<N>.json`` files.
        detail: also run the passes that count collectives and observe hooks and exposed communication.
    """

    contender: str
    model: str
    size: str
    dtype: str
    device: str
    threads: int
    warmup: int
    steps: int
    output: str
    detail: bool = False
    bucket: int | None = None
    zero: dict[str, Any] = field(default_factory=dict)
    adamw: str = "fused"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def read_status(key: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {key}: peak memory on CPU needs Linux")
    return int(match.group(1)) * 1024


class PeakMemory:
    """Peak memory since construction: the allocator's on CUDA, growth of the resident set on CPU. In bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            # Imports may have peaked higher than what stays resident; 5 resets the peak to the present size.
            Path("/proc/self/clear_refs").write_text("5")
            self.before = read_status("VmRSS")

    def read(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return read_status("VmHWM") - self.before


class Clock:
    """Seconds between calls, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.last = 0.0
        self.lap()

    def lap(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        elapsed, self.last = now - self.last, now
        return elapsed


def run_step(contender: Contender, batch: Tensor) -> Tensor:
    loss = contender.forward(batch)
    contender.backward(loss)
    contender.step()
    return loss.detach()


def time_parts(contender: Contender, batch: Tensor, clock: Clock, steps: int) -> dict[str, list[float]]:
    """Return the seconds of forward, backward and step of each of ``steps`` steps, synchronised between them."""
    parts: dict[str, list[float]] = {"forward": [], "backward": [], "step": []}
    clock.lap()
    for _ in range(steps):
        loss = contender.forward(batch)
        parts["forward"].append(clock.lap())
        contender.backward(loss)
        parts["backward"].append(clock.lap())
        contender.step()
        parts["step"].append(clock.lap())
    return parts


def measure(task: Task, device: torch.device) -> dict[str, Any]:
    """Run the task on this rank and return its figures (seconds and bytes)."""
    dtype = getattr(torch, task.dtype)
    workload = make_workload(task.model, task.size)
    batch = workload.make_batch(dist.get_rank(), dtype).to(device)
    warm_process(task.contender, device)

    memory = PeakMemory(device)
    model = build_model(workload, device, dtype)
    parameters = sum(p.numel() for p in model.parameters())
    options = Options(dtype, workload.lr, batch.shape[0], task.bucket, task.zero, task.adamw)
    contender = make_contender(task.contender, model, options)
    del model

    losses = [run_step(contender, batch) for _ in range(task.warmup)]
    clock = Clock(device)
    seconds = []
    for _ in range(task.steps):
        losses.append(run_step(contender, batch))
        seconds.append(clock.lap())
    peak = memory.read()

    result: dict[str, Any] = {
        "seconds": seconds,
        "peak_bytes": peak,
        "parameters": parameters,
        "losses": torch.stack(losses).float().tolist(),
        "parts": time_parts(contender, batch, clock, max(3, task.steps // 4)),
    }
    if task.detail:
        with CollectiveCounter() as counter:
            run_step(contender, batch)
        result["collectives"] = {
            "calls": dict(counter.calls),
            "bytes": dict(counter.bytes),
            "ring_bytes": counter.ring_bytes(),
        }
        result |= observe(contender, lambda: contender.forward(batch), device, max(3, task.steps // 4))
    if "deepspeed" in sys.modules:
        result["package"] = package_version(sys.modules["deepspeed"], task.contender)
    result["torch"] = torch.__version__
    if device.type == "cuda":
        result["device_name"] = torch.cuda.get_device_name(device)
    return result


def package_version(package: ModuleType, contender: str) -> str:
    """The version of the package that was measured.

    Raises:
        RuntimeError: a peer is this package, or the other way round.
    """
    is_own = Path(package.__file__).resolve().is_relative_to(Path(__file__).resolve().parent.parent)
    if is_own == contender.startswith(PEER):
        raise RuntimeError(f"{contender} would measure the package in {package.__file__}")
    return package.__version__


def join_ranks(device_type: str, threads: int) -> torch.device:
    """Make this process a rank of the process group that the environment names; return its device."""
    torch.set_num_threads(threads)
    device = torch.device(device_type)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
    return device


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    device = join_ranks(task.device, task.threads)
    result = measure(task, device)
    Path(task.output, f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
