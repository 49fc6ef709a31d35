# SPDX-License-Identifier: Apache-2.0
"""``offload_param``: shards of weights rest on the host and come to the device to be gathered. On a machine without a
device the copies are made all the same, so that nobody reads or writes the shard in place of the whole value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.runtime.zero.sharded_parameter import shard_of
from unit.common import DistributedTest
from unit.graphs import ReusableNet, make_model, mse, my_batch, run_micro_step, two_backwards, weights_of

ON_HOST = {"device": "cpu", "pin_memory": True, "buffer_size": 1000, "max_in_cpu": 1000}


def config_of(offload: bool = True, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 8,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 50,
            "stage3_param_persistence_threshold": 10,
            "stage3_prefetch_bucket_size": 40,
            **({"offload_param": ON_HOST} if offload else {}),
            **zero,
        },
    }


def make(model: nn.Module, offload: bool = True, **zero: Any) -> Any:
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.125)
    return deepspeed.initialize(model=model, optimizer=sgd, config=config_of(offload, **zero))[0]


def train(engine: Any, window: int) -> None:
    run_micro_step(engine, two_backwards, "engine.backward", my_batch(engine, window))
    engine.step()


def assert_apart(module: nn.Module) -> None:
    """No whole value shares memory with its shard."""
    for parameter in module.parameters():
        shard = shard_of(parameter)
        assert shard.away and not shard.aliased
        if shard.full is not None:
            assert shard.full.untyped_storage().data_ptr() != shard.shard.untyped_storage().data_ptr()


class TestWeightsOnTheHost(DistributedTest):
    world_size = [1, 2]
    reuse_dist_env = True

    def test_frozen_parts_evaluation_and_hpz(self) -> None:
        """The same weights and outputs as in memory, with gathers ahead and small weights that stay."""
        for zero in ({}, {"stage3_max_live_parameters": 40}, {"zero_hpz_partition_size": 2}, {"overlap_comm": False}):
            engines = []
            for offload in (False, True):
                model = make_model()
                model.core[0].weight.requires_grad_(False)
                engines.append(make(model, offload, **zero))
            for window in range(3):
                for engine in engines:
                    train(engine, window)
                    engine.eval()
                with torch.no_grad():
                    outputs = [engine(my_batch(engine, window).x) for engine in engines]
                assert torch.equal(*outputs)
                for engine in engines:
                    engine.train()
                torch.testing.assert_close(*map(weights_of, (e.module for e in engines)), rtol=1e-6, atol=1e-7)
            assert_apart(engines[1].module)
            assert engines[1].optimizer.offload_param and not engines[0].optimizer.offload_param

    def test_gathered_parameters(self) -> None:
        """Writes of the modifying rank reach shard and master; other writes are dropped and spoil saved graphs."""
        engine = make(make_model())
        parameters = list(engine.module.parameters())
        train(engine, 0)
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            if dist.get_rank() == 0:
                for parameter in parameters:
                    parameter.data.fill_(0.5)
        for parameter in parameters:
            assert bool((weights := deepspeed.utils.safe_get_full_fp32_param(parameter)).eq(0.5).all()), weights
        with deepspeed.zero.GatheredParameters(parameters):
            for parameter in parameters:
                assert bool(parameter.eq(0.5).all())
                parameter.data.zero_()
        assert all(bool(value.eq(0.5).all()) for value in weights_of(engine.module).values())
        batch = my_batch(engine, 1)
        loss = mse(engine(batch.x), batch.target)
        with deepspeed.zero.GatheredParameters(parameters):
            engine.module.heads[0].weight.data.zero_()
        with pytest.raises(RuntimeError, match="modified"):
            engine.backward(loss)
        engine.zero_grad()
        deepspeed.utils.safe_set_full_fp32_param(parameters[0], torch.ones(6, 5))
        assert bool(weights_of(engine.module)["encoder.0.weight"].eq(1).all())
        train(engine, 2)
        assert_apart(engine.module)

    def test_init_and_checkpoints(self, tmpdir: Any) -> None:
        """Built partitioned on the host; saved and loaded with and without offload."""
        torch.manual_seed(7)
        with deepspeed.zero.Init(config_dict_or_path=config_of()):
            model = ReusableNet()
        assert_apart(model)
        engine, plain = make(model), make(make_model(), offload=False)
        torch.testing.assert_close(weights_of(engine.module), weights_of(plain.module), rtol=0, atol=0)
        for one in (engine, plain):
            train(one, 0)
        for source, target in ((engine, make(make_model(1), False)), (plain, make(make_model(1)))):
            folder = str(Path(tmpdir) / ("host" if source is engine else "device"))
            source.save_checkpoint(folder)
            target.load_checkpoint(folder)
            for one in (source, target):
                train(one, 1)
            torch.testing.assert_close(weights_of(target.module), weights_of(source.module), rtol=1e-6, atol=1e-7)

    def test_without_an_optimizer(self) -> None:
        expected = make_model()
        engine = deepspeed.initialize(model=make_model(), config=config_of())[0]
        batch = my_batch(engine, 0)
        with torch.no_grad():
            torch.testing.assert_close(engine(batch.x), expected.to(engine.device)(batch.x))
        assert_apart(engine.module)

    def test_moving_states_leaves_what_is_on_the_host(self) -> None:
        engines = [make(make_model()) for _ in range(2)]
        for window in range(2):
            for engine in engines:
                train(engine, window)
            engines[1].offload_states()
            engines[1].reload_states()
        assert_apart(engines[1].module)
        torch.testing.assert_close(*map(weights_of, (e.module for e in engines)), rtol=0, atol=0)
