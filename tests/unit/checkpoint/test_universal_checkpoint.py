# SPDX-License-Identifier: Apache-2.0
"""Universal checkpoints: what conversion writes, and loading it at any stage on any number of ranks."""

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint import files, storage
from deepspeed.checkpoint.ds_to_universal import main, natural_keys, parse_arguments
from deepspeed.checkpoint.universal_checkpoint import SubparamShape, enable_universal_checkpoint
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from unit.common import DistributedFixture, DistributedTest
from unit.runtime.engine_cases import WIDTH, batches_of, make_config, make_engine, run_window

INFO = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.4}}
TAG = "at2"


class Tied(nn.Module):
    """Tied, frozen and unused weights, a buffer, a scalar parameter, one without elements; two parameter groups."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.into = nn.Linear(WIDTH, 7)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.none = nn.Parameter(torch.empty(0))
        self.out = nn.Linear(7, 7)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.out.weight
        self.last = nn.Linear(7, WIDTH)
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, x, y, uses=1):
        hidden = torch.tanh(self.again(torch.tanh(self.out(self.frozen(torch.tanh(self.into(x)))))))
        return nn.functional.cross_entropy((self.gain * self.last(hidden)).float(), y)


def adam(model):
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices, "lr": 0.01}, {"params": rest, "lr": 0.02, "weight_decay": 0.0}])


def make(stage, dtype="fp32", universal=False, sub_group_size=None, elements=True):
    model = Tied()
    if not elements:
        del model.none
    zero = {"sub_group_size": sub_group_size} if sub_group_size else None
    sections = {"checkpoint": {"load_universal": universal}}
    if dtype == "fp16":
        sections["fp16"] = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}
    config = make_config(stage, dtype, zero=zero, **sections)
    engine = make_engine(config, model, adam(model))
    engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.basic_optimizer, 1, 0.5)
    return engine


def train(engine, steps, dtype="fp32"):
    for step in range(steps):
        run_window(engine, batches_of(dist.get_rank(), 1, dtype, 7 * step))
        engine.step()


def whole_state(engine):
    """Masters, moments and steps of all trained parameters, whole."""
    state = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and getattr(parameter, "ds_numel", parameter.numel()):
            state[name] = safe_get_full_fp32_param(parameter).cpu().clone()
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{name}/{key}"] = safe_get_full_optimizer_state(parameter, key).cpu().clone()
    return state


def facts_of(engine):
    groups = [
        {k: v for k, v in g.items() if k in ("lr", "weight_decay", "betas")} for g in engine.optimizer.param_groups
    ]
    steps = {float(s["step"]) for s in engine.basic_optimizer.state.values() if "step" in s}
    scale = engine.optimizer.loss_scale if engine.fp16_enabled() else 1.0
    return [groups, steps, scale, engine.global_steps, engine.skipped_steps, engine.global_samples]


def buffers_and_frozen(engine):
    state = engine.module_state_dict() if engine.zero_optimization_stage() < 3 else None
    if state is None:
        state = engine._zero3_consolidated_16bit_state_dict()
    return {} if state is None else {n: state[n].clone() for n in ("seen", "frozen.weight", "frozen.bias")}


class saved(DistributedFixture):
    """Two ranks save, and write down what they have."""

    world_size = 2

    def run(self, tmpdir, stage, dtype, sub_group_size):
        engine = make(stage, dtype, sub_group_size=sub_group_size)
        train(engine, 2, dtype)
        engine.module.seen.fill_(5.0)
        engine.save_checkpoint(str(tmpdir), TAG, client_state={**INFO, "mine": [1, 2]})
        noted = [whole_state(engine), facts_of(engine)]
        if dist.get_rank() == 0:
            torch.save(noted, str(tmpdir / "noted.pt"))
        engine.destroy()


def convert(folder, *options, tag=TAG):
    arguments = [
        "--input_folder",
        os.path.join(folder, tag),
        "--output_folder",
        os.path.join(folder, f"{tag}_universal"),
    ]
    main(parse_arguments([*arguments, *options]))
    return Path(folder) / f"{tag}_universal"


CASES = [(1, "fp32", None), (2, "fp16", None), (3, "fp32", 60), (3, "bf16", None)]


@pytest.mark.parametrize("stage, dtype, sub_group_size", CASES)
class TestLoadUniversal(DistributedTest):
    world_size = [1, 3]
    reuse_dist_env = True

    def test_at_every_stage(self, saved, tmpdir, stage, dtype, sub_group_size):
        folder = str(tmpdir)
        if dist.get_rank() == 0:
            convert(folder)
            shutil.rmtree(os.path.join(folder, TAG))
            os.remove(os.path.join(folder, "latest"))
        dist.barrier()
        expected, facts = torch.load(os.path.join(folder, "noted.pt"), weights_only=False)
        for target in (0, 1, 2, 3):
            engine = make(target, dtype, universal=True, sub_group_size=20 if target == 3 else None)
            path, client = engine.load_checkpoint(folder)
            assert os.path.dirname(path) == os.path.join(folder, f"{TAG}_universal")
            assert client["mine"] == [1, 2] and client["universal_checkpoint_info"] == INFO["universal_checkpoint_info"]
            assert "optimizer" not in client and "lr_scheduler" not in client
            found = whole_state(engine)
            assert found.keys() == expected.keys() and len(found) == 3 * 8
            assert all(torch.equal(found[key], expected[key]) for key in expected), f"stage {target}"
            assert facts_of(engine) == facts
            rest = buffers_and_frozen(engine)
            if rest:
                assert torch.equal(rest["seen"].float(), torch.full((3,), 5.0))
                assert torch.equal(rest["frozen.weight"], Tied().frozen.weight.to(rest["frozen.weight"].dtype))
            train(engine, 1, dtype)
            engine.destroy()


class TestSaveAndConvert(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_files(self, stage, tmpdir):
        folder = str(tmpdir)
        engine = make(stage)
        train(engine, 2)
        engine.save_checkpoint(folder, TAG, client_state=INFO)
        state = whole_state(engine)
        if dist.get_rank() != 0:
            return
        out = convert(folder)
        assert (Path(folder) / "latest_universal").read_text() == f"{TAG}_universal"
        models = [files.model_file(0)] if stage < 3 else [files.model_file(0, rank) for rank in (0, 1)]
        assert sorted(f.name for f in out.iterdir()) == sorted([*models, files.MANIFEST, "zero"])
        for name in models:
            assert (out / name).read_bytes() == (Path(folder) / TAG / name).read_bytes()
        trained = [n for n, p in Tied().named_parameters() if p.requires_grad and p.numel()]
        assert sorted(f.name for f in (out / "zero").iterdir()) == sorted([*trained, "optimizer_state.pt"])
        for name, shape in ((n, p.shape) for n, p in Tied().named_parameters() if p.requires_grad and p.numel()):
            place = out / "zero" / name
            stems = ["exp_avg", "exp_avg_sq", "fp32"]
            assert sorted(f.stem for f in place.iterdir()) == (stems if stage == 3 else [*stems, "step"])
            for stem in stems:
                entry = torch.load(place / f"{stem}.pt", weights_only=True)
                value = state[name if stem == "fp32" else f"{name}/{stem}"]
                if stage == 3:
                    assert entry.shape == (shape.numel(),) and torch.equal(entry, value.reshape(-1))
                else:
                    assert entry.keys() == {"param", "cat_dim"} and entry["cat_dim"] == 0
                    assert entry["param"].shape == shape and torch.equal(entry["param"], value)
            if stage < 3:
                assert float(torch.load(place / "step.pt", weights_only=True)) == 2.0
        common = storage.read_tensors(str(out / "zero" / "optimizer_state.pt"))
        assert [group["lr"] for group in common["param_groups"]] == [0.0025, 0.005]
        if stage == 3:
            assert {"optimizer_state_dict", "fp32_flat_groups", "zero_stage", "loss_scaler"} <= common.keys()
        else:
            assert {"zero_stage", "loss_scaler", "clip_grad", "partition_count"} <= common.keys()
            assert not {"base_optimizer_state", "single_partition_of_fp32_groups"} & common.keys()

    def test_an_attribute_of_the_model_is_saved(self, tmpdir):
        engine = make(2)
        train(engine, 1)
        engine.module.universal_checkpoint_info = INFO["universal_checkpoint_info"]
        engine.save_checkpoint(str(tmpdir), "as value")
        engine.module.universal_checkpoint_info = lambda: INFO["universal_checkpoint_info"]
        engine.save_checkpoint(str(tmpdir), "as method")
        for tag in ("as value", "as method"):
            state = storage.read_tensors(os.path.join(str(tmpdir), tag, files.model_file(0)))
            assert state["universal_checkpoint_info"] == INFO["universal_checkpoint_info"]

    def test_missing_information(self, tmpdir):
        folder = str(tmpdir)
        engine = make(1)
        train(engine, 1)
        engine.save_checkpoint(folder, TAG)
        if dist.get_rank() != 0:
            return
        with pytest.raises(AssertionError, match="--inject_missing_state"):
            convert(folder)
        assert not os.path.exists(os.path.join(folder, "latest_universal"))
        out = convert(folder, "--inject_missing_state", "--num_merge_workers", "1", "--keep_temp_folder")
        model = Tied()
        for name, expected in (("seen", model.seen), ("frozen.bias", model.frozen.bias)):
            entry = torch.load(out / "zero" / name / "fp32.pt", weights_only=True)
            assert torch.equal(entry["param"], expected) and os.listdir(out / "zero" / name) == ["fp32.pt"]
        tied = torch.load(out / "zero" / "again.weight" / "fp32.pt", weights_only=True)["param"]
        first = torch.load(out / "zero" / "out.weight" / "fp32.pt", weights_only=True)["param"]
        assert torch.equal(tied, first) and not torch.equal(tied, model.out.weight)

    def test_load_errors(self, tmpdir):
        folder = str(tmpdir)
        engine = make(2, universal=True)
        train(engine, 1)
        with pytest.raises(ValueError, match="latest_universal"):
            engine.load_checkpoint(folder)
        engine.save_checkpoint(folder, TAG, client_state=INFO)
        with pytest.raises(storage.CheckpointError, match="not a universal checkpoint"):
            engine.load_checkpoint(folder, TAG)
        if dist.get_rank() == 0:
            out = convert(folder)
            shutil.copytree(out, f"{out}_short")
            os.remove(f"{out}_short/{files.MANIFEST}")
            os.remove(f"{out}_short/zero/last.weight/fp32.pt")
            shutil.copytree(out, f"{out}_cut")
            os.remove(f"{out}_cut/zero/last.bias/exp_avg.pt")
            shutil.copytree(out, f"{out}_shape")
            os.remove(f"{out}_shape/{files.MANIFEST}")
            torch.save(torch.zeros(3), f"{out}_shape/zero/last.bias/exp_avg.pt")
        dist.barrier()
        with pytest.raises(AssertionError, match="there is no checkpoint"):
            engine.load_checkpoint(folder, "absent")
        for case, text in (
            ("short", "last.weight/fp32.pt is missing"),
            ("cut", "last.bias/exp_avg.pt is missing"),
            ("shape", r"exp_avg.pt holds shape \(3,\), the parameter has shape \(5,\)"),
        ):
            with pytest.raises(storage.CheckpointError, match=text):
                engine.load_checkpoint(folder, f"{TAG}_universal_{case}")
        before = [p.detach().clone() for p in engine.module.parameters()]
        train(engine, 1)
        engine.load_checkpoint(folder)
        assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters()))

    def test_weights_alone(self, tmpdir):
        folder = str(tmpdir)
        engine = make(3)
        train(engine, 2)
        engine.save_checkpoint(folder, TAG)
        expected = whole_state(engine)
        if dist.get_rank() == 0:
            convert(folder)
        dist.barrier()
        other = make(1, universal=True)
        _, client = other.load_checkpoint(folder, load_module_only=True)
        assert client["global_steps"] == 2 and other.global_steps == 0
        for name, parameter in other.module.named_parameters():
            if name in expected:
                assert torch.equal(parameter, expected[name]), name

    def test_parameters_one_by_one(self, tmpdir):
        folder = str(tmpdir)
        engine = make(2)
        train(engine, 2)
        engine.save_checkpoint(folder, TAG, client_state=INFO)
        expected = whole_state(engine)
        if dist.get_rank() == 0:
            convert(folder)
        dist.barrier()
        other = make(1)
        train(other, 1)
        named = {n: p for n, p in other.module.named_parameters() if p.requires_grad and p.numel()}
        enable_universal_checkpoint(named.values())
        for name, parameter in named.items():
            place = os.path.join(folder, f"{TAG}_universal", "zero", name)
            assert parameter.load_hp_checkpoint_state(place, 0, 1) == 2.0
        found = whole_state(other)
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        with pytest.raises(NotImplementedError, match="tensor"):
            named["gain"].load_hp_checkpoint_state(place, 0, 2)

    def test_what_cannot_be_converted(self, tmpdir):
        folder = str(tmpdir)
        plain, engine = make(0), make(2)
        train(plain, 1)
        plain.save_checkpoint(folder, "stage 0")
        train(engine, 1)
        engine.save_checkpoint(folder, TAG, client_state=INFO)
        if dist.get_rank() != 0:
            return
        with pytest.raises(ValueError, match="stage 0.*without conversion"):
            convert(folder, tag="stage 0")
        with pytest.raises(FileNotFoundError, match="absent"):
            convert(folder, tag="absent")
        os.mkdir(os.path.join(folder, "empty"))
        with pytest.raises(FileNotFoundError, match="model_states"):
            convert(folder, tag="empty")
        for name in ("mp_rank_01_model_states.pt", "layer_01-model_states.pt"):
            shutil.copytree(os.path.join(folder, TAG), os.path.join(folder, name[:5]))
            Path(folder, name[:5], name).touch()
            with pytest.raises(NotImplementedError, match=name):
                convert(folder, tag=name[:5])
        second = Path(folder, TAG, files.optim_file(1, 0, False))
        second.rename(second.with_suffix(".away"))
        with pytest.raises(storage.CheckpointError, match=f"{second.name} is missing"):
            convert(folder)
        os.remove(os.path.join(folder, TAG, files.MANIFEST))
        with pytest.raises(storage.CheckpointError, match=r"ranks \[1\] are missing"):
            convert(folder)
        assert [name for name in os.listdir(folder) if "universal" in name] == []


def as_published(content):
    """A file of optimizer state of stage 1 or 2 without what only files of this package say."""
    content = copy.copy(content)
    content["optimizer_state_dict"] = {k: v for k, v in content["optimizer_state_dict"].items() if k != "flat_groups"}
    return content


class TestPublishedFiles(DistributedTest):
    world_size = 2

    def test_laid_out_as_published(self, tmpdir):
        folder = str(tmpdir)
        engine = make(2, elements=False)
        train(engine, 2)
        engine.save_checkpoint(folder, TAG, client_state=INFO)
        expected = whole_state(engine)
        if dist.get_rank() == 0:
            os.remove(os.path.join(folder, TAG, files.MANIFEST))
            for rank in (0, 1):
                path = os.path.join(folder, TAG, files.optim_file(rank, 0, False))
                torch.save(as_published(torch.load(path, weights_only=False)), path)
            convert(folder)
        dist.barrier()
        other = make(3, universal=True, elements=False)
        other.load_checkpoint(folder)
        assert isinstance(other.optimizer, DeepSpeedZeroOptimizer_Stage3)
        found = whole_state(other)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def write_checkpoint(folder, elements, ranks):
    """Files of stage 3, as ranks would write them, of one parameter that takes 4 * elements bytes."""
    os.makedirs(folder)
    numel = elements // ranks
    for rank in range(ranks):
        flat = torch.arange(rank * numel, (rank + 1) * numel, dtype=torch.float32)
        inner = {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": flat + 1}},
            "param_groups": [{"lr": 1, "params": [0]}],
        }
        optimizer = {
            "zero_stage": 3,
            "partition_count": ranks,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": [flat],
        }
        torch.save({"optimizer_state_dict": optimizer}, f"{folder}/{files.optim_file(rank, 0, False)}")
        model = {"module": {}, "param_shapes": [{"w": torch.Size([elements])}], "dp_world_size": ranks}
        torch.save(model, f"{folder}/{files.model_file(0, rank)}")


def test_many_ranks_are_put_together_in_the_order_of_numbers(tmp_path):
    write_checkpoint(tmp_path / TAG, 24, 12)
    out = convert(str(tmp_path))
    assert torch.equal(torch.load(out / "zero" / "w" / "fp32.pt"), torch.arange(24.0))
    assert torch.equal(torch.load(out / "zero" / "w" / "exp_avg.pt"), torch.arange(24.0) + 1)
    assert len(list(out.glob("*_model_states.pt"))) == 12
    assert sorted(["r10", "r9"], key=natural_keys) == ["r9", "r10"]


def test_an_incomplete_entry(tmp_path):
    write_checkpoint(tmp_path / TAG, 24, 2)
    path = tmp_path / TAG / files.optim_file(1, 0, False)
    content = torch.load(path)
    del content["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["exp_avg"]
    torch.save(content, path)
    with pytest.raises(storage.CheckpointError, match="'w': 12 of 24 elements of 'exp_avg'.*--no_strict"):
        convert(str(tmp_path))
    assert [name for name in os.listdir(tmp_path) if "universal" in name] == []
    out = convert(str(tmp_path), "--no_strict")
    assert os.listdir(out / "zero" / "w") == ["fp32.pt"]


def test_converting_again_replaces_at_once(tmp_path):
    write_checkpoint(tmp_path / TAG, 24, 2)
    convert(str(tmp_path))
    write_checkpoint(tmp_path / "b" / TAG, 12, 2)
    main(parse_arguments(["--input_folder", f"{tmp_path}/b/{TAG}", "--output_folder", f"{tmp_path}/{TAG}_universal"]))
    assert torch.load(tmp_path / f"{TAG}_universal" / "zero" / "w" / "fp32.pt").numel() == 12
    assert sorted(os.listdir(tmp_path)) == [TAG, f"{TAG}_universal", "b", "latest_universal"]


def test_command_line(tmp_path):
    write_checkpoint(tmp_path / TAG, 24, 2)
    env = {**os.environ, "PYTHONPATH": str(Path(deepspeed.__file__).parents[1])}
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(tmp_path / TAG)]
    done = subprocess.run(
        [*command, "--output_folder", str(tmp_path / "o" / "u")], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 1 parameters" in done.stderr
    assert (tmp_path / "o" / "latest_universal").read_text() == "u" and (tmp_path / "o" / "u" / "zero" / "w").is_dir()
    defaults = parse_arguments(["--input_folder", "a", "--output_folder", "b"])
    assert (defaults.num_extract_workers, defaults.num_merge_workers, defaults.strict) == (4, 2, True)
    assert not defaults.keep_temp_folder and not defaults.inject_missing_state


def test_names_of_parts():
    shape = SubparamShape(patterns=["qkv"], shape=((3, 3), 4), partition_dim=0)
    assert shape.partition_dim == 0 and "qkv" in repr(shape)
