# SPDX-License-Identifier: Apache-2.0
"""A rank without a backward in a window lands the other ranks' gradients, and must know their loss scale to do so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.runtime.gradients.ledger import GradientAccountingError
from deepspeed.utils.tensor_fragment import safe_get_full_grad
from unit.common import DistributedTest


def make_engine(stage: int, steps: int = 1) -> Any:
    model = nn.Linear(6, 5)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": steps,
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 6, "loss_scale_window": 1},
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


class TestIdleRank(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    @pytest.mark.parametrize("idle", [0, 1])
    def test_gradient_is_unscaled_on_every_rank(self, stage: int, idle: int) -> None:
        engine = make_engine(stage)
        for _ in range(3):  # the scale grows with each step
            x = torch.ones(2, 6, dtype=torch.float16)
            loss = engine(x).float().sum()  # on every rank, as stage 3 needs
            if engine.global_rank != idle:
                engine.scale(loss).backward()
            gradient = safe_get_full_grad(engine.module.weight)
            # d/dw of the sum over two rows of ones is 2, and the idle rank contributes zero to the mean
            assert torch.equal(gradient, torch.ones(5, 6)), gradient
            engine.step()

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_other_scale_than_the_present_one(self, stage: int) -> None:
        """The idle rank takes the scale that the backward had, not the one in force when it joins."""
        engine = make_engine(stage, steps=2)
        x = torch.ones(2, 6, dtype=torch.float16)
        loss = engine(x).float().sum()
        if engine.global_rank == 0:
            engine.scale(loss).backward()
        engine.step()
        engine.optimizer.override_loss_scale(128.0)
        assert torch.equal(safe_get_full_grad(engine.module.weight), torch.full((5, 6), 0.5))

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_different_scales_in_one_window_are_refused(self, stage: int) -> None:
        engine = make_engine(stage, steps=2)
        x = torch.ones(2, 6, dtype=torch.float16)
        loss = engine(x).float().sum()
        if engine.global_rank == 0:
            engine.scale(loss).backward()
        engine.step()
        engine.optimizer.override_loss_scale(128.0)
        engine.scale(engine(x).float().sum()).backward()
        with pytest.raises(GradientAccountingError, match="loss scale.* by rank: \\[64.0, 128.0\\]"):
            engine.step()
        engine.zero_grad()
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(x).float().sum())
        engine.step()
        assert engine.was_step_applied()
