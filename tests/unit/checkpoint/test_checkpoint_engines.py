# SPDX-License-Identifier: Apache-2.0
"""How files of checkpoints are written: engines, streams, and writing while training goes on."""

import os
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint import (
    block_stream,
    files,
    folders,
    host_copies,
    native_sums,
    optimizer_transfer,
    record_sums,
    storage,
)
from deepspeed.checkpoint.block_stream import Blocks, BlockStream
from deepspeed.checkpoint.host_copies import HostBuffers, writable_state
from deepspeed.ops.op_builder import CheckpointBuilder
from deepspeed.runtime.checkpoint_engine import (
    CheckpointCommitInfo,
    DataStatesCheckpointEngine,
    DecoupledCheckpointEngine,
    FastCheckpointEngine,
    TorchCheckpointEngine,
    create_checkpoint_engine,
    unfinished,
)
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.model_checkpointing import CheckpointWriterFactory
from deepspeed.runtime.model_checkpointing.config import get_checkpoint_writer_config
from deepspeed.utils import safe_set_full_fp32_param
from unit.common import DistributedTest
from unit.runtime.engine_cases import batches_of, make_config, make_engine, run_window

ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}}
DECOUPLED = {"checkpoint": {"writer": {"type": "FAST", "decoupled": True, "io_buffer_size": 1000}}}
KEEP = 60.0  # seconds until a gate that nobody opens gives up


def make(stage=0, dtype="fp32", **top):
    return make_engine(make_config(stage, dtype, **{**ADAM, **top}))


def train(engine, steps, seed=0):
    for step in range(steps):
        run_window(engine, batches_of(dist.get_rank(), 1, "fp32", seed + step))
        engine.step()


def state_of(engine):
    """Masters and optimizer state of this rank, copied."""
    groups = engine.basic_optimizer.param_groups
    tensors = [p for group in groups for p in group["params"]]
    kept = [p.detach().clone() for p in tensors]
    for p in tensors:
        kept += [value.clone() for _, value in sorted(engine.basic_optimizer.state[p].items())]
    return kept


def check_same(left, right):
    assert len(left) == len(right) > 0
    assert all(torch.equal(a, b) for a, b in zip(left, right))


class Gate:
    """Keeps the files of this rank from being written until it is opened; or lets writing them fail."""

    def __init__(self, monkeypatch, fails=False):
        self.opened = threading.Event()
        write = storage.write_tensors

        def wait_and_write(path, *args, **kwargs):
            assert self.opened.wait(KEEP)
            if fails:
                raise OSError(28, "No space left on device")
            return write(path, *args, **kwargs)

        monkeypatch.setattr(storage, "write_tensors", wait_and_write)

    def open(self):
        self.opened.set()


def use_native_copies(monkeypatch, native):
    """Have all tensors copied by the op and written from where they are, or none."""
    least = 1 if native else 1 << 40
    monkeypatch.setattr(host_copies, "WORTH_A_SUM", least)
    monkeypatch.setattr(block_stream, "WORTH_A_WRITE", least)
    answer = native_sums._Answer()
    answer.asked = not native
    monkeypatch.setattr(native_sums, "_answer", answer)
    monkeypatch.setattr(native_sums, "WORTH_THE_OP", least)
    if native and CheckpointBuilder().why_not() is None:
        CheckpointBuilder().load()


def wait_for_writer(engine):
    deadline = time.monotonic() + KEEP
    while engine.checkpoint_engine.is_writing() and time.monotonic() < deadline:
        time.sleep(0.01)


def load_fresh(stage, folder, dtype="fp32", tag=None):
    engine = make(stage, dtype)
    path, client = engine.load_checkpoint(folder, tag)
    return engine, path, client


