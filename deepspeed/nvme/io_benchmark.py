# SPDX-License-Identifier: Apache-2.0
"""``ds_io``: how fast a folder is read and written.

``--engine`` says by what: ``aio_handle`` is what offload to NVMe uses (io_uring, libaio or threads, whichever this host
has first; each can be named, as can ``python``, the threads of a host without a compiler), ``aio_basic`` the same with
a handle made for each read or write, ``plain`` is ``pread`` and ``pwrite`` of blocks by ``--io_parallel`` threads,
``torch_io`` is ``torch.save`` and ``torch.load``. A write counts until the data is on the device (``fsync``); before a
read the file's pages are given up, so that the device is measured and not the memory.
"""

import argparse
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_HANDLE_ENGINE, _BASIC_ENGINE = "aio_handle", "aio_basic"
_NAMED_ENGINES = ("io_uring", "libaio", "threads", "python")
_ASYNC_ENGINES = (_HANDLE_ENGINE, _BASIC_ENGINE, *_NAMED_ENGINES)
_PLAIN_ENGINE = "plain"
_TORCH_ENGINE = "torch_io"
# Flags of engines that do not exist here; whoever gives one would measure something else than asked for.
_NOT_BUILT = ("use_gds", "slow_bounce_buffer")
# Flags that only asynchronous engines have a counterpart for.
_OF_ASYNC_ENGINES = ("queue_depth", "single_submit")
_DEFAULT_QUEUE_DEPTH = 32
# Long enough for any process to be started, far from a hang.
_START_TIMEOUT_S = 300


