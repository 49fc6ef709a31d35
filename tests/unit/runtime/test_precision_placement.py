# SPDX-License-Identifier: Apache-2.0
"""Which dtype weights, buffers, inputs and collectives have: autocast by the engine and around it, parts in fp32."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.runtime.torch_autocast import get_comm_dtype, has_comm_dtype
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from unit.common import DistributedTest
from unit.graphs import weights_of

STAGES = (0, 1, 2, 3)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Recording(nn.Module):
    """Notes the dtypes that its parts see."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)
        self.register_buffer("angles", torch.arange(6.0) / 512)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["x"] = x.dtype
        hidden = self.body(x)
        self.seen["hidden"] = hidden.dtype
        normed = self.norm((hidden + self.angles).to(self.norm.weight.dtype))
        self.seen["normed"] = normed.dtype
        out = self.head(normed.to(self.head.weight.dtype))
        self.seen["out"] = out.dtype
        return out.float().square().mean()


def make_engine(stage: int, model: nn.Module | None = None, **top: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
        **top,
    }
    model = Recording() if model is None else model
    trained = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, optimizer=torch.optim.SGD(trained, lr=1.0), config=config)[0]


def inputs(dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)


def train(engine: Any, x: Tensor) -> float:
    loss = engine(x)
    engine.backward(loss)
    engine.step()
    return loss.item()


def communicated(engine: Any) -> dict[torch.dtype, set[str]]:
    """dtype of the bucket that each parameter travels in."""
    found: dict[torch.dtype, set[str]] = {}
    for bucket in engine._stepper.reducer.buckets:
        found.setdefault(bucket.comm_dtype, set()).update(piece.record.name for piece in bucket.plan.pieces)
    return found


