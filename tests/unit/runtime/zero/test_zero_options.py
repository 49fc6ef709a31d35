# SPDX-License-Identifier: Apache-2.0
"""Every option that changes how gradients travel, against the float64 reference: options change speed and memory, not
gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.utils import safe_get_full_fp32_param
from unit.common import DistributedTest
from unit.graphs import weights_of
from unit.reference import max_relative_error, reference_gradients
from unit.runtime import engine_cases as cases

pytestmark = pytest.mark.slow

HUGE = 10**9
BUCKET_SIZES = (1, 3, cases.LARGEST, cases.TRAINABLE - 1, cases.TRAINABLE, cases.TRAINABLE + 1)
ZERO_OPTIONS: list[dict[str, Any]] = [
    {"reduce_bucket_size": 40, "overlap_comm": True},
    {"reduce_bucket_size": 3, "overlap_comm": True, "contiguous_gradients": False},
    {"reduce_bucket_size": 40, "contiguous_gradients": False},
    {"reduce_bucket_size": 40, "reduce_scatter": False},
    {"reduce_bucket_size": cases.LARGEST, "reduce_scatter": False, "contiguous_gradients": True},
    {"allgather_partitions": False},
    {"allgather_bucket_size": 4},
    {"round_robin_gradients": True, "reduce_bucket_size": 40},
    {"parameter_alignment": True, "reduce_bucket_size": 40},
    {"parameter_alignment": True, "round_robin_gradients": True, "reduce_scatter": False, "overlap_comm": True},
]
STAGE_3_OPTIONS: list[dict[str, Any]] = [
    {"reduce_bucket_size": 40, "overlap_comm": True, "stage3_param_persistence_threshold": 100_000},
    {"reduce_bucket_size": 3, "contiguous_gradients": False, "stage3_param_persistence_threshold": 10},
    {"reduce_bucket_size": 40, "reduce_scatter": False, "sub_group_size": 1},
    {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0},
    {"stage3_prefetch_bucket_size": 10**8, "stage3_max_live_parameters": 60, "sub_group_size": 30},
    {"stage3_model_persistence_threshold": 20, "stage3_param_persistence_threshold": 30},
    {"stage3_module_granularity_threshold": 1000, "overlap_comm": True},
    {"stage3_use_all_reduce_for_fetch_params": True, "stage3_allgather_sequential": True},
    {"round_robin_gradients": True, "stage3_use_all_reduce_for_fetch_params": True},
]
TOP_OPTIONS: list[dict[str, Any]] = [
    {"prescale_gradients": True},
    {"gradient_predivide_factor": 3.0},
    {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
    {"gradient_allreduce_op": "sum"},
    {"data_types": {"grad_accum_dtype": "fp32"}},
]
LOW_PRECISION_OPTIONS: list[dict[str, Any]] = [
    {},
    {"communication_data_type": "fp32"},
    {"communication_data_type": "bf16"},
    {"communication_data_type": "fp16"},
    {"data_types": {"grad_accum_dtype": "bf16"}},
    {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
    {"communication_data_type": "fp16", "gradient_allreduce_op": "sum"},
]


def fp32_options(stage: int) -> Iterator[dict[str, Any]]:
    for size in BUCKET_SIZES:
        yield {"zero": {"reduce_bucket_size": size}}
    for zero in STAGE_3_OPTIONS if stage == 3 else ZERO_OPTIONS:
        yield {"zero": zero}
    for top in of_stage(TOP_OPTIONS, stage):
        # a scattered bucket cannot be divided beforehand, which the config refuses
        yield {"zero": {"reduce_bucket_size": 40, "reduce_scatter": stage < 2}, **top}


def of_stage(options: list[dict[str, Any]], stage: int) -> list[dict[str, Any]]:
    """The config refuses sums instead of means at stage 3."""
    return [top for top in options if stage < 3 or "gradient_allreduce_op" not in top]


def low_precision_options(stage: int) -> Iterator[dict[str, Any]]:
    for index, top in enumerate(of_stage(LOW_PRECISION_OPTIONS, stage)):
        # with the small one every parameter is larger than the bucket
        yield {"zero": {"reduce_bucket_size": (3, HUGE)[(index + stage) % 2]}, **top}


def train_and_compare(stage: int, dtype: str, gas: int, options: dict[str, Any], windows: int = 2) -> None:
    """Gradients of two windows, the update of each under SGD, and equal weights on all ranks."""
    note = f"stage {stage}, {dtype}, accumulation {gas}, {options}"
    world, rank, lr = dist.get_world_size(), dist.get_rank(), 0.1
    summed = options.get("gradient_allreduce_op") == "sum"
    engine = cases.make_engine(cases.make_config(stage, dtype, gas, **options))
    for window in range(windows):
        data = [cases.batches_of(r, gas, dtype, seed=window) for r in range(world)]
        before = {n: weight.double() for n, weight in weights_of(engine.module).items()}
        masters = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters() if p.requires_grad}
        expected = reference_gradients(cases.twin_of(engine), cases.loss_of, data, cases.DTYPES[dtype])
        expected = {n: g * (world if summed else 1) for n, g in expected.items()}
        cases.run_window(engine, data[rank])
        gradients = cases.gradients_of(engine)
        worst, error = max_relative_error(gradients, expected)
        assert error <= cases.TOLERANCE[dtype], f"{note}, window {window}: gradient of {worst} is off by {error:.2g}"
        engine.step()
        for name, weight in weights_of(engine.module).items():
            if name not in masters:
                continue
            right = (masters[name] - lr * gradients[name]).to(weight.dtype)
            torch.testing.assert_close(weight, right, rtol=1e-6, atol=1e-7, msg=lambda m: f"{note}: {m}")
            moved = not torch.equal(weight.double(), before[name])
            assert moved == bool(right.double().ne(before[name]).any()), f"{note}: {name}"
        cases.check_same_on_all_ranks(engine.module, note)
    engine.destroy()


def share_of(world_size: int, options: Iterator[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """All options on two ranks; on one, three and four ranks a third each, so that they have all between them."""
    third = {1: 0, 3: 1, 4: 2}.get(world_size)
    return [(i, option) for i, option in enumerate(options) if third is None or i % 3 == third]


class TestOptions(DistributedTest):
    world_size = [1, 2, 3, 4]

    def test_fp32(self) -> None:
        for stage in (0, 1, 2, 3):
            for i, options in share_of(self.world_size, fp32_options(stage)):
                train_and_compare(stage, "fp32", 1 + i % 2, options, windows=2 if self.world_size == 2 else 1)

    def test_low_precision(self) -> None:
        for stage in (0, 1, 2, 3):
            for i, options in share_of(self.world_size, low_precision_options(stage)):
                train_and_compare(stage, "bf16", 1 + i % 2, options, windows=1)


class TestGroups(DistributedTest):
    world_size = 3

    def test_parameter_groups_keep_their_settings_and_their_gradients(self) -> None:
        """#68; also groups of mixed dtype and a group that is smaller than the world."""
        for stage in (0, 1, 2, 3):
            for zero in ({}, {"reduce_bucket_size": 4}, {"round_robin_gradients": True, "sub_group_size": 20}):
                model = cases.OddModel()
                optimizer = torch.optim.SGD(
                    [
                        {"params": [model.gain], "lr": 0.5},
                        {"params": [*model.last.parameters(), *model.first.parameters()], "lr": 0.25},
                        {"params": [*model.shared.parameters(), *model.unused.parameters()], "lr": 0.125},
                    ],
                    lr=1.0,
                )
                rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
                engine = cases.make_engine(cases.make_config(stage, gas=2, zero=zero), model, optimizer)
                before = weights_of(model)
                cases.check_window(engine, note=f"stage {stage}, {zero}")
                gradients = cases.gradients_of(engine)
                engine.step()
                after = weights_of(model)
                for name, parameter in model.named_parameters():
                    if parameter.requires_grad:
                        right = before[name] - rates[id(parameter)] * gradients[name]
                        torch.testing.assert_close(after[name], right, rtol=1e-6, atol=1e-7)
                assert engine.get_lr() == [0.5, 0.25, 0.125]

    def test_mixed_dtypes_in_one_group(self) -> None:
        """#78, #79: fp32 adapters beside bf16 weights."""
        for stage in (0, 1, 2, 3):
            for zero in ({}, {"reduce_bucket_size": 5, "sub_group_size": 20}):
                torch.manual_seed(1)
                model = nn.ModuleDict({"base": nn.Linear(5, 5).bfloat16(), "adapter": nn.Linear(5, 3)})
                engine = cases.make_engine(cases.make_config(stage, zero=zero), model)
                rank, world = dist.get_rank(), dist.get_world_size()
                inputs = [torch.randn(2, 5, generator=torch.Generator().manual_seed(r)) for r in range(world)]

                def loss(m: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
                    wide = m["adapter"].weight.dtype
                    return m["adapter"](torch.tanh(m["base"](x.to(m["base"].weight.dtype)).to(wide))).square().sum()

                twin = nn.ModuleDict({"base": nn.Linear(5, 5).bfloat16(), "adapter": nn.Linear(5, 3)})
                twin.load_state_dict(weights_of(model))
                expected = reference_gradients(twin, loss, [[x] for x in inputs])
                engine.backward(loss(engine.module, inputs[rank]))
                found = cases.gradients_of(engine)
                assert max_relative_error(found, expected)[1] < cases.TOLERANCE["bf16"]
                engine.step()
                assert model["base"].weight.dtype is torch.bfloat16 and model["adapter"].weight.dtype is torch.float32


class TiedEnds(nn.Module):
    """#2: the last Linear shares weight and bias with the first; a branch without gradient on top."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 5)
        self.middle = nn.Linear(5, 5)
        self.last = self.first
        self.branch = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shift = self.branch(x)
        return nn.functional.cross_entropy(self.last(torch.relu(self.middle(self.first(x)))) + shift, y)


SMALL_WHOLE = {"stage3_param_persistence_threshold": 10}
ALL_WHOLE = {"stage3_param_persistence_threshold": 100_000}
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
}


class TestStagesAgree(DistributedTest):
    world_size = 2

    def test_parameters_split_over_buckets_that_only_some_micro_steps_use(self) -> None:
        """Buckets of a parameter that a micro-step visits because of its neighbours must not shift its pieces."""

        def loss(m: nn.ModuleList, batch: tuple[torch.Tensor, int]) -> torch.Tensor:
            return m[batch[1]](batch[0]).square().sum()

        def make() -> nn.ModuleList:
            torch.manual_seed(2)
            return nn.ModuleList(nn.Linear(5, 3) for _ in range(4))

        def inputs(rank: int) -> list[tuple[torch.Tensor, int]]:
            generator = torch.Generator().manual_seed(rank)
            return [(torch.randn(2, 5, generator=generator), which) for which in (1, 0, 2, 1, 3, 2)]

        expected = reference_gradients(make, loss, [inputs(r) for r in range(2)])
        for stage in (0, 1, 2, 3):
            for size in (2, 7, 11):
                engine = cases.make_engine(cases.make_config(stage, gas=6, zero={"reduce_bucket_size": size}), make())
                for i, batch in enumerate(inputs(dist.get_rank())):
                    engine.backward(loss(engine.module, batch))
                    if i < 5:
                        engine.step()
                name, error = max_relative_error(cases.gradients_of(engine), expected)
                assert error < 1e-5, f"stage {stage}, bucket size {size}: {name} is off by {error:.2g}"

    def test_gradients_bitwise_in_fp32_on_two_ranks(self) -> None:
        """The sum of two numbers has one rounding, whatever collective forms it."""
        found: list[dict[str, torch.Tensor]] = []
        for stage in (0, 1, 2, 3):
            for zero in ({}, {"reduce_bucket_size": 7}, {"reduce_scatter": False}, {"overlap_comm": True}):
                engine = cases.make_engine(cases.make_config(stage, zero=zero))
                cases.run_window(engine, cases.batches_of(dist.get_rank(), 1))
                found.append(cases.gradients_of(engine))
                engine.destroy()
        for other in found[1:]:
            for name, gradient in other.items():
                assert torch.equal(gradient, found[0][name]), name

    @pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
    def test_ten_steps(self, optimizer: str) -> None:
        """Stages 0 to 3 follow plain torch in float64 over the data of all ranks; weights that stay whole at stage 3 as
        well as those that do not. All stages see the same losses."""
        world, rank, gas = dist.get_world_size(), dist.get_rank(), 2
        plain = TiedEnds().double()
        reference = OPTIMIZERS[optimizer]([p for p in plain.parameters()])
        zeros = {0: {}, 1: {}, 2: {}, 3: {}, "3, small weights whole": SMALL_WHOLE, "3, all whole": ALL_WHOLE}
        engines = {
            kind: cases.make_engine(
                cases.make_config(int(str(kind)[0]), gas=gas, zero=zero), TiedEnds(), OPTIMIZERS[optimizer]
            )
            for kind, zero in zeros.items()
        }
        for step in range(10):
            data = [list(cases.rank_batches(r, gas, 4, 5, seed=step)) for r in range(world)]
            reference.zero_grad()
            for batches in data:
                for x, y in batches:
                    (plain(x.double(), y) / (world * gas)).backward()
            # a parameter that nobody used has a zero gradient in the engine: weight decay applies to it
            for parameter in plain.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            reference.step()
            losses = {}
            for kind, engine in engines.items():
                losses[kind] = cases.run_window(engine, data[rank])
                engine.step()
            for kind, values in losses.items():
                assert torch.allclose(values, losses[0], rtol=1e-5, atol=1e-6), f"stage {kind}, step {step}"
        start = dict(TiedEnds().named_parameters())
        for kind, engine in engines.items():
            for name, weight in weights_of(engine.module).items():
                right = dict(plain.named_parameters())[name]
                distance = (right - start[name].double()).norm().item()
                error = (weight.double() - right).norm().item()
                assert error <= 1e-4 * max(distance, 0.1), f"stage {kind}, {name}: {error} after moving {distance}"
                if "branch" not in name:
                    assert distance > 0.02 and math.isfinite(error)
