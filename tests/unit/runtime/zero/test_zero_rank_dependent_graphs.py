# SPDX-License-Identifier: Apache-2.0
"""Ranks whose graphs differ: other parameters, other uses, another number of ``loss.backward()`` in the same window."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unit.common import DistributedTest
from unit.graphs import (
    Batch,
    Losses,
    assert_gradients,
    expected_gradients,
    make_batch,
    make_engine,
    make_model,
    mse,
    my_batch,
    run_micro_step,
)

stages = pytest.mark.parametrize("stage", [0, 1, 2], ids=lambda stage: f"stage{stage}")


def train(stage: int, form: str, losses: Losses, accumulation: int, windows: int = 4) -> None:
    engine = make_engine(make_model(), stage, accumulation=accumulation)
    for window in range(windows):
        expected = expected_gradients(
            engine.module,
            losses,
            lambda rank, window=window: [make_batch(rank, window, step) for step in range(accumulation)],
            accumulation,
        )
        for micro_step in range(accumulation):
            if micro_step:
                engine.step()
            run_micro_step(engine, losses, form, my_batch(engine, window, micro_step))
        assert_gradients(engine, expected, torch.float32, f"accumulation {accumulation}, window {window}")
        engine.step()
        assert engine.was_step_applied()
    engine.destroy()


def other_head_on_each_rank(call: Callable, module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    yield mse(call(batch.x, head=(batch.rank + batch.window) % 2), batch.target)


def one_more_backward_per_rank(call: Callable, module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    for count in range(1 + (batch.rank + batch.window) % 3):
        yield mse(call(batch.x * (count + 1)), batch.target)


def no_backward_on_one_rank(call: Callable, module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    if batch.rank != batch.window % 2:
        yield mse(call(batch.x), batch.target)


def late_firings_on_one_rank(call: Callable, module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    """Checkpointed uses on one rank fire after the buckets of their parameters could have gone out."""
    loss = mse(call(batch.x), batch.target)
    if batch.rank == batch.window % 2:
        for x in (batch.x, batch.y):
            loss = loss + checkpoint(module.encoder, x.clone().requires_grad_(), use_reentrant=True).square().mean()
    yield loss


def only_a_bare_part_on_one_rank(call: Callable, module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    if batch.rank == 0:
        yield module.encoder(batch.y).square().mean()
    else:
        yield mse(call(batch.x, head=1), batch.target)


class TestSameNumberOfBackwards(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @stages
    @pytest.mark.parametrize("form", ["engine.backward", "tensor.backward"])
    def test_gradients(self, stage: int, form: str) -> None:
        for losses in (other_head_on_each_rank, late_firings_on_one_rank, only_a_bare_part_on_one_rank):
            for accumulation in (1, 2):
                train(stage, form, losses, accumulation)


class TestOtherNumberOfBackwards(DistributedTest):
    """Only plain ``loss.backward()``: every rank takes part in each ``engine.backward``."""

    world_size = [2, 3]
    reuse_dist_env = True

    @stages
    @pytest.mark.parametrize("accumulation", [1, 3])
    def test_gradients(self, stage: int, accumulation: int) -> None:
        for losses in (one_more_backward_per_rank, no_backward_on_one_rank):
            train(stage, "tensor.backward", losses, accumulation)
