# SPDX-License-Identifier: Apache-2.0
"""Time to save and to load a checkpoint, as a ratio to writing and reading the same bytes plainly, in turns; and how
long a decoupled save holds up training, as a ratio to a blocking one.

python benchmarks/checkpoint_speed.py [--megabytes 1000] [--folder DIR] [--stage 1] [--rounds 5]

The plain write goes through the page cache in one call per file and is brought to the disk; "direct" does without the
cache. The plain read is of files that the cache does not have, into new memory, and so is the load.

The stall is measured twice: with training on all cores, where every second that the save takes of one is missing, and
with one core left to it.
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


def train_windows(engine: Any, count: int, samples: int) -> None:
    for _ in range(count):
        train_window(engine, samples)


def is_there(folder: Path, tag: str) -> bool:
    """Whether the checkpoint has appeared, with everything that training does for it."""
    latest = folder / "latest"
    return latest.is_file() and latest.read_text() == tag


def train_with_save(engine: Any, folder: Path, tag: str, least: int, samples: int) -> int:
    """A decoupled save and the windows after it, until the checkpoint is there and at least ``least``; how many."""
    engine.save_checkpoint(str(folder), tag=tag)
    count = 0
    while count < least or not is_there(folder, tag):
        train_window(engine, samples)
        count += 1
    return count


def copy_of_as_many(bytes_of_save: int) -> Callable[[], Any]:
    """A copy of so many bytes in memory, by all threads: the least that a save costs which does not stop training."""
    source = torch.ones(bytes_of_save, dtype=torch.uint8)
    target = source.clone()
    return lambda: target.copy_(source)


Times = tuple[float, float]  # by the clock, and that processors worked


def stall_round(
    blocking: Any, decoupled: Any, folder: Path, tag: str, windows: int, samples: int, copy: Callable[[], Any]
) -> dict[str, Times]:
    """One of each."""
    for name in ("blocking", "decoupled"):
        for old in (folder / name).glob("*/"):
            shutil.rmtree(old)
    used: list[int] = []
    found = {
        "without": timed(lambda: train_windows(decoupled, windows, samples)),
        "blocking save": timed(lambda: blocking.save_checkpoint(str(folder / "blocking"), tag=tag)),
        "with": timed(lambda: used.append(train_with_save(decoupled, folder / "decoupled", tag, windows, samples))),
        "copy": timed(copy),
    }
    more = used[0] / windows
    (with_clock, with_busy), (clock, busy) = found["with"], found["without"]
    return found | {"stall": (with_clock - more * clock, with_busy - more * busy)}


def measure_stall(blocking: Any, decoupled: Any, folder: Path, rounds: int, samples: int) -> None:
    """How much longer the same windows of training take with a decoupled save in them, from its call until the
    checkpoint is there; by the clock, and in the time that processors worked."""
    train_with_save(decoupled, folder / "decoupled", "first", 1, samples)  # makes the memory of the copies
    windows = train_with_save(decoupled, folder / "decoupled", "second", 1, samples) + 1
    size = sum(path.stat().st_size for path in (folder / "decoupled" / "second").glob("*.pt"))
    copy = copy_of_as_many(size)
    found = [stall_round(blocking, decoupled, folder, str(n), windows, samples, copy) for n in range(rounds)]
    cores = len(os.sched_getaffinity(0))
    print(f"decoupled, training on {torch.get_num_threads()} of {cores} cores, medians of {rounds} rounds in turns")
    heads = {
        "blocking save": "a blocking save",
        "without": f"{windows} windows without a save",
        "with": "with one, until it is there",
        "stall": "how much longer",
        "copy": "copy of as many bytes",
    }
    for name, head in heads.items():
        seconds, busy = (statistics.median(one[name][i] for one in found) for i in (0, 1))
        print(f"{head:28s} {seconds:7.3f} s, processors {busy:7.3f} s")
    for name in ("stall", "copy"):
        ratios = sorted(one[name][0] / one["blocking save"][0] for one in found)
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
    if torch.get_num_threads() > 1:  # what a training sees that does not need the last core, as on a device
        torch.set_num_threads(torch.get_num_threads() - 1)
        measure_stall(engine, decoupled, folder, options.rounds, options.samples)
    decoupled.destroy()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
