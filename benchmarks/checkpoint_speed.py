# SPDX-License-Identifier: Apache-2.0
"""Time to save and to load a checkpoint, as a ratio to writing and reading the same bytes plainly, in turns; and how
long a decoupled save holds up training, as a ratio to a blocking one.

python benchmarks/checkpoint_speed.py [--megabytes 1000] [--folder DIR] [--stage 1] [--rounds 5]

The plain write goes through the page cache in one call per file and is brought to the disk; "direct" does without the
cache. The plain read is of files that the cache does not have, into new memory, and so is the load.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import deepspeed

WIDTH = 1024


def make_engine(megabytes: int, stage: int, decoupled: bool = False) -> Any:
    """An engine with so much state in bf16 under Adam: 14 bytes per parameter."""
    width = WIDTH
    layers = max(1, round(megabytes * 1e6 / 14 / width**2))
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"writer": {"decoupled": True} if decoupled else None},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    train_window(engine)
    return engine


def train_window(engine: Any, samples: int = 1) -> None:
    engine.backward(engine(torch.ones(samples, WIDTH, dtype=torch.bfloat16)).float().mean())
    engine.step()


def write_plainly(sources: list[mmap.mmap], folder: Path) -> None:
    """The same files without any format, brought to the disk."""
    folder.mkdir(exist_ok=True)
    for index, source in enumerate(sources):
        with open(folder / str(index), "wb", buffering=0) as stream:
            view = memoryview(source)
            while view:
                view = view[stream.write(view) :]
            os.fsync(stream.fileno())


def write_directly(sources: list[mmap.mmap], folder: Path) -> None:
    """The same, past the page cache, in 64 MiB at a time; some bytes at the end are left out."""
    folder.mkdir(exist_ok=True)
    for index, source in enumerate(sources):
        file = os.open(folder / f"direct{index}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        view = memoryview(source)[: len(source) // mmap.PAGESIZE * mmap.PAGESIZE]
        while view:
            view = view[os.write(file, view[: 64 << 20]) :]
        os.fsync(file)
        os.close(file)


def read_plainly(paths: list[Path]) -> None:
    """The same files into new memory, as loading makes optimizer state."""
    for path in paths:
        path.read_bytes()


def forget_cached(paths: list[Path]) -> None:
    """Let the page cache drop files."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds that passed, and seconds that processors worked."""
    used, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    seconds, now = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    return seconds, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def source_of(path: Path) -> mmap.mmap:
    """A file's bytes, at an address that direct writes accept."""
    source = mmap.mmap(-1, path.stat().st_size)
    with open(path, "rb", buffering=0) as stream:
        stream.readinto(source)
    return source


def measure_speed(engine: Any, folder: Path, rounds: int, stage: int) -> None:
    """Saving and loading beside plain writing and reading."""
    save, plain = str(folder / "saved"), folder / "plain"
    engine.save_checkpoint(save, tag="t")
    files = sorted(Path(save, "t").glob("*.pt"))
    sources = [source_of(path) for path in files]
    write_plainly(sources, plain)
    paths = [plain / str(index) for index in range(len(sources))]
    work = {
        "plain write": lambda: write_plainly(sources, plain),
        "direct write": lambda: write_directly(sources, plain),
        "save": lambda: engine.save_checkpoint(save, tag="t"),
        "plain read": lambda: read_plainly(paths),
        "load": lambda: engine.load_checkpoint(save),
    }
    found: list[dict[str, tuple[float, float]]] = []
    for _ in range(rounds):
        found.append({})
        for name, one in work.items():
            forget_cached([*paths, *files])
            found[-1][name] = timed(one)
    size = sum(map(len, sources)) / 1e6
    print(f"stage {stage}, {size:.0f} MB, medians of {rounds} rounds that take turns")
    for name in work:
        seconds, busy = (statistics.median(one[name][i] for one in found) for i in (0, 1))
        print(f"{name:14s} {seconds:6.2f} s {size / seconds:6.0f} MB/s, processors {busy:5.2f} s")
    for ours, theirs in (("save", "plain write"), ("save", "direct write"), ("load", "plain read")):
        ratios = sorted(one[theirs][0] / one[ours][0] for one in found)
        print(
            f"{ours} at {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) of the rate of {theirs}"
        )


def measure_stall(blocking: Any, decoupled: Any, folder: Path, rounds: int, samples: int) -> None:
    """How much longer training takes with a decoupled save in it, from its call until it is written."""
    found: dict[str, list[float]] = {
        "window": [],
        "blocking save": [],
        "call": [],
        "windows of a save": [],
        "stall": [],
    }
    decoupled.save_checkpoint(str(folder / "first"))  # makes the memory of the copies
    for _ in range(rounds):
        decoupled.checkpoint_engine._join()
        ordinary = [timed(lambda: train_window(decoupled, samples))[0] for _ in range(3)]
        found["blocking save"].append(timed(lambda: blocking.save_checkpoint(str(folder / "blocking"), tag="t"))[0])
        begin = time.perf_counter()
        found["call"].append(timed(lambda: decoupled.save_checkpoint(str(folder / "decoupled"), tag="t"))[0])
        windows = 0
        while decoupled.checkpoint_engine.is_writing() or not windows:
            train_window(decoupled, samples)
            windows += 1
        whole = time.perf_counter() - begin
        found["window"].append(statistics.median(ordinary))
        found["windows of a save"].append(windows)
        found["stall"].append(whole - windows * found["window"][-1])
    print(f"decoupled, medians of {rounds} rounds that take turns")
    for name, values in found.items():
        print(f"{name:18s} {statistics.median(values):6.3f}")
    for name in ("call", "stall"):
        ratios = sorted(one / other for one, other in zip(found[name], found["blocking save"]))
        print(f"{name}: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) of a blocking save")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--folder", help="default: a temporary one")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=128, help="in a window of training, for the decoupled save")
    options = parser.parse_args()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    engine = make_engine(options.megabytes, options.stage)
    measure_speed(engine, folder, options.rounds, options.stage)
    decoupled = make_engine(options.megabytes, options.stage, decoupled=True)
    measure_stall(engine, decoupled, folder, options.rounds, options.samples)
    decoupled.destroy()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