class TestDecoupledSave(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("stage, native", [(0, False), (0, True), (1, True), (2, False), (3, True)])
    def test_values_are_those_of_the_call(self, stage, native, tmpdir, monkeypatch):
        use_native_copies(monkeypatch, native)
        folder = str(tmpdir)
        engine = make(stage, **DECOUPLED)
        train(engine, 2)
        noted = {"list": [1], "tensor": torch.ones(3)}
        gate = Gate(monkeypatch)
        before = state_of(engine)
        assert engine.save_checkpoint(folder, client_state={"noted": noted}) is True
        noted["list"].append(2)
        noted["tensor"].zero_()
        train(engine, 2, seed=10)  # asks at each boundary whether the checkpoint is written
        assert not os.path.exists(os.path.join(folder, "latest"))
        assert not os.path.exists(os.path.join(folder, "global_step2"))
        gate.open()
        wait_for_writer(engine)
        train(engine, 1)
        assert files.read_latest(folder) == "global_step2"
        assert folders.is_whole(os.path.join(folder, "global_step2"))
        other, _, client = load_fresh(stage, folder)
        check_same(state_of(other), before)
        assert other.global_steps == 2
        assert client["noted"]["list"] == [1] and client["noted"]["tensor"].tolist() == [1.0] * 3
        for one in (engine, other):
            one.destroy()

    def test_a_step_waits_for_what_is_copied_beside(self, tmpdir, monkeypatch):
        """Masters and state are copied beside; whatever writes to them next waits for that, or does it."""
        monkeypatch.setattr(optimizer_transfer, "WORTH_A_WAIT", 0)
        settle, copied = HostBuffers.settle, []

        def slowly(buffers, threads=0):
            copied.append(len(buffers._later))
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.3)
            settle(buffers, threads)

        monkeypatch.setattr(HostBuffers, "settle", slowly)
        # With the op copies begin by themselves: here no thread does, so that all are left to those who wait.
        monkeypatch.setattr(native_sums, "_threads_beside", lambda: 0)
        for stage, native in ((0, False), (1, False), (1, True), (2, True), (3, False), (3, True)):
            use_native_copies(monkeypatch, native)
            copied.clear()
            folder = f"{tmpdir}/{stage}{native}"
            engine = make(stage, **DECOUPLED)
            train(engine, 2)
            for tag in ("step", "accessor"):
                before = state_of(engine)
                engine.save_checkpoint(folder, tag)
                if tag == "step":
                    train(engine, 1, seed=5)
                for weight in engine.module.parameters() if tag == "accessor" else ():
                    if weight.requires_grad:
                        safe_set_full_fp32_param(weight, torch.zeros(getattr(weight, "ds_shape", weight.shape)))
                assert not all(torch.equal(*pair) for pair in zip(before, state_of(engine)))
                other, _, _ = load_fresh(stage, folder, tag=tag)
                check_same(state_of(other), before)
                other.destroy()
            if stage:
                engine.save_checkpoint(folder, "direct")
                next(iter(engine.optimizer.state.values()))["exp_avg"].add_(1)
                with pytest.raises(storage.CheckpointError, match="changed while they were copied"):
                    engine.load_checkpoint(folder, "step")
            engine.destroy()
            assert max(copied) == (0 if stage == 0 else 3), "master and two moments of one group"

    def test_the_next_save_waits(self, tmpdir, monkeypatch):
        folder = str(tmpdir)
        engine = make(2, **DECOUPLED)
        gate = Gate(monkeypatch)
        train(engine, 1)
        engine.save_checkpoint(folder)
        threading.Timer(0.3, gate.open).start()
        engine.save_checkpoint(folder, tag="second")
        assert folders.is_whole(os.path.join(folder, "global_step1"))
        engine.load_checkpoint(folder, "second")  # waits as well
        assert files.read_latest(folder) == "second"
        engine.destroy()

    def test_latest_waits_for_the_slowest_rank(self, tmpdir, monkeypatch):
        folder = str(tmpdir)
        engine = make(1, **DECOUPLED)
        train(engine, 1)
        gate = Gate(monkeypatch)
        if dist.get_rank() == 0:
            gate.open()
        engine.save_checkpoint(folder)
        if dist.get_rank() == 0:
            wait_for_writer(engine)
        train(engine, 1)
        assert files.read_latest(folder) is None
        gate.open()
        wait_for_writer(engine)
        train(engine, 1)
        assert files.read_latest(folder) == "global_step1"
        engine.destroy()

    @pytest.mark.parametrize("waits_in", ["save", "step", "load"])
    def test_an_error_of_one_writer_reaches_every_rank(self, waits_in, tmpdir, monkeypatch):
        folder = str(tmpdir)
        engine = make(1, **DECOUPLED)
        train(engine, 1)
        engine.save_checkpoint(folder, "good")
        engine.load_checkpoint(folder, "good")
        gate = Gate(monkeypatch, fails=dist.get_rank() == 1)
        gate.open()
        engine.save_checkpoint(folder, "bad")
        wait_for_writer(engine)
        with pytest.raises(storage.CheckpointError, match="save 'bad'.*rank 1: OSError.*No space left"):
            if waits_in == "step":
                train(engine, 1)
            elif waits_in == "load":
                engine.load_checkpoint(folder)
            else:
                engine.save_checkpoint(folder, "next")
        monkeypatch.undo()
        assert files.read_latest(folder) == "good" and files.tags_in(folder) == ["good"]
        engine.save_checkpoint(folder, "after")
        engine.load_checkpoint(folder, "after")
        assert files.read_latest(folder) == "after"
        engine.destroy()

    def test_what_cannot_be_copied_is_said_at_once(self, tmpdir):
        engine = make(1, **DECOUPLED)
        train(engine, 1)
        state = {"lock": threading.Lock()} if dist.get_rank() == 0 else {}
        with pytest.raises(storage.CheckpointError, match="rank 0: TypeError"):
            engine.save_checkpoint(str(tmpdir), client_state=state)
        assert files.tags_in(str(tmpdir)) == []
        engine.destroy()

    def test_destroy_completes_it_without_the_others(self, tmpdir):
        engine = make(2, **DECOUPLED)
        train(engine, 1)
        engine.save_checkpoint(str(tmpdir))
        if dist.get_rank() == 1:
            time.sleep(0.5)  # rank 0 does not wait for the call of this one
        engine.destroy()
        if dist.get_rank() == 0:
            assert files.read_latest(str(tmpdir)) == "global_step1"
            assert folders.is_whole(os.path.join(str(tmpdir), "global_step1"))

    def test_a_rank_that_never_writes_leaves_the_previous_checkpoint(self, tmpdir, monkeypatch):
        folder = str(tmpdir)
        engine = make(2, **DECOUPLED)
        train(engine, 1)
        engine.save_checkpoint(folder, "good")
        engine.load_checkpoint(folder, "good")
        gate = Gate(monkeypatch)
        if dist.get_rank() == 0:
            gate.open()
        engine.save_checkpoint(folder, "bad")
        save = unfinished._current.pop()
        if dist.get_rank() == 0:
            with pytest.raises(storage.CheckpointError, match="zero_pp_rank_1_mp_rank_00_optim_states.pt"):
                save.complete_alone(patience=0.3)
            assert files.read_latest(folder) == "good" and folders.is_whole(os.path.join(folder, "good"))
        dist.barrier()
        gate.open()
        engine.destroy()

    def test_a_rank_that_fails_at_the_end_is_not_waited_for(self, tmpdir, monkeypatch):
        engine = make(2, **DECOUPLED)
        train(engine, 1)
        Gate(monkeypatch, fails=dist.get_rank() == 1).open()
        engine.save_checkpoint(str(tmpdir), "bad")
        begun = time.monotonic()
        with pytest.raises(storage.CheckpointError, match="bad"):
            unfinished.finish_alone()
        assert time.monotonic() - begun < KEEP and files.read_latest(str(tmpdir)) is None
        engine.destroy()


