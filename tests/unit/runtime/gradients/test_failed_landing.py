# SPDX-License-Identifier: Apache-2.0
"""An exception between a bucket's collective and its result in the shard: other ranks have taken part, so nobody may be
left waiting, nothing half reduced may be stepped with, and the engine must be usable afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.gradients.ledger import GradientAccountingError
from deepspeed.utils import safe_get_full_grad
from unit.common import DistributedTest
from unit.reference import max_relative_error


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(5, 5) for _ in range(4)])


def batch_of(rank: int) -> Tensor:
    return torch.arange(10.0).view(2, 5) / 10 + rank


def expected_gradients(model: nn.Module, world_size: int) -> dict[str, Tensor]:
    """Mean over ranks, in float64."""
    reference = make_model().double()
    reference.load_state_dict(model.state_dict())
    for rank in range(world_size):
        (reference(batch_of(rank).double()).square().sum() / world_size).backward()
    return {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}


def make_engine(stage: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 40, "overlap_comm": False},
    }
    model = make_model()
    return deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config)[0]


class TestAnExceptionWhileABucketLands(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_leaves_no_rank_waiting(self, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make_engine(stage)
        rank = dist.get_rank()
        buckets = engine._stepper.reducer.buckets
        assert len(buckets) > 2
        with monkeypatch.context() as patch:
            if rank == 0:

                def interrupted(*_: Any, **__: Any) -> None:
                    raise KeyboardInterrupt

                patch.setattr(buckets[1], "land", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    engine.backward(engine(batch_of(rank)).square().sum())
            else:
                engine.backward(engine(batch_of(rank)).square().sum())
        with pytest.raises(GradientAccountingError, match="after 2 of"):
            engine.step()
        engine.zero_grad()
        engine.backward(engine(batch_of(rank)).square().sum())
        found = {name: safe_get_full_grad(parameter) for name, parameter in engine.module.named_parameters()}
        expected = expected_gradients(make_model(), dist.get_world_size())
        _, error = max_relative_error(found, expected)
        assert error < 1e-5
        engine.step()
        engine.destroy()
