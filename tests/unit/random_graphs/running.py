# SPDX-License-Identifier: Apache-2.0
"""A case is run by an engine in every rank, by the naive reducer beside it, and by plain autograd; all must agree.

Plain autograd runs twice, in the engine's dtype and in float64. Each rank computes its own data's part, and the parts
are summed by one collective that no engine is involved in.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

import deepspeed
from deepspeed.runtime.gradients.ledger import GradientAccountingError
from deepspeed.runtime.gradients.reference import NaiveReducer
from deepspeed.utils.tensor_fragment import safe_get_full_grad, safe_set_full_grad
from unit.delayed_transport import delayed_transport, jittery_transport
from unit.graphs import weights_of
from unit.random_graphs.cases import DTYPES, GAIN, LOSS_SCALE, Backward, Case, Edit, MicroStep, Window
from unit.random_graphs.model import MicroStepRun, RandomModel

LEARNING_RATES = (2.0**-5, 2.0**-6)
JITTER = 0.003  # seconds that a rank is late at most

# Largest error of a gradient as a share of its mass, the sum of the norms of its contributions: their sum may be small
# by cancellation, their rounding is not. Between runs with the same arithmetic only the reduction rounds.
REDUCTION = {"fp32": 2e-6, "bf16": 8e-3, "fp16": 1e-3}
ARITHMETIC = {"fp32": 2e-6, "bf16": 4e-2, "fp16": 4e-3}  # of the model itself, all parameters together


def full_config(case: Case) -> dict[str, Any]:
    """The config an engine is given."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_force_ds_cpu_optimizer": False,  # for offload
        **case.config,
    }


def run_case(case: Case) -> None:
    """All windows of a case; AssertionError on the first wrong gradient. Collective."""
    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    run = EngineRun(case)
    with ExitStack() as stack:
        works = stack.enter_context(delayed_transport()) if case.delayed else []
        if case.jitter:
            stack.enter_context(jittery_transport(JITTER, random.Random(case.seed * 100 + torch_dist.get_rank())))
        stack.enter_context(run.naive)
        for number in range(len(case.windows)):
            with run.frozen(case.windows[number]):
                run.window(number)
            run.check_weights()
    assert all(work.waited for work in works), "a collective was never awaited"
    run.engine.destroy()


class CaseJob:
    """What a rank of ``searching.Ranks`` does."""

    def run(self, case: Case) -> None:
        passed = False
        try:
            run_case(case)
            passed = True
        finally:
            if not passed and torch_dist.get_rank() == 0:
                print(case.describe(), flush=True)


@dataclass
class Outcome:
    """What an engine did with a window."""

    steps: Sequence[MicroStep]  # those that count
    first: int  # position in the window of the first of them
    gradients: dict[str, Tensor] = field(default_factory=dict)
    rounding: dict[str, float] = field(default_factory=dict)  # error that comes of how gradients were read


