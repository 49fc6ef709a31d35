# SPDX-License-Identifier: Apache-2.0
"""Random models, call sequences and configs, each drawn whole from one integer, and how to run them.

A case is data: drawn without a process group, printed by ``Case.describe``, and run twice from the same description: by
an engine in every rank, and by plain autograd in float64 over every rank's data.

A *program* says how data goes through the model: nested tuples whose first entry names what is done,

==================================  ===================================================================================
``("block", i)``                    through block ``i``; blocks are shared between all programs
``("chain", p, q, ...)``            one after the other
``("branches", p, q, ...)``         the sum of branches from one input
``("reentrant", p)``                under ``torch.utils.checkpoint(use_reentrant=True)``
``("nonreentrant", p)``             under ``torch.utils.checkpoint(use_reentrant=False)``
``("detached", p)``                 added without a graph: ``p`` runs and its parameters get no gradient from it
``("cut", p)``                      added, with a graph that ends before ``p``
``("on_ranks", (r, ...), p)``       on some ranks only, others pass by
==================================  ===================================================================================
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Program = tuple[Any, ...]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 64.0  # of fp16 cases

# ---------------------------------------------------------------------------------------------------- descriptions


@dataclass(frozen=True)
class Forward:
    """One forward: by which door (engine, module, submodule, parameter) and what it does there."""

    route: str
    program: Program
    index: int  # position in the micro-step, which seeds the data
    input_requires_grad: bool = True

    def __str__(self) -> str:
        plain = "" if self.input_requires_grad else ", input without grad"
        return f"out{self.index} = {self.route}: {render(self.program)}{plain}"


@dataclass(frozen=True)
class Backward:
    """One backward over outputs of the micro-step's forwards.

    ``kind``: engine (``engine.backward(loss)``), loss (``loss.backward()``), scale (``engine.scale(loss).backward()``),
    output (``out.backward(g)``), inputs (``loss.backward(inputs=some parameters)``).
    """

    kind: str
    outputs: tuple[int, ...]
    retain: bool = False
    scale_wrt_gas: bool = True
    ranks: tuple[int, ...] | None = None  # None: all
    penalty: bool = False  # the loss has a gradient penalty by torch.autograd.grad(create_graph=True)
    inputs_seed: int = 0
    aborted: bool = False  # dies of an exception when the input's gradient is known; nothing of it may count

    def __str__(self) -> str:
        notes = [f"outputs {list(self.outputs)}"]
        notes += ["retain_graph"] * self.retain + ["scale_wrt_gas=False"] * (not self.scale_wrt_gas)
        notes += (
            ["aborted"] * self.aborted
            + ["gradient penalty"] * self.penalty
            + ([f"only ranks {list(self.ranks)}"] if self.ranks else [])
        )
        return f"{self.kind} backward, {', '.join(notes)}"


@dataclass(frozen=True)
class MicroStep:
    """Forwards, then backwards (or each forward just before its first use), then ``engine.step()``."""

    forwards: tuple[Forward, ...]
    backwards: tuple[Backward, ...]
    lazy_forwards: bool = False  # each just before its first use
    deferred_by: str = ""  # no_sync or coalesce_grad_reduction around it
    zero_grad_after: bool = False


@dataclass(frozen=True)
class Window:
    """The micro-steps up to one update of the weights."""

    micro_steps: tuple[MicroStep, ...]
    frozen_blocks: tuple[int, ...] = ()  # do not require grad during this window
    read_by: str = "update"  # gradient taken from the change of the weights, or from the accessor before the last step


@dataclass(frozen=True)
class Case:
    """Everything about one case."""

    seed: int
    world_size: int
    dtype: str
    width: int
    blocks: tuple[tuple[str, int], ...]  # kind and a size, or for ties the block tied to
    frozen_blocks: tuple[int, ...]
    two_groups: bool
    config: dict[str, Any] = field(hash=False)
    boundary_by_hand: bool = False
    delayed: bool = False
    windows: tuple[Window, ...] = ()

    @property
    def steps(self) -> int:
        return self.config["gradient_accumulation_steps"]

    @property
    def stage(self) -> int:
        return self.config["zero_optimization"]["stage"]

    @property
    def managed(self) -> bool:
        return self.config.get("managed_gradient_accumulation", True)

    def describe(self) -> str:
        """All of it as text, with the command that runs it again."""
        lines = [
            f"case {self.seed}: {self.world_size} ranks, {self.dtype}, width {self.width}"
            + ", two parameter groups" * self.two_groups
            + ", boundary set by hand" * self.boundary_by_hand
            + ", delayed transport" * self.delayed,
            f"  run alone: DS_RANDOM_GRAPH_SEED={self.seed} DS_RANDOM_GRAPH_CASES=1 pytest "
            "tests/unit/runtime/zero/test_zero_random_graphs.py",
            f"  blocks: {', '.join(f'{i}={kind}({size})' for i, (kind, size) in enumerate(self.blocks))}"
            f"; frozen: {list(self.frozen_blocks)}",
            f"  config: {self.config}",
        ]
        for w, window in enumerate(self.windows):
            frozen = f", blocks {list(window.frozen_blocks)} frozen" if window.frozen_blocks else ""
            lines.append(f"  window {w}, gradient read by {window.read_by}{frozen}")
            for m, step in enumerate(window.micro_steps):
                lines.append(
                    f"    micro-step {m}"
                    + f" in {step.deferred_by}" * bool(step.deferred_by)
                    + ", forwards just before use" * step.lazy_forwards
                    + ", then zero_grad()" * step.zero_grad_after
                )
                lines += [f"      {action}" for action in (*step.forwards, *step.backwards)]
        return "\n".join(lines)


def render(program: Program) -> str:
    """A program as text."""
    kind, *rest = program
    if kind in ("block", "parameter"):
        return f"{kind}{rest[0]}"
    ranks = f"{list(rest.pop(0))}: " if kind == "on_ranks" else ""
    return f"{kind}({ranks}{', '.join(render(part) for part in rest)})"


def contains(program: Program, kind: str) -> bool:
    """Whether ``kind`` occurs in a program."""
    return program[0] == kind or any(isinstance(part, tuple) and part and contains(part, kind) for part in program[1:])


# ---------------------------------------------------------------------------------------------------- drawing


def draw_world_size(seed: int) -> int:
    """Number of ranks of a case, which its test has to know before there are ranks."""
    return random.Random(f"world {seed}").choice([1, 2, 2, 2, 3, 3, 4])


def draw_case(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(f"case {seed}")
    world = draw_world_size(seed)
    dtype = rng.choices(["fp32", "bf16", "fp16"], [6, 3, 1])[0]
    config = _draw_config(rng, dtype)
    blocks = _draw_blocks(rng, dtype)
    frozen = tuple(i for i, (kind, _) in enumerate(blocks) if kind != "tied" and rng.random() < 0.12)
    draft = Case(
        seed=seed,
        world_size=world,
        dtype=dtype,
        width=rng.choice([3, 5, 6, 8]),
        blocks=blocks,
        frozen_blocks=frozen,
        two_groups=rng.random() < 0.3,
        config=config,
        boundary_by_hand=config.get("managed_gradient_accumulation", True) and rng.random() < 0.15,
        delayed=rng.random() < 0.5,
    )
    windows = tuple(_draw_window(rng, draft) for _ in range(3))
    return Case(**{**vars(draft), "windows": windows})


def _draw_config(rng: random.Random, dtype: str) -> dict[str, Any]:
    stage = rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 3])
    managed = rng.random() < 0.85
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": rng.choice([1, 7, 20, 64, 200, 500000000]),
        "overlap_comm": rng.random() < 0.6 and (managed or stage >= 2),
        "contiguous_gradients": rng.random() < 0.6,
        "reduce_scatter": rng.random() < 0.6,
        "round_robin_gradients": rng.random() < 0.3,
        "allgather_partitions": rng.random() < 0.8,
        "allgather_bucket_size": rng.choice([2, 64, 500000000]),
    }
    if stage == 3:
        zero.update(_draw_stage_3(rng))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "gradient_accumulation_steps": rng.choice([1, 1, 2, 2, 3, 4]),
        "zero_optimization": zero,
    }
    if not managed:
        config["managed_gradient_accumulation"] = False
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": LOSS_SCALE}
    if rng.random() < 0.3:
        config["communication_data_type"] = rng.choice(["fp32", "fp32", "bf16"])
    if rng.random() < 0.2:
        config["data_types"] = {"grad_accum_dtype": rng.choice(["fp32", "fp32", "bf16"])}
    if not (stage >= 2 and zero["reduce_scatter"]):
        if rng.random() < 0.25:
            config["prescale_gradients"] = True
        elif rng.random() < 0.25:
            config["gradient_predivide_factor"] = 2.0
    return config


def _draw_stage_3(rng: random.Random) -> dict[str, Any]:
    """Which weights stay whole, how far ahead they are gathered, how many at a time, how long they are kept."""
    return {
        "stage3_param_persistence_threshold": rng.choice([0, 0, 0, 10, 100_000]),
        "stage3_model_persistence_threshold": rng.choice([20, 10**9]),
        "stage3_prefetch_bucket_size": rng.choice([0, 10, 40, 200, 50_000_000]),
        "stage3_max_live_parameters": rng.choice([0, 30, 100, 10**9]),
        "stage3_max_reuse_distance": rng.choice([0, 20, 10**9]),
        "sub_group_size": rng.choice([1, 10, 30, 10**9]),
        "stage3_module_granularity_threshold": rng.choice([0, 0, 0, 15]),
        "stage3_use_all_reduce_for_fetch_params": rng.random() < 0.2,
        "stage3_allgather_sequential": rng.random() < 0.2,
    }


def _draw_blocks(rng: random.Random, dtype: str) -> tuple[tuple[str, int], ...]:
    blocks: list[tuple[str, int]] = []
    for _ in range(rng.randint(2, 6)):
        kinds = ["linear", "linear", "mlp", "mlp", "norm", "scalar", "table", "empty", "tied"]
        kind = rng.choice(kinds + ["sparse"] * (dtype == "fp32"))  # torch adds no sparse 16-bit tensors on CPU
        owners = [i for i, (other, _) in enumerate(blocks) if other == "linear"]
        if kind == "tied" and not owners:
            kind = "linear"
        blocks.append((kind, rng.choice(owners) if kind == "tied" else rng.randint(1, 9)))
    return tuple(blocks)


def _draw_program(rng: random.Random, case: Case, depth: int = 3) -> Program:
    if depth == 0 or rng.random() < 0.2:
        return ("block", rng.randrange(len(case.blocks)))
    kinds = ["chain", "chain", "branches", "branches", "reentrant", "reentrant", "nonreentrant", "detached", "cut"]
    kind = rng.choice(kinds if case.stage == 3 else [*kinds, "on_ranks"])  # stage 3: all ranks run the same modules
    if kind in ("chain", "branches"):
        return (kind, *(_draw_program(rng, case, depth - 1) for _ in range(rng.randint(2, 3))))
    inner = _draw_program(rng, case, depth - 1)
    return (kind, _draw_ranks(rng, case), inner) if kind == "on_ranks" else (kind, inner)


def _draw_ranks(rng: random.Random, case: Case) -> tuple[int, ...]:
    return tuple(rank for rank in range(case.world_size) if rng.random() < 0.5)


def _draw_forward(rng: random.Random, case: Case, index: int) -> Forward:
    route = rng.choice(["engine", "engine", "engine", "module", "submodule", "parameter"])
    block = ("block", rng.randrange(len(case.blocks)))
    if route == "submodule":
        return Forward(route, block, index)
    if route == "parameter":
        return Forward(route, ("parameter", block[1]), index)
    program = _draw_program(rng, case)
    return Forward(route, program, index, contains(program, "reentrant") or rng.random() < 0.5)


def _draw_window(rng: random.Random, case: Case) -> Window:
    count = case.steps
    if not case.managed:
        count = 1
    elif case.boundary_by_hand:
        count = rng.randint(1, 4)
    steps = [_draw_micro_step(rng, case, last=i == count - 1) for i in range(count)]
    if count > 1 and rng.random() < 0.1:
        reset = rng.randrange(count - 1)
        steps[reset] = MicroStep(**{**vars(steps[reset]), "zero_grad_after": True})
    steps = _draw_backwards_of_some_ranks(rng, case, steps)
    steps = [_draw_aborted(rng, case, step, last=i == count - 1) for i, step in enumerate(steps)]
    thawed = [i for i, (kind, _) in enumerate(case.blocks) if kind != "tied" and i not in case.frozen_blocks]
    frozen = tuple(i for i in thawed if rng.random() < 0.08)
    return Window(tuple(steps), frozen, rng.choice(["update", "accessor"]))


def _draw_micro_step(rng: random.Random, case: Case, last: bool) -> MicroStep:
    forwards = tuple(_draw_forward(rng, case, i) for i in range(rng.choice([1, 1, 2, 2, 3])))
    most = 4 if not case.managed else 3
    backwards = [_draw_backward(rng, case, forwards) for _ in range(rng.randint(1, most))]
    deferred = ""
    if rng.random() < 0.15:
        if case.stage >= 1 and case.managed and rng.random() < 0.5:
            deferred = "coalesce_grad_reduction"
        elif case.stage <= 1:
            deferred = "no_sync"
    for i, backward in enumerate(backwards):  # a graph is kept while a later backward needs it
        retain = any(set(backward.outputs) & set(later.outputs) for later in backwards[i + 1 :])
        backwards[i] = Backward(**{**vars(backward), "retain": retain})
    return MicroStep(forwards, tuple(backwards), rng.random() < 0.3, deferred)


def _draw_backward(rng: random.Random, case: Case, forwards: tuple[Forward, ...]) -> Backward:
    kinds = (
        ["engine", "scale"]
        if case.dtype == "fp16"
        else ["engine", "engine", "engine", "loss", "loss", "scale", "output"]
    )
    kind = rng.choice(kinds)
    outputs = sorted(rng.sample(range(len(forwards)), rng.randint(1, len(forwards))))
    smooth = not any(contains(forwards[i].program, "reentrant") for i in outputs)
    if kind == "loss" and smooth and rng.random() < 0.2:
        kind = "inputs"
    if kind == "output":
        outputs = outputs[:1]
    return Backward(
        kind,
        tuple(outputs),
        scale_wrt_gas=kind != "engine" or rng.random() < 0.8,
        penalty=kind != "output" and smooth and rng.random() < 0.2,
        inputs_seed=rng.randrange(1000),
    )


def _draw_backwards_of_some_ranks(rng: random.Random, case: Case, steps: list[MicroStep]) -> list[MicroStep]:
    """Let some plain backwards run on some ranks only.

    Such a backward may not be followed, in its window, by a reduction that all ranks start without asking each other.
    """
    if case.stage == 3:
        return steps
    partitions = case.stage == 2
    safe = True
    result = []
    for position in reversed(range(len(steps))):
        step = steps[position]
        reduces = partitions or position == len(steps) - 1
        if step.zero_grad_after or (step.deferred_by.startswith("coalesce") and reduces):
            safe = False
        backwards = []
        for backward in reversed(step.backwards):
            communicates = reduces and not step.deferred_by
            if backward.kind == "engine":
                safe = safe and not communicates
            elif (safe or not communicates) and rng.random() < 0.25:
                backward = Backward(**{**vars(backward), "ranks": _draw_ranks(rng, case) or (0,)})
            backwards.append(backward)
        result.append(MicroStep(**{**vars(step), "backwards": tuple(reversed(backwards))}))
    return result[::-1]


def _draw_aborted(rng: random.Random, case: Case, step: MicroStep, last: bool) -> MicroStep:
    """Perhaps insert a backward that is aborted before anything of it was reduced, which training survives."""
    reduces = not step.deferred_by and (last or case.stage >= 2)
    able = [f.index for f in step.forwards if f.route != "parameter" and f.input_requires_grad]
    if reduces or not able or rng.random() < 0.7:
        return step
    kind = "engine" if case.dtype == "fp16" else rng.choice(["engine", "loss"])
    backwards = list(step.backwards)
    # the engine learns of an aborted loss.backward() by its next call
    places = [i for i, later in enumerate(backwards) if kind == "engine" or later.kind == "engine"] + [len(backwards)]
    place, output = rng.choice(places), rng.choice(able)
    for i, earlier in enumerate(backwards[:place]):
        if output in earlier.outputs:
            backwards[i] = Backward(**{**vars(earlier), "retain": True})
    backwards.insert(place, Backward(kind, (output,), retain=True, aborted=True))
    return MicroStep(**{**vars(step), "backwards": tuple(backwards)})


# ---------------------------------------------------------------------------------------------------- the model


class Block(nn.Module):
    """A residual layer of one of several kinds; the same width in and out."""

    def __init__(self, kind: str, width: int, size: int, tied_to: Block | None) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("linear", "tied"):
            self.layer = nn.Linear(width, width)
            if tied_to is not None:
                self.layer.weight = tied_to.layer.weight
        elif kind == "mlp":
            self.layer, self.out = nn.Linear(width, size), nn.Linear(size, width, bias=False)
        elif kind == "norm":
            self.layer = nn.LayerNorm(width)
        elif kind == "scalar":
            self.gain = nn.Parameter(torch.tensor(0.7))
            self.shift = nn.Parameter(0.1 * torch.randn(width))
        elif kind in ("table", "sparse"):
            self.table = nn.Embedding(size, width, sparse=kind == "sparse")
        elif kind == "empty":
            self.layer, self.nothing = nn.Linear(width, width), nn.Parameter(torch.empty(0, width))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "mlp":
            y = self.out(torch.tanh(self.layer(x)))
        elif self.kind == "scalar":
            y = self.gain * x + self.shift
        elif self.kind == "table":
            rows = torch.arange(x.shape[0]) % self.table.num_embeddings
            y = torch.tanh(nn.functional.linear(x, self.table.weight)) @ self.table.weight + self.table(rows)
        elif self.kind == "sparse":
            y = x + self.table(torch.arange(x.shape[0]) % self.table.num_embeddings)
        elif self.kind == "empty":
            y = self.layer(x) + nn.functional.linear(x, self.nothing).sum()
        else:
            y = self.layer(x)
        return 0.8 * x + 0.5 * torch.tanh(y)


class RandomModel(nn.Module):
    """The blocks of a case, and a gain that every output uses, so that every backward has something to contribute."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        blocks: list[Block] = []
        for kind, size in case.blocks:
            blocks.append(Block(kind, case.width, size, blocks[size] if kind == "tied" else None))
        self.blocks = nn.ModuleList(blocks)
        self.gain = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(3))
        for index in case.frozen_blocks:
            self.blocks[index].requires_grad_(False)

    def forward(self, x: Tensor, program: Program, rank: int, checkpoints: bool) -> Tensor:
        return self._run(program, x, rank, checkpoints) * self.gain

    def _run(self, program: Program, x: Tensor, rank: int, checkpoints: bool) -> Tensor:
        kind, *rest = program
        if kind == "block":
            return self.blocks[rest[0]](x)
        if kind == "on_ranks":
            return self._run(rest[1], x, rank, checkpoints) if rank in rest[0] else x
        if kind == "chain":
            for part in rest:
                x = self._run(part, x, rank, checkpoints)
            return x
        if kind == "branches":
            return sum(self._run(part, x, rank, checkpoints) for part in rest) / len(rest)
        if kind == "detached":
            return x + self._run(rest[0], x, rank, checkpoints).detach()
        if kind == "cut":
            # a leaf that requires grad, as a reentrant checkpoint inside needs one
            return x + self._run(rest[0], x.detach().requires_grad_(), rank, checkpoints)
        if not checkpoints:
            return self._run(rest[0], x, rank, checkpoints)
        return checkpoint(self._run, rest[0], x, rank, checkpoints, use_reentrant=kind == "reentrant")


