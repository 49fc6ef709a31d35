# SPDX-License-Identifier: Apache-2.0
"""Gradients, norms, loss scales and weights after ten windows, at every stage and in every mix of dtypes, against
training written out by hand (``precision_loop``)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from unit.common import DistributedTest
from unit.graphs import weights_of
from unit.runtime import precision_loop as plain
from unit.runtime.precision_loop import MixedNet, PlainLoop, Recipe

pytestmark = pytest.mark.slow

WINDOWS = 10
CLIP = 0.15
READ_IN = (0, 6)  # windows whose gradients are read; reading settles, so that the others go another way
OVERFLOWS_IN = (2, 3, 7)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DYNAMIC = {
    "loss_scale": 0,
    "initial_scale_power": int(math.log2(plain.INITIAL_SCALE)),
    "loss_scale_window": plain.SCALE_WINDOW,
    "hysteresis": plain.HYSTERESIS,
    "min_loss_scale": int(plain.LEAST_SCALE),
}
IN_FP32 = {"communication_data_type": "fp32"}

RECIPES = [
    Recipe("fp32", {}),
    Recipe("fp64", {}, FP64, masters=FP64, stepped=FP64, tolerance=1e-10),
    Recipe("bf16", {"bf16": {"enabled": True}}, BF16, tolerance=0.02),
    Recipe("bf16, summed in fp32", {"bf16": {"enabled": True}, **IN_FP32}, BF16, tolerance=0.02, exact=1e-5),
    Recipe(
        "bf16, accumulated in bf16",
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
        BF16,
        tolerance=0.02,
    ),
    Recipe(
        "bf16 masters",
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        BF16,
        masters=BF16,
        tolerance=0.04,
        stages=(1, 2, 3),
    ),
    Recipe(
        "bf16 masters and states",
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        BF16,
        masters=BF16,
        stepped=BF16,
        tolerance=0.04,
        stages=(1, 2, 3),
    ),
    Recipe(
        "bf16, norm in fp32",
        {"bf16": {"enabled": True}, "data_types": {"keep_in_fp32_modules": ["norm", "gain"]}},
        BF16,
        {"norm": FP32, "gain": FP32},
        tolerance=0.02,
    ),
    Recipe("the model's own mix", {}, FP32, {"first": BF16, "frozen": BF16, "gain": FP64}, tolerance=0.02),
    Recipe("fp16", {"fp16": {"enabled": True, **DYNAMIC}}, FP16, scaled=True, tolerance=0.002),
    Recipe(
        "fp16, summed in fp32",
        {"fp16": {"enabled": True, **DYNAMIC}, **IN_FP32},
        FP16,
        scaled=True,
        tolerance=0.002,
        exact=1e-5,
    ),
    Recipe(
        "fp16, accumulated in fp16",
        {"fp16": {"enabled": True, **DYNAMIC}, "data_types": {"grad_accum_dtype": "fp16"}},
        FP16,
        scaled=True,
        tolerance=0.002,
    ),
    Recipe("bf16 autocast", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, autocast=BF16, tolerance=0.02),
    Recipe(
        "fp16 autocast",
        {"torch_autocast": {"enabled": True, "dtype": "float16"}, "fp16": DYNAMIC},
        autocast=FP16,
        scaled=True,
        tolerance=0.002,
    ),
]
# With all four of accumulation and clipping, on two ranks; the others, and other numbers of ranks, take turns.
FULL = ("fp32", "bf16", "fp16")


def optimizer_for(micro_steps: int) -> Any:
    """Two kinds. The large eps keeps elements without gradient from moving by the sign of their rounding error."""
    if micro_steps == 1:
        return lambda parameters: torch.optim.AdamW(parameters, lr=0.02, eps=1e-2, weight_decay=0.1)
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def bad_factor(window: int) -> Any:
    """In some windows one rank's last loss is infinite or none."""

    def factor(rank: int, micro_step: int) -> float:
        here = window in OVERFLOWS_IN and rank == dist.get_world_size() - 1
        return (math.nan if window == OVERFLOWS_IN[0] else math.inf) if here and micro_step == 0 else 1.0

    return factor


def make_engine(recipe: Recipe, stage: int, micro_steps: int, clip: float) -> Any:
    model = MixedNet()
    if recipe.name == "the model's own mix" or recipe.weights is FP64:
        recipe.cast(model)  # the config says nothing of it
    config = {
        "train_micro_batch_size_per_gpu": plain.SAMPLES,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 40,
            "stage3_param_persistence_threshold": 20,
            "stage3_prefetch_bucket_size": 60,
        },
        **recipe.config,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer_for(micro_steps), config=config)[0]


def trained(engine: Any) -> dict[str, torch.nn.Parameter]:
    return {n: p for n, p in engine.module.named_parameters() if p.requires_grad}


def run_window(engine: Any, window: int, micro_steps: int) -> dict[str, Tensor] | None:
    """One window with its step; its gradients where they are to be read."""
    rank, factor = dist.get_rank(), bad_factor(window)
    for step, batch in enumerate(plain.batches_of(rank, window, micro_steps)):
        loss = engine(*batch) * factor(rank, step)
        if window % 2 and engine._stepper.needs_scaler():
            engine.scale(loss).backward()
        elif window % 2:
            loss.backward()
        else:
            engine.backward(loss)
        if step < micro_steps - 1:
            engine.step()
    found = {n: safe_get_full_grad(p) for n, p in trained(engine).items()} if window in READ_IN else None
    engine.step()
    return found


