# SPDX-License-Identifier: Apache-2.0
"""deepspeed.zero.GatheredParameters: whole weights for a block of code, before and beside an engine."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from unit.common import DistributedTest
from unit.graphs import (
    ReusableNet,
    assert_gradients,
    encoder_twice,
    expected_gradients,
    make_batch,
    make_engine,
    my_batch,
    run_micro_step,
    weights_of,
)

FP32 = {"train_batch_size": 6, "zero_optimization": {"stage": 3}}
PARTITIONED, WHOLE = ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.AVAILABLE


def sharded_net(**config: Any) -> ReusableNet:
    torch.manual_seed(7)
    with deepspeed.zero.Init(config_dict_or_path={**FP32, **config}):
        return ReusableNet()


def engine_over_net(threshold: int = 0, dtype: torch.dtype = torch.float32, **zero: Any) -> Any:
    torch.manual_seed(7)
    options = {"stage3_param_persistence_threshold": threshold, **zero}
    return make_engine(ReusableNet(), 3, dtype=dtype, zero=options)


def train_step(engine: Any, window: int, dtype: torch.dtype = torch.float32) -> None:
    """One step, with its gradients checked."""
    expected = expected_gradients(engine.module, encoder_twice, lambda rank: [make_batch(rank, window, dtype=dtype)], 1)
    run_micro_step(engine, encoder_twice, "engine.backward", my_batch(engine, window, dtype=dtype))
    assert_gradients(engine, expected, dtype, f"window {window}")
    engine.step()


def same_on_all_ranks(value: Tensor) -> bool:
    others = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(others, value.contiguous())
    return all(torch.equal(value, other) for other in others)


class TestWhatIsGathered(DistributedTest):
    world_size = [1, 2, 3]
    reuse_dist_env = True

    def test_one_and_many(self) -> None:
        torch.manual_seed(7)
        plain = ReusableNet()
        module = sharded_net()
        first, second = module.encoder[0].weight, module.core[0].weight
        with GatheredParameters(first) as nothing:
            assert nothing is None
            assert torch.equal(first, plain.encoder[0].weight) and first.ds_status is WHOLE
            assert second.shape == (0,) and second.ds_status is PARTITIONED
        assert first.shape == (0,) and first.ds_status is PARTITIONED
        for given in (
            [first, second],
            (first, second, first),
            (p for p in [second, first]),
            {first: 1, second: 2}.keys(),
            [first, nn.Parameter(torch.ones(2)), torch.ones(3), second],
        ):
            with GatheredParameters(given):
                assert torch.equal(first, plain.encoder[0].weight) and torch.equal(second, plain.core[0].weight)
            assert first.shape == second.shape == (0,)

    def test_nothing_to_gather(self) -> None:
        module, ordinary = sharded_net(), nn.Linear(3, 3)
        for given in ([], (), iter(()), ordinary.weight, ordinary.parameters()):
            for rank in (None, 0):
                with GatheredParameters(given, modifier_rank=rank):
                    ordinary.weight.data.fill_(1.0)
        with GatheredParameters(module.parameters(), enabled=False):
            assert module.encoder[0].weight.shape == (0,)
        with GatheredParameters(module.parameters(), modifier_rank=0, fwd_module=module, enabled=False):
            assert module.encoder[0].weight.shape == (0,)

    def test_a_context_may_be_used_again(self) -> None:
        module = sharded_net()
        context = GatheredParameters(list(module.parameters()))
        for _ in range(3):
            with context:
                assert module.encoder[0].weight.shape == (6, 5)
            assert module.encoder[0].weight.shape == (0,)

    def test_writes_of_the_modifying_rank_count(self) -> None:
        module = sharded_net()
        weight = module.encoder[0].weight
        before = weights_of(module)["encoder.0.weight"]
        with GatheredParameters(weight):
            weight.data.fill_(100.0 + dist.get_rank())
        assert torch.equal(weights_of(module)["encoder.0.weight"], before)
        for modifier in range(dist.get_world_size()):
            with GatheredParameters([weight], modifier_rank=modifier):
                with torch.no_grad():
                    weight.fill_(10.0 * dist.get_rank() + 1.0)
            assert weight.shape == (0,)
            assert torch.equal(weights_of(module)["encoder.0.weight"], torch.full((6, 5), 10.0 * modifier + 1.0))

    def test_new_data_of_the_same_shape(self) -> None:
        module = sharded_net()
        weight = module.encoder[0].weight
        with GatheredParameters(weight, modifier_rank=0):
            weight.data = torch.full((5, 6), 3.0 + dist.get_rank()).t()  # not contiguous
        assert torch.equal(weights_of(module)["encoder.0.weight"], torch.full((6, 5), 3.0))

    def test_an_exception_inside_drops_writes(self) -> None:
        module = sharded_net()
        before = weights_of(module)
        with pytest.raises(KeyError):
            with GatheredParameters(module.parameters(), modifier_rank=0):
                module.encoder[0].weight.data.zero_()
                raise KeyError
        assert module.encoder[0].weight.shape == (0,)
        assert all(torch.equal(value, before[name]) for name, value in weights_of(module).items())

    def test_nesting(self) -> None:
        module = sharded_net()
        first, second = module.encoder[0].weight, module.core[0].weight
        with GatheredParameters(first, modifier_rank=0):
            with GatheredParameters([second]):
                assert first.shape == (6, 5) and second.shape == (6, 6)
            assert first.shape == (6, 5) and second.shape == (0,)
            with pytest.raises(RuntimeError, match="held by another GatheredParameters"):
                with GatheredParameters([first, second]):
                    pass
            assert first.shape == (6, 5) and second.shape == (0,)
            first.data.fill_(2.0)
        assert torch.equal(weights_of(module)["encoder.0.weight"], torch.full((6, 5), 2.0))

    def test_another_shape_is_refused(self) -> None:
        module = sharded_net()
        weight = module.encoder[0].weight
        before = weights_of(module)["encoder.0.weight"]
        with pytest.raises(RuntimeError, match="shape"):
            with GatheredParameters(weight, modifier_rank=0):
                weight.data = torch.zeros(2, 15)
        assert weight.shape == (0,)
        assert torch.equal(weights_of(module)["encoder.0.weight"], before)

    def test_another_dtype_is_rounded(self) -> None:
        module = sharded_net()
        weight = module.encoder[0].weight
        with GatheredParameters(weight, modifier_rank=0):
            if dist.get_rank() == 0:
                weight.data = torch.full((6, 5), 0.1, dtype=torch.float64)
        assert weight.dtype is torch.float32
        assert torch.equal(weights_of(module)["encoder.0.weight"], torch.full((6, 5), 0.1))

    def test_grad_modes(self) -> None:
        module = sharded_net()
        with torch.inference_mode():
            with GatheredParameters(module.parameters()):
                assert module.encoder[0].weight.shape == (6, 5)
                module.encoder(torch.ones(1, 5))
        with torch.no_grad():
            with GatheredParameters(module.parameters(), modifier_rank=0):
                module.encoder[0].weight.fill_(4.0)
        with GatheredParameters(module.parameters()):
            assert not module.encoder[0].weight.is_inference()
            module.encoder[0].weight.mul(2.0).sum().backward()
            assert torch.equal(module.encoder[0].weight.grad, torch.full((6, 5), 2.0))
            module.encoder[0].weight.grad = None

    def test_copies_and_state_dicts(self) -> None:
        module = sharded_net()
        with pytest.raises(RuntimeError, match="GatheredParameters"):
            copy.deepcopy(module)
        with GatheredParameters(module.parameters()):
            copied = copy.deepcopy(module)
            state = {name: value.clone() for name, value in module.state_dict().items()}
            buffer = io.BytesIO()
            torch.save(module.state_dict(), buffer)
        assert module.encoder[0].weight.shape == (0,)
        assert all(type(p) is nn.Parameter and not hasattr(p, "ds_id") for p in copied.parameters())
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        assert state["encoder.0.weight"].shape == (6, 5)
        for name, value in copied.state_dict().items():
            assert torch.equal(value, state[name]) and torch.equal(value, loaded[name])
        copied(torch.ones(2, 5)).sum().backward()
        assert copied.encoder[0].weight.grad.shape == (6, 5)
        with GatheredParameters(module.parameters(), modifier_rank=0):
            module.load_state_dict({name: torch.full_like(value, 5.0) for name, value in state.items()})
        assert all(torch.equal(v, torch.full_like(v, 5.0)) for v in weights_of(module).values())


class TestSanityChecks(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("row", [0, 5])
    def test_dropped_writes_raise(self, row: int) -> None:
        """Whichever rank's part of the weight was written to."""
        module = sharded_net(zero_optimization={"stage": 3, "enable_sanity_checks": True})
        weight = module.encoder[0].weight
        before = weights_of(module)["encoder.0.weight"]
        with GatheredParameters(weight):
            assert weight.sum().item() != 0
        with pytest.raises(RuntimeError, match="without modifier_rank"):
            with GatheredParameters(weight):
                weight.data[row].fill_(9.0)
        with pytest.raises(RuntimeError, match="without modifier_rank"):
            with GatheredParameters(weight), torch.no_grad():
                weight[row] += 1.0
        assert torch.equal(weights_of(module)["encoder.0.weight"], before)
        with GatheredParameters(weight, modifier_rank=1):
            weight.data.fill_(9.0)
        assert torch.equal(weights_of(module)["encoder.0.weight"], torch.full((6, 5), 9.0))


