# SPDX-License-Identifier: Apache-2.0
"""Property: whatever the graph, the calls and the config, the gradient of a window is what plain autograd computes.

``DS_RANDOM_GRAPH_CASES=N`` runs N cases instead of the suite's, ``DS_RANDOM_GRAPH_SEED=S`` begins with seed S. A case
that fails prints its description and how to run it alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

import deepspeed
from deepspeed.runtime.gradients.reference import NaiveReducer
from deepspeed.utils.tensor_fragment import safe_get_full_fp32_param, safe_get_full_grad
from unit.common import DistributedTest
from unit.delayed_transport import delayed_transport
from unit.graphs import weights_of
from unit.random_graphs import (
    DTYPES,
    LOSS_SCALE,
    Backward,
    Case,
    MicroStep,
    MicroStepRun,
    RandomModel,
    Window,
    draw_case,
    draw_world_size,
)

CASES = int(os.environ.get("DS_RANDOM_GRAPH_CASES", "60"))
FIRST_SEED = int(os.environ.get("DS_RANDOM_GRAPH_SEED", "0"))
CASES_PER_GROUP = 20
LEARNING_RATES = (2.0**-5, 2.0**-6)

# Largest error of a gradient as a share of its mass, the sum of the norms of its contributions: their sum may be small
# by cancellation, their rounding is not. Between runs with the same arithmetic only the reduction rounds.
REDUCTION = {"fp32": 2e-6, "bf16": 8e-3, "fp16": 1e-3}
ARITHMETIC = {"fp32": 2e-6, "bf16": 4e-2, "fp16": 4e-3}  # of the model itself, all parameters together


def packs() -> list[Any]:
    """The seeds, in packs of equal world size."""
    by_world: dict[int, list[int]] = {}
    for seed in range(FIRST_SEED, FIRST_SEED + CASES):
        by_world.setdefault(draw_world_size(seed), []).append(seed)
    return [
        pytest.param(seeds[i : i + CASES_PER_GROUP], marks=pytest.mark.world_size(world), id=f"world{world}-{seeds[i]}")
        for world, seeds in sorted(by_world.items())
        for i in range(0, len(seeds), CASES_PER_GROUP)
    ]


class TestRandomGraphs(DistributedTest):
    @pytest.mark.parametrize("seeds", packs())
    def test_gradient_is_that_of_plain_autograd(self, seeds: list[int]) -> None:
        torch.set_num_threads(1)
        for seed in seeds:
            case = draw_case(seed)
            print(f"case {seed}", flush=True)
            with described(case):
                run_case(case)


@contextmanager
def described(case: Case) -> Iterator[None]:
    passed = False
    try:
        yield
        passed = True
    finally:
        if not passed and torch_dist.get_rank() == 0:  # once is enough; the others' seed stands above their error
            print(case.describe(), flush=True)


def run_case(case: Case) -> None:
    """All windows of a case; AssertionError on the first wrong gradient."""
    torch.manual_seed(case.seed)
    engine = make_engine(case)
    trained = {
        name: p for name, p in engine.module.named_parameters() if p.requires_grad and getattr(p, "ds_numel", p.numel())
    }
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        naive = NaiveReducer(trained.items(), case.steps, dtype=torch.float64)
    with delayed_transport() if case.delayed else nullcontext() as works, naive:
        for number, window in enumerate(case.windows):
            freeze(engine.module, window, True)
            copies = plain_copies(case, engine.module, window)
            actual, rounding = engine_gradients(case, number, engine, trained, naive)
            check_window(case, number, engine, actual, rounding, naive.average(), copies)
            freeze(engine.module, window, False)
            check_weights(engine, trained)
        assert not works or all(work.waited for work in works), "a collective was never awaited"
    engine.destroy()


def make_engine(case: Case) -> Any:
    model = RandomModel(case)
    parameters = list(model.parameters())
    half = len(parameters) // 2 if case.two_groups else len(parameters)
    groups = [{"params": part, "lr": lr} for part, lr in zip((parameters[:half], parameters[half:]), LEARNING_RATES)]
    optimizer = torch.optim.SGD([group for group in groups if group["params"]], lr=LEARNING_RATES[0])
    return deepspeed.initialize(model=model, optimizer=optimizer, config=case.config)[0]


def freeze(module: nn.Module, window: Window, frozen: bool) -> None:
    for index in window.frozen_blocks:
        module.blocks[index].requires_grad_(not frozen)


def plain_copies(case: Case, module: nn.Module, window: Window) -> dict[str, RandomModel]:
    """The model with its present weights, in its own dtype and in float64."""
    copies = {}
    for name, dtype in ((case.dtype, DTYPES[case.dtype]), ("fp64", torch.float64)):
        copies[name] = RandomModel(case).to(dtype)
        with deepspeed.zero.GatheredParameters(module.parameters()):
            copies[name].load_state_dict(module.state_dict())
        freeze(copies[name], window, True)
    return copies


# ---------------------------------------------------------------------------------------------------- both ways


def engine_gradients(
    case: Case, number: int, engine: Any, trained: dict[str, nn.Parameter], naive: NaiveReducer
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Run a window, and return the gradient its update used, with the error that comes of how it was read."""
    window = case.windows[number]
    masters = {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in trained.items()}
    gradients: dict[str, Tensor] = {}
    for position, step in enumerate(window.micro_steps):
        last = position == len(window.micro_steps) - 1
        if case.boundary_by_hand:
            engine.set_gradient_accumulation_boundary(last)
        with deepspeed.zero.GatheredParameters(weights_in_hand(case, step, engine.module)):
            run = MicroStepRun(case, (number, position), engine, engine.module, engine.global_rank, False)
            run_micro_step(case, run, naive)
        if last and window.read_by == "accessor":
            gradients = {name: safe_get_full_grad(parameter).double() for name, parameter in trained.items()}
        before = engine.global_steps
        engine.step()
        assert engine.global_steps - before == last, "the window ended at another micro-step than described"
        if step.zero_grad_after:
            engine.zero_grad()
            naive.drop()
    if gradients:
        return gradients, dict.fromkeys(trained, 0.0)
    rounding = {}
    for name, parameter in trained.items():
        after = safe_get_full_fp32_param(parameter)
        rate = rate_of(case, engine.module, name)
        gradients[name] = (masters[name].double() - after.double()) / rate
        rounding[name] = 2.0**-23 * after.norm().item() / rate
    return gradients, rounding


