# SPDX-License-Identifier: Apache-2.0
"""``checkpoint.use_node_local_storage``: each node has folders that other nodes do not see."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from deepspeed.checkpoint import files, folders
from deepspeed.checkpoint.storage import CheckpointError
from unit.checkpoint.checkpoint_cases import differences, everything, fresh, make_config, make_engine, train
from unit.common import DistributedTest

LOCAL = {"use_node_local_storage": True}


def on_first_rank(work) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        work()
    dist.barrier()


class TestTwoNodes(DistributedTest):
    """Ranks 0 and 1 write to one folder, 2 to another one, as two nodes would."""

    world_size = 3

    def test_each_node_has_what_its_ranks_need(self, tmpdir, monkeypatch):
        rank = dist.get_rank()
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
        for stage, writer in ((0, None), (2, {"decoupled": True}), (3, None)):
            config = make_config(stage, "bf16", checkpoint=LOCAL | {"writer": writer})
            here = str(Path(tmpdir, f"{stage}", f"node{rank // 2}"))
            engine = make_engine(config)
            train(engine, 0, 2)
            engine.save_checkpoint(here)
            expected = everything(engine)
            following = train(engine, 2, 2)
            engine.destroy()
            dist.barrier()
            place = Path(here, "global_step2")
            ranks = (0, 1) if rank < 2 else (2,)
            names = {files.model_file(0)} if stage < 3 else {files.model_file(0, one) for one in ranks}
            names |= {files.optim_file(one, 0, bf16=True) for one in ranks} if stage else set()
            assert {path.name for path in place.iterdir()} == names | {files.MANIFEST}
            assert folders.is_whole(str(place)) and files.read_latest(here) == "global_step2"
            other = fresh(config)
            assert other.load_checkpoint(here)[0] is not None
            assert differences(everything(other), expected) == []
            assert train(other, 2, 2) == following
            other.destroy()

    def test_one_folder_of_all_files(self, tmpdir, monkeypatch):
        """Copied together, the files are a checkpoint like any other; apart, they are only for who wrote them."""
        rank = dist.get_rank()
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
        here = str(Path(tmpdir, f"node{rank // 2}"))
        engine = make_engine(make_config(3, checkpoint=LOCAL))
        train(engine, 0, 2)
        engine.save_checkpoint(here, tag="t")
        expected = everything(engine)
        engine.destroy()
        swapped = str(Path(tmpdir, f"node{1 - rank // 2}"))
        for stage in (1, 3):
            other = fresh(make_config(stage, checkpoint=LOCAL))
            with pytest.raises(CheckpointError, match="on node-local storage, with the files of ranks"):
                other.load_checkpoint(swapped)
            other.destroy()
        on_first_rank(lambda: shutil.copytree(f"{tmpdir}/node1/t", f"{tmpdir}/node0/t", dirs_exist_ok=True))
        other = fresh(make_config(1))
        other.load_checkpoint(f"{tmpdir}/node0", tag="t")
        found = everything(other)
        wrong = [key for key in differences(found, expected) if key.startswith(("master", "exp_avg"))]
        assert not wrong and sum(key.startswith("master") for key in found) == 8
        other.destroy()

    def test_nodes_that_ended_apart(self, tmpdir, monkeypatch):
        """A job that dies while nodes rename: ``latest`` may differ, files of two saves under one tag are refused."""
        rank = dist.get_rank()
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
        here = Path(tmpdir, f"node{rank // 2}")
        engine = make_engine(make_config(1, checkpoint=LOCAL))
        states = []
        for step in range(2):
            train(engine, step, 1)
            engine.save_checkpoint(str(here))
            states.append(everything(engine))
        on_first_rank(lambda: Path(tmpdir, "node0", "latest").write_text("global_step1"))
        engine.load_checkpoint(str(here))
        assert differences(everything(engine), states[0]) == []
        engine.load_checkpoint(str(here), tag="global_step2")
        assert differences(everything(engine), states[1]) == []
        manifest = Path(tmpdir, "node1", "global_step2", files.MANIFEST)
        changed = json.loads(manifest.read_text()) | {"save": "another"}
        on_first_rank(lambda: manifest.write_text(json.dumps(changed)))
        with pytest.raises(CheckpointError, match=r"different saves on different nodes, on ranks \[\[0, 1\], \[2\]\]"):
            engine.load_checkpoint(str(here), tag="global_step2")
        engine.load_checkpoint(str(here), tag="global_step1")
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2 + 1))
        with pytest.raises(CheckpointError, match=r"local ranks are, by rank: \[1, 2, 1\]"):
            engine.save_checkpoint(str(here))
        engine.destroy()
        assert os.listdir(here)
