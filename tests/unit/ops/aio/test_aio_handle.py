# SPDX-License-Identifier: Apache-2.0
"""``aio_handle`` with every engine of this host: values, alignments, errors."""

import errno
import multiprocessing
import os
import random
import subprocess
import threading
import time

import pytest
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.aio import engines, python_engine
from deepspeed.ops.op_builder import AsyncIOBuilder
from unit.util import file_size_limit

aio = AsyncIOBuilder().load()
KINDS = aio.available_engines()
PAGE = 4096
SIZES = [0, 1, 511, 512, 513, PAGE, PAGE + 1, 3 * PAGE - 1, 100_003]


def handle_of(kind, **changes):
    settings = {"block_size": 16 * 1024, "queue_depth": 4, "intra_op_parallelism": 2} | changes
    return aio.aio_handle(engine=kind, **settings)


@pytest.fixture(params=KINDS)
def handle(request):
    made = handle_of(request.param)
    yield made
    made.close()


def bytes_of(size, seed=0):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_engines_of_this_host():
    """This system's kernel has both interfaces; a host without them has threads at least."""
    assert KINDS[-1] == "python"
    if engines.native_module() is not None:
        assert "threads" in KINDS
        assert KINDS.index("threads") == len(KINDS) - 2, "an asynchronous interface is preferred where there is one"


def test_what_is_written_is_read(handle, tmp_path):
    for size in [*SIZES, 10_000_019]:
        path = tmp_path / str(size)
        data = bytes_of(size, size)
        assert handle.sync_pwrite(data, path) == 1
        assert path.read_bytes() == data.numpy().tobytes()
        into = torch.zeros(size, dtype=torch.uint8)
        assert handle.sync_pread(into, path) == 1
        assert torch.equal(into, data)
    locked = handle.new_cpu_locked_tensor(10_000_019, data)
    handle.sync_pread(locked, path)
    assert torch.equal(locked, data)
    locked.add_(1)
    handle.sync_pwrite(locked, path)
    assert path.read_bytes() == locked.numpy().tobytes()
    assert handle.free_cpu_locked_tensor(locked) and not handle.free_cpu_locked_tensor(locked)


