# SPDX-License-Identifier: Apache-2.0
"""True gradients, masters and states by parameter, in 16 bits; the classes and methods that outside code knows."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import LossScaleConfig
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_update_full_grad_vectorized,
)
from unit.common import DistributedTest
from unit.graphs import weights_of
from unit.reference import max_relative_error, reference_gradients
from unit.runtime import engine_cases as cases

STAGES = (0, 1, 2, 3)
SCALED = {"fp16": {"enabled": True, "loss_scale": 64.0}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}


class FusedAdam(torch.optim.AdamW):
    """Stands for an optimizer that updates all parameters in one kernel; told by its name."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0)


def trained(engine: Any) -> dict[str, torch.nn.Parameter]:
    return {n: p for n, p in engine.module.named_parameters() if p.requires_grad}


def backward(engine: Any, dtype: str, seed: int = 0) -> None:
    cases.run_window(engine, cases.batches_of(dist.get_rank(), engine.gradient_accumulation_steps(), dtype, seed))


def fp16_engine(stage: int, gas: int = 1, **kwargs: Any) -> Any:
    config = cases.make_config(stage, "fp16", gas, zero={"reduce_bucket_size": 30}, **SCALED)
    return cases.make_engine(config, **kwargs)


class TestTrueGradients(DistributedTest):
    world_size = [1, 3]

    def test_getters_and_setters_mean_the_gradient_without_loss_scale(self) -> None:
        for stage in STAGES:
            for gas in (1, 2):
                engine = fp16_engine(stage, gas)
                data = [cases.batches_of(r, gas, "fp16") for r in range(dist.get_world_size())]
                expected = reference_gradients(cases.twin_of(engine), cases.loss_of, data, torch.float16)
                backward(engine, "fp16")
                found = {n: p.get_full_hp_grad() for n, p in trained(engine).items()}
                name, error = max_relative_error(found, expected)
                assert error < cases.TOLERANCE["fp16"], f"stage {stage}: {name} is off by {error:.2g}"
                safe_update_full_grad_vectorized(list(trained(engine).values()), lambda g, p: torch.full_like(g, 0.5))
                weight = engine.module.first.weight
                value = torch.full((7, 5), 2.0**-20)  # the loss scale must not be needed to hold it
                weight.set_full_hp_grad(value)
                assert torch.equal(safe_get_full_grad(weight), value), stage
                before = {n: safe_get_full_fp32_param(p) for n, p in trained(engine).items()}
                engine.step()
                norm = (0.25 * (cases.TRAINABLE - 35) + 35 * 2.0**-40) ** 0.5
                assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-5)
                for name, parameter in trained(engine).items():
                    moved = before[name] - safe_get_full_fp32_param(parameter)
                    right = 0.1 * (value if name == "first.weight" else torch.full_like(moved, 0.5))
                    torch.testing.assert_close(moved, right, rtol=1e-4, atol=1e-7)

    def test_a_weight_that_is_set_counts_at_once_and_a_state_in_the_next_step(self) -> None:
        for stage in STAGES:
            engine = fp16_engine(stage, optimizer=adamw)
            weight = engine.module.shared.weight
            value = torch.linspace(-1, 1, 49).view(7, 7)
            weight.set_full_hp_param(value)
            assert torch.equal(weight.get_full_hp_param(), value), "the master holds it in fp32"
            assert torch.equal(weights_of(engine.module)["shared.weight"], value.half()), "the weight, rounded"
            cases.check_same_on_all_ranks(engine.module)
            cases.check_window(engine, "fp16", note=f"stage {stage}: with the new weight")
            with pytest.raises(ValueError, match="no step has been made"):
                weight.get_full_hp_param("exp_avg")
            engine.step()
            moments = torch.full((7, 7), 3.0)
            weight.set_full_hp_param(moments, "exp_avg")
            assert torch.equal(weight.get_full_hp_param("exp_avg"), moments)
            safe_set_full_optimizer_state(weight, torch.ones(7, 7), "exp_avg_sq")
            before = safe_get_full_fp32_param(weight)
            backward(engine, "fp16", seed=1)
            safe_set_full_grad(weight, torch.zeros(7, 7))
            engine.step()
            moved = before - safe_get_full_fp32_param(weight)
            right = 0.01 * (2.7 / (1 - 0.9**2)) / (0.999 / (1 - 0.999**2)) ** 0.5  # two bias-corrected steps
            torch.testing.assert_close(moved, torch.full((7, 7), right), rtol=1e-3, atol=1e-6)

    def test_inside_no_sync_there_is_only_this_ranks_part(self) -> None:
        for stage in (0, 1):
            engine = cases.make_engine(cases.make_config(stage, "bf16"))
            weight = engine.module.first.weight
            batch = cases.batches_of(dist.get_rank(), 1, "bf16")[0]
            with engine.no_sync():
                engine.backward(engine(*batch))
                own = safe_get_full_grad(weight)
                with pytest.raises(ValueError, match=r"first\.weight.*inside no_sync.*afterwards"):
                    safe_set_full_grad(weight, own)
            total = own.clone()
            dist.all_reduce(total)
            found = safe_get_full_grad(weight)
            torch.testing.assert_close(found, total / dist.get_world_size(), rtol=0.02, atol=1e-4)

    def test_masters_in_bf16_are_shown_in_fp32(self) -> None:
        for stage in (1, 2, 3):
            bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
            engine = cases.make_engine(cases.make_config(stage, "bf16", bf16=bf16), optimizer=adamw)
            assert engine.optimizer.master_weights_and_grads_dtype is torch.bfloat16
            assert engine.get_data_types() == (torch.bfloat16, torch.bfloat16)
            backward(engine, "bf16")
            weight = engine.module.first.weight
            gradient = safe_get_full_grad(weight)
            assert gradient.dtype is torch.float32 and torch.equal(gradient, gradient.bfloat16().float())
            engine.step()
            assert weight.get_full_hp_param().dtype is torch.float32
            assert weight.get_full_hp_param("exp_avg").dtype is torch.float32
            inner = next(iter(engine.optimizer.state.values()))
            assert inner["exp_avg"].dtype is torch.bfloat16
            value = torch.full((7, 5), 0.3)
            safe_set_full_fp32_param(weight, value)
            assert torch.equal(safe_get_full_fp32_param(weight), value.bfloat16().float())
            assert torch.equal(weights_of(engine.module)["first.weight"], value.bfloat16())