def size_of(text: str) -> int:
    """Bytes of a size such as ``4096``, ``64K``, ``400M`` or ``2G``.

    Raises:
        argparse.ArgumentTypeError: no such size, or 0.
    """
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.strip().upper())
    if match is None or int(match.group(1)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 4096, 64K, 400M or 2G")
    return int(match.group(1)) * _UNITS[match.group(2)]


def parse_args(args: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line (``sys.argv`` when ``args`` is None)."""
    parser = argparse.ArgumentParser(prog="ds_io", description="measures reading from and writing to a folder")
    add = parser.add_argument
    add("--folder", type=str, default=None, help="folder to measure")
    add("--folder_to_device_mapping", nargs="*", default=None, help="FOLDER:DEVICE for each process")
    add("--io_size", type=size_of, required=True, help="bytes per process, e.g. 400M")
    add("--fast_io_size", type=size_of, default=None, help="of the fast file writer (64M); no effect here")
    add("--read", action="store_true", help="measure reading; otherwise writing")
    add("--multi_process", type=int, default=1, help="processes, each with a file of its own")
    add("--block_size", type=size_of, default=size_of("1M"), help="bytes per request")
    add("--queue_depth", type=int, default=None, help="requests in flight per thread (32); asynchronous engines only")
    add("--single_submit", action="store_true", help="one system call per request; asynchronous engines only")
    add("--sequential_requests", action="store_true", help="one request at a time")
    add("--validate", action="store_true", help="check what was written or read")
    engines = [*_ASYNC_ENGINES, _PLAIN_ENGINE, _TORCH_ENGINE]
    add("--engine", type=str, default="aio_handle", choices=engines, help="what reads and writes")
    add("--loops", type=int, default=3, help="measured repetitions")
    add("--io_parallel", type=int, default=1, help="threads per process")
    add("--gpu", action="store_true", help="the data starts and ends in device memory")
    add("--use_gds", action="store_true", help="not built")
    add("--slow_bounce_buffer", action="store_true", help="not built")
    add("--torch_legacy_save", action="store_true", help="torch_io: the old file format")
    add("--use_accelerator_pin_memory", action="store_true", help="memory from torch's allocator of pinned memory")
    add("--warmup_loops", type=int, default=1, help="repetitions before the measured ones")
    add("--include_warmup_time", action="store_true", help="count them too")
    add("--different_file_each_iteration", action="store_true", help="a new file for each repetition")
    parsed = parser.parse_args(args)
    _check(parser, parsed)
    return parsed


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if (args.folder is None) == (args.folder_to_device_mapping is None):
        parser.error("give either --folder or --folder_to_device_mapping")
    for name in _NOT_BUILT:
        if getattr(args, name):
            parser.error(f"--{name} needs reads and writes straight to device memory (op gds), which are not built")
    for name in ("multi_process", "loops", "io_parallel", "queue_depth"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    mapping = args.folder_to_device_mapping
    if mapping is not None:
        if any(":" not in entry for entry in mapping) or not mapping:
            parser.error("--folder_to_device_mapping takes entries of the form FOLDER:DEVICE")
        args.multi_process = len(mapping)
    for folder in sorted(set(_folders(args))):
        if not os.path.isdir(folder):
            parser.error(f"folder {folder!r} does not exist")


def _folders(args: argparse.Namespace) -> list[str]:
    """The folder of each process."""
    if args.folder_to_device_mapping is None:
        return [args.folder] * args.multi_process
    return [entry.rpartition(":")[0] for entry in args.folder_to_device_mapping]


def _device(args: argparse.Namespace, index: int) -> torch.device:
    if not args.gpu:
        return torch.device("cpu")
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        raise SystemExit("ds_io: --gpu needs an accelerator, and this host has none")
    mapping = args.folder_to_device_mapping
    number = int(mapping[index].rpartition(":")[2]) if mapping is not None else index % accelerator.device_count()
    return torch.device(accelerator.device_name(number))


@dataclass
class _Repetition:
    """One read or write of one process."""

    args: argparse.Namespace
    host: torch.Tensor
    on_device: torch.Tensor
    path: str
    handle: Any = None  # of asynchronous engines

    def _requests(self) -> list[tuple[int, memoryview]]:
        view, block = memoryview(self.host.numpy()), self.args.block_size
        return [(start, view[start : start + block]) for start in range(0, len(view), block)]

    def _run(self, request: Callable[[tuple[int, memoryview]], None]) -> None:
        threads = 1 if self.args.sequential_requests else self.args.io_parallel
        if threads == 1:
            for one in self._requests():
                request(one)
            return
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(request, self._requests()):
                pass

    @contextmanager
    def _with_handle(self) -> Iterator[Any]:
        """The handle, or one for this time alone."""
        handle = self.handle or make_handle(self.args)
        yield handle
        if self.handle is None:
            handle.close()

    def write(self) -> None:
        """Device memory to storage."""
        self.host.copy_(self.on_device)
        if self.args.engine == _TORCH_ENGINE:
            torch.save(self.host, self.path, _use_new_zipfile_serialization=not self.args.torch_legacy_save)
        if self.args.engine in _ASYNC_ENGINES:
            with self._with_handle() as handle:
                handle.sync_pwrite(self.host, self.path)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if self.args.engine == _PLAIN_ENGINE:
                self._run(lambda request: _write_all(file, *request))
            os.fsync(file)
        finally:
            os.close(file)

    def read(self) -> None:
        """Storage to device memory."""
        if self.args.engine == _TORCH_ENGINE:
            self.on_device.copy_(torch.load(self.path, weights_only=True))
            return
        if self.args.engine in _ASYNC_ENGINES:
            with self._with_handle() as handle:
                handle.sync_pread(self.host, self.path)
            self.on_device.copy_(self.host)
            return
        file = os.open(self.path, os.O_RDONLY)
        try:
            self._run(lambda request: _read_all(file, *request))
        finally:
            os.close(file)
        self.on_device.copy_(self.host)

    def forget(self) -> None:
        """Clears the buffers, and lets the next read of the file come from the device where the system knows how."""
        self.host.zero_()
        self.on_device.zero_()
        if hasattr(os, "posix_fadvise"):
            file = os.open(self.path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def _write_all(file: int, offset: int, data: memoryview) -> None:
    while data:
        done = os.pwrite(file, data, offset)
        offset, data = offset + done, data[done:]


def _read_all(file: int, offset: int, into: memoryview) -> None:
    while into:
        done = os.preadv(file, [into], offset)
        if done == 0:
            raise OSError(f"the file ended {len(into)} bytes early")
        offset, into = offset + done, into[done:]


def make_handle(args: argparse.Namespace) -> Any:
    """The asynchronous engine that the arguments name, with their settings."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    one_by_one = args.sequential_requests
    return (
        AsyncIOBuilder()
        .load()
        .aio_handle(
            args.block_size,
            1 if one_by_one else args.queue_depth or _DEFAULT_QUEUE_DEPTH,
            args.single_submit,
            not one_by_one,
            1 if one_by_one else args.io_parallel,
            args.engine if args.engine in _NAMED_ENGINES else None,
        )
    )


def _host_memory(args: argparse.Namespace) -> torch.Tensor:
    """Whole pages, page-locked where there is an accelerator."""
    if args.use_accelerator_pin_memory:
        from deepspeed.accelerator import get_accelerator

        return get_accelerator().pin_memory(torch.empty(args.io_size, dtype=torch.uint8))
    from deepspeed.utils.pin_memory import get_native_pinned_memory

    return get_native_pinned_memory().pin_empty(torch.empty(0, dtype=torch.uint8), (args.io_size,))


def _pattern(size: int, index: int) -> torch.Tensor:
    """Bytes that differ from process to process and from block to block."""
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def measure(args: argparse.Namespace, index: int, barrier: Any = None) -> list[float]:
    """Seconds of each counted repetition of process ``index``.

    Raises:
        RuntimeError: ``--validate`` found other bytes than were written.
    """
    device = _device(args, index)
    expected = _pattern(args.io_size, index)
    host = _host_memory(args)
    handle = make_handle(args) if args.engine in (_HANDLE_ENGINE, *_NAMED_ENGINES) else None
    on_device = torch.empty_like(expected, device=device)
    seconds = []
    paths: set[str] = set()
    try:
        for loop in range(args.warmup_loops + args.loops):
            suffix = f"_{loop}" if args.different_file_each_iteration else ""
            path = os.path.join(_folders(args)[index], f"_ds_io_{os.getppid()}_{index}{suffix}.bin")
            once = _Repetition(args, host, on_device, path, handle)
            if not args.read or path not in paths:
                on_device.copy_(expected)
            if args.read and path not in paths:
                once.write()
            paths.add(path)
            if args.read:
                once.forget()
            if barrier is not None:
                barrier.wait(_START_TIMEOUT_S)
            start = time.perf_counter()
            (once.read if args.read else once.write)()
            _synchronize(device)
            seconds.append(time.perf_counter() - start)
            if args.validate:
                _validate(once, expected)
    finally:
        for path in paths:
            os.remove(path)
        if handle is not None:
            handle.close()
    return seconds if args.include_warmup_time else seconds[args.warmup_loops :]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        from deepspeed.accelerator import get_accelerator

        get_accelerator().synchronize(device)


def _validate(once: _Repetition, expected: torch.Tensor) -> None:
    if not once.args.read:
        once.forget()
        once.read()
    if not torch.equal(once.on_device.cpu(), expected):
        wrong = int((once.on_device.cpu() != expected).sum())
        raise RuntimeError(f"ds_io: {wrong} of {expected.numel()} bytes of {once.path} are not those written")


def _measure_in_process(args: argparse.Namespace, index: int, barrier: Any, results: Any) -> None:
    try:
        results.put((index, measure(args, index, barrier)))
    except BaseException:
        barrier.abort()  # the others need not wait for this one
        raise


def measure_all(args: argparse.Namespace) -> list[list[float]]:
    """Seconds of each repetition of each process."""
    if args.multi_process == 1:
        return [measure(args, 0)]
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(args.multi_process), context.SimpleQueue()
    processes = [
        context.Process(target=_measure_in_process, args=(args, index, barrier, results))
        for index in range(args.multi_process)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    failed = [index for index, process in enumerate(processes) if process.exitcode != 0]
    if failed:
        raise SystemExit(f"ds_io: processes {failed} failed")
    found = dict(results.get() for _ in processes)
    return [found[index] for index in range(args.multi_process)]


def _note(args: argparse.Namespace) -> str:
    """What is measured, in one line."""
    if args.engine == _TORCH_ENGINE:
        return "ds_io: torch.load" if args.read else "ds_io: torch.save and fsync"
    if args.engine == _PLAIN_ENGINE:
        idle = [f"--{name}" for name in _OF_ASYNC_ENGINES if getattr(args, name)]
        without = f"; without effect: {', '.join(idle)}" if idle else ""
        return f"ds_io: pread and pwrite, {args.io_parallel} thread(s){without}"
    handle = make_handle(args)
    handle.close()
    depth, threads = handle.get_queue_depth(), handle.get_intra_op_parallelism()
    return f"ds_io: {handle.engine}, {depth} requests in flight per thread, {threads} thread(s)"


def ds_io_main(args: list[str] | None = None) -> None:
    """Entry point of the ``ds_io`` command: prints bandwidth and latency, over all processes.

    Raises:
        SystemExit: arguments that cannot be, or a process that failed.
        RuntimeError: ``--validate`` found other bytes than were written.
    """
    parsed = parse_args(args)
    print(_note(parsed), flush=True)
    # A repetition lasts as long as its slowest process: they start it together.
    seconds = [max(times) for times in zip(*measure_all(parsed))]
    total = parsed.io_size * parsed.multi_process
    mean = sum(seconds) / len(seconds)
    direction, best = "read" if parsed.read else "write", min(seconds)
    rates = f"{total / mean / 1e9:.3f} GB/s mean, {total / best / 1e9:.3f} GB/s best, {mean * 1e3:.2f} ms each"
    files = f"{parsed.multi_process} process(es) x {parsed.io_size} bytes in blocks of {parsed.block_size}"
    print(f"{direction}: {rates}; {files}, {len(seconds)} repetitions")


if __name__ == "__main__":
    ds_io_main()
