# SPDX-License-Identifier: Apache-2.0
"""GB/s of the asynchronous I/O engines by block size and queue depth, beside plain I/O, in turns within one run.

    PYTHONPATH=. python benchmarks/aio.py --folder /mnt/nvme --megabytes 1024

``dd`` is what ``dd conv=fsync`` does: one request after the other through the page cache. ``dd direct`` is what
``dd oflag=direct`` does. A write ends with ``fsync`` for all; before a read the file's pages are given up.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.nvme.io_benchmark import size_of
from deepspeed.ops.op_builder import AsyncIOBuilder

PLAIN = ("dd", "dd direct")


@dataclass
class Contender:
    """One way to move a file, with its settings."""

    engine: str
    block: int
    depth: int
    write: Callable[[torch.Tensor, str], None]
    read: Callable[[torch.Tensor, str], None]

    @property
    def key(self) -> tuple[str, int, int]:
        return self.engine, self.block, self.depth


def plain(block: int, direct: bool) -> Contender:
    """One request after the other in the calling thread."""
    flag = os.O_DIRECT if direct else 0

    def move(buffer: torch.Tensor, path: str, flags: int, request: Callable[[int, memoryview, int], int]) -> None:
        view = memoryview(buffer.numpy())
        file = os.open(path, flags | flag, 0o600)
        try:
            at = 0
            while at < len(view):
                done = request(file, view[at : at + block], at)
                if done <= 0:
                    raise OSError(f"{path}: nothing was moved at byte {at}")
                at += done
        finally:
            os.close(file)

    def write(buffer: torch.Tensor, path: str) -> None:
        move(buffer, path, os.O_WRONLY | os.O_CREAT, os.pwrite)

    def read(buffer: torch.Tensor, path: str) -> None:
        move(buffer, path, os.O_RDONLY, lambda file, view, at: os.preadv(file, [view], at))

    return Contender(PLAIN[direct], block, 1, write, read)


def contenders(args: argparse.Namespace, aio: Any) -> list[Contender]:
    """All of them; handles live as long as the run."""
    found = [plain(block, direct) for block in args.block_sizes for direct in (False, True)]
    for engine in args.engines or aio.available_engines():
        for block in args.block_sizes:
            for depth in args.queue_depths:
                handle = aio.aio_handle(block, depth, False, True, args.threads, engine)
                found.append(Contender(engine, block, depth, handle.sync_pwrite, handle.sync_pread))
    return found


def flush(path: str, forget: bool = False) -> None:
    """Bring what was written to the device; ``forget``: and drop it from memory."""
    file = os.open(path, os.O_RDWR)
    os.fsync(file)
    if forget:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def measure(
    args: argparse.Namespace, ways: list[Contender], buffer: torch.Tensor
) -> dict[tuple, dict[str, list[float]]]:
    """Seconds of each repetition; the contenders take turns, so that what slows the machine slows all."""
    path = os.path.join(args.folder, f"_aio_benchmark_{os.getpid()}.bin")
    pattern = torch.arange(buffer.nbytes, dtype=torch.int64).to(torch.uint8)
    buffer.copy_(pattern)
    seconds: dict[tuple, dict[str, list[float]]] = {way.key: {"write": [], "read": []} for way in ways}
    try:
        ways[0].write(buffer, path)  # the file's blocks exist before anybody is measured
        for round_number in range(args.rounds):
            for number, way in enumerate(ways, start=1):
                start = time.perf_counter()
                way.write(buffer, path)
                flush(path)
                seconds[way.key]["write"].append(time.perf_counter() - start)
                buffer.zero_()
                flush(path, forget=True)
                start = time.perf_counter()
                way.read(buffer, path)
                seconds[way.key]["read"].append(time.perf_counter() - start)
                if not torch.equal(buffer, pattern):
                    raise SystemExit(f"{way.key} read other bytes than were written")
                print(f"\rround {round_number + 1}/{args.rounds}, {number}/{len(ways)} ", end="", file=sys.stderr)
    finally:
        if os.path.exists(path):
            os.remove(path)
    print(file=sys.stderr)
    return seconds


def rows_of(seconds: dict[tuple, dict[str, list[float]]], size: int) -> list[dict[str, Any]]:
    """GB/s by the median over rounds, with the slowest and the fastest, and the ratio to ``dd`` of the same blocks."""
    rows = []
    for (engine, block, depth), times in seconds.items():
        row: dict[str, Any] = {"engine": engine, "block_size": block, "queue_depth": depth}
        for direction, values in times.items():
            base = seconds[PLAIN[0], block, 1][direction]
            row[direction] = size / statistics.median(values) / 1e9
            row[f"{direction}_range"] = [size / max(values) / 1e9, size / min(values) / 1e9]
            row[f"{direction}_to_dd"] = statistics.median(b / v for b, v in zip(base, values))
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    titles = f"{'write GB/s':>11} {'(rounds)':>14} {'/dd':>6} {'read GB/s':>11} {'(rounds)':>14} {'/dd':>6}"
    print(f"{'engine':<10} {'block':>9} {'depth':>5} {titles}")
    for row in rows:
        cells = ""
        for direction in ("write", "read"):
            low, high = row[f"{direction}_range"]
            cells += f" {row[direction]:>11.3f} {f'{low:.2f}..{high:.2f}':>14} {row[f'{direction}_to_dd']:>6.2f}"
        print(f"{row['engine']:<10} {row['block_size']:>9} {row['queue_depth']:>5}{cells}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="on the disk to be measured")
    parser.add_argument("--megabytes", type=int, default=512, help="size of the file (10^6 bytes, in whole pages)")
    parser.add_argument("--engines", nargs="*", default=None, help="default: all that this host has")
    parser.add_argument(
        "--block_sizes", nargs="+", type=size_of, default=[size_of("256K"), size_of("1M"), size_of("8M")]
    )
    parser.add_argument("--queue_depths", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=1, help="intra_op_parallelism")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default=None, help="file for the results")
    args = parser.parse_args()
    aio = AsyncIOBuilder().load()
    ways = contenders(args, aio)
    size = args.megabytes * 10**6 // 4096 * 4096
    buffer = aio.aio_handle(engine="python").new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
    rows = rows_of(measure(args, ways, buffer), size)
    show(rows)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"bytes": size, "threads": args.threads, "rounds": args.rounds, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
