# SPDX-License-Identifier: Apache-2.0
"""Ranks whose graphs differ: other parameters, other uses, another number of ``loss.backward()`` in the same window."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.utils import safe_get_full_fp32_param, set_z3_leaf_modules
from unit.common import DistributedTest
from unit.graphs import (
    Batch,
    Losses,
    ReusableNet,
    assert_gradients,
    expected_gradients,
    full_gradients,
    make_batch,
    make_engine,
    make_model,
    mse,
    my_batch,
    run_micro_step,
)

stages = pytest.mark.parametrize("stage", [0, 1, 2], ids=lambda stage: f"stage{stage}")


def train(stage: int, form: str, losses: Losses, accumulation: int, windows: int = 4) -> None:
    run_windows(make_engine(make_model(), stage, accumulation=accumulation), form, losses, accumulation, windows)


def run_windows(engine: Any, form: str, losses: Losses, accumulation: int, windows: int) -> None:
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


class Choice(nn.Module):
    """Experts of different sizes, of which each rank and window takes another one, another number of times, under a
    checkpoint or not."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6)) for width in (4, 7, 9)
        )
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, number: int) -> Tensor:
        for use in range(1 + number % 2):
            expert = self.experts[(number + use) % 3]
            if (number + use) % 4 == 0:
                x = x + expert(x)
            else:
                x = x + checkpoint(expert, x, use_reentrant=(number + use) % 4 == 1)
        return x * self.gain if number % 5 == 0 else x


class ChoosingNet(nn.Module):
    """All ranks run the same modules except inside of the choice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
        self.choice = Choice()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.head(self.choice(self.encoder(x), number))


def choose(call: Callable, module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    number = 2 * batch.rank + batch.window + batch.micro_step
    yield mse(call(batch.x, number), batch.target) + module.choice(module.encoder(batch.y), number + 1).square().mean()


def whole_model(call: Callable, module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    """Two losses of one graph; each rank takes other heads."""
    hidden = call(batch.x, head=(batch.rank + batch.window) % 2)
    yield mse(hidden, batch.target) + mse(call(batch.y, head=batch.rank % 2), batch.target)
    yield call(batch.y, head=(batch.rank + 1) % 2).square().mean()


class TestStage3(DistributedTest):
    """Every rank runs the same modules, except inside of a module that is gathered as a whole."""

    world_size = [2, 3]
    reuse_dist_env = True

    @pytest.mark.parametrize("form", ["engine.backward", "tensor.backward"])
    @pytest.mark.parametrize("threshold", [0, 10, 100_000])
    def test_choices_inside_of_a_leaf_module_are_right(self, form: str, threshold: int) -> None:
        for make, leaf, losses in ((ChoosingNet, Choice, choose), (ReusableNet, ReusableNet, whole_model)):
            for accumulation in (1, 2):
                torch.manual_seed(7)
                model = make()
                assert set_z3_leaf_modules(model, [leaf])
                zero = {"stage3_param_persistence_threshold": threshold}
                engine = make_engine(model, 3, accumulation=accumulation, zero=zero)
                run_windows(engine, form, losses, accumulation, windows=4)

    @pytest.mark.parametrize("form", ["engine.backward", "tensor.backward"])
    @pytest.mark.parametrize("threshold", [0, 3, 100_000])
    def test_other_choices_are_refused_on_every_rank(self, form: str, threshold: int) -> None:
        """Other weights of the same size are gathered under one another's name; no step is made with the result."""
        engine = make_engine(make_model(), 3, zero={"stage3_param_persistence_threshold": threshold})
        before = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
        run_micro_step(engine, other_head_on_each_rank, form, my_batch(engine, 0))
        with pytest.raises(RuntimeError, match=r"different modules.*rank 0: .*heads\.0.*rank 1: .*heads\.1.*z3_leaf"):
            engine.step()
        assert engine.global_steps == 0
        after = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
        assert all(torch.equal(after[name], before[name]) for name in before)

    def test_reading_a_gradient_is_refused_as_well(self) -> None:
        engine = make_engine(make_model(), 3)
        run_micro_step(engine, other_head_on_each_rank, "engine.backward", my_batch(engine, 0))
        with pytest.raises(RuntimeError, match="different modules"):
            full_gradients(engine)
