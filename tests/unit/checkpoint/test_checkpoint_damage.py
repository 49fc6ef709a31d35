# SPDX-License-Identifier: Apache-2.0
"""Files that are missing, damaged, foreign, or cannot be written."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint import files, storage
from deepspeed.checkpoint.storage import CheckpointError
from unit.checkpoint.checkpoint_cases import differences, everything, make_config, make_engine, train
from unit.common import DistributedTest

LARGEST = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def on_first_rank(work: Callable[[], Any]) -> None:
    """Do something to files while all ranks wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def tensor_byte(path: Path) -> int:
    """A place in the middle of the largest tensor of a file."""
    import zipfile

    with zipfile.ZipFile(path) as archive:
        tensors = [info for info in archive.infolist() if "/data/" in info.filename]
        largest = max(tensors, key=lambda info: info.file_size)
        return largest.header_offset + 30 + len(largest.filename) + largest.file_size


KINDS: list[tuple[Callable[[Path], Any], str]] = [
    (Path.unlink, "{0} is missing"),
    (lambda file: os.truncate(file, file.stat().st_size - 1), "{0} has .* bytes instead of"),
    (lambda file: os.truncate(file, 0), "{0} has 0 bytes instead of"),
    (lambda file: flip(file, tensor_byte(file)), "{0}: contents of .*data/.* do not match"),
    (lambda file: flip(file, file.stat().st_size - 30), "{0} is damaged"),
    (lambda file: file.with_name("manifest.json").write_text("{"), "manifest.json is damaged"),
    (lambda file: file.with_name("manifest.json").write_text("[1]"), "manifest.json is damaged"),
]


class TestDamage(DistributedTest):
    world_size = 2

    def test_every_kind(self, tmpdir):
        """The error names the file, what is wrong and a checkpoint that is whole; the engine stays as it was."""
        for stage in (0, 1, 3):
            folder, name = Path(tmpdir, str(stage)), "mp_rank_00_model_states.pt" if stage == 0 else LARGEST
            engine = make_engine(make_config(stage))
            train(engine, 0, 1)
            engine.save_checkpoint(str(folder), tag="old")
            train(engine, 1, 1)
            engine.save_checkpoint(str(folder), tag="new")
            train(engine, 2, 1)
            before = everything(engine)
            whole = {path: path.read_bytes() for path in (folder / "new").iterdir()}
            for damage, message in KINDS:
                on_first_rank(partial(damage, folder / "new" / name))
                with pytest.raises(CheckpointError, match=message.format(name)) as caught:
                    engine.load_checkpoint(str(folder))
                assert "oldest first: ['old'" in str(caught.value)
                on_first_rank(lambda whole=whole: [path.write_bytes(data) for path, data in whole.items()])
            assert differences(everything(engine), before) == []
            assert engine.load_checkpoint(str(folder), tag="old")[0] is not None
            assert engine.load_checkpoint(str(folder))[0] is not None
            engine.destroy()

    def test_without_manifest(self, tmpdir):
        """As DeepSpeed writes them: missing files are noticed by the number of ranks that saved."""
        engine = make_engine(make_config(1))
        train(engine, 0, 1)
        engine.save_checkpoint(str(tmpdir))
        expected = everything(engine)
        place = Path(tmpdir, "global_step1")
        on_first_rank((place / "manifest.json").unlink)
        train(engine, 1, 1)
        engine.load_checkpoint(str(tmpdir))
        assert differences(everything(engine), expected) == []
        for rank, others in ((1, r"\[1\]"), (0, r"\[0\]")):
            name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            on_first_rank(lambda: os.rename(place / name, Path(tmpdir, "aside")))  # noqa: B023
            with pytest.raises(CheckpointError, match=f"ranks {others} are missing"):
                engine.load_checkpoint(str(tmpdir))
            on_first_rank(lambda: os.rename(Path(tmpdir, "aside"), place / name))  # noqa: B023
        on_first_rank(lambda: shutil.copy(place / LARGEST, place / LARGEST.replace("1", "2", 1)))
        engine.load_checkpoint(str(tmpdir))  # of an older checkpoint of three ranks in the same folder
        assert differences(everything(engine), expected) == []
        on_first_rank((place / "mp_rank_00_model_states.pt").unlink)
        with pytest.raises(AssertionError, match="no checkpoint"):
            engine.load_checkpoint(str(tmpdir))

    def test_files_that_run_code(self, tmpdir, monkeypatch):
        """Refused by all ranks, before anything has run, unless the user trusts them."""
        engine = make_engine(make_config(2))
        train(engine, 0, 1)
        engine.save_checkpoint(str(tmpdir), client_state={"evil": Evil(str(tmpdir))})
        with pytest.raises(CheckpointError, match="DS_TRUST_CHECKPOINTS=1"):
            engine.load_checkpoint(str(tmpdir))
        dist.barrier()
        assert not os.path.exists(f"{tmpdir}/ran")
        monkeypatch.setenv("DS_TRUST_CHECKPOINTS", "1")
        assert engine.load_checkpoint(str(tmpdir))[0] is not None
        assert os.path.isdir(f"{tmpdir}/ran")

    def test_unchecked_sums(self, tmpdir, monkeypatch):
        """``DS_CHECKPOINT_VERIFY=0`` reads what is needed and nothing else."""
        engine = make_engine(make_config(1))
        engine.save_checkpoint(str(tmpdir))
        file = Path(tmpdir, "global_step0", LARGEST)
        on_first_rank(lambda: flip(file, tensor_byte(file)))
        monkeypatch.setenv("DS_CHECKPOINT_VERIFY", "0")
        engine.load_checkpoint(str(tmpdir))
        monkeypatch.setenv("DS_CHECKPOINT_VERIFY", "1")
        with pytest.raises(CheckpointError, match="do not match"):
            engine.load_checkpoint(str(tmpdir))


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.makedirs, (f"{self.folder}/ran", 0o777, True)