SCRIPT = """
import os, sys, torch, deepspeed
model = torch.nn.Linear(200, 200)
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
          "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
          "checkpoint": {"writer": {"decoupled": True}}}
engine = deepspeed.initialize(model=model, config=config)[0]
engine.backward(engine(torch.ones(1, 200)).sum())
engine.step()
os.chdir(sys.argv[1])
engine.save_checkpoint("here")
os.chdir("/")
if sys.argv[2] == "destroy":
    torch.distributed.destroy_process_group()
elif sys.argv[2] == "raise":
    raise RuntimeError("the script ends")
"""


@pytest.mark.parametrize("end", ["return", "destroy", "raise"])
def test_the_end_of_the_program_waits(end, tmp_path):
    env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": "0", "PYTHONPATH": str(Path(deepspeed.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), end], env=env, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode != 0) == (end == "raise"), done.stderr
    assert files.read_latest(str(tmp_path / "here")) == "global_step1"
    assert folders.is_whole(str(tmp_path / "here" / "global_step1"))


def test_a_forked_child_does_not_complete_what_its_parent_saves():
    unfinished._current.append(None)
    child = os.fork()
    if child == 0:
        os._exit(len(unfinished._current))
    assert unfinished._current.pop() is None
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Noting(TorchCheckpointEngine):
    """Notes what is asked of it."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def create(self, info):
        self.calls.append(("create", info.tag))

    def save(self, state_dict, path):
        self.calls.append(("save", os.path.basename(path)))
        super().save(state_dict, path)

    def commit(self, info):
        self.calls.append(("commit", info.tag))
        return super().commit(info)


class TestWritersOfAnEngine(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("kind", ["FAST", "PYTHON"])
    def test_at_once(self, kind, tmpdir):
        engine = make(2, checkpoint={"writer": {"type": kind, "io_buffer_size": 333}})
        assert engine.checkpoint_writer_enabled() and engine.checkpoint_serialization_enabled()
        assert isinstance(engine.checkpoint_engine, FastCheckpointEngine)
        train(engine, 2)
        engine.save_checkpoint(str(tmpdir))
        assert files.read_latest(str(tmpdir)) == "global_step2"
        other, _, _ = load_fresh(2, str(tmpdir))
        check_same(state_of(other), state_of(engine))
        for one in (engine, other):
            one.destroy()

    @pytest.mark.parametrize("decoupled", [False, True])
    def test_mock_leaves_nothing(self, decoupled, tmpdir):
        engine = make(2, checkpoint={"writer": {"type": "MOCK", "decoupled": decoupled}})
        train(engine, 1)
        assert engine.save_checkpoint(os.path.join(str(tmpdir), "none"))
        train(engine, 1)
        assert os.listdir(str(tmpdir)) == []
        engine.destroy()

    @pytest.mark.parametrize("stage", [1, 2])
    def test_masters_from_fp32_weights_or_not(self, stage, tmpdir):
        engine = make(stage, "bf16")
        for step in range(2):
            run_window(engine, batches_of(dist.get_rank(), 1, "bf16", step))
            engine.step()
        engine.save_checkpoint(str(tmpdir))
        expected = state_of(engine)
        for from_fp32 in (True, False):
            zero = {"stage": stage, "load_from_fp32_weights": from_fp32}
            other = make(stage, "bf16", zero_optimization=zero)
            other.load_checkpoint(str(tmpdir))
            found = state_of(other)
            check_same(found[1:], expected[1:])
            rounded = expected[0].bfloat16().float()
            assert not torch.equal(rounded, expected[0])
            assert torch.equal(found[0], expected[0] if from_fp32 else rounded)
            other.destroy()
        engine.destroy()

    def test_one_of_the_users_own(self, tmpdir):
        engine = make(1)
        assert type(engine.checkpoint_engine) is TorchCheckpointEngine and not engine.checkpoint_writer_enabled()
        train(engine, 1)
        engine.checkpoint_engine = Noting()
        engine.save_checkpoint(str(tmpdir), "mine")
        names = [files.optim_file(dist.get_rank(), 0, False)]
        names = [files.model_file(0), *names] if dist.get_rank() == 0 else names
        saves = [("save", name) for name in names]
        assert engine.checkpoint_engine.calls == [("create", "mine"), *saves, ("commit", "mine")]
        assert files.read_latest(str(tmpdir)) == "mine"
        engine.destroy()


def test_engines_by_config():
    def of(**section):
        return create_checkpoint_engine(DeepSpeedConfig({"train_batch_size": 1, **section}), None, 0, False, False)

    assert type(create_checkpoint_engine(None)) is type(of()) is TorchCheckpointEngine
    fast, decoupled = of(checkpoint={"writer": {}}), of(checkpoint={"writer": {"decoupled": True}})
    assert type(fast) is FastCheckpointEngine and not fast.is_decoupled()
    assert type(decoupled) is DecoupledCheckpointEngine and decoupled.is_decoupled()
    assert decoupled.is_data_parallel_writer(0) and not decoupled.is_data_parallel_writer(1)
    assert fast.preserves_storage_sharing()
    with pytest.raises(NotImplementedError, match="DataStates"):
        of(datastates_ckpt={"host_cache_size": 1})
    with pytest.raises(NotImplementedError, match="datastates_ckpt"):
        DataStatesCheckpointEngine(None, 0)
    with pytest.raises(NotImplementedError, match="data_parallel"):
        of(checkpoint={"writer": {"data_parallel": "REPLICA"}})
    for option in ("io_buffer_size", "io_multiplier"):
        with pytest.raises(ValueError, match=option):
            of(checkpoint={"writer": {option: 0}})


def test_an_engine_alone(tmp_path):
    config = DeepSpeedConfig({"train_batch_size": 1, **DECOUPLED})
    engine, info = create_checkpoint_engine(config), CheckpointCommitInfo("t", str(tmp_path), True)
    engine.makedirs(tmp_path / "a" / "b", exist_ok=True)
    engine.makedirs(tmp_path / "a" / "b", exist_ok=True)
    path, value = str(tmp_path / "a" / "b" / "x.pt"), torch.arange(7.0)
    engine.create(info)
    assert engine.get_commit_info() == info
    engine.save({"x": value}, path)
    value.zero_()
    assert engine.commit(info) is True
    assert engine.get_commit_info() is None
    assert torch.equal(engine.load(path)["x"], torch.arange(7.0))
    assert engine.load(path, map_location="meta")["x"].device.type == "meta"
    with pytest.raises(FileNotFoundError):
        engine.load(path + "no")
    engine.create(info)
    engine.save({"x": value}, str(tmp_path / "absent" / "x.pt"))
    with pytest.raises(FileNotFoundError):
        engine.commit(info)
    engine.cleanup()
    engine.cleanup()


@pytest.mark.parametrize("kind", ["FAST", "PYTHON", "MOCK"])
@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("double, at_once", [(True, 1), (True, 3), (False, 1)])
def test_streams(kind, size, double, at_once, tmp_path):
    section = {"type": kind, "io_buffer_size": size, "io_buffer_double": double, "io_multiplier": at_once}
    section["show_statistics"] = True
    factory = CheckpointWriterFactory(get_checkpoint_writer_config({"checkpoint": {"writer": section}}), None, None)
    content = bytes(range(256)) * (3 if size < 4096 else 50)
    with factory.create_writer(str(tmp_path / "x"), False) as stream:
        for begin, end in ((0, 0), (0, 1), (1, 300), (300, 307), (307, len(content))):
            assert stream.write(memoryview(content)[begin:end]) == end - begin
            assert stream.tell() == end
        stream.flush()
        assert kind == "MOCK" or (tmp_path / "x").read_bytes() == content
        stream.write(b"end")
        stream.flush()
    stream.close()
    assert stream.closed
    assert (kind == "MOCK" and not (tmp_path / "x").exists()) or (tmp_path / "x").read_bytes() == content + b"end"
    factory.release_writer()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device without room")
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("size", [10, 1000])
def test_a_stream_says_that_the_disk_is_full(double, size):
    section = {"type": "FAST", "io_buffer_size": size, "io_buffer_double": double}
    factory = CheckpointWriterFactory(get_checkpoint_writer_config({"checkpoint": {"writer": section}}), None, None)
    stream = factory.create_writer("/dev/full", False)
    with pytest.raises(OSError, match="No space left"):
        stream.write(b"x" * 100)
        stream.flush()
    stream.close()


@pytest.mark.skipif(not hasattr(torch.serialization, "set_crc32_options"), reason="before torch 2.6 they are torch's")
@pytest.mark.parametrize("wanted", ["1", "0"])
def test_checksums_are_those_of_torch(wanted, tmp_path, monkeypatch):
    """In blocks of which many are needed, with and without the page cache; torch's own switch is as it was."""
    monkeypatch.setenv("DS_CHECKPOINT_DIRECT", wanted)
    monkeypatch.setattr(record_sums, "CHUNK", 10_007 * 64)
    state = {
        "large": torch.randn(700_000),
        "list": [torch.zeros(0), torch.tensor(3), torch.zeros(0)],
        "text": "x" * 9000,
    }
    state["like a descriptor"] = torch.tensor([0x08074B50, 0, 16, 16], dtype=torch.int32)
    state["like a header"] = torch.tensor([0x04034B50] * 8, dtype=torch.int32)
    torch.save(state, tmp_path / "torchs")
    blocks = Blocks(64 << 10, 2)
    for file in ("ours", "again"):
        size = storage.write_tensors(str(tmp_path / file), state, lambda part: BlockStream(part, blocks))
        assert size == (tmp_path / file).stat().st_size
    with zipfile.ZipFile(tmp_path / "torchs") as theirs, zipfile.ZipFile(tmp_path / "again") as ours:
        assert ours.testzip() is None
        names = {info.filename.partition("/")[2]: info.CRC for info in theirs.infolist()}
        own = {info.filename.partition("/")[2]: info.CRC for info in ours.infolist()}
        names.pop(".data/serialization_id"), own.pop(".data/serialization_id")
        assert own == names and sum(map(bool, own.values())) >= 8
    assert torch.serialization.get_crc32_options() is True
    assert storage.wrong_sums(str(tmp_path / "ours")) == []
    assert torch.equal(torch.load(tmp_path / "ours")["large"], state["large"])