class TestBesideAnEngine(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("threshold", [0, 100_000])
    def test_masters_follow(self, threshold: int) -> None:
        engine = engine_over_net(threshold, torch.bfloat16)
        for window in range(3):
            train_step(engine, window, torch.bfloat16)
        weight = engine.module.encoder[0].weight
        masters = {n: safe_get_full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}
        with GatheredParameters(engine.module.parameters(), modifier_rank=1):
            weight.data[2] = 7.0 + dist.get_rank()
        after = {n: safe_get_full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}
        masters["encoder.0.weight"][2] = 8.0
        assert (masters["encoder.0.weight"] != masters["encoder.0.weight"].bfloat16().float()).any()
        for name, master in masters.items():  # where nothing was written, masters keep their precision
            assert torch.equal(after[name], master), name
        train_step(engine, 3, torch.bfloat16)
        assert same_on_all_ranks(weights_of(engine.module)["encoder.0.weight"])
        engine.destroy()

    @pytest.mark.parametrize("threshold", [0, 100_000])
    def test_writes_inside_by_other_ways(self, threshold: int) -> None:
        """A setter of masters, and a load of a state dict into the engine, inside of a context that drops writes."""
        engine = engine_over_net(threshold)
        train_step(engine, 0)
        weight = engine.module.encoder[0].weight
        value = torch.full((6, 5), 3.0)
        with GatheredParameters(engine.module.parameters()):
            safe_set_full_fp32_param(weight, value)
        assert torch.equal(safe_get_full_fp32_param(weight), value)
        assert torch.equal(weights_of(engine.module)["encoder.0.weight"], value)
        for window in (1, 2):
            train_step(engine, window)
        engine.destroy()

    @pytest.mark.parametrize("threshold", [0, 100_000])
    def test_dropped_writes_on_one_rank(self, threshold: int) -> None:
        engine = engine_over_net(threshold)
        for window in range(3):
            train_step(engine, window)
            before = weights_of(engine.module)
            with GatheredParameters(engine.module.parameters()):
                if dist.get_rank() == 0:
                    engine.module.core[0].weight.data.zero_()
            for name, value in weights_of(engine.module).items():
                assert torch.equal(value, before[name]), name
        engine.destroy()

    @pytest.mark.parametrize("threshold", [0, 100_000])
    def test_forward_and_backward_inside(self, threshold: int) -> None:
        engine = engine_over_net(threshold)
        for window in range(3):
            batch = my_batch(engine, window)
            expected = expected_gradients(engine.module, encoder_twice, lambda r, w=window: [make_batch(r, w)], 1)
            with GatheredParameters(list(engine.module.core.parameters())):
                assert engine.module.core[0].weight.shape == (6, 6)
                run_micro_step(engine, encoder_twice, "engine.backward", batch)
                assert engine.module.core[0].weight.shape == (6, 6)
            assert_gradients(engine, expected, torch.float32, f"{window}")
            engine.step()
        engine.destroy()

    @pytest.mark.parametrize("threshold", [0, 100_000])
    def test_left_between_forward_and_backward(self, threshold: int) -> None:
        engine = engine_over_net(threshold)
        for window in range(3):
            expected = expected_gradients(engine.module, encoder_twice, lambda r, w=window: [make_batch(r, w)], 1)
            with GatheredParameters(engine.module.parameters()):
                losses = list(encoder_twice(engine, engine.module, my_batch(engine, window)))
            with GatheredParameters(engine.module.core.parameters()):
                engine.backward(losses[0])
            assert_gradients(engine, expected, torch.float32, f"{window}")
            engine.step()
        engine.destroy()

    def test_weights_changed_between_forward_and_backward(self) -> None:
        engine = engine_over_net()
        loss = engine(my_batch(engine, 0).x).square().sum()
        with GatheredParameters(engine.module.core[0].weight, modifier_rank=0):
            engine.module.core[0].weight.data.mul_(2.0)
        with pytest.raises(RuntimeError, match="core.0.weight.*modified"):
            engine.backward(loss)
        engine.zero_grad()
        train_step(engine, 1)
        engine.destroy()

    def test_step_inside_is_refused(self) -> None:
        engine = engine_over_net()
        run_micro_step(engine, encoder_twice, "engine.backward", my_batch(engine, 0))
        with GatheredParameters(engine.module.core[0].weight):
            with pytest.raises(RuntimeError, match="inside GatheredParameters.*core.0.weight"):
                engine.step()
        engine.destroy()

    def test_inside_the_forward_of_a_module(self) -> None:
        class Borrows(nn.Module):
            def __init__(self, lender: nn.Linear) -> None:
                super().__init__()
                self.own = nn.Linear(6, 6)
                self.lender = [lender]

            def forward(self, x: Tensor) -> Tensor:
                with GatheredParameters([self.lender[0].weight, self.own.weight]):
                    return self.own(x) @ self.lender[0].weight.t()

        class Whole(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lender = nn.Linear(6, 6)
                self.borrows = Borrows(self.lender)

            def forward(self, x: Tensor) -> Tensor:
                return self.borrows(self.lender(x))

        torch.manual_seed(3)
        module = Whole()
        plain = copy.deepcopy(module)
        plain.borrows.lender = [plain.lender]
        engine = make_engine(module, 3)
        for window in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(window))
            plain.zero_grad()
            plain(x).square().mean().backward()
            engine.backward(engine(x).square().mean())
            assert_gradients(engine, {n: p.grad for n, p in plain.named_parameters()}, torch.float32, f"{window}")
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter -= 0.125 * parameter.grad
            engine.step()
        engine.destroy()

    def test_for_the_forward_of_another_module(self) -> None:
        """``fwd_module`` registers the parameters as that module's."""
        engine = engine_over_net()
        lender, user = engine.module.core[0].weight, engine.module.heads[0]
        with GatheredParameters(lender, fwd_module=user):
            pass
        assert [p for _, p in user.ds_external_parameters()] == [lender]
        seen = []
        handle = user.register_forward_pre_hook(lambda *_: seen.append(lender.shape))
        engine.backward(engine(my_batch(engine, 0).x).sum())
        assert seen == [(6, 6)]
        handle.remove()
        deepspeed.zero.unregister_external_parameter(user, lender)
        assert list(user.ds_external_parameters()) == []
        engine.destroy()

    def test_copy_of_an_engine_s_module(self) -> None:
        engine = engine_over_net()
        train_step(engine, 0)
        with pytest.raises(RuntimeError, match="GatheredParameters"):
            copy.deepcopy(engine.module)
        with GatheredParameters(engine.module.parameters()):
            copied = copy.deepcopy(engine.module)
            buffer = io.BytesIO()
            torch.save(copied, buffer)
        gathers = engine.optimizer.parameter_offload.coordinator.gathers
        x = torch.ones(2, 5)
        copied(x).sum().backward()
        assert copied.encoder[0].weight.grad.shape == (6, 5)
        assert engine.optimizer.parameter_offload.coordinator.gathers == gathers
        assert torch.equal(engine(x), copied(x))
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=False)(x), copied(x))
        train_step(engine, 1)
        engine.destroy()

    def test_values_changed_for_a_while_are_not_those_of_a_later_backward(self) -> None:
        """Changes are dropped at the end, so a graph made inside must not be used after it in silence."""
        engine = engine_over_net()
        weight = engine.module.encoder[0].weight
        x = torch.ones(2, 5, requires_grad=True)
        with GatheredParameters(weight):
            weight.data.fill_(2.0)
            loss = engine(x).sum()
        with pytest.raises(RuntimeError, match="leaving a GatheredParameters in which it was changed"):
            engine.backward(loss)
        engine.zero_grad()
        train_step(engine, 0)
        engine.destroy()