class TestWritingFails(DistributedTest):
    world_size = 2

    def test_a_full_disk(self, tmpdir, monkeypatch):
        """On one rank, at different moments: all ranks raise, what was there is whole, the disk is freed."""
        for stage in (0, 1, 3):
            folder = f"{tmpdir}/{stage}"
            engine = make_engine(make_config(stage))
            train(engine, 0, 1)
            engine.save_checkpoint(folder, tag="kept")
            expected = everything(engine)
            train(engine, 1, 1)
            names = sorted(os.listdir(folder))
            for full_rank in (0,) if stage == 0 else (0, 1):
                for call in ("fsync", "replace"):
                    with monkeypatch.context() as patch:
                        if dist.get_rank() == full_rank:
                            patch.setattr(os, call, disk_is_full)
                        with pytest.raises(CheckpointError, match=rf"rank {full_rank}: OSError.*No space left"):
                            engine.save_checkpoint(folder, tag="kept" if call == "fsync" else "other")
                    dist.barrier()
                    assert sorted(os.listdir(folder)) == names
            train(engine, 2, 1)
            engine.load_checkpoint(folder)
            assert differences(everything(engine), expected) == []
            assert engine.save_checkpoint(folder, tag="kept")
            engine.destroy()

    def test_a_folder_that_cannot_be_made(self, tmpdir):
        on_first_rank(lambda: Path(tmpdir, "file").write_text(""))
        engine = make_engine(make_config(3))
        with pytest.raises(CheckpointError, match="rank 0: .*(NotADirectoryError|FileExistsError)"):
            engine.save_checkpoint(f"{tmpdir}/file")

    def test_state_that_cannot_be_written(self, tmpdir):
        """Whatever raises while files are made, on one rank: all ranks say so."""
        engine = make_engine(make_config(3))
        state = {"open": open(os.devnull)} if dist.get_rank() == 1 else {}
        with pytest.raises(CheckpointError, match="rank 1: TypeError"):
            engine.save_checkpoint(str(tmpdir), client_state=state)
        assert engine.save_checkpoint(str(tmpdir))


def disk_is_full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# ---------------------------------------------------------------------------------------------------- the parts


def test_ranks_are_numbers(tmp_path):
    """Rank 10 comes after rank 9; a hole is named."""
    for rank in range(12):
        (tmp_path / files.optim_file(rank, 0, rank % 2 == 0)).touch()
    found = [os.path.basename(path) for path in files.find_optim_files(str(tmp_path))]
    assert found == [files.optim_file(rank, 0, rank % 2 == 0) for rank in range(12)]
    (tmp_path / files.optim_file(10, 0, True)).unlink()
    with pytest.raises(FileNotFoundError, match=r"ranks \[10\] are missing"):
        files.find_optim_files(str(tmp_path))


def test_nothing_is_half_there(tmp_path, monkeypatch):
    """A file that could not be written keeps its former contents."""
    path = str(tmp_path / "x.pt")
    storage.write_tensors(path, {"a": torch.arange(3)})
    monkeypatch.setattr(os, "fsync", disk_is_full)
    with pytest.raises(OSError, match="No space"):
        storage.write_tensors(path, {"a": torch.arange(4)})
    assert torch.equal(storage.read_tensors(path)["a"], torch.arange(3))


def test_files_of_other_kinds(tmp_path):
    plain = tmp_path / "x_model_states.pt"
    plain.write_bytes(pickle.dumps(Evil(str(tmp_path))))
    with pytest.raises(CheckpointError):
        storage.read_tensors(str(plain))
    plain.write_bytes(b"no checkpoint at all")
    with pytest.raises(CheckpointError, match="x_model_states"):
        storage.read_tensors(str(plain))
    assert "damaged" in storage.wrong_sums(str(plain))[0]
    assert not (tmp_path / "ran").exists()


def test_classes_that_need_trust():
    class Own:
        pass

    assert storage.needs_trust({"a": [1, (Own(), {2, 3})], "b": torch.ones(2)}) == {
        f"{Own.__module__}.{Own.__qualname__}"
    }
