# SPDX-License-Identifier: Apache-2.0
"""What was saved at one stage, on some ranks, in one dtype, is loaded at another, on others, in another."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.checkpoint.optimizer_state import SavedParameter
from deepspeed.utils import safe_get_full_fp32_param
from unit.checkpoint.checkpoint_cases import DTYPES, everything, fresh, kept_by_name, make_config, make_engine, train
from unit.common import DistributedFixture, DistributedTest

STAGES = [0, 1, 2, 3]
WORLDS = [1, 2, 3, 4]


def dtype_of(stage: int, world: int) -> str:
    return ["fp32", "bf16", "fp16"][(stage + world) % 3]


def config_of(stage: int, world: int) -> dict[str, Any]:
    """At stages 1 to 3 every other one keeps masters and optimizer state, at stage 3 weights too, on the host."""
    away = {"offload_optimizer": {"device": "cpu"}} if stage and world % 2 == 0 else {}
    if away and stage == 3:
        away["offload_param"] = {"device": "cpu"}
    return make_config(stage, dtype_of(stage, world), zero=away, zero_force_ds_cpu_optimizer=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("saved"))


def save_all_stages(folder: str) -> None:
    """A checkpoint of each stage, and beside it what is in it, whole."""
    world = dist.get_world_size()
    for stage in STAGES:
        engine = make_engine(config_of(stage, world))
        train(engine, 0, 4)
        assert engine.global_steps > engine.skipped_steps
        engine.save_checkpoint(f"{folder}/{stage}-{world}")
        state = everything(engine)
        if dist.get_rank() == 0:
            torch.save(state, f"{folder}/{stage}-{world}.whole")
        engine.destroy()


class saved_by_1(DistributedFixture):
    world_size = 1
    fixture_scope = "module"

    def run(self, folder):
        save_all_stages(folder)


class saved_by_2(DistributedFixture):
    world_size = 2
    fixture_scope = "module"

    def run(self, folder):
        save_all_stages(folder)


class saved_by_3(DistributedFixture):
    world_size = 3
    fixture_scope = "module"

    def run(self, folder):
        save_all_stages(folder)


class saved_by_4(DistributedFixture):
    world_size = 4
    fixture_scope = "module"

    def run(self, folder):
        save_all_stages(folder)


def check_loaded(engine: Any, saved: dict[str, Any], dtype: str, same_dtype: bool) -> None:
    """Masters and optimizer state are the saved ones; weights are masters, rounded; the rest is as it was saved."""
    kept = kept_by_name(engine)
    wrong = [key for key, value in kept.items() if not _equal(value, saved[key])]
    assert not wrong and sum(key.startswith(("master", "exp_avg")) for key in kept) == 8 * 3
    own = DTYPES[dtype]
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for name, value in engine.module.state_dict().items():
            source = saved.get(f"master of {name}", saved[name])
            if name in ("words.weight", "head.weight"):
                source = saved["master of words.weight"]
            assert torch.equal(value, source.to(value.dtype)), name
            assert not same_dtype or torch.equal(value, saved[name]), name
            assert value.dtype is own or not value.is_floating_point() or name == "mean"
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        assert getattr(engine, counter) == saved[counter]


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


class TestAcross(DistributedTest):
    world_size = WORLDS

    def test_all_kinds_of_pairs(self, folder, saved_by_1, saved_by_2, saved_by_3, saved_by_4):
        """Every saved stage on every saved number of ranks, on every number of ranks; every stage to every stage."""
        here = dist.get_world_size()
        for stage in STAGES:
            for world in WORLDS:
                saved = torch.load(f"{folder}/{stage}-{world}.whole")
                target = (stage + world + here) % 4
                dtype = dtype_of(target, world + here)
                engine = fresh(config_of(target, world + here))
                path, _ = engine.load_checkpoint(f"{folder}/{stage}-{world}")
                assert path is not None
                check_loaded(engine, saved, dtype, dtype == dtype_of(stage, world))
                engine.destroy()

    def test_goes_on(self, folder, saved_by_1, saved_by_3):
        """After resuming at any stage, the next steps are those of stage 0."""
        here = dist.get_world_size()
        for saved, losses in ((f"{folder}/3-3", []), (f"{folder}/1-1", [])):
            for stage in STAGES:
                engine = fresh(make_config(stage))
                engine.load_checkpoint(saved)
                steps = train(engine, 50, 2)
                losses.append(torch.tensor([value for value in steps if isinstance(value, float)]))
                engine.destroy()
            assert all(torch.allclose(one, losses[0], rtol=1e-5, atol=0) for one in losses), here

    def test_reads_only_what_it_keeps(self, folder, saved_by_2, saved_by_3, monkeypatch):
        """At stages 1 to 3 elements of masters and state are read for the own part alone."""
        read: list[int] = []
        fill = SavedParameter.fill

        def counted(self: SavedParameter, key: str, target: torch.Tensor, begin: int, end: int) -> None:
            read.append(end - begin)
            fill(self, key, target, begin, end)

        monkeypatch.setattr(SavedParameter, "fill", counted)
        for stage in (1, 2, 3):
            for saved in ("3-2", "1-3", "2-2", "3-3"):
                engine = fresh(make_config(stage))
                read.clear()
                engine.load_checkpoint(f"{folder}/{saved}")
                groups = engine.optimizer.reducer.layout.groups
                own = sum(end - begin for group in groups for _, _, begin, end, _ in group.local_ranges())
                frozen = [p.ds_tensor.ds_numel if stage == 3 else p.numel() for p in engine.module.frozen.parameters()]
                assert own and 3 * own <= sum(read) <= 3 * own + sum(frozen), (stage, saved)
                engine.destroy()

    def test_weights_alone(self, folder, saved_by_2, saved_by_3):
        """Without the optimizer's state masters are the weights, at stage 3 the exact masters."""
        for saved in ("0-2", "1-3", "3-2", "3-3"):
            expected = torch.load(f"{folder}/{saved}.whole")
            for stage in STAGES:
                engine = fresh(make_config(stage))
                engine.load_checkpoint(f"{folder}/{saved}", load_optimizer_states=False)
                for name, parameter in engine.module.named_parameters():
                    if parameter.requires_grad:
                        source = expected[f"master of {name}"] if saved[0] == "3" else expected[name].float()
                        assert torch.equal(safe_get_full_fp32_param(parameter), source), (saved, stage, name)
                assert engine.global_steps == expected["global_steps"]
                assert not any(bool(state) for state in engine.optimizer.state.values())
                engine.destroy()


def test_all_stages_were_saved_on_all_ranks(folder, saved_by_1, saved_by_2, saved_by_3, saved_by_4):
    """Files are those of the layout."""
    for stage in STAGES:
        for world in WORLDS:
            names = set(os.listdir(f"{folder}/{stage}-{world}/global_step4"))
            bf16 = "bf16_" if dtype_of(stage, world) == "bf16" else ""
            front = [f"zero_pp_rank_{rank}_mp_rank_00" for rank in range(world)]
            expected = {f"{bf16}{name}_optim_states.pt" for name in front if stage > 0}
            expected |= {f"{name}_model_states.pt" for name in front} if stage == 3 else {"mp_rank_00_model_states.pt"}
            assert names == expected | {"manifest.json"}