def weights_in_hand(case: Case, step: MicroStep, module: RandomModel) -> list[nn.Parameter]:
    """What a micro-step uses outside of any module's forward, which at stage 3 has to be held whole meanwhile."""
    if case.stage < 3:
        return []
    coarse = case.config["zero_optimization"]["stage3_module_granularity_threshold"] > 0
    held: dict[nn.Parameter, None] = {}
    for forward in step.forwards:
        if forward.route in ("parameter", "submodule"):
            held[module.gain] = None
        if forward.route == "parameter" or (forward.route == "submodule" and coarse):
            # a submodule of one that is gathered as a whole gathers nothing itself
            held.update(dict.fromkeys(module.blocks[forward.program[1]].parameters()))
    return list(held)


def rate_of(case: Case, module: nn.Module, name: str) -> float:
    """Learning rate of a parameter, as ``make_engine`` grouped it."""
    names = [name for name, _ in module.named_parameters()]
    return LEARNING_RATES[case.two_groups and names.index(name) >= len(names) // 2]


def run_micro_step(case: Case, run: MicroStepRun, naive: NaiveReducer) -> None:
    engine = run.model
    with getattr(engine, run.step.deferred_by)() if run.step.deferred_by else nullcontext():
        for backward in filter(run.runs, run.step.backwards):
            naive.weight = 1.0 if backward.scale_wrt_gas else float(case.steps)
            if case.dtype == "fp16":
                naive.weight /= LOSS_SCALE
            if backward.aborted:
                naive.weight = 0.0
            with run.interrupted(backward) if backward.aborted else nullcontext():
                run_backward(run, backward)


def run_backward(run: MicroStepRun, backward: Backward) -> None:
    engine, retain = run.model, backward.retain
    if backward.kind == "output":
        output, direction = run.output(backward.outputs[0]), run.direction(backward.outputs[0])
        output.backward(direction, retain_graph=retain)
        return
    loss = run.loss(backward)
    if backward.kind == "engine":
        engine.backward(loss, retain_graph=retain, scale_wrt_gas=backward.scale_wrt_gas)
    elif backward.kind == "scale":
        engine.scale(loss).backward(retain_graph=retain)
    elif backward.kind == "inputs":
        loss.backward(inputs=run.chosen_inputs(backward), retain_graph=retain)
    else:
        loss.backward(retain_graph=retain)


def plain_gradients(case: Case, number: int, model: RandomModel) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The window by plain autograd over all ranks' data, summed in float64: gradients, and the mass of each."""
    named = dict(model.named_parameters())
    total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in named.items()}
    mass = dict.fromkeys(total, 0.0)
    for position, step in enumerate(case.windows[number].micro_steps):
        for rank in range(case.world_size):
            run = MicroStepRun(case, (number, position), model, model, rank, checkpoints=False)
            for backward in filter(run.contributes, step.backwards):
                scale = LOSS_SCALE if model.gain.dtype == torch.float16 else 1.0
                plain_backward(run, backward, scale)
                share = 1.0 / scale / case.world_size / (case.steps if backward.scale_wrt_gas else 1)
                for name, parameter in named.items():
                    if parameter.grad is not None:
                        contribution = parameter.grad.double() * share
                        total[name] += contribution
                        mass[name] += contribution.norm().item()
                        parameter.grad = None
        if step.zero_grad_after:
            total = {name: torch.zeros_like(value) for name, value in total.items()}
            mass = dict.fromkeys(total, 0.0)
    return total, mass


