# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 as libraries around it use it: reference models without optimizer, generation without hooks, whole weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from unit.common import DistributedTest
from unit.graphs import (
    ReusableNet,
    assert_gradients,
    encoder_twice,
    expected_gradients,
    make_batch,
    make_engine,
    make_model,
    my_batch,
    run_micro_step,
    weights_of,
)


class Generates(ReusableNet):
    """With a loop over its own forward, as language models have."""

    def generate(self, x: Tensor, steps: int = 4) -> Tensor:
        for _ in range(steps):
            out = self(x[:, -5:])
            x = torch.cat([x, out], dim=1)
        return x


def generating_model() -> Generates:
    torch.manual_seed(7)
    return Generates()


def train(engine: Any, windows: range) -> None:
    for window in windows:
        expected = expected_gradients(engine.module, encoder_twice, lambda rank, w=window: [make_batch(rank, w)], 1)
        run_micro_step(engine, encoder_twice, "engine.backward", my_batch(engine, window))
        assert_gradients(engine, expected, torch.float32, f"window {window}")
        engine.step()


def parameters_in_reach(module: nn.Module) -> list[nn.Parameter]:
    """All parameters below a module, and those that it uses of others."""
    return [p for _, p in itertools.chain(module.named_parameters(recurse=True), module.ds_external_parameters())]


@contextmanager
def unwrapped_by_hand(engine: Any) -> Iterator[nn.Module]:
    """Hooks taken out and put back by a client through the attributes that it knows."""
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    missing = [p for p in engine.module.parameters() if p.ds_status is not ZeroParamStatus.AVAILABLE]
    with deepspeed.zero.GatheredParameters(missing):
        for parameter in parameters_in_reach(offload.module):
            parameter.ds_active_sub_modules.clear()
        for handle in [*offload.forward_hooks, *offload.backward_hooks]:
            handle.remove()
        offload.forward_hooks = []
        offload.backward_hooks = []
        yield engine.module
        offload._register_deepspeed_module(offload.module)
        if not offload.param_coordinator.is_invalid_trace():
            offload.param_coordinator._invalidate_trace()


WAYS = {"by hand": unwrapped_by_hand, "ours": lambda engine: deepspeed.zero.unwrap_model_for_generation(engine)}


class TestGeneration(DistributedTest):
    world_size = [1, 2, 3]
    reuse_dist_env = True

    @pytest.mark.parametrize("threshold", [0, 10])
    @pytest.mark.parametrize("way", WAYS)
    def test_between_training_steps(self, way: str, threshold: int) -> None:
        engine = make_engine(generating_model(), 3, zero={"stage3_param_persistence_threshold": threshold})
        offload = engine.optimizer.parameter_offload
        hooks = len(offload.forward_hooks)
        x = torch.ones(2, 5) + dist.get_rank()
        for window in range(3):
            train(engine, range(2 * window, 2 * window + 2))
            for grad in (False, True):
                gathers = offload.coordinator.gathers
                with WAYS[way](engine) as module, torch.set_grad_enabled(grad):
                    assert module is engine.module
                    # lengths may differ between ranks: nothing is gathered meanwhile
                    out = module.generate(x, steps=2 + dist.get_rank())
                    assert all(p.shape == p.ds_shape for p in module.parameters())
                    assert offload.coordinator.gathers == gathers
                assert out.shape == (2, 5 + 3 * (2 + dist.get_rank()))
                whole = weights_of(engine.module)
                copied = generating_model()
                copied.load_state_dict(whole)
                assert torch.allclose(out, copied.generate(x, steps=2 + dist.get_rank()))
            assert len(offload.forward_hooks) == hooks
        for parameter in engine.module.parameters():
            assert parameter.shape == (0,) or parameter.ds_persist
        engine.destroy()

    @pytest.mark.parametrize("way", WAYS)
    def test_in_the_middle_of_a_window(self, way: str) -> None:
        engine = make_engine(generating_model(), 3, accumulation=2)
        for window in range(2):
            batches = [make_batch(rank, window, step) for rank in range(dist.get_world_size()) for step in range(2)]
            of = {rank: [b for b in batches if b.rank == rank] for rank in range(dist.get_world_size())}
            expected = expected_gradients(engine.module, encoder_twice, of.__getitem__, 2)
            run_micro_step(engine, encoder_twice, "engine.backward", my_batch(engine, window, 0))
            engine.step()
            with WAYS[way](engine) as module, torch.no_grad():
                module.generate(torch.ones(2, 5))
            run_micro_step(engine, encoder_twice, "engine.backward", my_batch(engine, window, 1))
            assert_gradients(engine, expected, torch.float32, f"window {window}")
            engine.step()
        engine.destroy()

    def test_generation_with_hooks(self) -> None:
        """Without unwrapping; every rank makes the same number of steps."""
        engine = make_engine(generating_model(), 3)
        x = torch.ones(2, 5)
        for mode in (torch.no_grad, torch.inference_mode):
            train(engine, range(2))
            engine.eval()
            with mode():
                out = engine.generate(x)
            engine.train()
            copied = generating_model()
            copied.load_state_dict(weights_of(engine.module))
            assert torch.allclose(out, copied.generate(x))
        train(engine, range(2, 4))
        engine.destroy()

    def test_an_exception_while_unwrapped(self) -> None:
        engine = make_engine(generating_model(), 3)
        train(engine, range(1))
        with pytest.raises(KeyError):
            with deepspeed.zero.unwrap_model_for_generation(engine):
                raise KeyError
        train(engine, range(1, 3))
        engine.destroy()