def test_random_ranges_change_nothing_else(handle, tmp_path):
    """Ranges of any offset, size and place in memory, many at once; the file is compared whole."""
    draw = random.Random(7)
    path = tmp_path / "file"
    content = bytearray(bytes_of(400_000).numpy().tobytes())
    path.write_bytes(content)
    memory = handle.new_cpu_locked_tensor(2_000_000, torch.empty(0, dtype=torch.uint8))
    memory.copy_(bytes_of(2_000_000, 1))
    used, end = 0, 0
    for _ in range(30):  # disjoint, in file and memory
        offset = end + draw.choice([0, 1, 511, PAGE - 1, draw.randrange(6000)])
        size = min(draw.choice([*SIZES[:6], 3 * PAGE, draw.randrange(40_000)]), 400_000 - offset)
        if draw.random() < 0.5:
            used = -(-used // PAGE) * PAGE + offset % PAGE  # as O_DIRECT wants it
        if size < 0:
            break
        handle.async_pwrite(memory[used : used + size], path, offset)
        content[offset : offset + size] = memory[used : used + size].numpy().tobytes()
        used, end = used + size, offset + size
    assert handle.wait() > 5
    assert path.read_bytes() == content
    pieces = []
    for _ in range(40):
        offset = draw.randrange(400_000)
        size = draw.randrange(400_000 - offset)
        into = torch.zeros(size + 1, dtype=torch.uint8)[draw.randrange(2) :][:size]
        pieces.append((into, offset))
        handle.async_pread(into, path, offset)
    assert handle.wait() == 40 and handle.wait() == 0
    for into, offset in pieces:
        assert into.numpy().tobytes() == content[offset : offset + len(into)]


@pytest.mark.parametrize("kind", KINDS)
def test_settings(kind, tmp_path):
    data = bytes_of(100_001)
    for block_size, queue_depth, threads, single_submit, overlap_events in (
        (1000, 1, 1, False, False),
        (1000, 5, 1, True, False),
        (PAGE, 64, 3, False, True),
        (PAGE, 3, 2, True, True),
        (1 << 20, 2, 1, False, False),
    ):
        handle = aio.aio_handle(block_size, queue_depth, single_submit, overlap_events, threads, kind)
        got = handle.get_single_submit(), handle.get_overlap_events()
        numbers = handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()
        assert got == (single_submit, overlap_events) and numbers == (block_size, queue_depth, threads)
        locked = handle.new_cpu_locked_tensor(100_001, data).copy_(data)
        assert handle.write(locked, tmp_path / "file", True) == 1
        locked.zero_()
        assert handle.read(locked, tmp_path / "file", True) == 1
        assert torch.equal(locked, data)
        handle.close()


def test_whole_pages_go_around_the_page_cache(handle, tmp_path, monkeypatch):
    """With O_DIRECT, where memory and file system allow it; the file system of ``tmp_path`` may not."""
    taken = []
    submit = handle._engine.submit

    class Watched:
        def submit(self, direct_fd, *rest):
            taken.append((direct_fd >= 0, rest[-2:]))
            return submit(direct_fd, *rest)

        def close(self):
            pass

    monkeypatch.setattr(handle, "_engine", Watched())
    page_aligned = handle.new_cpu_locked_tensor(5 * PAGE, torch.empty(0, dtype=torch.uint8)).zero_()
    path = tmp_path / "file"
    handle.sync_pwrite(page_aligned, path)
    handle.sync_pwrite(page_aligned[: 3 * PAGE + 5], path)
    handle.sync_pwrite(page_aligned[PAGE - 7 : 4 * PAGE], path, PAGE - 7)
    handle.sync_pwrite(page_aligned[:PAGE], path, 1)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        assert not any(direct for direct, _ in taken)
        return
    assert taken[:3] == [(True, (0, 5 * PAGE)), (True, (0, 3 * PAGE)), (True, (7, 3 * PAGE + 7))]
    assert taken[3][1] == (PAGE, PAGE), "nothing is direct"


def test_tensors_of_any_dtype_and_shape(handle, tmp_path):
    data = torch.randn(7, 9, dtype=torch.bfloat16)
    handle.write(data, tmp_path / "file")
    into = torch.zeros(63, dtype=torch.bfloat16)
    handle.read(into, tmp_path / "file")
    assert torch.equal(into.view(7, 9), data)
    with pytest.raises(ValueError, match="contiguous"):
        handle.read(data.t(), tmp_path / "file")
    with pytest.raises(ValueError, match="negative"):
        handle.read(data, tmp_path / "file", file_offset=-1)
    with pytest.raises(ValueError, match="async_op"):
        handle.pread(data, tmp_path / "file", True, True)
    if get_accelerator().device_name() == "cuda":
        on_device = data.to("cuda")
        handle.write(on_device, tmp_path / "device", True)
        back = torch.zeros_like(on_device)
        handle.async_pread(back, tmp_path / "device")
        handle.wait()
        assert torch.equal(back, on_device)


def test_validate_compares(handle, tmp_path, monkeypatch):
    data = bytes_of(1000)
    path = tmp_path / "file"
    handle.write(data, path, True)
    monkeypatch.setattr(handle, "sync_pread", lambda buffer, *rest: buffer.zero_())
    with pytest.raises(RuntimeError, match="not those of the tensor"):
        handle.read(torch.ones(1000, dtype=torch.uint8), path, True)


# ----------------------------------------------------------------------------------------------- errors


def check(error, path, number, operation, offset, wanted):
    found = error.value
    assert isinstance(found, OSError)
    assert (found.errno, found.filename, found.operation) == (number, str(path), operation)
    assert (found.offset, found.wanted) == (offset, wanted)
    assert str(path) in str(found) and str(wanted) in str(found)
    return found


def test_missing_folder(handle, tmp_path):
    path = tmp_path / "gone" / "file"
    for function in (handle.sync_pwrite, handle.async_pwrite, handle.sync_pread, handle.async_pread):
        with pytest.raises(aio.AsyncIOError) as error:
            function(torch.zeros(10), path, 8)
        check(error, path, errno.ENOENT, "write" if "write" in function.__name__ else "read", 8, 40)
    assert handle.wait() == 0


def test_short_file(handle, tmp_path):
    """A file that ends early says where; what is before the end is read. The handle goes on working."""
    path = tmp_path / "file"
    data = bytes_of(70_000)
    path.write_bytes(data.numpy().tobytes())
    for size, offset in ((70_001, 0), (100_000, 0), (20_000, 50_001), (1, 70_000), (5, 100_000)):
        into = handle.new_cpu_locked_tensor(size, data).zero_()
        with pytest.raises(aio.AsyncIOError, match="shorter") as error:
            handle.sync_pread(into, path, offset)
        found = check(error, path, errno.ENODATA, "read", offset, size)
        assert found.error_offset == max(70_000, offset) and found.done == max(0, 70_000 - offset)
        assert torch.equal(into[: found.done], data[offset:])
    whole = torch.zeros_like(data)
    handle.sync_pread(whole, path)
    assert torch.equal(whole, data)


def test_several_failures_at_once(handle, tmp_path):
    good, short = tmp_path / "good", tmp_path / "short"
    good.write_bytes(bytes(100))
    short.write_bytes(bytes(10))
    into = torch.full((100,), 7, dtype=torch.uint8)
    handle.async_pread(torch.zeros(100, dtype=torch.uint8), short)
    handle.async_pread(into, good)
    handle.async_pread(torch.zeros(90, dtype=torch.uint8), short, 5)
    with pytest.raises(aio.AsyncIOError, match="1 more reads or writes failed") as error:
        handle.wait()
    assert error.value.done == 10 and not into.any()
    assert handle.wait() == 0


def small_disk(folder):
    """Mounts a file system of 1 MB on ``folder``, where this user may."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    return done.returncode == 0


def test_full_disk(handle, tmp_path):
    if not small_disk(tmp_path):
        pytest.skip("needs the right to mount a file system of 1 MB")
    try:
        path = tmp_path / "file"
        data = bytes_of(3 << 20)
        with pytest.raises(aio.AsyncIOError, match="disk is full") as error:
            handle.sync_pwrite(data, path)
        found = check(error, path, errno.ENOSPC, "write", 0, 3 << 20)
        assert 0 < found.done <= 1 << 20 and found.error_offset <= 1 << 20
        path.unlink()  # room again; without it, the first page may be one that found none
        handle.sync_pwrite(data[:1000], path)
        into = torch.zeros_like(data[:1000])
        handle.sync_pread(into, path)
        assert torch.equal(into, data[:1000])
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_write_that_is_cut_short(handle, tmp_path):
    """At the largest size that the process may write, a request is answered with fewer bytes, the next with an error:
    the rest must be asked for, not be taken for written."""
    path = tmp_path / "file"
    data = handle.new_cpu_locked_tensor(300_000, torch.empty(0, dtype=torch.uint8)).fill_(3)
    too_large = pytest.raises(aio.AsyncIOError, match="larger than this process may write")
    with file_size_limit(100_000), too_large as error:
        handle.sync_pwrite(data, path)
    found = check(error, path, errno.EFBIG, "write", 0, 300_000)
    content = path.read_bytes()
    assert (found.error_offset, found.done, len(content), content.count(3)) == (100_000,) * 4


def test_requests_answered_with_fewer_bytes(tmp_path, monkeypatch):
    """The Python engine; the system calls move at most 1000 bytes."""
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: _preadv(fd, [views[0][:1000]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: _pwrite(fd, view[:1000], at))
    handle = handle_of("python")
    data = handle.new_cpu_locked_tensor(50_003, bytes_of(0)).copy_(bytes_of(50_003))
    handle.sync_pwrite(data, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()
    into = torch.zeros_like(data)
    handle.sync_pread(into, tmp_path / "file")
    assert torch.equal(into, data)


_preadv, _pwrite = os.preadv, os.pwrite


# ----------------------------------------------------------------------------------------------- beside the program


def test_other_threads_run_while_one_waits(handle, tmp_path):
    """A read from a pipe-like slow source cannot be had for regular files, so many reads are waited for, and a thread
    counts meanwhile."""
    path = tmp_path / "file"
    data = handle.new_cpu_locked_tensor(8 << 20, bytes_of(0)).zero_()
    handle.sync_pwrite(data, path)
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        begin = counted[0]
        for _ in range(8):
            handle.async_pread(data, path)
        handle.wait()
        assert counted[0] > begin
    finally:
        stop.set()
        thread.join()


def _use_of_parent(handle, path, queue):
    try:
        handle.sync_pread(torch.zeros(10), path)
    except RuntimeError as error:
        queue.put(str(error))
    else:
        queue.put("no error")
    del handle


def test_forked_child(handle, tmp_path):
    """A data loader's process has the handle and not its threads: it is told so, ends, and the parent goes on."""
    path = tmp_path / "file"
    handle.sync_pwrite(torch.zeros(10), path)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_use_of_parent, args=(handle, path, queue))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and "forked" in queue.get()
    assert handle.sync_pread(torch.zeros(10), path) == 1


