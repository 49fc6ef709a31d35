# SPDX-License-Identifier: Apache-2.0
"""A job that resumes goes on bit by bit as the one that saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from unit.checkpoint.checkpoint_cases import (
    KeptModel,
    differences,
    everything,
    fresh,
    groups_of,
    make_config,
    make_engine,
    micro_batch,
    train,
)
from unit.common import DistributedTest

STAGES = [0, 1, 2, 3]


class FusedAdam(torch.optim.AdamW):
    """Makes the engine keep the masters in one tensor; it is known by its name."""


def check_continuation(
    folder: str, config: dict[str, Any], kind: str = "AdamW", mixed: bool = False, windows: int = 4
) -> Any:
    """Train, save, train on; a fresh engine resumes and does the same. The fresh engine."""
    first = make_engine(config, kind, KeptModel(mixed=mixed))
    train(first, 0, windows)
    at_save = everything(first, kind)
    assert first.save_checkpoint(folder, client_state={"note": kind})
    assert differences(everything(first, kind), at_save) == [], "saving changed the engine"
    seen = train(first, windows, windows)
    end = everything(first, kind)
    assert differences(end, at_save), "the training after the save changed nothing"
    first.destroy()

    second = fresh(config, kind, mixed)
    path, client_state = second.load_checkpoint(folder)
    assert path is not None and client_state["note"] == kind
    assert differences(everything(second, kind), at_save) == []
    assert train(second, windows, windows) == seen
    assert differences(everything(second, kind), end) == []
    return second


class TestContinuation(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", STAGES)
    def test_dtypes_and_optimizers(self, stage, tmpdir):
        for dtype, kind, gas in [
            ("fp32", "AdamW", 2),
            ("fp32", "SGD", 1),
            ("fp32", "Adagrad", 1),
            ("bf16", "AdamW", 1),
            ("bf16", "SGD", 2),
            ("fp16", "AdamW", 2),
            ("fp16", "Adagrad", 1),
        ]:
            engine = check_continuation(f"{tmpdir}/{dtype}-{kind}", make_config(stage, dtype, gas), kind)
            if dtype == "fp16":
                assert engine.skipped_steps > 0 and engine.optimizer.loss_scaler.cur_iter == 8
            engine.destroy()

    @pytest.mark.parametrize("stage", STAGES)
    def test_parts_in_other_dtypes(self, stage, tmpdir):
        engine = check_continuation(str(tmpdir), make_config(stage), mixed=True)
        assert {p.dtype for p in engine.module.parameters()} == {torch.float32, torch.float64, torch.bfloat16}

    @pytest.mark.parametrize("stage", [1, 2, 3])
    @pytest.mark.parametrize("states", [False, True])
    def test_bf16_masters(self, stage, states, tmpdir):
        precision = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": states}
        config = make_config(stage, "bf16") | {"bf16": precision, "data_types": {"grad_accum_dtype": "bf16"}}
        check_continuation(str(tmpdir), config)

    def test_an_optimizer_of_the_config(self, tmpdir):
        for stage in STAGES:
            config = make_config(stage, "bf16", optimizer={"type": "AdamW", "params": {"lr": 0.02}})
            first = make_engine(config, optimizer=None)
            train(first, 0, 3)
            first.save_checkpoint(f"{tmpdir}/{stage}")
            expected, seen = everything(first), train(first, 3, 3)
            second = make_engine(config, optimizer=None, seed=5)
            second.load_checkpoint(f"{tmpdir}/{stage}")
            assert differences(everything(second), expected) == []
            assert train(second, 3, 3) == seen

    def test_masters_in_one_tensor(self, tmpdir):
        """A fused Adam at stage 0: masters and state of a group end to end, as DeepSpeed writes them."""
        for dtype in ("bf16", "fp16"):
            folder, engines = f"{tmpdir}/{dtype}", []
            for seed in (0, 99):
                model = KeptModel(seed)
                optimizer = FusedAdam(groups_of(model), lr=0.1, betas=(0.8, 0.95))
                engines.append(make_engine(make_config(0, dtype), model=model, optimizer=optimizer))
            first, second = engines
            assert type(first.optimizer) is FP16_Optimizer
            train(first, 0, 5)
            first.save_checkpoint(folder)
            expected = everything(first)
            saved = torch.load(f"{folder}/global_step5/mp_rank_00_model_states.pt", weights_only=False)["optimizer"]
            sizes = [sum(p.numel() for p in group) for group in first.optimizer.fp32_groups]
            assert [flat.shape for flat in saved["fp32_groups_flat"]] == [(size,) for size in sizes]
            assert "fp32_groups" not in saved and saved["clip_grad"] == 0.5 and ("cur_scale" in saved)
            inner = saved["optimizer_state_dict"]
            assert [group["params"] for group in inner["param_groups"]] == [[0], [1], []]
            assert [inner["state"][index]["exp_avg"].shape for index in (0, 1)] == [(size,) for size in sizes[:2]]
            second.load_checkpoint(folder)
            assert differences(everything(second), expected) == []
            assert train(second, 5, 2) == train(first, 5, 2)
            other = fresh(make_config(1, dtype))
            other.load_checkpoint(folder)
            found = everything(other)
            assert not [key for key in differences(found, expected) if key.startswith(("master", "exp_avg"))]

    def test_a_checkpoint_from_before_the_first_step(self, tmpdir):
        """Loaded into an engine that has stepped, whose optimizer state must go."""
        for stage in STAGES:
            engine = make_engine(make_config(stage))
            start = everything(engine)
            engine.save_checkpoint(f"{tmpdir}/{stage}")
            seen = train(engine, 0, 3)
            engine.load_checkpoint(f"{tmpdir}/{stage}")
            assert differences(everything(engine), start) == []
            assert train(engine, 0, 3) == seen
            engine.destroy()

    def test_the_engine_that_saved_goes_back(self, tmpdir):
        """Also in the middle of a window, whose gradients are dropped; the next micro-step begins a window."""
        for stage in STAGES:
            engine = make_engine(make_config(stage, "bf16", gas=3))
            train(engine, 0, 2)
            engine.save_checkpoint(f"{tmpdir}/{stage}")
            at_save, seen = everything(engine), train(engine, 2, 2)
            for micro_step in range(2):
                engine.backward(engine(*micro_batch(100 + micro_step)))
                engine.step()
            engine.load_checkpoint(f"{tmpdir}/{stage}")
            assert differences(everything(engine), at_save) == []
            assert train(engine, 2, 2) == seen
            engine.destroy()

    def test_torch_schedulers(self, tmpdir):
        def milestones(optimizer: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.3)

        def chained(optimizer: torch.optim.Optimizer) -> Any:
            parts = [
                torch.optim.lr_scheduler.LinearLR(optimizer),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
            ]
            return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [3])

        def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

        for make in (milestones, chained, one_cycle):
            config = make_config(2)
            del config["scheduler"]
            first = make_engine(config, lr_scheduler=make)
            train(first, 0, 3)
            first.save_checkpoint(f"{tmpdir}/{make.__name__}")
            seen = train(first, 3, 3)
            second = make_engine(config, lr_scheduler=make, seed=3)
            second.load_checkpoint(f"{tmpdir}/{make.__name__}")
            assert train(second, 3, 3) == seen, make.__name__


class TestMoreRanksThanElements(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("stage", [1, 3])
    def test_small(self, stage, tmpdir):
        """The scalar, the bias of two elements: some ranks own nothing of them."""
        assert dist.get_world_size() > KeptModel().unused.bias.numel()
        check_continuation(str(tmpdir), make_config(stage, "bf16"))


class TestOneRank(DistributedTest):
    world_size = 1

    def test_every_stage(self, tmpdir):
        for stage in STAGES:
            check_continuation(f"{tmpdir}/{stage}", make_config(stage, "fp16", gas=2)).destroy()
