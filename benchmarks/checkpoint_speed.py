# SPDX-License-Identifier: Apache-2.0
"""Time to save and to load a checkpoint, as a ratio to writing and reading the same bytes plainly, in turns.

python benchmarks/checkpoint_speed.py [--megabytes 500] [--folder DIR] [--stage 1] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import deepspeed


def make_engine(megabytes: int, stage: int) -> Any:
    """An engine with so much state in bf16 under Adam: 14 bytes per parameter."""
    width = 1024
    layers = max(1, round(megabytes * 1e6 / 14 / width**2))
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)).float().mean())
    engine.step()
    return engine


def write_plainly(sources: list[bytes], folder: Path) -> None:
    """The same files without any format, brought to the disk."""
    folder.mkdir(exist_ok=True)
    for index, source in enumerate(sources):
        with open(folder / str(index), "wb", buffering=0) as stream:
            view = memoryview(source)
            while view:
                view = view[stream.write(view) :]
            os.fsync(stream.fileno())


def read_plainly(paths: list[Path]) -> None:
    """The same files into new memory, as loading makes optimizer state."""
    for path in paths:
        path.read_bytes()


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--folder", help="default: a temporary one")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    engine = make_engine(options.megabytes, options.stage)
    save, plain = str(folder / "saved"), folder / "plain"
    engine.save_checkpoint(save, tag="t")
    sources = [path.read_bytes() for path in sorted(Path(save, "t").glob("*.pt"))]
    write_plainly(sources, plain)
    paths = [plain / str(index) for index in range(len(sources))]
    work = {
        "plain write": lambda: write_plainly(sources, plain),
        "save": lambda: engine.save_checkpoint(save, tag="t"),
        "plain read": lambda: read_plainly(paths),
        "load": lambda: engine.load_checkpoint(save),
    }
    rounds = [{name: timed(one) for name, one in work.items()} for _ in range(options.rounds)]
    os.environ["DS_CHECKPOINT_VERIFY"] = "0"
    unchecked = statistics.median(timed(work["load"]) for _ in range(options.rounds))
    shutil.rmtree(folder)
    size = sum(map(len, sources)) / 1e6
    print(f"stage {options.stage}, {size:.0f} MB, medians of {options.rounds} rounds that take turns")
    for name in work:
        seconds = statistics.median(one[name] for one in rounds)
        print(f"{name:24s} {seconds:6.2f} s {size / seconds:7.0f} MB/s")
    print(f"{'load, sums not compared':24s} {unchecked:6.2f} s {size / unchecked:7.0f} MB/s")
    for ours, theirs in (("save", "plain write"), ("load", "plain read")):
        ratio = statistics.median(one[theirs] / one[ours] for one in rounds)
        print(f"{ours} at {ratio:.2f} of the rate of {theirs}")


if __name__ == "__main__":
    main()
