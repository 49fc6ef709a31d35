# SPDX-License-Identifier: Apache-2.0
"""Two engines in one loss: each divides by its own accumulation count and takes the loss scale of the backward that
ran, whoever ran it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed.comm as dist
from unit.common import DistributedTest
from unit.graphs import (
    Batch,
    assert_gradients,
    make_batch,
    make_engine,
    make_model,
    mse,
    my_batch,
    send_backward,
    whole_copy,
)


def joint_loss(first: Callable, second: Callable, bare: nn.Module, batch: Batch) -> Tensor:
    """Engines one after the other and side by side, and the second one's encoder around its engine."""
    out = first(batch.x)
    fed = second(torch.cat([out.to(batch.y.dtype), batch.y[:, :2]], dim=1))
    return (
        mse(out, batch.target)
        + mse(fed, batch.target).to(out.dtype)
        + bare.encoder(batch.y).square().mean().to(out.dtype)
    )


def expected_of_both(
    engines: list[Any], window: int, micro_steps: int, divisors: list[float], dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    wide = [whole_copy(engine.module).cpu().double() for engine in engines]
    for module in wide:
        module.zero_grad(set_to_none=True)
    for rank in range(dist.get_world_size()):
        for micro_step in range(micro_steps):
            batch = make_batch(rank, window, micro_step, dtype).map(lambda tensor: tensor.double())
            joint_loss(*wide, wide[1], batch).backward()
    return [
        {
            name: (torch.zeros_like(p) if p.grad is None else p.grad) / (dist.get_world_size() * divisor)
            for name, p in module.named_parameters()
        }
        for module, divisor in zip(wide, divisors)
    ]


def train(engines: list[Any], form: str, accumulation: list[int], dtypes: list[torch.dtype], who: int = 0) -> None:
    """Two windows of the longer accumulation; engine ``who`` runs the backward."""
    micro_steps, narrow = max(accumulation), min(dtypes, key=lambda dtype: dtype.itemsize)
    for window in range(2):
        expected = expected_of_both(engines, window, micro_steps, accumulation, narrow)
        for micro_step in range(micro_steps):
            batch = my_batch(engines[0], window, micro_step, narrow)
            send_backward(engines[who], joint_loss(*engines, engines[1].module, batch), form)
            if micro_step + 1 < micro_steps:
                for engine in engines:
                    engine.set_gradient_accumulation_boundary(False)
                    engine.step()
            for engine in engines:
                engine.set_gradient_accumulation_boundary(micro_step + 2 >= micro_steps)
        for engine, gradients, dtype in zip(engines, expected, dtypes):
            assert_gradients(engine, gradients, narrow, f"window {window}, {dtype}")
            engine.step()
            assert engine.was_step_applied()


class TestTwoEngines(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("form", ["engine.backward", "tensor.backward"])
    @pytest.mark.parametrize("stages", [(0, 0), (1, 1), (2, 2), (0, 2), (2, 1), (3, 3), (0, 3), (3, 2)], ids=str)
    def test_own_accumulation_count(self, form: str, stages: tuple[int, int]) -> None:
        for accumulation in ([1, 1], [2, 2], [1, 3], [3, 2]):
            for who in (0, 1):
                engines = [make_engine(make_model(s), stages[s], accumulation=accumulation[s]) for s in (0, 1)]
                for engine in engines:
                    engine.set_gradient_accumulation_boundary(max(accumulation) == 1)
                train(engines, form, accumulation, [torch.float32] * 2, who)

    @pytest.mark.parametrize("form", ["engine.backward", "tensor.backward"])
    @pytest.mark.parametrize("stages", [(0, 0), (1, 2), (2, 1), (3, 3), (3, 1)], ids=str)
    @pytest.mark.parametrize("scales", [(256.0, 16.0), (16.0, 1024.0)], ids=str)
    def test_own_loss_scale(self, form: str, stages: tuple[int, int], scales: tuple[float, float]) -> None:
        engines = [
            make_engine(make_model(s), stages[s], torch.float16, accumulation=2, loss_scale=scales[s]) for s in (0, 1)
        ]
        for engine in engines:
            engine.set_gradient_accumulation_boundary(False)
        train(engines, form, [2, 2], [torch.float16] * 2)