def test_closed_handle_finishes_and_refuses(handle, tmp_path):
    data = bytes_of(1 << 20)
    handle.async_pwrite(data, tmp_path / "file")
    handle.close()
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="closed"):
        handle.sync_pwrite(data, tmp_path / "file")
    assert len(os.listdir("/proc/self/fd")) == before
    assert handle.wait() == 1


def test_files_are_closed(handle, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for index in range(20):
        handle.async_pwrite(bytes_of(10_000), tmp_path / str(index))
    handle.wait()
    with pytest.raises(aio.AsyncIOError):
        handle.sync_pread(bytes_of(20_000), tmp_path / "0")
    assert len(os.listdir("/proc/self/fd")) == before


# ----------------------------------------------------------------------------------------------- choice of the engine


def test_choice_of_the_engine(monkeypatch):
    monkeypatch.delenv("DS_AIO_ENGINE", raising=False)
    assert aio.aio_handle().engine == KINDS[0]
    for kind in KINDS:
        monkeypatch.setenv("DS_AIO_ENGINE", kind)
        assert aio.aio_handle().engine == kind
    monkeypatch.setenv("DS_AIO_ENGINE", "tape")
    with pytest.raises(ValueError, match="DS_AIO_ENGINE='tape' must be one of io_uring, libaio, threads, python"):
        aio.aio_handle()
    with pytest.raises(ValueError, match="queue_depth=0"):
        aio.aio_handle(queue_depth=0)


def test_without_a_compiler(monkeypatch, tmp_path):
    """One line says so, and Python threads do the work."""
    warned = []
    monkeypatch.setattr(engines.logger, "warning", warned.append)

    def fails(self, verbose=False):
        raise RuntimeError("no compiler\nand much more text")

    monkeypatch.setattr(AsyncIOBuilder, "load_native", fails)
    engines.native_module.cache_clear()
    try:
        first, second = aio.aio_handle(), aio.aio_handle()
        assert first.engine == second.engine == "python" and first._module is python_engine
        assert len(warned) == 1 and "no compiler" in warned[0] and "\n" not in warned[0]
        with pytest.raises(RuntimeError, match="io_uring"):
            aio.aio_handle(engine="io_uring")
        assert first.write(bytes_of(5), tmp_path / "file", True) == 1
    finally:
        engines.native_module.cache_clear()


def test_functions(tmp_path):
    data = torch.randn(1000)
    assert aio.aio_write(data, tmp_path / "file", validate=True) == 1
    into = torch.zeros(1000)
    assert aio.aio_read(into, tmp_path / "file", 4096, 2, True, False, True) == 1
    assert torch.equal(into, data)
