# SPDX-License-Identifier: Apache-2.0
"""Reading and writing true gradients, master weights and optimizer state of whole parameters at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed import utils
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_update_full_grad_vectorized,
)
from unit.common import DistributedTest
from unit.graphs import weights_of
from unit.reference import max_relative_error, reference_gradients
from unit.runtime import engine_cases as cases

STAGES = (0, 1, 2, 3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0)


def trained(engine: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]


def shape_of(parameter: torch.nn.Parameter) -> torch.Size:
    """Of the whole parameter."""
    return getattr(parameter, "ds_shape", parameter.shape)


def same_everywhere(value: Tensor) -> bool:
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, value.contiguous())
    return all(torch.equal(one, value) for one in everyone)


class TestGradients(DistributedTest):
    world_size = [1, 3]

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_after_every_backward_it_is_the_mean_of_what_is_accumulated_so_far(self, dtype: str) -> None:
        for stage in STAGES:
            for bucket in (6, 10**9):
                gas, world = 3, dist.get_world_size()
                zero = {"reduce_bucket_size": bucket}
                engine = cases.make_engine(cases.make_config(stage, dtype, gas, zero=zero))
                data = [cases.batches_of(r, gas, dtype) for r in range(world)]
                for step, batch in enumerate(data[dist.get_rank()], start=1):
                    engine.backward(engine(*batch))
                    so_far = [batches[:step] for batches in data]
                    expected = reference_gradients(cases.twin_of(engine), cases.loss_of, so_far, cases.DTYPES[dtype])
                    expected = {n: g * step / gas for n, g in expected.items()}
                    for _ in range(2):  # reading changes nothing
                        found = cases.gradients_of(engine)
                        name, error = max_relative_error(found, expected)
                        assert error < cases.TOLERANCE[dtype], f"stage {stage}, step {step}: {name} off by {error:.2g}"
                    assert all(g.dtype is torch.float32 and same_everywhere(g) for g in found.values())
                    assert not found["unused.weight"].count_nonzero()
                    engine.step()
                assert engine.was_step_applied()
                cases.check_same_on_all_ranks(engine.module)

    def test_without_a_backward_it_is_an_error_and_frozen_parameters_have_none(self) -> None:
        for stage in STAGES:
            engine = cases.make_engine(cases.make_config(stage))
            frozen, weight = engine.module.frozen.weight, engine.module.first.weight
            for _ in range(2):
                with pytest.raises(ValueError, match=r"first\.weight.*no backward"):
                    safe_get_full_grad(weight)
                with pytest.raises(ValueError, match="no backward"):
                    safe_set_full_grad(weight, torch.zeros(7, 5))
                assert safe_get_full_grad(frozen) is None
                assert safe_get_full_fp32_param(frozen) is None
                assert safe_get_full_optimizer_state(frozen, "exp_avg") is None
                cases.check_window(engine)
                engine.step()
            with pytest.raises(ValueError, match="not trained"):
                safe_set_full_fp32_param(frozen, torch.zeros(7, 7))

    def test_edits_change_the_step_and_the_norm(self) -> None:
        """#38"""
        for stage in STAGES:
            for gas in (1, 2):
                engine = cases.make_engine(cases.make_config(stage, gas=gas, zero={"reduce_bucket_size": 20}))
                cases.run_window(engine, cases.batches_of(dist.get_rank(), gas))
                values = {}
                for i, (name, parameter) in enumerate(trained(engine)):
                    values[name] = torch.randn(shape_of(parameter), generator=torch.Generator().manual_seed(i))
                    safe_set_full_grad(parameter, values[name])
                found = cases.gradients_of(engine)
                assert all(torch.equal(found[name], values[name]) for name in values), f"stage {stage}"
                safe_update_full_grad_vectorized([p for _, p in trained(engine)], lambda g, p: 2 * g)
                before = weights_of(engine.module)
                engine.step()
                norm = sum((2 * v).square().sum().item() for v in values.values()) ** 0.5
                assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-5)
                after = weights_of(engine.module)
                for name, value in values.items():
                    torch.testing.assert_close(after[name], before[name] - 0.2 * value)
                cases.check_window(engine, note="after edits")

    def test_edits_in_the_middle_of_a_window_are_kept_and_added_to(self) -> None:
        for stage in STAGES:
            engine = cases.make_engine(cases.make_config(stage, gas=2))
            first, second = cases.batches_of(dist.get_rank(), 2)
            engine.backward(engine(*first))
            for _, parameter in trained(engine):
                safe_set_full_grad(parameter, torch.zeros(shape_of(parameter)))
            engine.step()
            engine.backward(engine(*second))
            data = [[cases.batches_of(r, 2)[1]] for r in range(dist.get_world_size())]
            expected = reference_gradients(cases.twin_of(engine), cases.loss_of, data)
            name, error = max_relative_error(cases.gradients_of(engine), {n: g / 2 for n, g in expected.items()})
            assert error < cases.TOLERANCE["fp32"], f"stage {stage}: {name} is off by {error:.2g}"

    def test_wrong_shapes_are_refused(self) -> None:
        for stage in STAGES:
            engine = cases.make_engine(cases.make_config(stage))
            cases.run_window(engine, cases.batches_of(dist.get_rank(), 1))
            weight = engine.module.first.weight
            with pytest.raises(ValueError, match=r"first\.weight.*\(7, 5\).*\(5, 7\)"):
                safe_set_full_grad(weight, torch.zeros(5, 7))
            with pytest.raises(ValueError, match=r"\(7, 5\)"):
                safe_set_full_fp32_param(weight, torch.zeros(35))
            engine.step()
            assert engine.was_step_applied()

    def test_stage_0_publishes_the_gradient_and_counts_edits_there(self) -> None:
        for dtype in ("fp32", "bf16"):
            engine = cases.make_engine(cases.make_config(0, dtype))
            cases.run_window(engine, cases.batches_of(dist.get_rank(), 1, dtype))
            for _, parameter in trained(engine):
                assert parameter.grad is not None and parameter.grad.dtype is parameter.dtype
            engine.module.first.weight.grad.mul_(4)
            engine.module.shared.weight.grad = None
            before = {n: p.detach().clone() for n, p in trained(engine)}
            shown = engine.module.first.weight.grad.clone()
            engine.step()
            right = (before["first.weight"].float() - 0.1 * shown.float()).to(shown.dtype)
            torch.testing.assert_close(engine.module.first.weight.detach(), right, rtol=2**-7, atol=1e-6)
            assert torch.equal(engine.module.shared.weight, before["shared.weight"])
            assert all(p.grad is None for p in engine.module.parameters())


