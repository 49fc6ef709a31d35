# SPDX-License-Identifier: Apache-2.0
"""A rank without a backward in a window lands the other ranks' gradients, and must know their loss scale to do so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.utils.tensor_fragment import safe_get_full_grad
from unit.common import DistributedTest


class TestIdleRank(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", [0, 1, 2])
    @pytest.mark.parametrize("idle", [0, 1])
    def test_gradient_is_unscaled_on_every_rank(self, stage: int, idle: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(6, 5)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 6, "loss_scale_window": 1},
            "zero_optimization": {"stage": stage},
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        for _ in range(3):  # the scale grows with each step
            x = torch.ones(2, 6, dtype=torch.float16)
            if engine.global_rank != idle:
                engine.scale(engine(x).float().sum()).backward()
            gradient = safe_get_full_grad(engine.module.weight)
            # d/dw of the sum over two rows of ones is 2, and the idle rank contributes zero to the mean
            assert torch.equal(gradient, torch.ones(5, 6)), gradient
            engine.step()