class TestAutocast(DistributedTest):
    world_size = 2

    def test_the_engine_casts_what_torch_casts_and_keeps_weights_in_fp32(self) -> None:
        for stage in STAGES:
            for name, dtype in (("bfloat16", BF16), ("float16", FP16)):
                engine = make_engine(stage, torch_autocast={"enabled": True, "dtype": name})
                train(engine, inputs())
                assert engine.module.seen == {"x": FP32, "hidden": dtype, "normed": FP32, "out": dtype}
                assert all(p.dtype is FP32 for p in engine.module.parameters())
                linear = {"body.weight", "body.bias", "head.weight", "head.bias"}
                assert communicated(engine) == {dtype: linear, FP32: {"norm.weight", "norm.bias"}}
                assert has_comm_dtype(engine.module.body.weight) and not has_comm_dtype(engine.module.norm.weight)
                assert get_comm_dtype(engine.module.body.bias) is dtype
                assert engine._stepper.needs_scaler() == (dtype is FP16)
                assert engine.was_step_applied() or dtype is FP16

    def test_safe_modules_are_those_that_are_named(self) -> None:
        for stage in STAGES:
            autocast = {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": ["torch.nn.LayerNorm"]}
            engine = make_engine(stage, torch_autocast=autocast)
            assert communicated(engine)[BF16] == {"norm.weight", "norm.bias"}
            engine = make_engine(stage, torch_autocast=autocast, communication_data_type="fp32")
            assert list(communicated(engine)) == [FP32], "what the config says for all is for all"
        with pytest.raises(ValueError, match=r"torch\.nn\.Nothing"):
            autocast["lower_precision_safe_modules"] = ["torch.nn.Nothing"]
            make_engine(0, torch_autocast=autocast)

    def test_an_autocast_around_the_engine_counts_only_where_the_config_says_so(self) -> None:
        for stage in STAGES:
            for asked in (False, True):
                engine = make_engine(stage, torch_autocast={"enabled": asked, "dtype": "bf16"})
                with torch.autocast("cpu", dtype=FP16):
                    train(engine, inputs())
                    assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is FP16
                assert engine.module.seen["hidden"] is (BF16 if asked else FP32), (stage, asked)
                assert engine.was_step_applied()
        engine = make_engine(2, bf16={"enabled": True})
        with torch.autocast("cpu", dtype=FP16):
            train(engine, inputs(BF16))
        assert engine.module.seen["hidden"] is BF16

    def test_an_autocast_that_stays_open_does_not_go_on_with_former_weights(self) -> None:
        for stage in STAGES:
            losses: list[list[float]] = []
            # One that is switched off keeps copies too, those of autocasts inside of it.
            for around in (nullcontext(), torch.autocast("cpu", dtype=BF16), torch.autocast("cpu", enabled=False)):
                engine = make_engine(stage, torch_autocast={"enabled": True, "dtype": "bf16"})
                with around:
                    losses.append([train(engine, inputs()) for _ in range(3)])
                    with torch.no_grad():
                        losses[-1].append(engine(inputs()).item())
            assert losses[0] == losses[1] == losses[2], stage
            assert len(set(losses[0])) == 4, "each step changes the loss"

    def test_monitors_see_the_loss_scale_of_fp16_autocast(self, tmp_path: Path) -> None:
        for name, written in (("float16", ["4,8.0", "8,16.0"]), ("bfloat16", None)):
            engine = make_engine(
                2,
                torch_autocast={"enabled": True, "dtype": name},
                fp16={"initial_scale_power": 2, "loss_scale_window": 1},
                csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": name},
            )
            for _ in range(2):
                train(engine, inputs())
            engine.destroy()
            file = tmp_path / name / "Train_Samples_loss_scale.csv"
            if dist.get_rank() == 0:
                assert (file.read_text().split()[1:] if file.exists() else None) == written


class TestPartsInFp32(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("section", ["bf16", "fp16"])
    def test_by_name_of_module_or_parameter(self, section: str) -> None:
        low = {"bf16": BF16, "fp16": FP16}[section]
        for stage in STAGES:
            for names, kept in ((["norm"], {"norm.weight", "norm.bias"}), (["head.bias"], {"head.bias"}), ([], set())):
                model = Recording()
                if "head.bias" in kept:
                    model.head = nn.Linear(6, 3, bias=False)
                    model.head.register_parameter("bias_", nn.Parameter(torch.zeros(3)))
                    names, kept = ["bias_"], {"head.bias_"}
                engine = make_engine(
                    stage, model, **{section: {"enabled": True}, "data_types": {"keep_in_fp32_modules": names}}
                )
                dtypes = {n: p.dtype for n, p in engine.module.named_parameters()}
                assert dtypes == {n: FP32 if n in kept else low for n in dtypes}, (stage, names)
                assert {n for n in communicated(engine).get(FP32, set())} == kept
                train(engine, inputs(low))
                train(engine, inputs(low))
                for name, parameter in engine.module.named_parameters():
                    master = safe_get_full_fp32_param(parameter)
                    assert torch.equal(master.to(parameter.dtype), weights_of(engine.module)[name]), (stage, name)

    def test_as_the_model_itself_says(self) -> None:
        class Listing(Recording):
            _keep_in_fp32_modules = ("norm",)
            _keep_in_fp32_modules_strict = ("head",)

        for stage in STAGES:
            for section, low, kept in (("fp16", FP16, ("norm", "head")), ("bf16", BF16, ("head",))):
                engine = make_engine(stage, Listing(), **{section: {"enabled": True}})
                for name, parameter in engine.module.named_parameters():
                    assert parameter.dtype is (FP32 if name.startswith(kept) else low), (stage, section, name)

    def test_a_frozen_bf16_base_with_fp32_adapters_in_an_engine_that_casts_nothing(self) -> None:
        """#78, #79"""

        class Adapted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.base = nn.Linear(4, 4).to(BF16).requires_grad_(False)
                self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                return (self.base(x.to(BF16)).float() + self.up(self.down(x))).square().mean()

        results = []
        for stage in STAGES:
            for autocast in ({}, {"torch_autocast": {"enabled": True, "dtype": "bf16"}}):
                engine = make_engine(stage, Adapted(), **autocast)
                assert (engine.module.base.weight.dtype, engine.module.up.weight.dtype) == (BF16, FP32)
                for _ in range(3):
                    train(engine, inputs())
                results.append((bool(autocast), weights_of(engine.module)))
        for autocast, weights in results:
            first = next(w for a, w in results if a == autocast)
            for name, weight in weights.items():
                torch.testing.assert_close(weight, first[name], rtol=2**-7 if autocast else 1e-6, atol=1e-4)
        assert not torch.equal(results[0][1]["up.weight"], weights_of(Adapted())["up.weight"]), "it was trained"

    def test_buffers_keep_their_dtype_unless_asked(self) -> None:
        """#80"""
        for stage in STAGES:
            for types, dtype in (({}, FP32), ({"buffer_dtype": "bf16"}, BF16)):
                engine = make_engine(stage, bf16={"enabled": True}, data_types=types)
                assert engine.module.angles.dtype is dtype and engine.module.count.dtype is torch.int64
                train(engine, inputs(BF16))
            assert torch.equal(make_engine(stage, bf16={"enabled": True}).module.angles, torch.arange(6.0) / 512)
            model = Recording()
            model.norm.register_buffer("ranges", torch.arange(3.0) / 512)
            types = {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["norm"]}
            module = make_engine(stage, model, bf16={"enabled": True}, data_types=types).module
            assert (module.norm.ranges.dtype, module.angles.dtype) == (FP32, BF16), stage

    def test_auto_cast_brings_inputs_to_fp16(self) -> None:
        for stage in STAGES:
            engine = make_engine(stage, fp16={"enabled": True, "auto_cast": True, "loss_scale": 8.0})
            train(engine, inputs())
            assert engine.module.seen["x"] is FP16 and engine.was_step_applied()
            engine = make_engine(stage, fp16={"enabled": True, "loss_scale": 8.0})
            with pytest.raises(RuntimeError, match="dtype"):
                engine(inputs())


class TestAccumulation(DistributedTest):
    world_size = 2

    def test_small_contributions_survive_in_fp32_and_not_in_bf16(self) -> None:
        """#81: 64 contributions of 2**-9 of the first one."""

        class Scale(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(3, 2))

            def forward(self, factor: Tensor) -> Tensor:
                return (self.weight * factor.to(self.weight.dtype)).sum()

        steps = 65
        for stage in STAGES:
            for accumulate, survives in (("fp32", True), ("bf16", False)):
                engine = make_engine(
                    stage,
                    Scale(),
                    bf16={"enabled": True},
                    data_types={"grad_accum_dtype": accumulate},
                    gradient_accumulation_steps=steps,
                )
                for step in range(steps):
                    engine.backward(engine(torch.tensor(1.0 if step == 0 else 2.0**-9)))
                    if step < steps - 1:
                        engine.step()
                found = safe_get_full_grad(engine.module.weight)[0, 0].item() * steps
                assert found == pytest.approx(1.125 if survives else 1.0, rel=0.01), (stage, accumulate)
                engine.step()
                assert engine.was_step_applied()
