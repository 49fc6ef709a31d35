# SPDX-License-Identifier: Apache-2.0
"""Bytes by kind against sizes worked out by hand, at every stage."""

import types

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.profiling.memory import KINDS, MemoryBreakdown, memory_breakdown, memory_table
from unit.common import DistributedTest
from unit.runtime.engine_cases import make_config, make_engine

ADAM = {"type": "Adam", "params": {"lr": 0.01}}
WIDTH, BATCH = 8, 2
TRAINED = 2 * (WIDTH * WIDTH + WIDTH)  # elements; divisible by twice the ranks, so there is no padding
FROZEN, BUFFER = WIDTH * WIDTH, 5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.tied = self.second
        self.register_buffer("table", torch.zeros(BUFFER))

    def forward(self, x):
        return self.frozen(self.tied(torch.tanh(self.first(x)))).square().mean()


def engine_after_a_step(stage, dtype, gas=1, **zero):
    config = make_config(stage, dtype, gas=gas, zero=zero, optimizer=ADAM)
    engine = make_engine(config, Model())
    x = torch.ones(BATCH, WIDTH, dtype=engine.get_data_types()[0])
    for _ in range(gas):
        engine.backward(engine(x))
        engine.step()
    return engine, x


def adam_steps(engine):
    """Bytes of the counters of steps, one per state."""
    states = engine._stepper.optimizer.state.values()
    return sum(state["step"].untyped_storage().nbytes() for state in states)


class TestStages(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("dtype, size", [("fp32", 4), ("bf16", 2)])
    @pytest.mark.parametrize("stage", [0, 1, 2])
    def test_kinds(self, stage, dtype, size):
        engine, _ = engine_after_a_step(stage, dtype)
        share = 1 if stage == 0 else dist.get_world_size()
        found = memory_breakdown(engine)
        assert found.weights == size * (TRAINED + FROZEN)
        assert found.module_buffers == engine.module.table.element_size() * BUFFER
        assert found.gradients == 4 * TRAINED // share
        own_masters = stage > 0 or dtype == "bf16"
        masters = 4 * TRAINED // share if own_masters else 0
        assert found.optimizer_state - adam_steps(engine) == masters + 2 * 4 * TRAINED // share
        buffers = 2 if stage > 0 else 1  # an exchange of slices receives into the second
        assert found.communication_buffers == buffers * size * TRAINED
        assert found.gathered_parameters == found.on_host == 0 and found.device_allocated is found.other is None
        assert found.total == sum(getattr(found, kind) for kind in KINDS) and found.rank == dist.get_rank()
        engine.destroy()

    def test_shown_gradients_are_views_and_count_once(self):
        engine, x = engine_after_a_step(0, "fp32")
        before = memory_breakdown(engine).gradients
        engine.backward(engine(x))
        assert engine.module.first.weight.grad is not None
        assert memory_breakdown(engine).gradients == before == 4 * TRAINED
        engine.destroy()

    def test_waiting_gradients_and_buckets(self):
        """Stage 1 parks what it has not reduced; buffers are freed where they are not to persist."""
        engine, x = engine_after_a_step(1, "bf16", gas=2, contiguous_gradients=False)
        engine.backward(engine(x))
        found = memory_breakdown(engine)
        assert found.gradients == 4 * TRAINED // 2 + 4 * TRAINED
        assert found.communication_buffers == 0
        engine.destroy()

    def test_partitioned_weights(self):
        """Each rank keeps its slices; whole values are there while somebody holds them."""
        engine, _ = engine_after_a_step(3, "bf16", stage3_param_persistence_threshold=0)
        ranks = dist.get_world_size()
        found = memory_breakdown(engine)
        assert found.weights == 2 * (TRAINED + FROZEN) // ranks and found.gathered_parameters == 0
        assert found.gradients == 4 * TRAINED // ranks
        assert found.optimizer_state - adam_steps(engine) == 3 * 4 * TRAINED // ranks
        with deepspeed.zero.GatheredParameters([engine.module.first.weight]):
            during = memory_breakdown(engine)
        assert during.gathered_parameters == 2 * WIDTH * WIDTH and during.weights == found.weights
        assert memory_breakdown(engine) == found
        engine.destroy()

    def test_an_engine_without_optimizer_has_weights_alone(self):
        config = make_config(0)
        engine = deepspeed.initialize(model=Model().requires_grad_(False), config=config)[0]
        found = memory_breakdown(engine)
        assert found.total == found.weights + found.module_buffers == 4 * (TRAINED + FROZEN + BUFFER)
        engine.destroy()


def test_partitioned_parameters():
    """As ZeRO-3 keeps them: a slice each, and whole values of those that are gathered."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for parameter in model.parameters():
        parameter.ds_tensor = parameter.data.flatten()[:8].clone()
    model[1].weight.data = torch.empty(0)
    device = torch.device("cpu")
    engine = types.SimpleNamespace(module=model, device=device, global_rank=0, _stepper=None)
    found = memory_breakdown(engine)
    assert (found.weights, found.gathered_parameters) == (2 * 8 * 4, 16 * 4)
    model[0].weight.data = model[0].weight.ds_tensor  # one rank: the whole is the slice
    assert memory_breakdown(engine).gathered_parameters == 0


def test_table():
    rows = [MemoryBreakdown(rank=rank, weights=2**20 * (rank + 1), optimizer_state=512) for rank in range(20)]
    lines = memory_table(rows).splitlines()
    assert lines[0].split("  ")[-1] == "total" and "gradients" not in lines[0]
    assert len(lines) == 18 and lines[1].split() == ["4", "5.0", "MB", "512.0", "B", "5.0", "MB"]
    assert lines[-1] == "the 16 of 20 ranks that hold most"
    cuda = MemoryBreakdown(rank=0, weights=1024, optimizer_state=2048, on_host=2048, device_allocated=1000)
    assert cuda.other == -24 and memory_table([cuda]).splitlines()[1].split()[-2:] == ["-24.0", "B"]
