# SPDX-License-Identifier: Apache-2.0
"""Optimizer state that rests in files: values, bounds, order of reads and writes, failures of the disk."""

from __future__ import annotations

import gc
import multiprocessing
import os
from types import SimpleNamespace

import pytest
import torch

from deepspeed.runtime.gradients.host_memory import HostMemory
from deepspeed.runtime.swap_tensor import swap_folder
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.swap_tensor.buffer_pool import PAGE, BufferPool, aligned_buffer
from deepspeed.runtime.swap_tensor.errors import SwapError
from deepspeed.runtime.swap_tensor.file_home import FileHome, Phase
from deepspeed.runtime.swap_tensor.swap_folder import SwapFolder
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
from unit.util import file_size_limit

NUMEL = [5000, 3, 1024, 7001, 1]


@pytest.fixture(autouse=True)
def python_threads(monkeypatch):
    """No compiler is waited for; engines have tests of their own."""
    monkeypatch.setenv("DS_AIO_ENGINE", "python")


class Groups:
    """Flat groups with a master each, and an optimizer's state that appears in the first step."""

    def __init__(self, path, numel=NUMEL, **settings):
        config = DeepSpeedZeroOffloadOptimizerConfig(device="nvme", nvme_path=path, **settings)
        record = SimpleNamespace(name="weight")
        groups = [
            SimpleNamespace(index=i, shard_numel=n, dtype=torch.float32, records=[record]) for i, n in enumerate(numel)
        ]
        self.live: list[dict[str, torch.Tensor]] = []
        self.expected: list[dict[str, torch.Tensor]] = []
        self.home = FileHome(groups, config, AIO_DEFAULT_DICT, rank=3)
        for i, n in enumerate(numel):
            values = torch.randn(n)
            self.live.append({"master": self.home.empty(n, torch.float32).copy_(values)})
            self.expected.append({"master": values})
            self.home.admit(i, lambda i=i: dict(self.live[i]))

    def step(self, order=None):
        """All groups change; two entries are made in the first step."""
        for batch in self.home.visit(range(len(self.live)) if order is None else order):
            for i in batch:
                self.change(i)

    def change(self, i):
        live, expected = self.live[i], self.expected[i]
        for name, dtype in (("first", torch.float32), ("second", torch.bfloat16)):
            if name not in live:
                live[name] = torch.zeros(live["master"].numel(), dtype=dtype)
                expected[name] = torch.zeros(live["master"].numel(), dtype=dtype)
        for name, tensor in live.items():
            assert torch.equal(tensor, expected[name]), (i, name)
            change = torch.randn(tensor.numel()).to(tensor.dtype)
            tensor.add_(change)
            expected[name] = expected[name] + change

    def check(self, order=None):
        for batch in self.home.visit(range(len(self.live)) if order is None else order, write=False):
            for i in batch:
                for name, tensor in self.live[i].items():
                    assert torch.equal(tensor, self.expected[i][name]), (i, name)

    def phases(self):
        return [group.phase for group in self.home._groups.values()]


PIPELINES = [
    {"buffer_count": 3},
    {"buffer_count": 9, "pipeline_read": True, "pipeline_write": True},
    {"buffer_count": 4, "pipeline_read": True, "pipeline_write": True},
    {"buffer_count": 1, "pipeline_read": True},
    {"buffer_count": 6, "pipeline_write": True},
]


@pytest.mark.parametrize("settings", PIPELINES)
def test_values_survive(tmp_path, settings):
    groups = Groups(tmp_path, **settings)
    tensors = [live["master"] for live in groups.live]
    for _ in range(2):
        groups.step()
    groups.check(order=[2, 0, 4, 3, 1])
    groups.step(order=[4, 4, 1])
    with groups.home.resident(3):
        groups.change(3)
    groups.home.settle()
    for i in range(len(NUMEL)):
        found = groups.home.values(i)
        assert found.keys() == groups.expected[i].keys()
        assert all(torch.equal(found[name], value) for name, value in groups.expected[i].items())
    assert all(before is live["master"] for before, live in zip(tensors, groups.live)), "identities are kept"
    assert groups.home.pool.most_made <= max(3, settings["buffer_count"])
    groups.home.close()


