# SPDX-License-Identifier: Apache-2.0
"""The global gradient norm, clipping, and what happens to a step whose gradient is not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unit.common import DistributedTest
from unit.graphs import weights_of
from unit.reference import reference_gradients
from unit.runtime import engine_cases as cases


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))


def expected_gradients(engine: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    gas = engine.gradient_accumulation_steps()
    data = [cases.batches_of(r, gas, seed=seed) for r in range(dist.get_world_size())]
    return reference_gradients(cases.twin_of(engine), cases.loss_of, data)


class TestNorm(DistributedTest):
    world_size = [1, 2, 3]

    def test_one_norm_at_every_stage_bucket_and_option(self) -> None:
        """#29, #42"""
        for stage in (0, 1, 2, 3):
            for zero in ({}, {"reduce_bucket_size": 5, "overlap_comm": True}, {"parameter_alignment": True}):
                for gas in (1, 4):
                    engine = cases.make_engine(cases.make_config(stage, gas=gas, zero=zero))
                    right = norm_of(expected_gradients(engine))
                    cases.run_window(engine, cases.batches_of(dist.get_rank(), gas))
                    assert engine.get_global_grad_norm() is None
                    engine.step()
                    assert float(engine.get_global_grad_norm()) == pytest.approx(right, rel=1e-5), (stage, zero, gas)
                    engine.destroy()

    def test_accumulation_changes_neither_norm_nor_update(self) -> None:
        """#27, #36: the same samples in one micro-step and in four, clipping active."""
        results = []
        for stage in (0, 1, 2, 3):
            for gas in (1, 4):
                engine = cases.make_engine(cases.make_config(stage, gas=gas, gradient_clipping=0.1))
                data = [(x, y, 2) for x, y, _ in cases.batches_of(dist.get_rank(), 4)]
                if gas == 1:
                    data = [(torch.cat([b[0] for b in data]), torch.cat([b[1] for b in data]), 2)]
                cases.run_window(engine, data)
                engine.step()
                flat = torch.cat([weight.reshape(-1) for weight in weights_of(engine.module).values()])
                results.append((float(engine.get_global_grad_norm()), flat))
        for norm, weights in results[1:]:
            assert norm == pytest.approx(results[0][0], rel=1e-5)
            torch.testing.assert_close(weights, results[0][1], rtol=1e-6, atol=1e-7)

    def test_clipping_scales_once_by_the_right_factor(self) -> None:
        for stage in (0, 1, 2, 3):
            for dtype in ("fp32", "bf16"):
                for clip in (0.0, 0.05, 1e6):
                    engine = cases.make_engine(cases.make_config(stage, dtype, 2, gradient_clipping=clip))
                    stepped = weights_of(engine.module)
                    cases.run_window(engine, cases.batches_of(dist.get_rank(), 2, dtype))
                    gradients = cases.gradients_of(engine)
                    norm = norm_of(gradients)
                    factor = 1.0 / max(1.0, (norm + 1e-6) / clip) if clip else 1.0
                    assert (factor < 0.5) == (clip == 0.05)
                    engine.step()
                    after = weights_of(engine.module)
                    for name, gradient in gradients.items():
                        right = (stepped[name].float() - 0.1 * factor * gradient).to(after[name].dtype)
                        tight = {"rtol": 1e-6, "atol": 1e-7} if dtype == "fp32" else {"rtol": 2**-7, "atol": 1e-6}
                        torch.testing.assert_close(after[name], right, **tight)
                    assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-5), "norm before clipping"

    def test_the_default_clips_at_one_and_the_norm_can_be_switched_off(self) -> None:
        config = cases.make_config(1)
        del config["gradient_clipping"]
        assert cases.make_engine(config).gradient_clipping() == 1.0
        engine = cases.make_engine(cases.make_config(2, zero={"compute_grad_norm": False}))
        cases.check_window(engine)
        engine.step()
        assert engine.was_step_applied() and engine.get_global_grad_norm() is None

    def test_kinds_of_the_public_norm(self) -> None:
        for stage, kind, dtype in (
            (0, float, None),
            (1, torch.Tensor, torch.float32),
            (2, torch.Tensor, torch.float32),
            (3, torch.Tensor, torch.float64),
        ):
            engine = cases.make_engine(cases.make_config(stage))
            cases.run_window(engine, cases.batches_of(dist.get_rank(), 1))
            engine.step()
            norm = engine.get_global_grad_norm()
            assert isinstance(norm, kind)
            if kind is torch.Tensor:
                assert norm.dim() == 0 and norm.dtype is dtype


class TestOverflow(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_a_bad_gradient_on_one_rank_makes_all_skip(self, dtype: str) -> None:
        """#46"""
        for stage in (0, 1, 2, 3):
            for bad in (math.inf, math.nan):
                for zero in ({}, {"compute_grad_norm": False} if stage in (1, 2) else {}):
                    config = cases.make_config(stage, dtype, 2, zero=zero)
                    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
                    engine = cases.make_engine(config)
                    before = weights_of(engine.module)
                    lr, scheduled = engine.get_lr(), engine.lr_scheduler.state_dict()
                    for i, batch in enumerate(cases.batches_of(dist.get_rank(), 2, dtype)):
                        engine.backward(engine(*batch) * (bad if dist.get_rank() == 1 and i == 0 else 1.0))
                        engine.step()
                    case = f"stage {stage}, {dtype}, {bad}, {zero}"
                    assert (engine.skipped_steps, engine.global_steps, engine.micro_steps) == (1, 1, 2), case
                    assert not engine.was_step_applied() and engine.get_global_grad_norm() == math.inf
                    assert (engine.get_lr(), engine.lr_scheduler.state_dict()) == (lr, scheduled), "not stepped"
                    for name, weight in weights_of(engine.module).items():
                        assert torch.equal(weight, before[name]), f"{case}: {name}"
                    cases.check_window(engine, dtype, note=case)
                    engine.step()
                    assert engine.was_step_applied() and engine.lr_scheduler.state_dict() != scheduled
                    cases.check_same_on_all_ranks(engine.module)
                    engine.destroy()

    def test_bf16_can_be_told_not_to_check(self) -> None:
        for stage in (0, 1, 2, 3):
            config = cases.make_config(stage, "bf16", bf16={"enabled": True, "check_grad_overflow": False})
            engine = cases.make_engine(config)
            batch = cases.batches_of(dist.get_rank(), 1, "bf16")[0]
            engine.backward(engine(*batch) * math.nan)
            engine.step()
            assert engine.was_step_applied() and engine.skipped_steps == 0
            assert bool(weights_of(engine.module)["first.weight"].isnan().any())
