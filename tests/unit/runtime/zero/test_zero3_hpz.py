# SPDX-License-Identifier: Apache-2.0
"""Secondary shards (``zero_hpz_partition_size``): backward gathers within small groups, never from stale weights."""

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

import deepspeed
from deepspeed.runtime.zero.sharded_parameter import Gather, shard_of, start_gathers
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from unit.common import DistributedTest
from unit.graphs import (
    assert_gradients,
    encoder_twice,
    expected_gradients,
    make_batch,
    make_engine,
    make_model,
    my_batch,
    weights_of,
)

HPZ = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def check_gradients(engine, window: int) -> None:
    expected = expected_gradients(engine.module, encoder_twice, lambda rank: [make_batch(rank, window)], 1)
    for loss in encoder_twice(engine, engine.module, my_batch(engine, window)):
        engine.backward(loss)
    assert_gradients(engine, expected, torch.float32, f"window {window}")


def sizes_of_gathers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Ranks of each gather from now on, and whether it is one of a backward."""
    log = []
    start = Gather._start

    def noted(gather: Gather) -> None:
        log.append((gather._ranks.world_size, torch._C._current_graph_task_id() != -1))
        start(gather)

    monkeypatch.setattr(Gather, "_start", noted)
    return log


def load(engine) -> None:
    torch.manual_seed(21)
    engine.load_module_state_dict(
        {"module": {name: torch.randn(w.shape) for name, w in weights_of(engine.module).items()}}
    )


def edit(engine) -> None:
    with deepspeed.zero.GatheredParameters(engine.module.parameters(), modifier_rank=3):
        for parameter in engine.module.parameters():
            parameter.data.mul_(-2.0 if torch_dist.get_rank() == 3 else 7.0)


def set_masters(engine) -> None:
    for parameter in engine.module.parameters():
        safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter) * 3)


def step(engine) -> None:
    engine.step()


class TestSecondaryShards(DistributedTest):
    world_size = 4
    reuse_dist_env = True

    @pytest.mark.parametrize("write", [step, load, edit, set_masters])
    def test_are_fresh_after_every_write(self, write):
        engine = make_engine(make_model(), 3, zero=HPZ)
        for window in range(2):
            check_gradients(engine, window)
            if write is not step:
                engine.zero_grad()
            write(engine)
        check_gradients(engine, 5)

    def test_backward_gathers_in_the_small_group(self, monkeypatch):
        engine = make_engine(make_model(), 3, zero=HPZ)
        log = sizes_of_gathers(monkeypatch)
        for window in range(3):
            log.clear()
            for loss in encoder_twice(engine, engine.module, my_batch(engine, window)):
                engine.backward(loss)
            assert {size for size, backward in log if backward} == {2}, window
            assert {size for size, backward in log if not backward} == {4}, window
            engine.step()
        secondary = shard_of(engine.module.core[0].weight).secondary
        assert torch_dist.get_process_group_ranks(secondary.ranks.data_parallel_group) == [
            torch_dist.get_rank() // 2 * 2,
            torch_dist.get_rank() // 2 * 2 + 1,
        ]

    def test_stale_ones_are_not_gathered_from(self):
        engine = make_engine(make_model(), 3, zero=HPZ)
        with torch.no_grad():
            engine(my_batch(engine, 0).x)
        shards = [shard_of(parameter) for parameter in engine.module.core.parameters()]
        assert all(shard.secondary.version == shard.version for shard in shards)
        edit(engine)
        wanted = weights_of(engine.module.core)
        for gather in start_gathers(shards, prefer_secondary=True):
            gather.wait()
        for name, parameter in engine.module.core.named_parameters():
            assert torch.equal(parameter.data, wanted[name])
            shard_of(parameter).hide()

    def test_written_between_forward_and_backward(self):
        engine = make_engine(make_model(), 3, zero=HPZ)
        (loss,) = encoder_twice(engine, engine.module, my_batch(engine, 0))
        edit(engine)
        with pytest.raises(RuntimeError, match="was modified"):
            engine.backward(loss)
        engine.zero_grad()
        check_gradients(engine, 1)

    def test_nothing_but_the_weights_is_read(self):
        """Padding of secondary shards is poisoned."""
        engine = make_engine(make_model(), 3, zero=HPZ)
        (loss,) = encoder_twice(engine, engine.module, my_batch(engine, 0))
        poisoned = 0
        for parameter in engine.module.parameters():
            shard = shard_of(parameter)
            if shard.secondary.data is None:  # of the head that is not used
                continue
            numel = shard.secondary.data.numel()
            begin = min(shard.secondary.ranks.rank * numel, shard.numel)
            padding = shard.secondary.data[min(numel, shard.numel - begin) :]
            padding.fill_(float("nan"))
            poisoned += padding.numel()
        expected = expected_gradients(engine.module, encoder_twice, lambda rank: [make_batch(rank, 0)], 1)
        engine.backward(loss)
        assert_gradients(engine, expected, torch.float32)
        assert poisoned > 0 or torch_dist.get_rank() % 2 == 0

    def test_ranks_out_of_order_in_backward_are_refused(self):
        """The order of gathers in small groups counts as well."""

        class TwoHeads(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

            def forward(self, x):
                return self.first(torch.tanh(x)), self.second(torch.tanh(x))

        engine = make_engine(TwoHeads(), 3, zero={**HPZ, "stage3_prefetch_bucket_size": 0})
        x = torch.randn(2, 4, requires_grad=True)
        outputs = engine(x)
        order = outputs if torch_dist.get_rank() < 2 else outputs[::-1]
        for out in order:  # both are gathered in both groups, but not in the same order
            engine.backward(out.sum())
        with pytest.raises(RuntimeError, match="ranks ran different modules"):
            engine.step()
