# SPDX-License-Identifier: Apache-2.0
"""Gradients at the edges of what dtypes hold - infinite, none, denormal, huge, zero - and who is told of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.gradients.arithmetic import NORM_ROW, exact_sum_of_squares, sum_of_squares
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.utils import logger, safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_grad
from unit.common import DistributedTest
from unit.graphs import weights_of
from unit.runtime import engine_cases as cases

STAGES = (0, 1, 2, 3)


def test_sums_of_squares_do_not_lose_what_is_added_late() -> None:
    values = torch.ones(60 * NORM_ROW + 3)
    values[0] = 4096.0  # its square is 2**24, to which fp32 adds no 1
    right = 2.0**24 + values.numel() - 1
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert sum_of_squares(values.to(dtype)).item() == pytest.approx(right, rel=1e-4), dtype
        assert exact_sum_of_squares(values.to(dtype)).item() == right, dtype
    assert sum_of_squares(torch.tensor([3.0])).item() == 9.0
    assert sum_of_squares(torch.empty(0)).item() == exact_sum_of_squares(torch.empty(0)).item() == 0.0
    assert exact_sum_of_squares(torch.full((3,), 1e30)).item() == pytest.approx(3e60)
    assert exact_sum_of_squares(torch.full((5,), 1e-40)).item() == pytest.approx(5e-80, rel=1e-4)
    assert math.isnan(exact_sum_of_squares(torch.tensor([1.0, math.nan])).item())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_public_clip_helper_leaves_the_norm_that_was_asked_for(dtype: torch.dtype) -> None:
    """#39"""
    for norm_type, before in ((2, 10.0), (math.inf, 8.0), (1, 14.0)):
        parameters = [nn.Parameter(torch.zeros(1, dtype=dtype)) for _ in range(3)]
        parameters[0].grad, parameters[1].grad = (torch.full((1,), size, dtype=dtype) for size in (6.0, -8.0))
        assert clip_grad_norm_(parameters, 1.0, norm_type).item() == pytest.approx(before, rel=1e-6)
        after = torch.stack([p.grad.double() for p in parameters[:2]]).norm(norm_type).item()
        assert after == pytest.approx(1.0, rel=2 * torch.finfo(dtype).eps + 1e-6), (norm_type, dtype)
        kept = [p.grad.clone() for p in parameters[:2]]
        clip_grad_norm_(iter(parameters), 2.0, norm_type)
        assert all(torch.equal(p.grad, k) for p, k in zip(parameters, kept)), "below the limit nothing changes"
    single = nn.Parameter(torch.zeros(2, dtype=dtype))
    single.grad = torch.tensor([3.0, 4.0], dtype=dtype)
    assert clip_grad_norm_(single, 10.0).item() == 5.0 and parameters[2].grad is None
    assert clip_grad_norm_([nn.Parameter(torch.zeros(1))], 1.0).item() == 0.0