def test_checksums_of_pieces():
    data = bytes(range(251)) * 40
    for cut in (0, 1, 4, 1000, len(data)):
        first, second = zlib.crc32(data[:cut]), zlib.crc32(data[cut:])
        assert record_sums.combined(first, second, len(data) - cut) == zlib.crc32(data)


def test_torch_files_that_cannot_be_followed_pass_unchanged():
    crew = record_sums.crew_of_sums()
    sums = record_sums.RecordSums(crew)
    for piece in (b"PK\x03\x04" + bytes(30), b"PK\x07\x08" + bytes(12), b"anything"):
        view, pending = sums.through(memoryview(piece))
        assert bytes(view) == piece and pending is None
    assert not sums.complete
    crew.close()


def test_host_copies_use_their_memory_again():
    buffers = HostBuffers()
    live = {"a": torch.arange(6.0).view(2, 3).t(), "b": [torch.ones(4, dtype=torch.bfloat16), torch.tensor(2)], "c": 3}
    first = buffers.snapshot(live)
    buffers.wait()
    live["a"].zero_()
    assert torch.equal(first["a"], torch.arange(6.0).view(2, 3).t()) and first["c"] == 3
    places = [first["a"].data_ptr(), first["b"][0].data_ptr()]
    second = buffers.snapshot(live)
    buffers.wait()
    assert second["a"].data_ptr() != first["a"].data_ptr()  # the first one may still be read
    buffers.release()
    third = buffers.snapshot({"x": live["a"]})
    assert third["x"].data_ptr() in (first["a"].data_ptr(), second["a"].data_ptr())
    buffers.wait()
    buffers.release()
    assert sum(len(kept) for kept in buffers._free.values()) == 1  # what it had no use for is given back
    assert len(places) == 2


