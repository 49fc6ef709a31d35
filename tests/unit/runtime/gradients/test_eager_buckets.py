# SPDX-License-Identifier: Apache-2.0
"""Buckets leave while backward goes on, also where those in front of them have nothing to wait for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed
from unit.common import DistributedTest


class Model(nn.Module):
    """Two layers in use, and one that is not; its buckets are the first in order when it is declared last."""

    def __init__(self, unused_is_last: bool) -> None:
        super().__init__()
        if not unused_is_last:
            self.unused = nn.Linear(4, 4)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        if unused_is_last:
            self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


class TestEagerBuckets(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize("unused_is_last", [False, True])
    def test_bucket_of_the_last_layer_leaves_before_the_first_layer_fires(self, unused_is_last: bool) -> None:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 20},
        }
        model = Model(unused_is_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        reducer = engine.optimizer.reducer
        sent_before_first_layer: list[int] = []
        model.first.weight.register_hook(lambda _: sent_before_first_layer.append(reducer.transport.collectives_issued))
        for _ in range(3):
            before = reducer.transport.collectives_issued
            engine.backward(engine(torch.ones(2, 4)))
            sent_before_first_layer[-1] -= before
            engine.step()
        # the first backward does not know yet what is unused
        assert sent_before_first_layer[1:] == [1 + unused_is_last] * 2, sent_before_first_layer
