# SPDX-License-Identifier: Apache-2.0
"""Stage 3: what cannot work with partitioned weights is an error that says what to do, on every rank."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.utils import set_z3_leaf_modules
from unit.common import DistributedTest


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pair, self.last = Pair(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pair(x))


def make_engine(model: nn.Module, **zero: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def train(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, 4)).square().sum())
    engine.step()


class TestMisuse(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    def test_copies_and_pickles(self) -> None:
        model = Model()
        engine = make_engine(model)
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(RuntimeError, match=r"'pair.first.weight' is partitioned.*GatheredParameters"):
                attempt(model)
        with deepspeed.zero.GatheredParameters(model.parameters()):
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        expected = engine(torch.ones(1, 4))
        for plain in copies:
            assert torch.equal(plain(torch.ones(1, 4)), expected)
            assert all(type(p) is nn.Parameter and p.numel() for p in plain.parameters())
        train(engine)
        engine.destroy()

    def test_part_of_a_leaf_module_alone(self) -> None:
        model = Model()
        set_z3_leaf_modules(model, [Pair])
        engine = make_engine(model)
        message = (
            r"Linear was called alone while its parameters 'pair.first.weight', 'pair.first.bias' are.*part of a Pair"
        )
        with pytest.raises(RuntimeError, match=message):
            model.pair.first(torch.ones(1, 4))
        assert model.pair(torch.ones(1, 4)).shape == (1, 4)
        with deepspeed.zero.GatheredParameters(model.pair.parameters()):
            assert model.pair.first(torch.ones(1, 4)).shape == (1, 4)
        train(engine)
        engine.destroy()
        assert not model.pair.first._forward_pre_hooks

    def test_unfrozen_later(self) -> None:
        model = Model()
        model.pair.first.weight.requires_grad_(False)
        engine = make_engine(model)
        train(engine)
        model.pair.first.weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match="'pair.first.weight' did not require grad.*new engine"):
            engine(torch.ones(1, 4))
        with torch.no_grad():
            engine(torch.ones(1, 4))
        model.pair.first.weight.requires_grad_(False)
        train(engine)
        engine.destroy()

    def test_another_shape_on_one_rank(self) -> None:
        """All ranks say so: none waits for values that do not come."""
        model = Model()
        engine = make_engine(model)
        for modifier in (0, 1):
            with pytest.raises(RuntimeError, match=r"rank 1: parameter 'last.weight' was of shape \(3, 4\)"):
                with deepspeed.zero.GatheredParameters(model.last.weight, modifier_rank=modifier):
                    if dist.get_rank() == 1:
                        model.last.weight.data = torch.ones(4, 3)
        train(engine)
        engine.destroy()

    def test_initialize_again_after_a_refusal(self) -> None:
        model = Model()
        with pytest.raises(AssertionError, match="Nope"):
            deepspeed.initialize(
                model=model,
                config={
                    "train_micro_batch_size_per_gpu": 1,
                    "optimizer": {"type": "Nope"},
                    "zero_optimization": {"stage": 3},
                },
            )
        engine = make_engine(model)
        train(engine)
        with deepspeed.zero.GatheredParameters(model.parameters()):
            for weight, start in zip(model.parameters(), Model().parameters()):
                assert 0 < (weight - start).abs().max() <= 0.0011
        engine.destroy()