def test_files_of_the_old_format_are_read(tmp_path):
    path = str(tmp_path / "old.pt")  # checkpoint_serialization: false
    torch.save({"w": torch.arange(5.0)}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(storage.read_tensors(path)["w"], torch.arange(5.0))
    (tmp_path / "cut.pt").write_bytes(Path(path).read_bytes()[:-8])
    with pytest.raises(storage.CheckpointError):
        storage.read_tensors(str(tmp_path / "cut.pt"))


def test_tied_tensors_are_written_once(tmp_path):
    weight = torch.randn(100, 100)
    state = {"in": weight, "out": weight.view(100, 100), "half": weight[:50], "empty": [torch.empty(0), torch.empty(0)]}
    size = storage.write_tensors(str(tmp_path / "x"), writable_state(state))
    assert 60_000 < size < 70_000  # 40,000 bytes and the half of them again
    buffers = HostBuffers()
    copied = buffers.snapshot(state)
    assert copied["in"].data_ptr() == copied["out"].data_ptr() != weight.data_ptr()
    assert torch.equal(copied["half"], weight[:50])


def test_a_state_to_be_written_at_once_is_not_copied():
    flat = torch.zeros(1000)
    one = torch.ones(2, dtype=torch.bfloat16)[1:].expand(1).as_strided((1,), (0,))
    state = writable_state({"whole": flat, "part": flat[:10], "turned": torch.zeros(3, 5).t(), "one": one})
    assert state["part"].data_ptr() == flat.data_ptr()
    assert torch.equal(state["one"], one) and state["one"].untyped_storage().nbytes() == 2
    assert state["whole"].data_ptr() == flat.data_ptr()
    assert state["part"].untyped_storage().nbytes() == 40
    assert state["turned"].is_contiguous() and state["turned"].shape == (5, 3)
