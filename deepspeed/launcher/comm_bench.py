# SPDX-License-Identifier: Apache-2.0
"""``ds_bench``: time and bandwidth of collectives.

Started without the environment of a rank it starts itself again through `deepspeed`, with the flags that are not its
own. Every operation is checked once before it is timed. Bandwidths are those of nccl-tests: *algbw* is the bytes of the
operation per second, *busbw* what the slowest link must have carried, which does not depend on the number of ranks.
"""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.utils.comms_logging import calc_bw_log, convert_size

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
_DTYPES = {
    "torch.float32": torch.float32,
    "torch.float16": torch.float16,
    "torch.bfloat16": torch.bfloat16,
    "torch.float64": torch.float64,
    "torch.int32": torch.int32,
    "torch.int64": torch.int64,
    "torch.uint8": torch.uint8,
}


@dataclass(frozen=True)
class Operation:
    """A collective with its buffers.

    Attributes:
        call: issues it; takes ``async_op`` and returns the handle.
        nbytes: bytes that this rank puts in, as ``calc_bw_log`` takes them.
        result: tensor in which every element must be ``expected`` after the first call on buffers full of ones.
        expected: see ``result``.
    """

    call: Callable[[bool], Any]
    nbytes: int
    result: torch.Tensor
    expected: int


Make = Callable[[ModuleType, torch.Tensor, int, int], Operation]


def _all_reduce(dist: ModuleType, data: torch.Tensor, rank: int, ranks: int) -> Operation:
    return Operation(lambda later: dist.all_reduce(data, async_op=later), data.nbytes, data, ranks)