def test_away_from_memory_there_is_a_stand_in(tmp_path):
    groups = Groups(tmp_path)
    groups.step()
    for live, numel in zip(groups.live, NUMEL):
        for tensor in live.values():
            assert tensor.shape == (numel,) and tensor.untyped_storage().nbytes() <= 4 and tensor.isnan().all()
    groups.home.close()


def test_the_next_is_read_and_the_last_is_written_meanwhile(tmp_path):
    groups = Groups(tmp_path, buffer_count=9, pipeline_read=True, pipeline_write=True)
    groups.step()
    groups.home.settle()
    groups.home._reap = lambda: None  # a disk that is slower than this test
    start_read = groups.home.handle.start_read
    begun = []
    groups.home.handle.start_read = lambda *args: begun.append(args[1].path) or start_read(*args)
    written = []
    for batch in groups.home.visit([0, 3, 2]):
        groups.change(batch[0])
        written.append({path[-7:] for path in begun})
        if batch == [3]:
            assert groups.phases()[2] in (Phase.READING,), "read ahead"
            group = groups.home._groups[0]
            assert group.phase is Phase.WRITING and group.transfers, "written behind"
        if batch == [2]:
            break
    assert written == [{"0.state", "3.state"}, {"0.state", "3.state", "2.state"}, {"0.state", "3.state", "2.state"}]
    groups.home.close()
    one_by_one = Groups(tmp_path, buffer_count=9)
    one_by_one.step()
    for batch in one_by_one.home.visit(range(5)):
        others = [phase for i, phase in enumerate(one_by_one.phases()) if i != batch[0]]
        assert others == [Phase.RESTING] * 4
    one_by_one.home.close()


def test_a_visit_that_only_reads_writes_nothing(tmp_path):
    groups = Groups(tmp_path)
    groups.step()
    with file_size_limit(0):
        groups.check()
        groups.home.settle()
    groups.home.close()


def test_tensors_that_were_replaced_or_went(tmp_path):
    """What a checkpoint loads between visits, or an optimizer makes anew in a step, has the values that count."""
    groups = Groups(tmp_path, numel=[600, 40])
    groups.step()
    groups.live[0]["first"] = torch.full((600,), 5.0)
    groups.expected[0]["first"] = torch.full((600,), 5.0)
    assert torch.equal(groups.home.values(0)["first"], groups.expected[0]["first"])
    groups.check()
    groups.check()
    groups.live[1]["first"] = torch.full((40,), 3.0, dtype=torch.float64)  # of another kind
    groups.expected[1]["first"] = groups.live[1]["first"].clone()
    groups.step()
    del groups.live[1]["second"], groups.expected[1]["second"]
    groups.step()
    groups.check()
    assert groups.home.pool.made <= 4
    groups.home.close()


def test_a_visit_that_was_abandoned(tmp_path):
    """The optimizer raised in the middle: what it had changed is kept, and the home goes on."""
    groups = Groups(tmp_path, buffer_count=6, pipeline_read=True, pipeline_write=True)
    groups.step()
    visit = groups.home.visit([0, 3, 2])
    groups.change(next(visit)[0])
    groups.change(next(visit)[0])
    again = groups.home.visit([2, 0])
    assert next(again) == [2]
    del visit  # its end must not end the other
    groups.change(2)
    again.close()
    groups.check()
    groups.home.close()


# ----------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("settings", PIPELINES[:2])
def test_a_write_that_fails_loses_nothing(tmp_path, settings):
    """The step goes on in memory; the next one raises before it changes anything, and works when there is space."""
    groups = Groups(tmp_path, **settings)
    groups.step()
    groups.home.settle()
    with file_size_limit(0):
        groups.step()
        with pytest.raises(SwapError, match=r"rank 3: .* flat group 0 \(weight to weight\).*Nothing is lost"):
            groups.home.settle()
        assert Phase.HELD in groups.phases()
        groups.check()
        for i in range(len(NUMEL)):
            found = groups.home.values(i)
            assert all(torch.equal(found[name], value) for name, value in groups.expected[i].items())
        for _ in range(2):
            with pytest.raises(SwapError) as error:
                groups.step()
            assert "No such" not in str(error.value.__cause__) and error.value.__cause__.operation == "write"
    groups.step()
    assert groups.home.pool.made <= max(3, settings["buffer_count"]), "buffers beyond the bound are let go of"
    groups.home.settle()
    groups.check()
    groups.home.close()