class TestLocalPartitions(DistributedTest):
    world_size = [1, 3]

    def test_they_are_the_ranks_part_of_the_whole(self) -> None:
        engine = fp16_engine(3, optimizer=adamw)
        rank, world, optimizer = dist.get_rank(), dist.get_world_size(), engine.optimizer

        def own(whole: Tensor) -> Tensor:
            size = -(-whole.numel() // world)
            return whole.reshape(-1)[rank * size : (rank + 1) * size]

        def agree(local: Tensor, whole: Tensor) -> None:
            assert local.dim() == 1 and local.dtype is torch.float32 and local.numel() == -(-whole.numel() // world)
            part = own(whole)
            assert torch.equal(local[: part.numel()], part)

        for seed in range(2):
            backward(engine, "fp16", seed)
            for parameter in trained(engine).values():
                agree(safe_get_local_grad(parameter), safe_get_full_grad(parameter))
                agree(optimizer.get_local_fp32_grad_for_param(parameter), optimizer.get_fp32_grad_for_param(parameter))
                agree(safe_get_local_fp32_param(parameter), optimizer.get_full_hp_param(parameter))
            engine.step()
        weight = engine.module.shared.weight
        agree(safe_get_local_optimizer_state(weight, "exp_avg"), optimizer.get_full_hp_param(weight, "exp_avg"))
        with pytest.raises(ValueError, match="no backward has run"):
            safe_get_local_grad(weight)
        backward(engine, "fp16", seed=2)
        ones = torch.ones_like(safe_get_local_grad(weight))
        safe_set_local_grad(weight, ones * (rank + 1))
        optimizer.set_local_hp_param(ones * rank, weight, "exp_avg")
        safe_set_local_fp32_param(weight, ones * 0.5)
        assert torch.equal(weights_of(engine.module)["shared.weight"], torch.full((7, 7), 0.5).half())
        assert torch.equal(own(safe_get_full_grad(weight)).unique(), torch.tensor([rank + 1.0]))
        assert torch.equal(own(optimizer.get_full_hp_param(weight, "exp_avg")).unique(), torch.tensor([float(rank)]))
        optimizer.set_fp32_grad_for_param(torch.zeros(7, 7), weight)
        optimizer.update_fp32_grad_for_param_vectorized(lambda g, p: g + 0.25, [weight])
        assert torch.equal(optimizer.get_fp32_grad_for_param(weight), torch.full((7, 7), 0.25))
        optimizer.set_local_grad_for_param(ones, weight)
        optimizer.set_full_hp_param(torch.zeros(7, 7), weight)
        assert not weights_of(engine.module)["shared.weight"].any()
        assert optimizer.get_hp_param_device(weight) == optimizer.get_hp_param_device(weight, "exp_avg")
        engine.step()
        assert engine.was_step_applied()


class TestClasses(DistributedTest):
    world_size = 2

    def test_which_class_an_engine_has(self) -> None:
        for stage, dtype, extra, optimizer, expected in (
            (1, "bf16", FP32_SUMS, None, BF16_Optimizer),
            (1, "bf16", {}, None, DeepSpeedZeroOptimizer),
            (1, "fp16", FP32_SUMS, None, DeepSpeedZeroOptimizer),
            (2, "bf16", FP32_SUMS, None, DeepSpeedZeroOptimizer),
            (0, "bf16", {}, None, FP16_UnfusedOptimizer),
            (0, "fp16", {}, FusedAdam, FP16_Optimizer),
            (0, "bf16", {}, FusedAdam, FP16_Optimizer),
        ):
            scaled = SCALED if dtype == "fp16" else {}
            engine = cases.make_engine(cases.make_config(stage, dtype, **extra, **scaled), optimizer=optimizer)
            assert type(engine.optimizer) is expected, (stage, dtype, extra)
            assert isinstance(engine.optimizer, DeepSpeedOptimizer) and isinstance(engine.optimizer, ZeROOptimizer)
            cases.check_window(engine, dtype)
            engine.step()

    def test_bf16_optimizer_shows_what_it_keeps(self) -> None:
        engine = cases.make_engine(cases.make_config(1, "bf16", 2, **FP32_SUMS))
        optimizer, rank = engine.optimizer, dist.get_rank()
        assert [p.shape for p in optimizer.bf16_groups[0]] == [p.shape for p in trained(engine).values()]
        (flat,), (masters,) = optimizer.bf16_groups_flat, optimizer.fp32_groups_flat_partition
        assert flat.dtype is torch.bfloat16 and masters.dtype is torch.float32
        assert flat.numel() == 2 * masters.numel() >= cases.TRAINABLE
        assert torch.equal(masters.bfloat16(), flat.chunk(2)[rank])
        assert optimizer.group_paddings == [(flat.numel() - cases.TRAINABLE) if rank == 1 else 0]
        assert optimizer.fp32_groups_gradients_flat == [None] and optimizer.fp32_groups_gradients == [[]]
        assert not any(optimizer.fp32_groups_has_gradients[0])
        first, second = cases.batches_of(rank, 2, "bf16")
        engine.backward(engine(*first))
        has = dict(zip(trained(engine), optimizer.fp32_groups_has_gradients[0]))
        assert has["first.weight"] and not has["unused.weight"], "pending on this rank"
        engine.step()
        engine.backward(engine(*second))
        gradient = optimizer.fp32_groups_gradients_flat[0]
        assert gradient.dtype is torch.float32 and gradient.numel() == masters.numel()
        whole = torch.cat([safe_get_full_grad(p).reshape(-1) for p in trained(engine).values()])
        mine = whole[rank * masters.numel() : (rank + 1) * masters.numel()]
        assert torch.equal(gradient[: mine.numel()], mine)
        assert torch.equal(torch.cat([g.reshape(-1) for g in optimizer.fp32_groups_gradient_dict[0]]), mine)
        engine.step()
        with pytest.raises(ValueError, match="norm_type=1"):
            BF16_Optimizer(torch.optim.SGD(engine.module.parameters(), lr=0.1), {}, norm_type=1)

    def test_fp16_optimizer_keeps_masters_in_one_tensor(self) -> None:
        for dtype in ("fp16", "bf16"):
            kinds = (FusedAdam, torch.optim.AdamW)
            flat, plain = (cases.make_engine(cases.make_config(0, dtype), optimizer=kind) for kind in kinds)
            optimizer = flat.optimizer
            (masters,) = optimizer.fp32_groups_flat
            for seed in range(3):
                for engine in (flat, plain):
                    backward(engine, dtype, seed)
                    engine.step()
                shown = [m.detach().reshape(-1) for m in optimizer.fp32_groups[0]]
                assert torch.equal(torch.cat(shown), masters[: cases.TRAINABLE]) and masters.dtype is torch.float32
                for name, weight in weights_of(flat.module).items():
                    assert torch.equal(weight, weights_of(plain.module)[name]), f"{dtype}: {name}"
            assert [p.dtype for p in optimizer.fp16_groups[0]] == [cases.DTYPES[dtype]] * len(trained(flat))

    def test_loss_scale_config_is_the_scalers_state(self) -> None:
        fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 5, "loss_scale_window": 2}
        engine = cases.make_engine(cases.make_config(0, "fp16", fp16=fp16))
        for seed in range(2):
            backward(engine, "fp16", seed)
            engine.step()
        shown = engine.optimizer.loss_scale_config
        assert (shown.use_grad_scaling, shown.dynamic_loss_scale, shown.cur_iter) == (True, True, 2)
        assert (shown.cur_scale, shown.scale_factor, shown.scale_window, shown.min_loss_scale) == (64.0, 2.0, 2, 1)
        made = LossScaleConfig(torch.float16, True, 0.0, {"scale_window": 7}, initial_dynamic_scale=8.0)
        assert (made.cur_scale, made.scale_window, made.cur_iter) == (8.0, 7, 0)
        made = LossScaleConfig(torch.bfloat16, True, 4.0, None)
        assert (made.use_grad_scaling, made.cur_scale, made.scale_window) == (False, 1.0, None)

    def test_backward_by_the_optimizer(self) -> None:
        for stage in STAGES:
            engine = fp16_engine(stage)
            batch = cases.batches_of(dist.get_rank(), 1, "fp16")[0]
            engine.backward(engine(*batch))
            expected = cases.gradients_of(engine)
            engine.zero_grad()
            engine.optimizer.backward(engine(*batch))
            for name, gradient in cases.gradients_of(engine).items():
                torch.testing.assert_close(gradient, expected[name])
            engine.step()

    def test_fragments_show_states_and_links_are_no_burden_of_a_copy(self) -> None:
        for stage in STAGES:
            config = cases.make_config(stage, "bf16", zero={"stage3_param_persistence_threshold": 0})
            engine = cases.make_engine(config, optimizer=adamw)
            weight = engine.module.first.weight
            backward(engine, "bf16")
            if stage in (1, 2):
                assert weight._hp_mapping is None or weight._hp_mapping.get_optim_state_keys() == []
            engine.step()
            whole = {key: weight.get_full_hp_param(key) for key in ("exp_avg", "exp_avg_sq")}
            if stage in (1, 2) and weight._hp_mapping is not None:
                mapping = weight._hp_mapping
                start, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
                assert set(mapping.get_optim_state_keys()) >= set(whole)
                for key, value in whole.items():
                    part = value.reshape(-1)[start : start + numel]
                    assert torch.equal(mapping.get_hp_fragment(key), part)
                with pytest.raises(ValueError, match="nonsense"):
                    mapping.get_hp_fragment("nonsense")
            if stage < 3:
                written = io.BytesIO()
                torch.save(engine.module, written)
                written.seek(0)
                for other in (torch.load(written, weights_only=False), copy.deepcopy(engine.module)):
                    assert torch.equal(other.first.weight, engine.module.first.weight)
                    assert safe_get_full_fp32_param(other.first.weight) is None, "of no engine"
            engine.destroy()
            assert not hasattr(weight, "get_full_hp_param") and safe_get_full_fp32_param(weight) is None
