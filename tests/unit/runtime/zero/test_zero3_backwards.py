# SPDX-License-Identifier: Apache-2.0
"""Backwards of many kinds under ZeRO-3 against plain autograd, and weights written between forward and backward."""

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_fp32_param
from unit.common import DistributedTest
from unit.graphs import (
    TOLERANCE,
    assert_gradients,
    encoder_twice,
    expected_gradients,
    full_gradients,
    make_batch,
    make_engine,
    make_model,
    mse,
    my_batch,
    weights_of,
    whole_copy,
)
from unit.reference import max_relative_error

HIDDEN = {"stage3_param_persistence_threshold": 0}


def gradients_of(engine, losses, window: int, divisor: float = 1, micro_steps: int = 1) -> dict[str, Tensor]:
    return expected_gradients(
        engine.module, losses, lambda rank: [make_batch(rank, window, i) for i in range(micro_steps)], divisor
    )


class TestManyBackwards(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    def test_forward_forward_backward_backward(self):
        engine = make_engine(make_model(), 3, zero=HIDDEN)
        for window in range(3):

            def both(call, module, batch):
                yield mse(call(batch.x), batch.target) + 0 * mse(call(batch.y), batch.target)
                yield mse(call(batch.y), batch.target)

            expected = gradients_of(engine, both, window)
            batch = my_batch(engine, window)
            first, second = mse(engine(batch.x), batch.target), mse(engine(batch.y, head=0), batch.target)
            engine.backward(first)
            engine.backward(second)
            assert_gradients(engine, expected, torch.float32)
            engine.step()

    def test_retained_graph(self):
        engine = make_engine(make_model(), 3, zero=HIDDEN)
        for window in range(3):
            expected = gradients_of(engine, encoder_twice, window, divisor=1 / 3)
            (loss,) = encoder_twice(engine, engine.module, my_batch(engine, window))
            engine.backward(loss, retain_graph=True)
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            assert_gradients(engine, expected, torch.float32)
            engine.step()

    def test_autograd_grad_leaves_no_trace(self):
        engine = make_engine(make_model(), 3, zero=HIDDEN)
        for window in range(2):
            (loss,) = encoder_twice(engine, engine.module, my_batch(engine, window))
            plain = whole_copy(engine.module)
            (own,) = encoder_twice(plain, plain, my_batch(engine, window))
            names = [name for name, _ in engine.module.encoder.named_parameters()]
            mine = torch.autograd.grad(loss, list(engine.module.encoder.parameters()), retain_graph=True)
            reference = torch.autograd.grad(own, list(plain.encoder.parameters()))
            worst, error = max_relative_error(dict(zip(names, mine)), dict(zip(names, reference)))
            assert error < 1e-5, worst
            assert all(p.shape == (0,) and p.grad is None for p in engine.module.parameters())
            expected = gradients_of(engine, encoder_twice, window)
            engine.backward(loss)
            assert_gradients(engine, expected, torch.float32)
            engine.step()

    @pytest.mark.parametrize("persistent", [0, 10])
    def test_double_backward(self, persistent):
        """A penalty on the gradient with respect to the input."""

        def penalty(call, module, batch):
            x = batch.x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(mse(call(x), batch.target), x, create_graph=True)
            yield gradient.square().sum() + mse(call(batch.y), batch.target)

        engine = make_engine(make_model(), 3, zero={"stage3_param_persistence_threshold": persistent})
        for window in range(3):
            expected = gradients_of(engine, penalty, window)
            for loss in penalty(engine, engine.module, my_batch(engine, window)):
                engine.backward(loss)
            assert_gradients(engine, expected, torch.float32)
            engine.step()

    def test_func_grad_over_the_engine(self):
        engine = make_engine(make_model(), 3, zero=HIDDEN)
        plain = whole_copy(engine.module)
        batch = my_batch(engine, 0)

        def alone(call, x: Tensor) -> Tensor:
            return torch.func.grad(lambda x: call(x).square().sum())(x)

        def per_sample(call, x: Tensor) -> Tensor:
            return torch.func.vmap(torch.func.grad(lambda x: call(x).square().sum()))(x)

        for transformed in (alone, per_sample) * 2:
            torch.testing.assert_close(transformed(engine, batch.x), transformed(plain, batch.x))
            assert all(p.shape == (0,) for p in engine.module.parameters())
        expected = gradients_of(engine, encoder_twice, 0)
        for loss in encoder_twice(engine, engine.module, batch):
            engine.backward(loss)
        assert_gradients(engine, expected, torch.float32)
        engine.step()

    def test_two_engines_in_one_loss(self):
        first, second = make_engine(make_model(1), 3, zero=HIDDEN), make_engine(make_model(2), 3, zero=HIDDEN)
        for window in range(2):
            pair = nn.ModuleList([whole_copy(first.module), whole_copy(second.module)]).double()
            for rank in range(torch_dist.get_world_size()):
                batch = make_batch(rank, window).map(lambda tensor: tensor.double())
                (mse(pair[0](batch.x) * pair[1](batch.y), batch.target) / torch_dist.get_world_size()).backward()
            batch = my_batch(first, window)
            first.backward(mse(first(batch.x) * second(batch.y), batch.target))
            for engine, twin in zip((first, second), pair):
                wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in twin.named_parameters()}
                assert_gradients(engine, wanted, torch.float32)
                engine.step()