def test_no_space_at_all(tmp_path):
    with file_size_limit(0), pytest.raises(SwapError, match="cannot be written"):
        Groups(tmp_path)


def test_file_that_was_cut_off(tmp_path):
    groups = Groups(tmp_path)
    groups.step()
    path = groups.home.folder.path / "group3.state"
    os.truncate(path, 3 * PAGE)
    with pytest.raises(SwapError, match=r"flat group 3 .*cannot be read back from .*group3.state"):
        groups.check()
    with pytest.raises(SwapError, match="cannot be read back"):
        groups.home.values(3)
    groups.check(order=[0, 1, 2, 4])
    groups.home.close()


def test_folder_that_was_removed(tmp_path):
    """The files are open, so what is in them stays."""
    groups = Groups(tmp_path)
    groups.step()
    for file in groups.home.folder.path.iterdir():
        file.unlink()
    groups.home.folder.path.rmdir()
    groups.step()
    groups.check()
    assert torch.equal(groups.home.values(0)["first"], groups.expected[0]["first"])
    groups.home.close()
    assert os.listdir(tmp_path) == []


def test_close_leaves_nothing_behind(tmp_path):
    groups = Groups(tmp_path, buffer_count=9, pipeline_write=True)
    gc.collect()  # what other tests left behind is not closed in between
    before = len(os.listdir("/proc/self/fd"))
    again = Groups(tmp_path, buffer_count=9, pipeline_write=True)
    again.step()
    assert len(os.listdir(tmp_path)) == 4, "two folders and their locks"
    again.home.close()
    again.home.close()
    assert len(os.listdir("/proc/self/fd")) == before
    groups.step()
    groups.check()
    groups.home.close()
    assert os.listdir(tmp_path) == []


# ----------------------------------------------------------------------------------------------- folder and buffers


def test_folder_must_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nvme_path '.*/missing' does not exist .*rank 3.*Mount the disk"):
        Groups(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        Groups(tmp_path / "file")


def _own_a_folder(path, queue, go_on):
    folder = SwapFolder(path, 0, "key")
    (folder.path / "data").write_text("x")
    queue.put(str(folder.path))
    go_on.wait(60)
    os._exit(1)  # as if killed: no clean-up


def test_folders_of_dead_processes_are_removed_and_others_stay(tmp_path, monkeypatch):
    context = multiprocessing.get_context("fork")
    queue, go_on = context.SimpleQueue(), context.Event()
    other = context.Process(target=_own_a_folder, args=(tmp_path, queue, go_on))
    other.start()
    path = queue.get()
    mine = SwapFolder(tmp_path, 0, "key")
    assert os.path.exists(os.path.join(path, "data")), "its process lives"
    go_on.set()
    other.join(60)
    assert os.path.exists(os.path.join(path, "data"))
    said = []
    monkeypatch.setattr(swap_folder.logger, "warning", said.append)
    third = SwapFolder(tmp_path, 1, "key")
    assert not os.path.exists(path) and not os.path.exists(path + ".lock")
    assert len(said) == 1 and path in said[0]
    assert mine.path.exists() and third.path.exists() and mine.path != third.path
    for folder in (mine, third, third):
        folder.remove()
    assert os.listdir(tmp_path) == []


def test_pool_keeps_its_bound():
    pool = BufferPool(2, 10_000, lambda nbytes: aligned_buffer(HostMemory(pinned=False), nbytes))
    first, second = pool.take(5), pool.take(10_000)
    assert first.nbytes == second.nbytes == 3 * PAGE and first.data_ptr() % PAGE == 0
    assert pool.take(1) is None
    third = pool.take(1, insist=True)
    assert pool.made == 3 and third.nbytes == PAGE
    pool.give(third)
    assert pool.made == 2
    pool.give(first)
    larger = pool.take(20_000)
    assert larger.nbytes == 5 * PAGE and pool.made == 2, "it took the place of one that was too small"
    pool.give(second)
    assert pool.take(3) is second
