# SPDX-License-Identifier: Apache-2.0
"""Several backwards per step: what is communicated, what is held, what can be read meanwhile, in many configs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed.comm as dist
from unit.common import DistributedTest
from unit.graphs import (
    Batch,
    ReusableNet,
    assert_gradients,
    encoder_twice,
    expected_gradients,
    full_gradients,
    make_batch,
    make_engine,
    make_model,
    mse,
    my_batch,
    run_micro_step,
    two_backwards,
)

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3], ids=lambda stage: f"stage{stage}")
forms = pytest.mark.parametrize("form", ["engine.backward", "tensor.backward"])


def uses(count: int, reentrant: bool) -> Callable:
    """A loss that uses the encoder once through the engine and ``count`` times around it."""

    def losses(call: Callable, module: nn.Module, batch: Batch) -> Iterable[Tensor]:
        loss = mse(call(batch.x), batch.target) + mse(module(batch.y, head=1), batch.target)
        for _ in range(count):
            if reentrant:
                again = checkpoint(module.encoder, batch.y.clone().requires_grad_(), use_reentrant=True)
            else:
                again = module.encoder(batch.y)
            loss = loss + again.square().mean()
        yield loss

    return losses


def train(engine: Any, losses: Callable, form: str, accumulation: int, windows: int = 2, **tolerance: Any) -> None:
    dtype = tolerance.get("dtype", torch.float32)
    factor = tolerance.get("factor", 1.0)
    for window in range(windows):
        expected = expected_gradients(
            engine.module,
            losses,
            lambda rank, w=window: [make_batch(rank, w, step, dtype) for step in range(accumulation)],
            accumulation / factor,
        )
        for micro_step in range(accumulation):
            if micro_step:
                engine.step()
            run_micro_step(engine, losses, form, my_batch(engine, window, micro_step, dtype))
        assert_gradients(engine, expected, dtype, f"window {window}")
        engine.step()
        assert engine.was_step_applied()


class TestCommunication(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @stages
    @forms
    @pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
    def test_as_many_collectives_as_buckets(self, stage: int, form: str, reentrant: bool) -> None:
        """Whatever the number of uses, once a first window has shown how often each parameter fires."""
        for count in (0, 1, 3):
            engine = make_engine(make_model(), stage)
            reducer = engine._stepper.reducer
            train(engine, uses(count, reentrant), form, 1, windows=1)
            assert len(reducer.buckets) > 1
            for window in range(2):
                before = reducer.transport.collectives_issued
                run_micro_step(engine, uses(count, reentrant), form, my_batch(engine, window))
                engine.step()
                assert reducer.transport.collectives_issued - before == len(reducer.buckets), f"{count} uses"

    @stages
    @forms
    def test_rounds_per_window(self, stage: int, form: str) -> None:
        """Stages 2 and 3 reduce in each backward, stages 0 and 1 in those of the last micro-step."""
        engine = make_engine(make_model(), stage, accumulation=3)
        reducer = engine._stepper.reducer
        issued = []
        for micro_step in range(3):
            run_micro_step(engine, two_backwards, form, my_batch(engine, 0, micro_step))
            issued.append(reducer.transport.collectives_issued // len(reducer.buckets))
            engine.step()
        assert issued == ([2, 4, 6] if stage >= 2 else [0, 0, 2])
        assert reducer.transport.collectives_issued == issued[-1] * len(reducer.buckets)

    @pytest.mark.parametrize("stage", [0, 1, 2])
    def test_unused_parameters_do_not_hold_back_the_rest(self, stage: int) -> None:
        """Buckets go out during backward although those before them wait for parameters that are not used. At stage 3
        on the host they do so only where they need not wait for others, which depends on time."""
        engine = make_engine(make_model(), stage)
        reducer = engine._stepper.reducer
        issued = []
        engine.module.encoder[0].weight.register_hook(lambda _: issued.append(reducer.transport.collectives_issued))
        train(engine, encoder_twice, "engine.backward", 1, windows=1)
        before = reducer.transport.collectives_issued
        train(engine, encoder_twice, "engine.backward", 1, windows=1)
        assert len(reducer.buckets) >= 3 and issued[-1] - before == len(reducer.buckets) - 1

    @stages
    @forms
    def test_nothing_is_held_after_the_step(self, stage: int, form: str) -> None:
        engine = make_engine(make_model(), stage, accumulation=2)
        reducer = engine._stepper.reducer
        train(engine, uses(2, reentrant=True), form, 2)
        assert all(parameter.grad is None for parameter in engine.module.parameters())
        assert not reducer.ledger.waiting() and not any(bucket.local_in_use for bucket in reducer.buckets)
        held = reducer.buffer_nbytes
        train(engine, uses(2, reentrant=True), form, 2, windows=4)
        assert reducer.buffer_nbytes == held


class TestReadingInBetween(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @stages
    @forms
    def test_gradient_so_far(self, stage: int, form: str) -> None:
        """Read after each backward it is the mean over ranks of what is there, and reading changes nothing."""
        engine = make_engine(make_model(), stage, accumulation=2)
        for window in range(2):
            for micro_step in range(2):
                run_micro_step(engine, two_backwards, form, my_batch(engine, window, micro_step))
                expected = expected_gradients(
                    engine.module,
                    two_backwards,
                    lambda rank, w=window, m=micro_step: [make_batch(rank, w, step) for step in range(m + 1)],
                    2,
                )
                for _ in range(2):
                    assert_gradients(engine, expected, torch.float32, f"window {window}, micro-step {micro_step}")
                engine.step()


CONFIGS = {
    "overlap": {"zero": {"overlap_comm": True}},
    "no contiguous gradients": {"zero": {"contiguous_gradients": False}},
    "all-reduce": {"zero": {"reduce_scatter": False}},
    "round robin": {"zero": {"round_robin_gradients": True}},
    "prescale": {"prescale_gradients": True, "zero": {"reduce_scatter": False}},
    "predivide": {"gradient_predivide_factor": 4.0, "zero": {"reduce_scatter": False}},
    "one bucket": {"zero": {"reduce_bucket_size": 10**8}},
    "one element": {"zero": {"reduce_bucket_size": 1}},
}
OF_STAGE_3 = [
    {"stage3_param_persistence_threshold": 12},
    {"stage3_param_persistence_threshold": 10**5},
    {"sub_group_size": 20, "stage3_max_live_parameters": 30},
    {"stage3_use_all_reduce_for_fetch_params": True},
    {"stage3_allgather_sequential": True, "stage3_max_reuse_distance": 0},
]


class TestConfigurations(DistributedTest):
    world_size = [2, 3]
    reuse_dist_env = True

    @stages
    @pytest.mark.parametrize("name", CONFIGS)
    def test_gradients(self, stage: int, name: str) -> None:
        for form, losses in (("engine.backward", two_backwards), ("tensor.backward", uses(2, reentrant=True))):
            train(make_engine(make_model(), stage, accumulation=2, **CONFIGS[name]), losses, form, 2)

    @pytest.mark.parametrize("zero", OF_STAGE_3, ids=lambda zero: next(iter(zero)))
    def test_gradients_under_options_of_stage_3(self, zero: dict[str, Any]) -> None:
        for form, losses in (("engine.backward", two_backwards), ("tensor.backward", uses(2, reentrant=True))):
            train(make_engine(make_model(), 3, accumulation=2, zero=zero), losses, form, 2)

    @pytest.mark.world_size(2)
    @stages
    def test_sum_over_ranks(self, stage: int) -> None:
        if stage == 3:
            with pytest.raises(ValueError, match="gradient_allreduce_op.*stage 3"):
                make_engine(make_model(), stage, gradient_allreduce_op="sum")
            return
        engine = make_engine(make_model(), stage, accumulation=2, gradient_allreduce_op="sum")
        train(engine, two_backwards, "engine.backward", 2, factor=dist.get_world_size())

    @pytest.mark.world_size(2)
    @stages
    @forms
    def test_fp16(self, stage: int, form: str) -> None:
        """The gradient is the true one, without loss scale, which differs from a power of the accumulation count."""
        for losses in (two_backwards, uses(2, reentrant=True)):
            train(make_engine(make_model(), stage, torch.float16, 3), losses, form, 3, dtype=torch.float16)

    @pytest.mark.world_size(2)
    @stages
    @pytest.mark.parametrize("accumulate", ["fp32", "bf16"])
    @pytest.mark.parametrize("communicate", ["fp32", "bf16"])
    def test_bf16(self, stage: int, accumulate: str, communicate: str) -> None:
        engine = make_engine(
            make_model(),
            stage,
            torch.bfloat16,
            2,
            communication_data_type=communicate,
            data_types={"grad_accum_dtype": accumulate},
        )
        train(engine, two_backwards, "engine.backward", 2, dtype=torch.bfloat16)


class MixedNet(ReusableNet):
    """fp32, but for a core in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.core.to(torch.bfloat16)

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        hidden = self.encoder(x)
        return self.heads[head](self.core(hidden.to(self.core[0].weight.dtype)).to(hidden.dtype))


class TestMixedDtypes(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @stages
    @forms
    def test_bf16_part_of_an_fp32_model(self, stage: int, form: str) -> None:
        torch.manual_seed(7)
        engine = make_engine(MixedNet(), stage, accumulation=2)
        assert engine.module.core[0].weight.dtype is torch.bfloat16
        for window in range(2):
            expected = expected_gradients(
                engine.module, two_backwards, lambda rank, w=window: [make_batch(rank, w, step) for step in range(2)], 2
            )
            for micro_step in range(2):
                if micro_step:
                    engine.step()
                run_micro_step(engine, two_backwards, form, my_batch(engine, window, micro_step))
            assert_gradients(engine, expected, torch.bfloat16, f"window {window}")
            assert full_gradients(engine)["core.0.weight"].dtype is torch.float32
            engine.step()