class TestWithoutOptimizer(DistributedTest):
    world_size = [1, 2, 3]
    reuse_dist_env = True

    def engine_without_optimizer(self, init: bool = False, **config: Any) -> Any:
        settings = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 3}, **config}
        torch.manual_seed(7)
        with deepspeed.zero.Init(config_dict_or_path=settings, enabled=init):
            module = Generates()
        engine, optimizer, loader, scheduler = deepspeed.initialize(model=module, config=settings)
        assert engine.optimizer is optimizer and loader is None and scheduler is None
        return engine

    @pytest.mark.parametrize("init", [False, True])
    def test_forward(self, init: bool) -> None:
        engine = self.engine_without_optimizer(init)
        assert type(engine.optimizer) is DeepSpeedZeRoOffload
        assert engine.optimizer.module is engine.module
        plain, x = generating_model(), my_batch(engine, 0).x
        engine.eval()
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                for _ in range(2):
                    assert torch.equal(engine(x), plain(x))
                assert torch.equal(engine.module(x, head=1), plain(x, head=1))
                assert torch.equal(engine.generate(x), plain.generate(x))
        for parameter in engine.module.parameters():
            assert parameter.shape == (0,) or parameter.ds_persist
            assert parameter.grad is None
        loss = engine(x).sum()
        for refused in (lambda: engine.backward(loss), engine.step):
            with pytest.raises(AssertionError, match="optimizer"):
                refused()
        engine.destroy()

    def test_weights(self, tmpdir: Any) -> None:
        gather = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
        engine = self.engine_without_optimizer(zero_optimization=gather)
        plain = generating_model()
        for name, value in weights_of(engine.module).items():
            assert torch.equal(value, plain.get_parameter(name))
        state = engine._zero3_consolidated_16bit_state_dict()
        assert (state is None) == (dist.get_rank() != 0)
        assert engine.save_16bit_model(str(tmpdir), "weights.bin")
        dist.barrier()
        loaded = torch.load(str(tmpdir.join("weights.bin")), weights_only=True)
        for name, value in plain.state_dict().items():
            assert torch.equal(loaded[name], value)
            assert state is None or torch.equal(state[name], value)
        engine.destroy()

    def test_weights_are_not_gathered_unasked(self, tmpdir: Any) -> None:
        engine = self.engine_without_optimizer()
        assert not engine.save_16bit_model(str(tmpdir), "weights.bin")
        assert not tmpdir.join("weights.bin").exists()
        engine.destroy()

    @pytest.mark.parametrize("way", WAYS)
    def test_generation(self, way: str) -> None:
        engine = self.engine_without_optimizer()
        x = torch.ones(2, 5)
        plain = generating_model()
        for _ in range(2):
            with WAYS[way](engine) as module, torch.no_grad():
                assert torch.equal(module.generate(x), plain.generate(x))
            with torch.no_grad():
                assert torch.equal(engine(x), plain(x))
        engine.destroy()

    def test_nothing_stays_after_destroy(self) -> None:
        engine = self.engine_without_optimizer()
        x = torch.ones(2, 5)
        engine(x)
        module = engine.module
        engine.destroy()
        engine.destroy()
        with pytest.raises(RuntimeError, match="destroy\\(\\) was called on this engine"):
            engine(x)
        assert all(p.shape == (0,) for p in module.parameters())
        assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()) == 0
        train(make_engine(module, 3), range(2))

    def test_beside_a_trained_model(self) -> None:
        """A frozen reference whose output takes part in the loss, and an engine that trains."""
        reference = self.engine_without_optimizer()
        reference.eval()
        engine = make_engine(make_model(9), 3)
        plain = generating_model()

        def losses(call: Any, module: nn.Module, batch: Any) -> Iterator[Tensor]:
            on_engine = call is engine
            with torch.no_grad():
                wanted = (reference if on_engine else plain.to(batch.x.dtype))(batch.x)
            yield (call(batch.x) - wanted).square().mean()

        for window in range(3):
            expected = expected_gradients(engine.module, losses, lambda rank, w=window: [make_batch(rank, w)], 1)
            run_micro_step(engine, losses, "engine.backward", my_batch(engine, window))
            assert_gradients(engine, expected, torch.float32, f"window {window}")
            engine.step()
        engine.destroy()
        reference.destroy()

    def test_gradients_pass_through_a_reward_model(self) -> None:
        """The trained model's output goes through a frozen model without optimizer."""
        reward = self.engine_without_optimizer()
        reward.module.requires_grad_(False)
        engine = make_engine(make_model(9), 3)
        plain = generating_model()

        def losses(call: Any, module: nn.Module, batch: Any) -> Iterator[Tensor]:
            judge = reward if call is engine else plain.to(batch.x.dtype)
            out = call(batch.x)
            yield judge(torch.cat([out, out[:, :2]], dim=1)).square().mean()

        for window in range(3):
            expected = expected_gradients(engine.module, losses, lambda rank, w=window: [make_batch(rank, w)], 1)
            run_micro_step(engine, losses, "engine.backward", my_batch(engine, window))
            assert_gradients(engine, expected, torch.float32, f"window {window}")
            engine.step()
        engine.destroy()
        reward.destroy()


class TestTwoEnginesOfOneModel(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    def test_the_second_is_refused_until_the_first_is_destroyed(self) -> None:
        former = make_engine(make_model(), 3)
        train(former, range(1))
        with pytest.raises(RuntimeError, match="'encoder.0.weight'.*destroy"):
            make_engine(former.module, 3)
        train(former, range(1, 2))
        former.destroy()
        engine = make_engine(former.module, 3)
        former.destroy()
        with pytest.raises(AssertionError, match="destroy\\(\\) was called on this engine"):
            former.step()
        train(engine, range(2, 4))
        engine.destroy()

    def test_an_engine_that_never_came_to_be(self) -> None:
        """It leaves the model to the next one."""
        module = make_model()
        config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
        with pytest.raises(ValueError, match="not a parameter of the model"):
            foreign = torch.optim.AdamW(nn.Linear(3, 3).parameters())
            deepspeed.initialize(model=module, optimizer=foreign, config=config)
        train(make_engine(module, 3), range(2))
