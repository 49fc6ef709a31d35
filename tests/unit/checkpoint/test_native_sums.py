# SPDX-License-Identifier: Apache-2.0
"""CRC-32 by the op, copies made beside other work, and files written with it, without it and while it is compiled."""

import errno
import fcntl
import logging
import os
import threading
import time
import zipfile
import zlib
from functools import partial

import numpy
import pytest
import torch

from deepspeed.checkpoint import block_stream, native_sums, record_sums, storage
from deepspeed.checkpoint.block_stream import Blocks, BlockStream
from deepspeed.checkpoint.host_copies import HostBuffers
from deepspeed.checkpoint.native_sums import NativeSums
from deepspeed.ops.op_builder import CheckpointBuilder

WHY_NOT = CheckpointBuilder().why_not()
needs_compiler = pytest.mark.skipif(WHY_NOT is not None, reason=f"the op cannot be compiled: {WHY_NOT}")
SIZES = [0, 1, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 255, 256, 257, 1023, 1024, 1025, 262_143, 262_144, 262_401]
LARGE = 10_000_019

# Before torch 2.6 checksums are torch's own affair.
sums_are_ours = pytest.mark.skipif(
    not hasattr(torch.serialization, "set_crc32_options"), reason="torch 2.6 lets others compute checksums"
)


@pytest.fixture(scope="module")
def op():
    return CheckpointBuilder().load()


@pytest.fixture
def fresh(monkeypatch):
    """Nothing is known of the op yet."""
    answer = native_sums._Answer()
    monkeypatch.setattr(native_sums, "_answer", answer)
    return answer


def noise(count, seed=0):
    return numpy.random.default_rng(seed).integers(0, 256, count, dtype=numpy.uint8)


def ways(op):
    return [NativeSums(op, level) for level in range(len(op.levels()))]


@needs_compiler
def test_sums_are_those_of_zlib(op):
    assert op.levels()[-1] == "portable"
    data = noise(LARGE + 16)
    for native in ways(op):
        for size in [*SIZES, *range(300), LARGE]:
            for start in (0, 1, 9):
                part = memoryview(data)[start : start + size]
                for before in (0, 0xFFFFFFFF, 0x12345678):
                    assert native.crc32(part, before) == zlib.crc32(part, before), (native._level, size, start)
                if size >= LARGE:
                    break
        chained, cuts = 0, [0, 1, 8, 100, 1123, 70_000, LARGE]
        for begin, end in zip(cuts, cuts[1:]):
            chained = native.crc32(memoryview(data)[begin:end], chained)
        assert chained == zlib.crc32(data[:LARGE])
    with pytest.raises(ValueError, match="no level"):
        NativeSums(op, 3).crc32(memoryview(b"x"))


@needs_compiler
def test_copies_are_copies_and_nothing_else_is_written(op):
    data = noise(1_000_003)
    for native in ways(op):
        for size in [*SIZES, 1_000_003]:
            for start, place in ((0, 64), (1, 64), (0, 67), (5, 1)):
                part = memoryview(data)[start : start + size]
                target = numpy.full(size + 200, 77, dtype=numpy.uint8)
                into = -target.ctypes.data % 64 + place
                assert native.crc32(part, target=target.ctypes.data + into) == zlib.crc32(part)
                end = into + len(part)
                assert bytes(target[into:end]) == bytes(part), (native._level, size, start, place)
                assert (target[:into] == 77).all() and (target[end:] == 77).all()


@needs_compiler
def test_sums_of_pieces_combine(op):
    data = noise(5000)
    for cut in (0, 1, 4, 1000, 4999, 5000):
        first, second = zlib.crc32(data[:cut]), zlib.crc32(data[cut:])
        for combined in (NativeSums(op).combined, record_sums.combined):
            assert combined(first, second, len(data) - cut) == zlib.crc32(data)
    assert NativeSums(op).combined(5, 7, 1 << 40) == record_sums.combined(5, 7, 1 << 40)


