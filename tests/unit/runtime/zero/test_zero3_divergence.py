# SPDX-License-Identifier: Apache-2.0
"""Ranks that run different modules under ZeRO-3: an error that says who did what, never mixed weights in silence."""

import re

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

import deepspeed
from deepspeed.comm import watchdog
from deepspeed.runtime.zero.sharded_parameter import ShardRanks, first_difference
from unit.common import DistributedTest
from unit.graphs import make_engine


class Choice(nn.Module):
    """One of two layers, of the same size or not."""

    def __init__(self, sizes: tuple[int, int] = (4, 4)) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 4)
        self.choices = nn.ModuleList(nn.Linear(4, size, bias=False) for size in sizes)

    def forward(self, x: Tensor, *which: int) -> Tensor:
        hidden = torch.tanh(self.entry(x))
        return hidden.sum() + sum(self.choices[i](hidden).square().sum() for i in which)


def make(model: nn.Module, **zero):
    options = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0, **zero}
    return make_engine(model, 3, zero=options)


def told(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error))


class TestSameSizes(DistributedTest):
    """The transport cannot tell: only the record of gathers can."""

    world_size = 3

    def test_step_refuses_on_every_rank(self):
        engine = make(Choice())
        before = [p.ds_tensor.clone() for p in engine.module.parameters()]
        engine.backward(engine(torch.randn(2, 4), 1 if torch_dist.get_rank() == 2 else 0))
        difference = "rank 0: 'choices.0.weight'; rank 1: 'choices.0.weight'; rank 2: 'choices.1.weight'"
        for _ in range(2):  # what was refused stays refused
            with pytest.raises(RuntimeError, match="ranks ran different modules") as caught:
                engine.step()
            assert difference in told(caught.value)
        assert all(torch.equal(p.ds_tensor, b) for p, b in zip(engine.module.parameters(), before))

    def test_so_do_the_accessors(self):
        engine = make(Choice())
        engine.backward(engine(torch.randn(2, 4), torch_dist.get_rank() % 2))
        with pytest.raises(RuntimeError, match="ranks ran different modules"):
            deepspeed.utils.safe_get_full_grad(engine.module.entry.weight)

    def test_another_order_of_the_same_modules(self):
        engine = make(Choice())
        engine.backward(engine(torch.randn(2, 4), *((0, 1) if torch_dist.get_rank() else (1, 0))))
        with pytest.raises(RuntimeError, match="ranks ran different modules"):
            engine.step()

    def test_long_after_the_difference(self):
        engine = make(Choice())
        with torch.no_grad():
            engine(torch.randn(2, 4), torch_dist.get_rank() % 2)
            for _ in range(70):
                engine(torch.randn(2, 4), 0)
        engine.backward(engine(torch.randn(2, 4), 0))
        with pytest.raises(RuntimeError, match="lies before the last gathers on record"):
            engine.step()


class TestSanityChecks(DistributedTest):
    """``enable_sanity_checks`` compares each gather before it begins."""

    world_size = 2

    @pytest.mark.parametrize("sizes", [(4, 4), (4, 9)])
    def test_error_at_the_module_that_differs(self, sizes):
        engine = make(Choice(sizes), enable_sanity_checks=True)
        engine.backward(engine(torch.randn(2, 4), 0, 1))
        engine.step()
        with pytest.raises(RuntimeError, match="ranks ran different modules") as caught:
            engine(torch.randn(2, 4), torch_dist.get_rank())
        assert "rank 0: 'choices.0.weight'; rank 1: 'choices.1.weight'" in told(caught.value)

    def test_in_generation(self):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "stage3_prefetch_bucket_size": 0,
                "enable_sanity_checks": True,
            },
        }
        engine = deepspeed.initialize(model=Choice(), config=config)[0]
        with torch.no_grad():
            engine(torch.randn(2, 4), 0)
            with pytest.raises(RuntimeError, match="ranks ran different modules"):
                engine(torch.randn(2, 4), torch_dist.get_rank())

    def test_in_gathered_parameters(self):
        engine = make(Choice(), enable_sanity_checks=True)
        wanted = engine.module.choices[torch_dist.get_rank()].weight
        with pytest.raises(RuntimeError, match="ranks ran different modules"):
            with deepspeed.zero.GatheredParameters(wanted):
                pass

    def test_ranks_that_agree_train_as_ever(self):
        engine = make(Choice(), enable_sanity_checks=True, stage3_prefetch_bucket_size=100)
        for step in range(4):
            engine.backward(engine(torch.randn(2, 4), step % 2))
            engine.step()


class TestMissingRank(DistributedTest):
    """One rank gathers, the others do something else or nothing."""

    world_size = 2

    @pytest.mark.parametrize("checks", [False, True])
    def test_a_rank_that_skips_a_module(self, checks):
        """The report names the weights that rank 0 waits for, and where rank 1 is."""
        engine = make(Choice(), enable_sanity_checks=checks)
        watchdog.set_timeout(2.0)
        with pytest.raises(RuntimeError) as caught:
            if torch_dist.get_rank() == 0:
                engine(torch.randn(2, 4), 0)
            else:
                engine(torch.randn(2, 4))
                deepspeed.comm.barrier()
        message = told(caught.value)
        assert "choices.0.weight" in message and "barrier" in message, message

    def test_a_rank_that_sleeps(self):
        engine = make(Choice())
        watchdog.set_timeout(1.5)
        if torch_dist.get_rank() == 1:
            import time

            time.sleep(4)
        with pytest.raises(RuntimeError) as caught:
            engine(torch.randn(2, 4), 0)
        if torch_dist.get_rank() == 0:
            message = told(caught.value)
            assert "entry.weight" in message and "rank 1" in message, message


def test_first_difference_is_told_by_rank():
    record = [(1, ["a"]), (2, ["b", "c"])]
    assert "gather number 2: rank 0: b, c; rank 1: nothing" in first_difference([record, record[:1]])
    assert "gather number 1: rank 0: a; rank 1: b" in first_difference([record, [(1, ["b"]), (2, ["b", "c"])]])
    assert "before" in first_difference([record, record])


class TestRecord(DistributedTest):
    world_size = 2

    def test_tells_orders_apart_that_differ_in_one_place(self):
        engine = make(Choice())
        ranks: ShardRanks = engine.module.entry.weight._ds_shard.ranks
        shards = [p._ds_shard for p in engine.module.parameters()]
        digests = set()
        for order in ([[0], [1]], [[1], [0]], [[0, 1]], [[1, 0]], [[0], [0]], [[2], [1]]):
            ranks.count, ranks.digest = 0, 0
            for gather in order:
                ranks.note([shards[i] for i in gather])
            digests.add((ranks.count, ranks.digest))
        assert len(digests) == 6