# ---------------------------------------------------------------------------------------------------- running


class Interrupted(Exception):
    """Ends a backward on purpose."""


class MicroStepRun:
    """The outputs and losses of one micro-step of one rank.

    Args:
        place: window and micro-step.
        model: what is called, the engine or the module itself.
        module: the bare module.
        checkpoints: False runs what is under a checkpoint without one.
    """

    def __init__(
        self, case: Case, place: tuple[int, int], model: Any, module: RandomModel, rank: int, checkpoints: bool
    ) -> None:
        self.case = case
        self.window, self.position = place
        self.step = case.windows[self.window].micro_steps[self.position]
        self.model = model
        self.module = module
        self.rank = rank
        self.checkpoints = checkpoints
        self.dtype = module.gain.dtype
        self._outputs: dict[int, Tensor] = {}
        self._inputs: dict[int, Tensor] = {}
        if not self.step.lazy_forwards:
            for index in range(len(self.step.forwards)):
                self.output(index)

    def _random(self, index: int, purpose: int, rows: int) -> Tensor:
        """Normal numbers, rounded to the case's dtype for every run of it."""
        numbers = (self.case.seed, self.window, self.position, self.rank, index, purpose)
        generator = torch.Generator().manual_seed(hash(numbers) % (1 << 60))
        values = torch.randn(rows, self.case.width, generator=generator).to(DTYPES[self.case.dtype])
        return values.to(self.dtype)

    def output(self, index: int) -> Tensor:
        if index not in self._outputs:
            forward = self.step.forwards[index]
            rows = 1 + (self.rank + index) % 3  # ranks have batches of different sizes
            x = self._random(index, 0, rows)
            self._inputs[index] = x
            if forward.route == "parameter":
                block = self.module.blocks[forward.program[1]]
                flat = torch.cat([p.reshape(-1) for p in block.parameters()] + [self.module.gain])
                self._outputs[index] = torch.tanh(flat).reshape(1, -1)
                return self._outputs[index]
            x.requires_grad_(forward.input_requires_grad)
            if forward.route == "submodule":
                self._outputs[index] = self.module.blocks[forward.program[1]](x) * self.module.gain
            else:
                called = self.model if forward.route == "engine" else self.module
                self._outputs[index] = called(x, forward.program, self.rank, self.checkpoints)
        return self._outputs[index]

    def loss(self, backward: Backward) -> Tensor:
        total = 0.0
        for index in backward.outputs:
            output = self.output(index)
            wide = _wide(output)
            total = total + wide.square().mean() + wide.mean() * (0.5 + index)
            source = self._inputs[index]
            if backward.penalty and source.requires_grad:
                (slope,) = torch.autograd.grad(wide.sum(), source, create_graph=True)
                total = total + _wide(slope).square().mean()
        return total

    def direction(self, index: int) -> Tensor:
        """What ``out.backward`` is given."""
        output = self.output(index)
        values = self._random(index, 1, output.numel())[:, :1].reshape(output.shape)
        return values / output.numel()

    def chosen_inputs(self, backward: Backward) -> list[nn.Parameter]:
        trainable = [p for p in self.module.parameters() if p.requires_grad and p is not self.module.gain]
        return [self.module.gain, *random.Random(backward.inputs_seed).sample(trainable, len(trainable) // 2)]

    def runs(self, backward: Backward) -> bool:
        return backward.ranks is None or self.rank in backward.ranks

    def contributes(self, backward: Backward) -> bool:
        return self.runs(backward) and not backward.aborted

    @contextmanager
    def interrupted(self, backward: Backward) -> Iterator[None]:
        """A backward inside dies when it has the gradient of its input; so it must."""

        def interrupt(_: Tensor) -> None:
            raise Interrupted

        self.output(backward.outputs[0])
        handle = self._inputs[backward.outputs[0]].register_hook(interrupt)
        with pytest.raises(Interrupted):
            yield
        handle.remove()


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