class TestWindows(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_accumulation(self, dtype):
        engine = make_engine(make_model(), 3, dtype, accumulation=3)
        for window in range(2):
            expected = gradients_of(engine, encoder_twice, window, 3, 3)
            for micro_step in range(3):
                batch = my_batch(engine, window, micro_step, dtype)
                for loss in encoder_twice(engine, engine.module, batch):
                    engine.backward(loss)
                if micro_step == 2:
                    assert_gradients(engine, expected, dtype)
                engine.step()

    def test_coalesced(self):
        engine = make_engine(make_model(), 3, accumulation=3, zero=HIDDEN)
        expected = gradients_of(engine, encoder_twice, 0, 3, 3)
        with engine.coalesce_grad_reduction():
            for micro_step in range(3):
                for loss in encoder_twice(engine, engine.module, my_batch(engine, 0, micro_step)):
                    engine.backward(loss)
        assert_gradients(engine, expected, torch.float32)

    def test_unmanaged(self):
        engine = make_engine(make_model(), 3, zero=HIDDEN, managed_gradient_accumulation=False)
        for window, count in enumerate((2, 3, 1)):
            expected = gradients_of(engine, encoder_twice, window, 1, count)
            for micro_step in range(count):
                for loss in encoder_twice(engine, engine.module, my_batch(engine, window, micro_step)):
                    engine.backward(loss)
            assert_gradients(engine, expected, torch.float32)
            engine.step()

    def test_no_sync_is_refused(self):
        engine = make_engine(make_model(), 3)
        with pytest.raises(AssertionError, match="incompatible with gradient partitioning"):
            with engine.no_sync():
                pass

    def test_overflow_on_one_rank_skips_on_all(self):
        fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 1}
        engine = make_engine(make_model(), 3, torch.float16, fp16=fp16, zero=HIDDEN)
        before = weights_of(engine.module)
        scale = engine.optimizer.loss_scale
        batch = my_batch(engine, 0, dtype=torch.float16)
        loss = mse(engine(batch.x).float(), batch.target.float())
        engine.backward(loss * (float("inf") if torch_dist.get_rank() == 1 else 1.0))
        engine.step()
        assert engine.skipped_steps == 1 and engine.optimizer.loss_scale == scale / 2
        assert all(torch.equal(w, before[name]) for name, w in weights_of(engine.module).items())
        for window in range(1, 3):
            expected = gradients_of(engine, encoder_twice, window)
            for loss in encoder_twice(engine, engine.module, my_batch(engine, window, dtype=torch.float16)):
                engine.backward(loss)
            assert_gradients(engine, expected, torch.float16)
            engine.step()
        assert engine.skipped_steps == 1
        assert not any(
            torch.equal(w, before[name]) for name, w in weights_of(engine.module).items() if "heads.1" not in name
        )


def step_of_another_loss(engine) -> None:
    engine.backward(mse(engine(my_batch(engine, 5).x), my_batch(engine, 5).target))
    engine.step()


def load(engine) -> None:
    engine.load_module_state_dict({"module": {n: w * 2 for n, w in weights_of(engine.module).items()}})


def edit(engine) -> None:
    with deepspeed.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
        for parameter in engine.module.parameters():
            parameter.data.mul_(2)


def set_masters(engine) -> None:
    for parameter in engine.module.parameters():
        safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter) * 2)


class Guarded(nn.Module):
    """Small and large weights in one module, and a small one within it."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(5, 6))
        self.small = nn.Parameter(torch.randn(6))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(x @ self.large) * self.small)[:, :3] * 1.5


class TestWrittenInBetween(DistributedTest):
    """Between forward and backward: an error, as without an engine, never a gradient of mixed weights."""

    world_size = [1, 2]
    reuse_dist_env = True

    @pytest.mark.parametrize("write", [step_of_another_loss, load, edit, set_masters])
    @pytest.mark.parametrize("persistent", [0, 6, 1000])
    def test_is_an_error(self, write, persistent):
        torch.manual_seed(8)
        engine = make_engine(Guarded(), 3, zero={"stage3_param_persistence_threshold": persistent})
        step_of_another_loss(engine)  # from now on small weights are whole
        batch = my_batch(engine, 0)
        loss = mse(engine(batch.x), batch.target)
        write(engine)
        with pytest.raises(RuntimeError, match="modified"):
            engine.backward(loss)
        engine.zero_grad()

        def once(call, module, batch):
            yield mse(call(batch.x), batch.target)

        expected = gradients_of(engine, once, 1)
        for again in once(engine, engine.module, my_batch(engine, 1)):
            engine.backward(again)
        assert_gradients(engine, expected, torch.float32)
        assert max(float(g.norm()) for g in full_gradients(engine).values()) > TOLERANCE[torch.float32]
        assert safe_get_full_grad(engine.module.large).shape == (5, 6)
