# SPDX-License-Identifier: Apache-2.0
"""What save_checkpoint and load_checkpoint take, return and refuse."""

from __future__ import annotations

import argparse
import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.checkpoint.storage import CheckpointError
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.logging import logger
from unit.checkpoint.checkpoint_cases import KeptModel, differences, everything, fresh, make_config, make_engine, train
from unit.common import DistributedTest

STAGES = [0, 1, 2, 3]
OF_EVERY_FILE = {
    "buffer_names", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "frozen_param_fragments",
    "frozen_param_shapes", "global_samples", "param_shapes", "shared_params",
}  # fmt: skip
COUNTERS = {"skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd"}


class Log(logging.Handler):
    """Warnings of the package while it is open."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logger.addHandler(self)
        return self.lines

    def __exit__(self, *_: Any) -> None:
        logger.removeHandler(self)


def saved_engine(folder: str, stage: int, dtype: str = "fp32", **options: Any) -> Any:
    engine = make_engine(make_config(stage, dtype))
    train(engine, 0, 2)
    assert engine.save_checkpoint(folder, **options) is True
    return engine


class TestReturnValues(DistributedTest):
    world_size = 2

    def test_client_state_and_path(self, tmpdir):
        for stage in STAGES:
            folder = f"{tmpdir}/{stage}"
            own = {"epoch": 7, "nested": {"list": [1, (2, "x")], "tensor": torch.arange(3)}, "ds_version": "mine"}
            first = saved_engine(folder, stage, client_state=own)
            assert Path(folder, "latest").read_bytes() == b"global_step2"
            front = f"zero_pp_rank_{dist.get_rank()}_" if stage == 3 else ""
            path, state = first.load_checkpoint(folder)
            assert path == f"{folder}/global_step2/{front}mp_rank_00_model_states.pt"
            assert set(state) == OF_EVERY_FILE | {"epoch", "nested"}
            assert state["epoch"] == 7 and state["nested"]["list"] == [1, (2, "x")] and state["ds_version"] == "mine"
            assert torch.equal(state["nested"]["tensor"], torch.arange(3))
            assert state["buffer_names"] == ["seen", "mean"] and state["ds_config"] == first.config
            assert state["shared_params"] == (
                None if stage == 0 else {"head.weight": "words.weight"} if stage < 3 or not dist.get_rank() else {}
            )
            _, state = first.load_checkpoint(folder, load_lr_scheduler_states=False)
            assert "lr_scheduler" in state and "optimizer" not in state
            _, state = first.load_checkpoint(folder, load_optimizer_states=False)
            assert "lr_scheduler" not in state and "optimizer" in state
            _, state = first.load_checkpoint(folder, load_module_only=True)
            assert set(state) - {"lr_scheduler", "optimizer"} == OF_EVERY_FILE | COUNTERS | {"epoch", "nested"}
            first.destroy()

    def test_weights_only(self, tmpdir):
        """Counters, schedule and optimizer state stay; masters follow the weights."""
        for stage in STAGES:
            saved_engine(f"{tmpdir}/{stage}", stage, "bf16").destroy()
            other = fresh(make_config(stage, "bf16"))
            train(other, 0, 3)
            before = everything(other)
            other.load_checkpoint(f"{tmpdir}/{stage}", load_module_only=True)
            after = everything(other)
            changed = set(differences(after, before))
            assert changed and not [
                c for c in changed if c.startswith(("exp_avg", "step", "settings", "sched", "glob"))
            ]
            for name, parameter in other.module.named_parameters():
                if parameter.requires_grad and stage < 3:
                    assert torch.equal(safe_get_full_fp32_param(parameter), after[name].float())
            other.destroy()

    def test_deleted_optimizer_files_do_not_matter_to_weights(self, tmpdir):
        for stage in (1, 2):
            folder = f"{tmpdir}/{stage}"
            engine = saved_engine(folder, stage)
            expected = everything(engine)
            dist.barrier()
            if dist.get_rank() == 0:
                for path in Path(folder, "global_step2").glob("*optim_states.pt"):
                    path.unlink()
            dist.barrier()
            other = fresh(make_config(stage))
            for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
                path, _ = other.load_checkpoint(folder, **options)
                assert path and not [
                    d for d in differences(everything(other), expected) if d in dict(KeptModel().state_dict())
                ]
            with pytest.raises(CheckpointError, match="optim_states.pt is missing"):
                other.load_checkpoint(folder)
            engine.destroy()
            other.destroy()

    def test_no_latest(self, tmpdir):
        engine = saved_engine(f"{tmpdir}", 1, save_latest=False)
        assert sorted(os.listdir(tmpdir)) and "latest" not in os.listdir(tmpdir)
        before = everything(engine)
        with Log() as lines:
            assert engine.load_checkpoint(str(tmpdir)) == (None, None)
            assert engine.load_checkpoint(f"{tmpdir}/nowhere") == (None, None)
        assert len(lines) == 2 and "global_step2" in lines[0] and "latest" in lines[1]
        assert differences(everything(engine), before) == []
        assert engine.load_checkpoint(str(tmpdir), tag="global_step2")[0] is not None

    def test_unknown_tag(self, tmpdir):
        engine = saved_engine(str(tmpdir), 2, tag="one")
        engine.save_checkpoint(str(tmpdir), tag="deeper/two")
        with pytest.raises(AssertionError, match=r"no checkpoint 'three'.*\['one', 'deeper/two'\]"):
            engine.load_checkpoint(str(tmpdir), tag="three")
        with pytest.raises(AssertionError, match="that folder does not exist"):
            engine.load_checkpoint(f"{tmpdir}/nowhere", tag="three")
        assert engine.load_checkpoint(str(tmpdir))[0] == f"{tmpdir}/deeper/two/mp_rank_00_model_states.pt"


class TestTags(DistributedTest):
    world_size = 2

    def test_names(self, tmpdir):
        engine = make_engine(make_config(3))
        for tag in (5, "a_b", "a/b", "with space", "x%2Fy"):
            assert engine.save_checkpoint(str(tmpdir), tag=tag)
            engine.global_samples += 1
        for count, tag in enumerate((5, "a_b", "a/b", "with space", "x%2Fy")):
            assert os.path.isdir(f"{tmpdir}/{tag}")
            engine.load_checkpoint(str(tmpdir), tag=tag)
            assert engine.global_samples == count

    def test_tags_that_leave_the_folder(self, tmpdir):
        engine = saved_engine(f"{tmpdir}/in", 1)
        for tag in ("../out", "/tmp/out", "a/../../out", "..", ".", "", "a//b", "a/", ".saving-x"):
            for use in (engine.save_checkpoint, engine.load_checkpoint):
                with pytest.raises(ValueError, match="checkpoint tag"):
                    use(f"{tmpdir}/in", tag=tag)
        with pytest.raises(ValueError, match="latest"):
            engine.save_checkpoint(f"{tmpdir}/in", tag="latest")
        dist.barrier()
        if dist.get_rank() == 0:
            Path(tmpdir, "in", "latest").write_text("../in/global_step2")
        dist.barrier()
        with pytest.raises(CheckpointError, match="must name a folder inside"):
            engine.load_checkpoint(f"{tmpdir}/in")
        assert os.listdir(tmpdir) == ["in"]

    def test_a_tag_below_another(self, tmpdir):
        """Replacing the folder of a tag must not take the one below with it."""
        engine = saved_engine(str(tmpdir), 1, tag="a/b")
        with pytest.raises(CheckpointError, match="folder of the checkpoints"):
            engine.save_checkpoint(str(tmpdir), tag="a")
        assert engine.load_checkpoint(str(tmpdir))[0] is not None

    def test_ranks_that_do_not_agree(self, tmpdir):
        for mode in ("WARN", "IGNORE", "FAIL"):
            engine = make_engine(make_config(2, checkpoint={"tag_validation": mode}))
            tag = f"{mode}-{dist.get_rank()}"
            with Log() as lines:
                if mode == "FAIL":
                    with pytest.raises(AssertionError, match="FAIL-0.*FAIL-1"):
                        engine.save_checkpoint(str(tmpdir), tag=tag)
                else:
                    engine.save_checkpoint(str(tmpdir), tag=tag)
            assert bool([line for line in lines if "different checkpoint tags" in line]) is (mode == "WARN")
            if mode != "FAIL":
                path, _ = engine.load_checkpoint(str(tmpdir))
                assert path == f"{tmpdir}/{mode}-0/mp_rank_00_model_states.pt"
            engine.destroy()
        assert sorted(os.listdir(tmpdir)) == sorted({"IGNORE-0", "WARN-0", "latest", *programs(tmpdir)})

    def test_refused_arguments(self, tmpdir):
        engine = make_engine(make_config(1))
        with pytest.raises(ValueError, match="empty save_dir"):
            engine.save_checkpoint("")
        with pytest.raises(KeyError, match="checkpoint_parallel_dimensions"):
            engine.save_checkpoint(str(tmpdir), client_state={"checkpoint_parallel_dimensions": 1})
        assert os.listdir(tmpdir) == []


def programs(folder: Any) -> list[str]:
    """Stand-alone programs that saving puts into the folder."""
    return [name for name in os.listdir(folder) if name.endswith(".py")]


class TestWeights(DistributedTest):
    world_size = 2

    def test_other_models(self, tmpdir):
        """Names and shapes of both; the engine stays as it was."""
        for stage in (1, 3):
            saved_engine(f"{tmpdir}/{stage}", stage).destroy()
            for target in (0, stage):
                other = fresh(make_config(target), width=4)
                before = everything(other)
                with pytest.raises(CheckpointError, match=r"inner.weight: \(7, 5\) saved, \(4, 5\) here"):
                    other.load_checkpoint(f"{tmpdir}/{stage}")
                assert differences(everything(other), before) == []
                with pytest.raises(CheckpointError, match="inner.weight"):
                    other.load_checkpoint(f"{tmpdir}/{stage}", load_optimizer_states=False)
                other.destroy()
                more = make_engine(make_config(target), model=KeptModel(mixed=True))
                before = everything(more)
                with pytest.raises(CheckpointError, match="missing .*wide.weight"):
                    more.load_checkpoint(f"{tmpdir}/{stage}")
                assert differences(everything(more), before) == []
                with pytest.raises(CheckpointError, match="missing .*wide.weight"):
                    more.load_checkpoint(f"{tmpdir}/{stage}", load_optimizer_states=False)
                more.destroy()

    def test_not_strict(self, tmpdir):
        """What is there is taken, the rest stays."""
        for stage in STAGES:
            expected = everything(saved_engine(f"{tmpdir}/{stage}", stage))
            for target in {stage, 3 - stage}:
                model = KeptModel(seed=8, mixed=True)
                other = make_engine(make_config(target), model=model)
                before = everything(other)
                other.load_checkpoint(f"{tmpdir}/{stage}", load_module_strict=False, load_optimizer_states=False)
                after = everything(other)
                names = dict(KeptModel().state_dict())
                assert not [n for n in names if not torch.equal(after[n], expected[n])], (stage, target)
                assert torch.equal(after["wide.weight"], before["wide.weight"])
                assert torch.equal(after["master of inner.weight"], expected["inner.weight"])
                other.destroy()

    def test_custom_load_fn(self, tmpdir):
        for stage in STAGES:
            expected = everything(saved_engine(f"{tmpdir}/{stage}", stage))
            other = fresh(make_config(stage))
            calls = []

            def load(src: dict[str, Any], dst: torch.nn.Module, calls: list[Any] = calls) -> None:
                calls.append(set(src))
                with deepspeed.zero.GatheredParameters(list(dst.parameters()), modifier_rank=0), torch.no_grad():
                    dst.load_state_dict({name: value * 2 for name, value in src.items()})

            other.load_checkpoint(f"{tmpdir}/{stage}", custom_load_fn=load, load_optimizer_states=False)
            after = everything(other)
            assert calls == [set(KeptModel().state_dict())]
            assert torch.equal(after["inner.weight"], expected["inner.weight"] * 2), stage
            assert torch.equal(after["master of inner.weight"], expected["inner.weight"] * 2), stage
            other.destroy()

    def test_without_frozen_weights(self, tmpdir):
        for stage in STAGES:
            engine = saved_engine(f"{tmpdir}/{stage}", stage, exclude_frozen_parameters=True)
            other = fresh(make_config(stage))
            before, expected = everything(other), everything(engine)
            other.load_checkpoint(f"{tmpdir}/{stage}", load_module_strict=False)
            after = everything(other)
            assert differences(after, expected) == ["frozen.weight", "frozen.bias"]
            assert torch.equal(after["frozen.weight"], before["frozen.weight"])
            file = torch.load(next(Path(f"{tmpdir}/{stage}/global_step2").glob("*model_states.pt")), weights_only=False)
            assert file["frozen_param_fragments"] is None and (stage == 3 or "frozen.weight" not in file["module"])
            other.destroy()


class TestClientPatterns(DistributedTest):
    world_size = 2

    def test_what_scripts_keep(self, tmpdir):
        """Random states, arguments, numpy arrays, paths: read without trust."""
        random.seed(3)
        torch.manual_seed(3)
        numpy.random.seed(3)
        kept = {
            "rng": [random.getstate(), numpy.random.get_state(), torch.get_rng_state()],
            "args": argparse.Namespace(lr=0.1, out=Path("x"), sizes=[1, 2]),
            "numpy": {"array": numpy.arange(4.0), "number": numpy.float32(2.5), "flag": numpy.bool_(True)},
        }
        with Log() as lines:
            engine = saved_engine(str(tmpdir), 2, client_state=kept)
            _, state = engine.load_checkpoint(str(tmpdir))
        assert not lines
        random.setstate(state["rng"][0])
        numpy.random.set_state(state["rng"][1])
        assert random.getstate() == kept["rng"][0] and torch.equal(state["rng"][2], kept["rng"][2])
        assert state["args"] == kept["args"] and state["numpy"]["number"] == numpy.float32(2.5)
        assert numpy.array_equal(state["numpy"]["array"], numpy.arange(4.0))

    def test_hugging_face(self, tmpdir):
        """A folder per step, the default tag found by pattern, no latest needed; None means nothing was loaded."""
        engine = saved_engine(f"{tmpdir}/checkpoint-2", 3)
        assert [path.name for path in Path(tmpdir, "checkpoint-2").glob("global_step*")] == ["global_step2"]
        path, _ = engine.load_checkpoint(f"{tmpdir}/checkpoint-2", load_module_strict=True,
                                         load_optimizer_states=True, load_lr_scheduler_states=True)  # fmt: skip
        assert path is not None

    def test_lightning(self, tmpdir):
        """Everything of the trainer in client_state, one tag; engines and counters come back apart."""
        trainer = {
            "epoch": 1,
            "state_dict": {},
            "loops": {"fit_loop": {"state_dict": {}}},
            "pytorch-lightning_version": "2",
        }
        engine = saved_engine(f"{tmpdir}/a.ckpt", 1, client_state=trainer, tag="checkpoint")
        assert Path(tmpdir, "a.ckpt", "checkpoint", "mp_rank_00_model_states.pt").is_file()
        _, state = engine.load_checkpoint(f"{tmpdir}/a.ckpt", load_optimizer_states=True,
                                          load_lr_scheduler_states=False, load_module_strict=True)  # fmt: skip
        assert {key: state[key] for key in trainer} == trainer

    def test_accelerate(self, tmpdir):
        engine = make_engine(make_config(2))
        train(engine, 0, 1)
        engine.save_checkpoint(f"{tmpdir}/state", "pytorch_model")
        before = everything(engine)
        train(engine, 1, 1)
        engine.load_checkpoint(f"{tmpdir}/state", "pytorch_model")
        assert differences(everything(engine), before) == []

    def test_other_files_in_the_folder_of_a_tag_stay(self, tmpdir):
        engine = saved_engine(str(tmpdir), 1, tag="kept")
        dist.barrier()
        if dist.get_rank() == 0:
            Path(tmpdir, "kept", "rng_state_0.pth").write_text("mine")
        dist.barrier()
        engine.save_checkpoint(str(tmpdir), tag="kept")
        assert Path(tmpdir, "kept", "rng_state_0.pth").read_text() == "mine"
        assert sorted(os.listdir(tmpdir)) == sorted({"kept", "latest", *programs(tmpdir)})

    def test_memory_does_not_grow(self, tmpdir):
        """Ten saves and loads: no tensor and no memory map is left over."""
        import gc

        engine = saved_engine(str(tmpdir), 3, tag="same")

        def left() -> tuple[int, int]:
            gc.collect()
            tensors = sum(isinstance(item, torch.Tensor) for item in gc.get_objects())
            with open("/proc/self/maps", encoding="utf-8") as maps:
                return tensors, sum("_states.pt" in line for line in maps)

        def once() -> None:
            engine.save_checkpoint(str(tmpdir), tag="same", client_state={"t": torch.ones(3)})
            engine.load_checkpoint(str(tmpdir))

        once()
        before = left()
        for _ in range(10):
            once()
        after = left()
        assert after[0] < before[0] + 10 and after[1] == before[1] == 0  # less than one per save