class OneElement(nn.Module):
    """Fewer elements than ranks; the gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.double() * x.double()).sum()


def sgd(lr: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.0)


def one_element_engine(stage: int, optimizer: Any, **top: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        **top,
    }
    return deepspeed.initialize(model=OneElement(), optimizer=optimizer, config=config)[0]


class TestMagnitudes(DistributedTest):
    world_size = [1, 3]

    def test_huge_and_tiny_gradients_have_a_norm_and_make_a_step(self) -> None:
        """Their squares leave the range of fp32; they themselves do not."""
        for stage in STAGES:
            for size in (1e25, 1e-25, 1e-41):
                lr = min(0.1 / size, 1e37)
                engine = one_element_engine(stage, sgd(lr))
                engine.backward(engine(torch.tensor([size])))
                engine.step()
                assert engine.was_step_applied(), (stage, size)
                assert float(engine.get_global_grad_norm()) == pytest.approx(size, rel=1e-3), (stage, size)
                weight = safe_get_full_fp32_param(engine.module.weight).item()
                assert weight == pytest.approx(2 - lr * size, rel=1e-5) and weight < 2, (stage, size)

    def test_a_huge_gradient_is_clipped_to_the_norm_asked_for(self) -> None:
        for stage in STAGES:
            engine = one_element_engine(stage, sgd(1.0), gradient_clipping=0.5)
            engine.backward(engine(torch.tensor([1e25])))
            engine.step()
            assert float(engine.get_clipped_grad_norm()) == pytest.approx(0.5, rel=1e-5)
            assert weights_of(engine.module)["weight"].item() == pytest.approx(1.5, rel=1e-5), stage

    def test_a_gradient_of_zeros_is_a_step_like_any_other(self) -> None:
        for stage in STAGES:
            for extra in ({}, {"fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1}}):
                engine = one_element_engine(stage, adamw, gradient_clipping=1.0, **extra)
                scale = engine._stepper.loss_scale
                engine.backward(engine(torch.zeros(1)))
                engine.step()
                assert engine.was_step_applied() and float(engine.get_global_grad_norm()) == 0.0
                assert float(engine.get_clipped_grad_norm()) == 0.0
                assert weights_of(engine.module)["weight"].item() == 2.0
                assert engine._stepper.loss_scale == (2 * scale if extra else scale), "a clean step"

    def test_what_16_bits_cannot_hold_arrives_by_the_loss_scale(self) -> None:
        """1e-9 is zero in fp16; 2**12 times that is not."""
        tiny = 1e-9
        for stage in STAGES:
            for power, arrives in ((0, False), (12, True)):
                fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": power}
                engine = one_element_engine(stage, sgd(0.1 / tiny), fp16=fp16)
                engine.backward(engine(torch.tensor([tiny])))
                found = safe_get_full_grad(engine.module.weight).item()
                assert found == pytest.approx(tiny if arrives else 0.0, rel=0.05), (stage, power)
                engine.step()
                master = safe_get_full_fp32_param(engine.module.weight).item()
                assert master == pytest.approx(1.9 if arrives else 2.0, abs=0.01), (stage, power)


def infinite_on(rank: int, parameter: nn.Parameter, value: float = math.inf) -> Any:
    """Make the parameter's gradient not finite on one rank; returns the hook."""
    here = dist.get_rank() == rank
    return parameter.register_hook(lambda gradient: gradient * value if here else gradient)


def window(engine: Any, dtype: str, seed: int = 0) -> None:
    cases.run_window(engine, cases.batches_of(dist.get_rank(), engine.gradient_accumulation_steps(), dtype, seed))
    engine.step()