class EngineRun:
    """The engine of a case, and what it is compared with."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.engine = make_engine(case)
        self.module: RandomModel = self.engine.module
        self.rank = self.engine.global_rank
        self.trained = {
            name: p
            for name, p in self.module.named_parameters()
            if p.requires_grad and getattr(p, "ds_numel", p.numel())
        }
        with deepspeed.zero.GatheredParameters(self.module.parameters()):
            self.naive = NaiveReducer(self.trained.items(), case.steps, dtype=torch.float64)
        self.names = {id(parameter): name for name, parameter in self.trained.items()}
        self.masters = self._gathered_masters()
        self.weights = weights_of(self.module)

    # ------------------------------------------------------------------ a window

    def window(self, number: int) -> None:
        window = self.case.windows[number]
        copies = self._plain_copies(window)
        steps = window.micro_steps
        try:
            outcome = self._run_steps(number, steps, 0)
        except GradientAccountingError:
            assert window.may_refuse, f"window {number} was refused, and nothing had been aborted in a reduction"
            outcome = self._again_after_refusal(number)
        self._compare(number, outcome, copies)

    def _again_after_refusal(self, number: int) -> Outcome:
        """The refused step has not ended its micro-step, which is still the boundary: it is a window of its own now."""
        self.engine.zero_grad()
        self.naive.drop()
        steps = self.case.windows[number].micro_steps
        kept = tuple(backward for backward in steps[-1].backwards if not backward.aborted)
        return self._run_steps(number, [replace(steps[-1], backwards=kept)], len(steps) - 1)

    def _run_steps(self, number: int, steps: Sequence[MicroStep], first: int) -> Outcome:
        """Train through micro-steps of a window, the last of which is its boundary."""
        window, engine = self.case.windows[number], self.engine
        outcome = Outcome(steps, first)
        before_update = self.masters
        for i, step in enumerate(steps):
            position, last = first + i, i == len(steps) - 1
            if self.case.boundary_by_hand:
                engine.set_gradient_accumulation_boundary(last)
            with deepspeed.zero.GatheredParameters(self._weights_in_hand(step)):
                self._run_backwards(MicroStepRun(self.case, (number, position), step, engine, self.module, self.rank))
            if step.reduced_after:
                engine.allreduce_gradients()
            for edit in window.edits:
                if edit.micro_step == position:
                    self._edit(edit, step)
            if last and window.read_by == "accessor":
                outcome.gradients = {name: safe_get_full_grad(p).double() for name, p in self.trained.items()}
            steps_before = engine.global_steps
            engine.step()
            assert engine.global_steps - steps_before == last, "the window ended at another micro-step than described"
            if step.zero_grad_after:
                engine.zero_grad()
                self.naive.drop()
        self.masters = self._gathered_masters()
        if outcome.gradients:
            outcome.rounding = dict.fromkeys(self.trained, 0.0)
        else:
            self._read_from_update(outcome, before_update)
        return outcome

    def _read_from_update(self, outcome: Outcome, before: dict[str, Tensor]) -> None:
        """SGD: the change of a weight is its gradient, clipped, times the rate."""
        norm, limit = float(self.engine.get_global_grad_norm()), self.case.config.get("gradient_clipping", 0.0)
        clip = 1.0 / max(1.0, (norm + 1e-6) / limit) if limit else 1.0
        for name, after in self.masters.items():
            rate = self._rate_of(name) * clip
            outcome.gradients[name] = (before[name].double() - after.double()) / rate
            outcome.rounding[name] = 2.0**-23 * after.norm().item() / rate

    def _weights_in_hand(self, step: MicroStep) -> list[nn.Parameter]:
        """What a micro-step uses outside of any module's forward, which at stage 3 has to be held whole meanwhile."""
        if self.case.stage < 3:
            return []
        coarse = self.case.zero.get("stage3_module_granularity_threshold", 0) > 0
        held: dict[nn.Parameter, None] = {}
        for forward in step.forwards:
            if forward.route in ("parameter", "submodule"):
                held[self.module.gain] = None
            if forward.route == "parameter" or (forward.route == "submodule" and coarse):
                # a submodule of one that is gathered as a whole gathers nothing itself
                held.update(dict.fromkeys(self.module.blocks[forward.program[1]].parameters()))
        return list(held)

    def _run_backwards(self, run: MicroStepRun) -> None:
        with getattr(self.engine, run.step.deferred_by)() if run.step.deferred_by else nullcontext():
            for backward in filter(run.runs, run.step.backwards):
                self.naive.weight = 1.0 if backward.scale_wrt_gas else float(self.case.steps)
                if self.case.dtype == "fp16":
                    self.naive.weight /= LOSS_SCALE
                if backward.aborted:
                    self.naive.weight = 0.0
                with run.interrupted(backward) if backward.aborted else nullcontext():
                    run_backward(run, backward)

    def _edited(self, edit: Edit, module: RandomModel) -> str:
        """Name of the parameter that an edit changes."""
        if edit.block != GAIN:
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            for parameter in module.blocks[edit.block].parameters():
                if names[id(parameter)] in self.trained:
                    return names[id(parameter)]
        return "gain"

    def _edit(self, edit: Edit, step: MicroStep) -> None:
        if any(backward.ranks is not None for backward in step.backwards):
            # A rank alone in its loss.backward() waits for the others' next call of the engine: nothing before it.
            self.engine.allreduce_gradients()
        name = self._edited(edit, self.module)
        parameter = self.trained[name]
        if edit.how == "published":
            hidden = torch.tensor([parameter.grad is None], dtype=torch.int32)
            torch_dist.all_reduce(hidden)
            if hidden:  # on some rank: a contribution came late, and the gradient is not whole yet
                self.engine.allreduce_gradients()
            parameter.grad.mul_(edit.value)
        elif edit.how == "scale":
            safe_set_full_grad(parameter, safe_get_full_grad(parameter) * edit.value)
        else:
            safe_set_full_grad(parameter, torch.full(self.masters[name].shape, edit.value))
        # what this rank has summed so far must average to the same
        sums = self.naive._sums
        if edit.how == "set":
            sums[name] = torch.full(self.masters[name].shape, edit.value * self.case.steps, dtype=torch.float64)
        elif name in sums:
            sums[name] = sums[name] * edit.value

    # ------------------------------------------------------------------ what it is compared with

    @contextmanager
    def frozen(self, window: Window) -> Iterator[None]:
        """The window's frozen blocks do not require grad inside."""
        _freeze(self.module, window, True)
        yield
        _freeze(self.module, window, False)

    def _plain_copies(self, window: Window) -> dict[str, RandomModel]:
        """The model with its present weights, in its own dtype and in float64."""
        copies = {}
        for name, dtype in ((self.case.dtype, DTYPES[self.case.dtype]), ("fp64", torch.float64)):
            copies[name] = RandomModel(self.case).to(dtype)
            copies[name].load_state_dict(self.weights, strict=False)  # tied ones are named once
            _freeze(copies[name], window, True)
        return copies

    def _plain_gradients(
        self, number: int, outcome: Outcome, model: RandomModel
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The window by plain autograd over this rank's data, summed in float64: its part of each gradient, and the
        mass of that."""
        case, named = self.case, dict(model.named_parameters())
        total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in named.items()}
        mass = dict.fromkeys(total, 0.0)
        for i, step in enumerate(outcome.steps):
            position = outcome.first + i
            run = MicroStepRun(case, (number, position), step, model, model, self.rank)
            for backward in filter(run.contributes, step.backwards):
                scale = LOSS_SCALE if model.gain.dtype == torch.float16 else 1.0
                plain_backward(run, backward, scale)
                share = 1.0 / scale / case.world_size / (case.steps if backward.scale_wrt_gas else 1)
                for name, parameter in named.items():
                    if parameter.grad is not None:
                        contribution = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                        contribution = contribution.double() * share
                        total[name] += contribution
                        mass[name] += contribution.norm().item()
                        parameter.grad = None
            for edit in case.windows[number].edits:
                if edit.micro_step == position:
                    self._edit_plainly(edit, model, total, mass)
            if step.zero_grad_after:
                total = {name: torch.zeros_like(value) for name, value in total.items()}
                mass = dict.fromkeys(total, 0.0)
        return total, mass

    def _edit_plainly(self, edit: Edit, model: RandomModel, total: dict[str, Tensor], mass: dict[str, float]) -> None:
        name = self._edited(edit, model)
        if edit.how == "set":
            total[name] = torch.full_like(total[name], edit.value / self.case.world_size)
            mass[name] = total[name].norm().item()
        else:
            total[name] = total[name] * edit.value
            mass[name] *= abs(edit.value)

    def _compare(self, number: int, outcome: Outcome, copies: dict[str, RandomModel]) -> None:
        """Compare the engine's gradients with three others, parameter by parameter where the arithmetic is the same."""
        case, actual, rounding = self.case, outcome.gradients, outcome.rounding
        own, mass = self._plain_gradients(number, outcome, copies[case.dtype])
        exact, _ = self._plain_gradients(number, outcome, copies["fp64"])
        share = 1.0 / (case.world_size * case.steps)
        naive = {
            name: value * share if (value := self.naive._sums.get(name)) is not None else torch.zeros_like(own[name])
            for name in actual
        }
        self.naive.drop()
        naive, own, exact = _sum_over_ranks([naive, own, exact])
        (masses,) = _sum_over_ranks([{name: torch.tensor([value]) for name, value in mass.items()}])
        mass = {name: value.item() for name, value in masses.items()}
        assert any(mass.values()), "the reference is zero everywhere, nothing would be compared"
        tolerance = reduction_tolerance(case, case.windows[number])
        average = sum(mass.values()) / len(mass)
        # Where a 16-bit graph branches, autograd sums gradients in 16 bit, in an order of its own; what cancels there
        # is in no parameter's mass. The naive reducer was given the very same contributions.
        arithmetic = max(tolerance, ARITHMETIC[case.dtype])
        for other, values, part in (("the naive reducer", naive, tolerance), ("plain autograd", own, arithmetic)):
            for name, value in actual.items():
                error = (value - values[name].view_as(value)).norm().item()
                allowed = part * max(mass[name], 1e-2 * average) if mass[name] else 0.0
                assert error <= allowed + rounding[name], (
                    f"window {number}: gradient of {name} differs from {other} by {error:.3e}, allowed are"
                    f" {allowed + rounding[name]:.3e}; norm {value.norm().item():.6e}, expected"
                    f" {values[name].norm().item():.6e}, mass {mass[name]:.3e}"
                )
        slack = max(tolerance, ARITHMETIC[case.dtype]) * sum(mass.values()) + sum(rounding.values())
        error = sum((actual[name] - exact[name]).norm().item() for name in actual)
        assert error <= slack, (
            f"window {number}: all gradients differ from float64 by {error:.3e}, allowed are {slack:.3e}"
        )
        norm = sum(exact[name].square().sum().item() for name in actual) ** 0.5
        assert abs(float(self.engine.get_global_grad_norm()) - norm) <= slack, (
            f"window {number}: get_global_grad_norm() is {float(self.engine.get_global_grad_norm())}, expected {norm}"
        )

    def check_weights(self) -> None:
        """Every rank has the same weights, and they are the rounded masters."""
        self.weights = weights_of(self.module)
        flat = torch.cat([weight.reshape(-1).float() for weight in self.weights.values()])
        everyone = [torch.empty_like(flat) for _ in range(torch_dist.get_world_size())]
        torch_dist.all_gather(everyone, flat)
        assert all(torch.equal(one, flat) for one in everyone), "ranks have different weights after the step"
        for name, parameter in self.trained.items():
            rounded = self.masters[name].to(parameter.dtype)
            assert torch.equal(rounded, self.weights[name]), f"{name} is not its rounded master"

    # ------------------------------------------------------------------ facts

    def _gathered_masters(self) -> dict[str, Tensor]:
        """``safe_get_full_fp32_param`` of every trained parameter, by one collective."""
        parts = {}
        for name, parameter in self.trained.items():
            link = parameter._ds_link
            full = torch.zeros(link.record.numel)
            if self.case.stage or self.rank == 0:  # at stage 0 every rank has all of it
                full[link.begin : link.end] = link.optimizer.own_master(link).detach().reshape(-1).float()
            parts[name] = full.view(link.record.shape)
        return _sum_over_ranks([parts])[0]

    def _rate_of(self, name: str) -> float:
        """Learning rate of a parameter, as ``make_engine`` grouped it."""
        names = [name for name, _ in self.module.named_parameters()]
        return LEARNING_RATES[self.case.two_groups and names.index(name) >= len(names) // 2]


def _sum_over_ranks(parts: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Each tensor summed over the ranks; all tensors of one dtype. One collective."""
    flat = torch.cat([value.reshape(-1) for part in parts for value in part.values()])
    torch_dist.all_reduce(flat)
    chunks = iter(flat.split([value.numel() for part in parts for value in part.values()]))
    return [{name: next(chunks).view(value.shape) for name, value in part.items()} for part in parts]


def _freeze(module: RandomModel, window: Window, frozen: bool) -> None:
    for index in window.frozen_blocks:
        module.blocks[index].requires_grad_(not frozen)


def make_engine(case: Case) -> Any:
    """An engine with SGD, one rate for each half of the parameters."""
    model = RandomModel(case)
    parameters = list(model.parameters())
    half = len(parameters) // 2 if case.two_groups else len(parameters)
    groups = [{"params": part, "lr": lr} for part, lr in zip((parameters[:half], parameters[half:]), LEARNING_RATES)]
    optimizer = torch.optim.SGD([group for group in groups if group["params"]], lr=LEARNING_RATES[0])
    return deepspeed.initialize(model=model, optimizer=optimizer, config=full_config(case))[0]


def run_backward(run: MicroStepRun, backward: Backward) -> None:
    """One backward by an engine."""
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


def plain_backward(run: MicroStepRun, backward: Backward, scale: float) -> None:
    """The same without one."""
    if backward.kind == "output":
        index = backward.outputs[0]
        run.output(index).backward(run.direction(index), retain_graph=backward.retain)
        return
    inputs = run.chosen_inputs(backward) if backward.kind == "inputs" else None
    (run.loss(backward) * scale).backward(inputs=inputs, retain_graph=backward.retain)


def reduction_tolerance(case: Case, window: Window) -> float:
    """Rounding of the coarsest dtype on the way, and of every addition where sums are kept in a coarse dtype."""
    accumulation = case.config.get("data_types", {}).get("grad_accum_dtype", "fp32")
    passed = (case.dtype, case.config.get("communication_data_type", case.dtype), accumulation)
    additions = sum(len(step.backwards) for step in window.micro_steps) + len(window.edits)
    return max(REDUCTION[name] for name in passed) + additions * torch.finfo(DTYPES[accumulation]).eps / 2