class TestWeightsAndState(DistributedTest):
    world_size = [1, 3]

    def test_masters(self) -> None:
        for stage in STAGES:
            for dtype in ("fp32", "bf16"):
                engine = cases.make_engine(cases.make_config(stage, dtype), optimizer=adamw)
                weights = weights_of(engine.module)
                for name, parameter in trained(engine):
                    master = safe_get_full_fp32_param(parameter)
                    assert master.dtype is torch.float32 and same_everywhere(master)
                    assert torch.equal(master.to(parameter.dtype), weights[name]), name
                cases.run_window(engine, cases.batches_of(dist.get_rank(), 1, dtype))
                weight = engine.module.first.weight
                value = torch.arange(35.0).view(7, 5) / 35
                safe_set_full_fp32_param(weight, value)
                assert torch.equal(safe_get_full_fp32_param(weight), value)
                now = weights_of(engine.module)["first.weight"]
                assert torch.equal(now, value.to(now.dtype)), "the model's weight follows at once"
                engine.step()
                assert (safe_get_full_fp32_param(weight) - value).abs().max() <= 0.0101, "one step of lr 0.01 from it"
                after = weights_of(engine.module)["first.weight"]
                assert torch.equal(safe_get_full_fp32_param(weight).to(weight.dtype), after)
                cases.check_same_on_all_ranks(engine.module)

    def test_optimizer_state(self) -> None:
        for stage in STAGES:
            for dtype in ("fp32", "bf16"):
                engine = cases.make_engine(cases.make_config(stage, dtype), optimizer=adamw)
                weight = engine.module.shared.weight
                with pytest.raises(ValueError, match="no step has been made"):
                    safe_get_full_optimizer_state(weight, "exp_avg")
                cases.run_window(engine, cases.batches_of(dist.get_rank(), 1, dtype))
                gradients = cases.gradients_of(engine)
                engine.step()
                for name, parameter in trained(engine):
                    first = safe_get_full_optimizer_state(parameter, "exp_avg")
                    second = safe_get_full_optimizer_state(parameter, "exp_avg_sq")
                    torch.testing.assert_close(first, 0.1 * gradients[name], rtol=1e-5, atol=1e-9)
                    torch.testing.assert_close(second, 0.001 * gradients[name].square(), rtol=1e-4, atol=1e-12)
                    assert float(safe_get_full_optimizer_state(parameter, "step")) == 1.0
                with pytest.raises(ValueError, match="nonsense not found.*exp_avg"):
                    safe_get_full_optimizer_state(weight, "nonsense")
                value = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))
                safe_set_full_optimizer_state(weight, value, "exp_avg")
                assert torch.equal(safe_get_full_optimizer_state(weight, "exp_avg"), value)
                cases.run_window(engine, cases.batches_of(dist.get_rank(), 1, dtype, seed=1))
                gradient = cases.gradients_of(engine)["shared.weight"]
                engine.step()
                found = safe_get_full_optimizer_state(weight, "exp_avg")
                torch.testing.assert_close(found, 0.9 * value + 0.1 * gradient, rtol=1e-5, atol=1e-7)

    def test_local_accessors_are_for_stage_3(self) -> None:
        engine = cases.make_engine(cases.make_config(2))
        for name in (
            "safe_get_local_grad",
            "safe_set_local_grad",
            "safe_get_local_fp32_param",
            "safe_set_local_fp32_param",
            "safe_get_local_optimizer_state",
            "safe_set_local_optimizer_state",
        ):
            value = [torch.zeros(7, 5)] if name.startswith("safe_set") else []
            state = ["exp_avg"] if name.endswith("state") else []
            with pytest.raises(AssertionError, match=name):
                getattr(utils, name)(engine.module.first.weight, *value, *state)