def _all_gather(dist: ModuleType, data: torch.Tensor, rank: int, ranks: int) -> Operation:
    out = data.new_zeros(data.numel())
    share = data[: data.numel() // ranks]
    return Operation(lambda later: dist.all_gather_into_tensor(out, share, async_op=later), share.nbytes, out, 1)


def _reduce_scatter(dist: ModuleType, data: torch.Tensor, rank: int, ranks: int) -> Operation:
    out = data.new_zeros(data.numel() // ranks)
    return Operation(lambda later: dist.reduce_scatter_tensor(out, data, async_op=later), data.nbytes, out, ranks)


def _all_to_all(dist: ModuleType, data: torch.Tensor, rank: int, ranks: int) -> Operation:
    out = torch.zeros_like(data)
    return Operation(lambda later: dist.all_to_all_single(out, data, async_op=later), data.nbytes, out, 1)


def _broadcast(dist: ModuleType, data: torch.Tensor, rank: int, ranks: int) -> Operation:
    if rank:
        data.zero_()
    return Operation(lambda later: dist.broadcast(data, 0, async_op=later), data.nbytes, data, 1)


def _pt2pt(dist: ModuleType, data: torch.Tensor, rank: int, ranks: int) -> Operation:
    if rank == 1:
        data.zero_()

    def call(later: bool) -> Any:
        if rank > 1:
            return None
        if rank == 0:
            return dist.isend(data, 1) if later else dist.send(data, 1)
        return dist.irecv(data, 0) if later else dist.recv(data, 0)

    return Operation(call, data.nbytes, data, 1)


# Flag -> how it is made, and the name under which its bandwidth is defined.
OPERATIONS: dict[str, tuple[Make, str]] = {
    "all_reduce": (_all_reduce, "all_reduce"),
    "all_gather": (_all_gather, "all_gather_into_tensor"),
    "reduce_scatter": (_reduce_scatter, "reduce_scatter_tensor"),
    "all_to_all": (_all_to_all, "all_to_all_single"),
    "broadcast": (_broadcast, "broadcast"),
    "pt2pt": (_pt2pt, "send"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds_bench",
        allow_abbrev=False,
        description="measures collectives; other flags, such as --num_gpus or --hostfile, go to `deepspeed`",
    )
    add = parser.add_argument
    add("--local_rank", type=int, default=-1, help="passed by launchers; not used")
    for name in OPERATIONS:
        add(f"--{name.replace('_', '-')}", action="store_true", help=f"measure {name} (none given: all)")
    add("--trials", type=int, default=5, help="timed calls per size (%(default)s)")
    add("--warmups", type=int, default=5, help="calls before them (%(default)s)")
    add("--maxsize", type=int, default=24, help="largest size, as a power of two of elements (%(default)s)")
    add("--minsize", type=int, default=10, help="smallest size with --scan (%(default)s)")
    add("--scan", action="store_true", help="all powers of two up to the largest size")
    add("--mem-factor", type=float, default=0.1, help="share of the free device memory that a buffer may take")
    add("--dtype", type=str, default="torch.float32", choices=list(_DTYPES), help="of the elements")
    add("--bw-unit", type=str, default="Gbps", choices=["Gbps", "GBps"], help="bits or bytes per second")
    add("--backend", type=str, default=None, help="of torch.distributed (the accelerator's)")
    add("--dist", type=str, default="deepspeed", choices=["deepspeed", "torch"], help="whose functions are called")
    add("--async-op", action="store_true", help="issue all trials before waiting for them")
    add("--raw", action="store_true", help="numbers without units, separated by tabs")
    add("--debug", action="store_true", help="also print the fastest and the slowest rank")
    return parser


def parse_args(args: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own arguments, and those for the launcher (``sys.argv`` when ``args`` is None)."""
    parser = _parser()
    parsed, others = parser.parse_known_args(args)
    if parsed.trials < 1 or parsed.warmups < 0:
        parser.error("--trials must be at least 1 and --warmups at least 0")
    if parsed.maxsize < 0 or (parsed.scan and not 0 <= parsed.minsize <= parsed.maxsize):
        parser.error("--maxsize must be at least 0 and, with --scan, --minsize lie between 0 and it")
    return parsed, others


def sizes(args: argparse.Namespace, free_bytes: int, ranks: int) -> Iterator[int]:
    """Numbers of elements to measure, each divisible by the ranks."""
    most = int(free_bytes * args.mem_factor) // _DTYPES[args.dtype].itemsize
    for power in range(args.minsize if args.scan else args.maxsize, args.maxsize + 1):
        yield max(min(1 << power, most) // ranks, 1) * ranks
        if 1 << power >= most:
            return


def _seconds_per_call(operation: Operation, args: argparse.Namespace, barrier: Callable[[], Any]) -> float:
    accelerator = get_accelerator()

    def calls(count: int) -> None:
        handles = [operation.call(args.async_op) for _ in range(count)]
        for handle in handles:
            if args.async_op and handle is not None:
                handle.wait()
        accelerator.synchronize()

    calls(args.warmups)
    barrier()
    start = time.perf_counter()
    calls(args.trials)
    return (time.perf_counter() - start) / args.trials


def _check(operation: Operation, name: str, rank: int) -> None:
    operation.call(False)
    get_accelerator().synchronize()
    takes_part = name != "pt2pt" or rank < 2
    expected = torch.tensor(operation.expected, dtype=operation.result.dtype).item()
    if takes_part and not bool((operation.result == expected).all()):
        raise RuntimeError(f"ds_bench: {name} gave a wrong result on rank {rank}: not all elements are {expected}")


def _row(args: argparse.Namespace, name: str, nbytes: int, times: list[float], ranks: int) -> str:
    slowest = max(times)
    scale = 1.0 if args.bw_unit == "Gbps" else 1 / 8
    algorithm, bus = (scale * value for value in calc_bw_log(OPERATIONS[name][1], nbytes, slowest * 1e3, ranks))
    moved = nbytes * ranks if name == "all_gather" else nbytes
    if args.raw:
        return f"{name}\t{moved}\t{slowest * 1e3:.6f}\t{algorithm:.6f}\t{bus:.6f}"
    spread = f"   {min(times) * 1e3:.3f}..{slowest * 1e3:.3f} ms over ranks" if args.debug else ""
    return f"{name:<16}{convert_size(moved):>12}{slowest * 1e3:>14.3f}{algorithm:>14.3f}{bus:>14.3f}{spread}"


def run(args: argparse.Namespace, report: Callable[[str], None]) -> None:
    """Measures; ``report`` gets one line per operation and size, on rank 0.

    Raises:
        RuntimeError: an operation gave a wrong result, or the backend does not have it.
    """
    comm = importlib.import_module("deepspeed.comm")
    dist = comm if args.dist == "deepspeed" else importlib.import_module("torch.distributed")
    rank, ranks = comm.get_rank(), comm.get_world_size()
    say = report if rank == 0 else _say_nothing
    accelerator = get_accelerator()
    device = accelerator.current_device_name()
    say(f"{ranks} ranks, {args.dtype}, {args.dist}, {accelerator.device_name()}, mean of {args.trials} calls")
    header = ("operation", "size", "time (ms)", f"algbw ({args.bw_unit})", f"busbw ({args.bw_unit})")
    say("\t".join(header) if args.raw else f"{header[0]:<16}{header[1]:>12}" + "".join(f"{h:>14}" for h in header[2:]))
    free = torch.tensor([accelerator.available_memory()], dtype=torch.float64, device=device)
    comm.all_reduce(free, op=comm.ReduceOp.MIN)
    chosen = [name for name in OPERATIONS if getattr(args, name)] or list(OPERATIONS)
    for name in chosen:
        if name == "pt2pt" and ranks < 2:
            say("pt2pt needs two ranks: left out")
            continue
        for elements in sizes(args, int(free.item()), ranks):
            data = torch.ones(elements, dtype=_DTYPES[args.dtype], device=device)
            operation = OPERATIONS[name][0](dist, data, rank, ranks)
            _check(operation, name, rank)
            mine = _seconds_per_call(operation, args, comm.barrier)
            times: list[Any] = [None] * ranks
            comm.all_gather_object(times, mine)
            taking_part = times[:2] if name == "pt2pt" else times
            say(_row(args, name, operation.nbytes, taking_part, ranks))


def _without(given: Sequence[str], others: Sequence[str]) -> list[str]:
    """``given`` less ``others``, which stand in it in the same order; the same word may be in both (``2``)."""
    own, position = [], 0
    for word in given:
        if position < len(others) and word == others[position]:
            position += 1
        else:
            own.append(word)
    return own


def _say_nothing(line: str) -> None:
    """On every rank but the first."""


def main(args: list[str] | None = None) -> None:
    """Entry point of the ``ds_bench`` command.

    Raises:
        SystemExit: bad arguments.
        RuntimeError: see :func:`run`.
    """
    given = sys.argv[1:] if args is None else args
    parsed, for_launcher = parse_args(given)
    missing = [name for name in _RANK_VARIABLES if name not in os.environ]
    if missing:
        from deepspeed.launcher.runner import main as launch

        launch([*for_launcher, "--module", "deepspeed.launcher.comm_bench", *_without(given, for_launcher)])
        return
    if for_launcher:
        sys.exit(f"ds_bench: unknown arguments {' '.join(for_launcher)}")
    comm = importlib.import_module("deepspeed.comm")
    comm.init_distributed(dist_backend=parsed.backend)
    try:
        run(parsed, lambda line: print(line, flush=True))
    finally:
        comm.destroy_process_group()


if __name__ == "__main__":
    main()