@needs_compiler
def test_copies_by_several_threads(op, monkeypatch):
    piece = 256 << 10
    sizes = [0, 1, piece - 1, piece, piece + 1, 5 * piece + 3]
    sources = [torch.from_numpy(noise(size, seed)) for seed, size in enumerate(sizes)]
    sums = tuple(zlib.crc32(source.numpy()) for source in sources)
    for native in ways(op):
        for beside, threads in ((0, 0), (0, 1), (0, 3), (1, 0), (2, 2)):
            monkeypatch.setattr(native_sums, "_threads_beside", lambda number=beside: number)
            targets = [torch.full((source.numel() + 8,), 77, dtype=torch.uint8) for source in sources]
            pairs = [(target[: source.numel()], source) for target, source in zip(targets, sources)]
            copies = native.copies(pairs, beside=True)
            found = []
            wait = partial(lambda one, into: into.append(one.finish(0)), copies, found)
            others = [threading.Thread(target=wait) for _ in range(2)]
            for other in others:
                other.start()
            assert copies.finish(threads) == sums
            assert all(torch.equal(target, source) for target, source in pairs)
            for other in others:
                other.join()
            assert found == [sums] * 2
            assert all((target[-8:] == 77).all() for target in targets)


@needs_compiler
def test_a_forked_child_does_not_wait_for_threads_that_it_has_not(op):
    copies = NativeSums(op).copies([(torch.zeros(9), torch.ones(9))], beside=True)
    child = os.fork()
    if child == 0:
        try:
            copies.finish(1)
        except RuntimeError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    copies.finish(1)


def state():
    values = {str(k): torch.from_numpy(noise(size, k)) for k, size in enumerate((1, 4096, 70_001, 300_000, 1 << 20))}
    return values | {"wide": torch.randn(50_000), "text": "x" * 5000, "again": values["3"], "none": torch.zeros(0)}


def sums_in(path):
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        found = {info.filename.partition("/")[2]: info.CRC for info in archive.infolist()}
    return {name: value for name, value in found.items() if not name.startswith(".")}


@needs_compiler
@pytest.mark.parametrize("direct", ["1", "0"])
def test_files_are_the_same_with_and_without(direct, op, fresh, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_CHECKPOINT_DIRECT", direct)
    fresh.asked, values = True, state()
    written = []
    for name, native in (("zlib", None), ("native", NativeSums(op))):
        fresh.native = native
        path = tmp_path / name
        storage.write_tensors(str(path), values, lambda part: BlockStream(part, Blocks(64 << 10, 2)))
        assert storage.wrong_sums(str(path)) == []
        written.append(sums_in(path))
    assert written[0] == written[1] and sum(map(bool, written[0].values())) >= 7
    (tmp_path / "bad").write_bytes((tmp_path / "native").read_bytes().replace(b"xxx", b"xyx", 1))
    assert "do not match" in storage.wrong_sums(str(tmp_path / "bad"))[0]


@sums_are_ours
@pytest.mark.parametrize("direct", ["1", "0"])
@pytest.mark.parametrize("writers", [0, 2])
def test_memory_that_stays_is_written_from_where_it_is(direct, writers, fresh, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_CHECKPOINT_DIRECT", direct)
    monkeypatch.setattr(block_stream, "WORTH_A_WRITE", 4096)
    fresh.asked, values = True, state()
    buffers = HostBuffers()
    copied = buffers.snapshot(values, rests=lambda tensor: tensor.numel() == 1 << 20)
    buffers.wait()
    buffers.settle()
    steady = buffers.steady()
    assert len(steady) == 1 and set(steady) == {copied["4"].data_ptr()}  # of those that are large, at whole pages
    # One that is known by a wrong sum shows that it is used, one at an odd address that it is not needed there.
    odd = copied["3"].data_ptr()
    steady |= {odd: (300_000, 12345), copied["2"].data_ptr(): (70_000, None)}
    from_there, refused, pwrite = [], [], os.pwrite

    def note(file, view, place):
        address = native_sums.address_of(view)
        from_there.extend(start for start, (size, _) in steady.items() if start <= address < start + size)
        try:
            return pwrite(file, view, place)
        except OSError:
            refused.append(address)
            raise

    monkeypatch.setattr(os, "pwrite", note)
    before = torch.serialization.get_crc32_options(), getattr(record_sums._alignment(), "storage_alignment", None)
    path, blocks = tmp_path / "x", Blocks(64 << 10, writers)
    storage.write_tensors(str(path), copied, lambda part: BlockStream(part, blocks), steady=steady)
    after = torch.serialization.get_crc32_options(), getattr(record_sums._alignment(), "storage_alignment", None)
    assert before == after and not refused
    if record_sums._alignment() is not None or direct == "0":
        assert from_there.count(copied["4"].data_ptr()) == 16
    monkeypatch.setattr(storage, "sums_are_checked", lambda: False)
    loaded = torch.load(path)
    assert all(torch.equal(loaded[key], value) for key, value in values.items() if isinstance(value, torch.Tensor))
    assert storage.wrong_sums(str(path)) != []  # the one that was said to be 12345
    storage.write_tensors(str(path), copied, lambda part: BlockStream(part, blocks))
    assert storage.wrong_sums(str(path)) == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EFAULT])