def plain_backward(run: MicroStepRun, backward: Backward, scale: float) -> None:
    if backward.kind == "output":
        index = backward.outputs[0]
        run.output(index).backward(run.direction(index), retain_graph=backward.retain)
        return
    inputs = run.chosen_inputs(backward) if backward.kind == "inputs" else None
    (run.loss(backward) * scale).backward(inputs=inputs, retain_graph=backward.retain)


# ---------------------------------------------------------------------------------------------------- checks


def check_window(
    case: Case,
    number: int,
    engine: Any,
    actual: dict[str, Tensor],
    rounding: dict[str, float],
    naive: dict[str, Tensor],
    copies: dict[str, RandomModel],
) -> None:
    """Compare the engine's gradients with three others, parameter by parameter where the arithmetic is the same."""
    own, mass = plain_gradients(case, number, copies[case.dtype])
    assert any(mass.values()), "the reference is zero everywhere, nothing would be compared"
    tolerance = reduction_tolerance(case, case.windows[number])
    average = sum(mass.values()) / len(mass)
    for other, values in (("the naive reducer", naive), ("plain autograd", own)):
        for name, value in actual.items():
            error = (value - values[name].view_as(value)).norm().item()
            allowed = tolerance * max(mass[name], 1e-2 * average) if mass[name] else 0.0
            assert error <= allowed + rounding[name], (
                f"window {number}: gradient of {name} differs from {other} by {error:.3e}, allowed are"
                f" {allowed + rounding[name]:.3e}; norm {value.norm().item():.6e}, expected"
                f" {values[name].norm().item():.6e}, mass {mass[name]:.3e}"
            )
    exact, _ = plain_gradients(case, number, copies["fp64"])
    slack = max(tolerance, ARITHMETIC[case.dtype]) * sum(mass.values()) + sum(rounding.values())
    error = sum((actual[name] - exact[name]).norm().item() for name in actual)
    assert error <= slack, f"window {number}: all gradients differ from float64 by {error:.3e}, allowed are {slack:.3e}"
    norm = sum(exact[name].square().sum().item() for name in actual) ** 0.5
    assert abs(float(engine.get_global_grad_norm()) - norm) <= slack, (
        f"window {number}: get_global_grad_norm() is {float(engine.get_global_grad_norm())}, expected {norm}"
    )


def reduction_tolerance(case: Case, window: Window) -> float:
    """Rounding of the coarsest dtype on the way, and of every addition where sums are kept in a coarse dtype."""
    accumulation = case.config.get("data_types", {}).get("grad_accum_dtype", "fp32")
    passed = (case.dtype, case.config.get("communication_data_type", case.dtype), accumulation)
    additions = sum(len(step.backwards) for step in window.micro_steps)
    return max(REDUCTION[name] for name in passed) + additions * torch.finfo(DTYPES[accumulation]).eps / 2


def check_weights(engine: Any, trained: dict[str, nn.Parameter]) -> None:
    """Every rank has the same weights, and they are the rounded masters."""
    weights = {name: weight for name, weight in weights_of(engine.module).items() if name in trained}
    flat = torch.cat([weight.reshape(-1).float() for weight in weights.values()])
    everyone = [torch.empty_like(flat) for _ in range(torch_dist.get_world_size())]
    torch_dist.all_gather(everyone, flat)
    assert all(torch.equal(one, flat) for one in everyone), "ranks have different weights after the step"
    for name, parameter in trained.items():
        master = safe_get_full_fp32_param(parameter)
        assert torch.equal(master.to(parameter.dtype), weights[name]), f"{name} is not its rounded master"