class TestOverflow(DistributedTest):
    world_size = 2

    def test_at_the_floor_the_error_names_parameters_on_every_rank_and_training_can_go_on(self) -> None:
        """#47"""
        for stage in STAGES:
            for gas in (1, 2):
                fp16 = {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 2, "hysteresis": 1}
                config = cases.make_config(stage, "fp16", gas, zero={"reduce_bucket_size": 30}, fp16=fp16)
                engine = cases.make_engine(config)
                before = weights_of(engine.module)
                model = engine.module
                hooks = [infinite_on(1, model.shared.weight), infinite_on(0, model.last.bias, math.nan)]
                window(engine, "fp16")
                assert engine.optimizer.cur_scale == 2 and engine.skipped_steps == 1
                message = r"minimum of 2.*gradients of 'shared\.weight', 'last\.bias' are not finite"
                with pytest.raises(Exception, match=message) as caught:
                    window(engine, "fp16")
                assert type(caught.value) is Exception
                for hook in hooks:
                    hook.remove()
                for name, weight in weights_of(engine.module).items():
                    assert torch.equal(weight, before[name]), f"stage {stage}: {name}"
                assert not engine.was_step_applied() and engine.optimizer.overflow
                assert (engine.micro_steps, engine.global_steps, engine.skipped_steps) == (2 * gas, 2, 2)
                assert engine.global_samples == 2 * engine.train_batch_size()
                cases.check_window(engine, "fp16", note=f"stage {stage}: after the error")
                engine.step()
                assert engine.was_step_applied() and not engine.optimizer.overflow
                assert (engine.micro_steps, engine.skipped_steps) == (3 * gas, 2)
                engine.destroy()

    @pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
    def test_without_a_dynamic_loss_scale_the_log_names_them(self, dtype: str) -> None:
        lines: list[str] = []

        class Collect(logging.Handler):
            def emit(self, entry: logging.LogRecord) -> None:
                lines.append(entry.getMessage())

        handler = Collect()
        logger.addHandler(handler)
        for stage in STAGES:
            lines.clear()
            static = {"fp16": {"enabled": True, "loss_scale": 8.0}} if dtype == "fp16" else {}
            engine = cases.make_engine(cases.make_config(stage, dtype, **static))
            for parameter in (p for p in engine.module.parameters() if p.requires_grad):
                infinite_on(1, parameter)
            window(engine, dtype)
            assert engine.skipped_steps == 1
            said = [line for line in lines if "step skipped" in line]
            assert len(said) == (dist.get_rank() == 0), "on rank 0"
            if said:
                assert "'gain', 'first.weight'" in said[0] and "and 2 more are not finite" in said[0]
                assert ("loss scale was 8.0" in said[0]) == ("loss scale" in said[0]) == (dtype == "fp16")
        logger.removeHandler(handler)

    def test_an_external_scale_is_used_by_both_spellings_and_never_adapts(self) -> None:
        for stage in STAGES:
            fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 4, "loss_scale_window": 1, "hysteresis": 1}
            engine = cases.make_engine(cases.make_config(stage, "fp16", fp16=fp16))
            stepper = engine._stepper
            stepper.override_loss_scale(512.0)
            cases.check_window(engine, "fp16", note=f"stage {stage}")
            engine.step()
            batch = cases.batches_of(dist.get_rank(), 1, "fp16", seed=1)[0]
            loss = engine(*batch)
            scaled = engine.scale(loss)
            assert scaled.item() == pytest.approx(512 * loss.item(), rel=1e-3)
            scaled.backward()
            hook = infinite_on(0, engine.module.first.weight)
            engine.scale(engine(*batch)).backward()
            hook.remove()
            engine.step()
            assert stepper.overflow and engine.skipped_steps == 1
            assert (stepper.loss_scale, stepper.cur_scale, stepper.loss_scaler.cur_scale) == (512.0, 512.0, 16.0)
            window(engine, "fp16")
            assert engine.was_step_applied() and stepper.loss_scale == 512.0

    def test_the_scheduler_waits_and_a_changed_scale_counts_from_the_next_window(self) -> None:
        for stage in STAGES:
            config = cases.make_config(stage, "fp16", fp16={"enabled": True, "loss_scale": 0, "initial_scale_power": 3})
            config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.1}}
            engine = cases.make_engine(config)
            engine.optimizer.loss_scale = 32.0
            assert engine.optimizer.cur_scale == 32.0
            cases.check_window(engine, "fp16")
            engine.step()
            scheduled = engine.lr_scheduler.state_dict()
            hook = infinite_on(1, engine.module.last.weight)
            window(engine, "fp16")
            hook.remove()
            assert engine.lr_scheduler.state_dict() == scheduled and engine.skipped_steps == 1
            assert engine.get_clipped_grad_norm() is None
            window(engine, "fp16")
            assert engine.lr_scheduler.state_dict() != scheduled


def test_when_a_scaler_gives_up() -> None:
    scaler = DynamicLossScaler(4, 1000, 2, 2, False)
    states = []
    for _ in range(2):
        states.append(scaler.is_exhausted())
        scaler.update_scale(True)
    assert states == [False, False] and scaler.cur_scale == 2 and scaler.is_exhausted()
    with pytest.raises(Exception, match="so no step can succeed: it was us. The loss"):
        scaler.update_scale(True, "it was us")
    with pytest.raises(Exception, match="so no step can succeed. The loss"):
        scaler.update_scale(True)


class TestEmptyPartitions(DistributedTest):
    world_size = 3

    def test_ranks_that_own_nothing_share_norm_and_overflow(self) -> None:
        for stage in STAGES:
            engine = one_element_engine(stage, sgd(1.0), gradient_clipping=0.25)
            engine.backward(engine(torch.tensor([3.0 * dist.get_rank()])))
            engine.step()
            assert float(engine.get_global_grad_norm()) == pytest.approx(3.0)
            assert weights_of(engine.module)["weight"].item() == pytest.approx(1.75, rel=1e-5)
            engine.backward(engine(torch.tensor([math.nan if dist.get_rank() == 2 else 1.0])))
            engine.step()
            assert not engine.was_step_applied() and engine._stepper.overflow
            engine.backward(engine(torch.ones(1)))
            safe_set_full_grad(engine.module.weight, torch.tensor([0.125]))
            engine.step()
            assert float(engine.get_global_grad_norm()) == float(engine.get_clipped_grad_norm()) == 0.125
            assert weights_of(engine.module)["weight"].item() == pytest.approx(1.625, rel=1e-5)