def test_memory_that_the_disk_cannot_read_goes_through_the_cache(code, fresh, tmp_path, monkeypatch):
    fresh.asked, pwrite, refused = True, os.pwrite, []

    def refuse(file, view, place):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT and place >= 65536:
            refused.append(place)
            raise OSError(code, os.strerror(code))
        return pwrite(file, view, place)

    monkeypatch.setattr(os, "pwrite", refuse)
    storage.write_tensors(str(tmp_path / "x"), state(), lambda part: BlockStream(part, Blocks(64 << 10, 2)))
    if not refused:
        pytest.skip("a file system without direct writes")
    assert storage.wrong_sums(str(tmp_path / "x")) == []


@pytest.fixture
def no_op(fresh, tmp_path, monkeypatch):
    """The op is nowhere compiled; a compiler is to be set."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("deepspeed.ops.op_builder.compile.tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(CheckpointBuilder, "installed_library", lambda self: None)
    monkeypatch.setattr(native_sums, "WORTH_THE_OP", 1)
    monkeypatch.setenv("RANK", "0")
    return fresh


def compiling():
    return [thread for thread in threading.enumerate() if thread.name == "compiles checkpoint op"]


def test_without_a_compiler_zlib_does_it(no_op, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("DeepSpeed").addHandler(handler)
    for name in ("first", "second"):
        storage.write_tensors(str(tmp_path / name), state())
        assert storage.wrong_sums(str(tmp_path / name)) == []
        for thread in compiling():
            thread.join(60)
    logging.getLogger("DeepSpeed").removeHandler(handler)
    assert no_op.native is None
    assert len(messages) == 1 and "no-such-compiler" in messages[0] and "zlib" in messages[0]


def test_a_save_does_not_wait_for_the_compiler(no_op, tmp_path, monkeypatch):
    slow, goes_on = tmp_path / "slow", tmp_path / "goes_on"
    slow.write_text(
        f'#!/bin/sh\nn=0\nwhile [ ! -e "{goes_on}" ] && [ $n -lt 3000 ]; do sleep 0.02; n=$((n + 1)); done\nexit 1\n'
    )
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    storage.write_tensors(str(tmp_path / "x"), state())
    assert storage.wrong_sums(str(tmp_path / "x")) == []
    if CheckpointBuilder().why_not() is None:
        assert compiling() and no_op.native is None
    goes_on.touch()
    deadline = time.monotonic() + 60
    while compiling() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not compiling() and no_op.native is None


@sums_are_ours
def test_no_native_op_is_asked_for_where_they_are_not_wanted(no_op, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_NATIVE_OPS", "0")
    storage.write_tensors(str(tmp_path / "x"), state())
    assert no_op.asked and no_op.native is None and not compiling()