def worst(actual: dict[str, Tensor], expected: dict[str, Tensor], sizes: dict[str, float]) -> tuple[str, float]:
    """The parameter with the largest error, relative to ``sizes``; zeros must be zeros."""
    assert actual.keys() == expected.keys() and any(sizes.values())
    errors = {}
    for name, right in expected.items():
        difference = (actual[name].double() - right).norm().item()
        errors[name] = difference / sizes[name] if sizes[name] else math.inf * difference if difference else 0.0
    name = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return name, errors[name]


def updates(weights: dict[str, Tensor], start: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weights[name].double() - start[name].double() for name in weights}


def check_case(recipe: Recipe, stage: int, micro_steps: int, clip: float, expected: list[plain.Window]) -> dict:
    """Ten windows of an engine against those of the plain loop; the masters it ends with."""
    note = f"{recipe.name}, stage {stage}, {micro_steps} micro-steps, clip {clip}"
    engine = make_engine(recipe, stage, micro_steps, clip)
    stepper = engine._stepper
    for window, right in enumerate(expected):
        here = f"{note}, window {window}"
        tolerance = recipe.exact if recipe.exact and window == 0 else recipe.tolerance
        assert stepper.loss_scale == right.scale_before, here
        gradients = run_window(engine, window, micro_steps)
        if gradients is not None:
            name, error = worst(gradients, right.gradients, right.sizes)
            assert error <= tolerance, f"{here}: gradient of {name} is off by {error:.2g}"
        assert stepper.loss_scale == right.scale_after, here
        assert engine.was_step_applied() == stepper_applied(stepper) == right.applied, here
        assert engine.skipped_steps == sum(not w.applied for w in expected[: window + 1]), here
        tolerance = max(tolerance, 1e-6)  # the norm is shown in fp32 at stages 1 and 2
        if right.applied:
            assert float(engine.get_global_grad_norm()) == pytest.approx(right.norm, rel=tolerance), here
            assert float(engine.get_clipped_grad_norm()) == pytest.approx(right.clipped_norm, rel=tolerance), here
        else:
            assert engine.get_global_grad_norm() == math.inf and engine.get_clipped_grad_norm() is None, here
    masters = {n: safe_get_full_fp32_param(p) for n, p in trained(engine).items()}
    weights = weights_of(engine.module)
    for name, parameter in trained(engine).items():
        assert parameter.dtype is recipe.dtype_of(name), f"{note}: {name}"
        assert torch.equal(masters[name].to(parameter.dtype), weights[name]), f"{note}: {name} is not its master"
    engine.destroy()
    return masters


def stepper_applied(stepper: Any) -> bool:
    return not stepper.overflow


def check_recipe(recipe: Recipe, micro_steps: int, clip: float) -> None:
    world = dist.get_world_size()
    loop = PlainLoop(MixedNet(), recipe, optimizer_for(micro_steps), micro_steps, clip)
    start = {name: master.clone() for name, master in loop.masters.items()}
    expected = [
        loop.run([plain.batches_of(r, w, micro_steps) for r in range(world)], bad_factor(w)) for w in range(WINDOWS)
    ]
    assert [not w.applied for w in expected] == [w in OVERFLOWS_IN for w in range(WINDOWS)]
    if clip:
        assert sum(w.norm > clip for w in expected if w.applied) >= 5, "clipping must be active"
    right = updates(loop.masters, start)
    moved = {stage: updates(check_case(recipe, stage, micro_steps, clip, expected), start) for stage in recipe.stages}
    for stage, found in moved.items():
        note = f"{recipe.name}, stage {stage}, {micro_steps} micro-steps, clip {clip}"
        for other, reference in (("the loop by hand", right), ("the first stage", moved[recipe.stages[0]])):
            name, error = worst(found, reference, loop.path)
            # Rounding of masters to 16 bits in each step is no small part of what they moved.
            tolerance = recipe.tolerance * (5 if recipe.masters is BF16 else 1)
            assert error <= tolerance, f"{note}: {name} moved otherwise than in {other}, by {error:.2g}"


class TestParity(DistributedTest):
    world_size = [1, 2, 3]
    exec_timeout = 300

    @pytest.mark.parametrize("half", [0, 1])
    def test_ten_windows_equal_the_loop_by_hand(self, half: int) -> None:
        for index, recipe in enumerate(RECIPES[half::2]):
            cases = [(1, CLIP), (2, 0.0), (1, 0.0), (2, CLIP)]
            world = dist.get_world_size()
            if recipe.name not in FULL or world != 2:
                turn = (index + world) % len(cases)
                cases = cases[turn : turn + 1]
            if recipe.name not in FULL and world == 2 * (index % 2) + 1:
                continue  # of one and three ranks it has the other
            for micro_steps, clip in cases:
                check_recipe(recipe, micro_steps, clip)
