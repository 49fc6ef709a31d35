# SPDX-License-Identifier: Apache-2.0
"""The loss scale's arithmetic, and fp16 training with it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, DynamicLossScaler, LossScaler, to_python_float
from unit.common import DistributedTest
from unit.graphs import weights_of
from unit.reference import max_relative_error, reference_gradients
from unit.runtime import engine_cases as cases


def scales(scaler: DynamicLossScaler, overflows: str) -> list[float]:
    """Scale after each step; 'o' is an overflow, '.' a clean step."""
    result = []
    for step in overflows:
        scaler.update_scale(step == "o")
        result.append(scaler.cur_scale)
    return result


def dynamic(scale: float = 16, window: int = 1000, low: float = 1, shift: int = 2, refill: bool = False) -> Any:
    return DynamicLossScaler(scale, window, low, shift, refill)


def test_hysteresis_is_used_up_before_the_scale_halves() -> None:
    assert scales(dynamic(), "ooo") == [16, 8, 4]
    assert scales(dynamic(), "o...oo") == [16, 16, 16, 16, 8, 4], "not refilled by clean steps"
    assert scales(dynamic(refill=True), "o.o.oo") == [16, 16, 16, 16, 16, 8], "refilled by each clean step"
    assert scales(dynamic(shift=1), "oo") == [8, 4]
    assert scales(dynamic(shift=3), "oooo") == [16, 16, 8, 4]


def test_the_scale_doubles_after_each_full_window_of_clean_steps() -> None:
    assert scales(dynamic(window=3), "........") == [16, 16, 32, 32, 32, 64, 64, 64]
    assert scales(dynamic(window=3, shift=1), "..o...") == [16, 16, 8, 8, 8, 16], "counted from the last overflow"
    assert scales(dynamic(window=2), "o..oo") == [16, 16, 32, 32, 16], "a full window refills the hysteresis"


def test_an_overflow_at_the_floor_stops_the_run() -> None:
    scaler = dynamic(scale=2, low=1, shift=1)
    assert scales(scaler, "o") == [1]
    with pytest.raises(Exception, match="minimum of 1.*non-finite"):
        scaler.update_scale(True)
    patient = DynamicLossScaler(2, 1000, 1, 1, False, raise_error_at_min_scale=False)
    assert scales(patient, "ooo") == [1, 1, 1]


def test_a_static_scale_never_moves() -> None:
    scaler = LossScaler(128)
    scaler.update_scale(True)
    assert scaler.loss_scale == 128 and not scaler.dynamic
    loss = torch.tensor(1000.0, dtype=torch.float16, requires_grad=True)
    assert scaler.scale_loss(loss).item() == 128_000, "computed in fp32: a 16-bit product would be infinite"


def test_the_scaler_of_each_dtype() -> None:
    assert CreateLossScaler(torch.bfloat16, 64.0, True, None).loss_scale == 1
    assert CreateLossScaler(torch.float16, 64.0, False, None).loss_scale == 64
    made = CreateLossScaler(torch.float16, 0, True, {"init_scale": 8, "min_scale": 4, "delayed_shift": 1})
    assert made.dynamic and scales(made, "oo"[:1]) == [4]
    assert CreateLossScaler(torch.float16, 0, True, None).loss_scale == 2**16
    assert to_python_float(torch.tensor([2.5])) == 2.5 and to_python_float(3) == 3.0


def fp16_config(stage: int, gas: int = 1, **fp16: Any) -> dict:
    return cases.make_config(stage, "fp16", gas, fp16={"enabled": True, **fp16})


class TestTraining(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_gradient_norm_and_update_hold_no_loss_scale(self, stage: int) -> None:
        for fp16 in ({"loss_scale": 64.0}, {"loss_scale": 0, "initial_scale_power": 8}, {"loss_scale": 1.0}):
            for gas, spelling in ((1, "backward"), (2, "backward"), (2, "scale")):
                note = f"stage {stage}, {fp16}, accumulation {gas}, {spelling}"
                engine = cases.make_engine(fp16_config(stage, gas, **fp16))
                data = [cases.batches_of(r, gas, "fp16") for r in range(2)]
                expected = reference_gradients(cases.twin_of(engine), cases.loss_of, data, torch.float16)
                before = weights_of(engine.module)
                for i, batch in enumerate(data[dist.get_rank()]):
                    loss = engine(*batch)
                    if spelling == "scale":
                        engine.scale(loss).backward()
                    else:
                        returned = engine.backward(loss)
                        torch.testing.assert_close(returned, loss.detach() / gas), "the loss without the scale"
                    if i < gas - 1:
                        engine.step()
                name, error = max_relative_error(cases.gradients_of(engine), expected)
                assert error < cases.TOLERANCE["fp16"], f"{note}: {name} is off by {error:.2g}"
                engine.step()
                right = math.sqrt(sum(g.square().sum().item() for g in expected.values()))
                assert float(engine.get_global_grad_norm()) == pytest.approx(right, rel=2e-3), note
                for name, weight in weights_of(engine.module).items():
                    if name in expected and expected[name].norm() > 0:
                        moved = (before[name].double() - weight.double()).norm() / 0.1
                        assert moved.item() == pytest.approx(expected[name].norm().item(), rel=0.05), f"{note}: {name}"
                engine.destroy()

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_an_overflow_on_one_rank_makes_all_skip_and_the_scale_follow(self, stage: int) -> None:
        """#45; the scale's sequence of hysteresis 2 is 16, then 16, 8, 4 after each overflow."""
        engine = cases.make_engine(fp16_config(stage, loss_scale=0, initial_scale_power=4, hysteresis=2))
        optimizer, rank = engine.optimizer, dist.get_rank()
        before = weights_of(engine.module)
        assert optimizer.cur_scale == 16 and optimizer.dynamic_loss_scale
        for count, scale in enumerate((16, 8, 4), start=1):
            x, y, uses = cases.batches_of(rank, 1, "fp16")[0]
            engine.backward(engine(x, y, uses) * (math.inf if rank == 1 else 1.0))
            engine.step()
            assert optimizer.cur_scale == scale and optimizer.overflow and engine.skipped_steps == count
            assert not engine.was_step_applied() and engine.global_steps == count
            assert engine.get_global_grad_norm() == math.inf
        for name, weight in weights_of(engine.module).items():
            assert torch.equal(weight, before[name]), name
        cases.check_window(engine, "fp16", note="after overflows")
        engine.step()
        assert engine.was_step_applied() and not optimizer.overflow
        cases.check_same_on_all_ranks(engine.module)

    def test_the_norm_uses_the_scale_in_force_during_backward(self) -> None:
        """#44: the scale doubles in every step here."""
        for stage in (0, 1, 2, 3):
            config = fp16_config(stage, loss_scale=0, initial_scale_power=2, loss_scale_window=1)
            engine = cases.make_engine(config)
            for step in range(4):
                data = [cases.batches_of(r, 1, "fp16", seed=step) for r in range(2)]
                expected = reference_gradients(cases.twin_of(engine), cases.loss_of, data, torch.float16)
                scale = engine.optimizer.cur_scale
                cases.run_window(engine, data[dist.get_rank()])
                engine.step()
                assert engine.optimizer.cur_scale == 2 * scale
                right = math.sqrt(sum(g.square().sum().item() for g in expected.values()))
                assert float(engine.get_global_grad_norm()) == pytest.approx(right, rel=5e-3)

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_plain_backward_is_refused_with_advice_and_training_goes_on(self, stage: int) -> None:
        engine = cases.make_engine(fp16_config(stage, loss_scale=32.0))
        batch = cases.batches_of(dist.get_rank(), 1, "fp16")[0]
        with pytest.raises(RuntimeError, match=r"engine\.scale\(loss\)\.backward\(\)"):
            engine(*batch).backward()
        cases.check_window(engine, "fp16", note="after the refusal")
        engine.step()
        assert engine.was_step_applied()
        with pytest.raises(RuntimeError, match="loss scale"):
            engine(*batch).backward()
        engine.zero_grad()
        cases.check_window(engine, "fp16", seed=2, note="after the second refusal")

    def test_an_overridden_scale_is_used_and_kept(self) -> None:
        for stage in (0, 1, 2):
            engine = cases.make_engine(fp16_config(stage, loss_scale=0, initial_scale_power=4))
            engine.optimizer.override_loss_scale(256.0)
            assert engine.optimizer.loss_scale == 256.0
            cases.check_window(engine, "fp16")
            engine.step()
            assert engine.optimizer.loss_scale == 256.0 and engine.optimizer.cur_scale == 256.0
            assert engine.loss_scale() == 0 and engine.dynamic_loss_scale()
