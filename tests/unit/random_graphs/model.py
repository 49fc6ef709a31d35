# SPDX-License-Identifier: Apache-2.0
"""The model of a case, and one micro-step of one rank: its outputs, losses and directions, by engine or without one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unit.random_graphs.cases import DTYPES, INPUT, Backward, Case, Forward, MicroStep, Program


class Interrupted(Exception):
    """Ends a forward or a backward on purpose."""


# What such a backward says, or one that the engine refuses for what such a one has left.
INTERRUPTED = r"^$|aborted by an exception and this backward has added to its partial gradient"


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
        if kind == "fail":
            raise Interrupted
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


class MicroStepRun:
    """The outputs and losses of one micro-step of one rank.

    Args:
        place: window and micro-step, which seed the data.
        step: the micro-step.
        model: what is called: an engine, or the module itself, which then runs without checkpoints.
        module: the bare module.
    """

    def __init__(
        self, case: Case, place: tuple[int, int], step: MicroStep, model: Any, module: RandomModel, rank: int
    ) -> None:
        self.case = case
        self.window, self.position = place
        self.step = step
        self.model = model
        self.module = module
        self.rank = rank
        self.checkpoints = model is not module
        self.dtype = module.gain.dtype
        self._outputs: dict[int, Tensor] = {}
        self._inputs: dict[int, Tensor] = {}
        if self.checkpoints:
            for forward in step.failing:
                with pytest.raises(Interrupted):
                    self._call(forward)
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
            self._outputs[index] = self._call(self.step.forwards[index])
        return self._outputs[index]

    def _call(self, forward: Forward) -> Tensor:
        rows = 1 + (self.rank + forward.index) % 3  # ranks have batches of different sizes
        x = self._random(forward.index, 0, rows)
        self._inputs[forward.index] = x
        if forward.route == "parameter":
            block = self.module.blocks[forward.program[1]]
            flat = torch.cat([p.reshape(-1) for p in block.parameters()] + [self.module.gain])
            return torch.tanh(flat).reshape(1, -1)
        x.requires_grad_(forward.input_requires_grad)
        if forward.route == "submodule":
            return self.module.blocks[forward.program[1]](x) * self.module.gain
        called = self.model if forward.route == "engine" else self.module
        return called(x, forward.program, self.rank, self.checkpoints)

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
        """A backward inside dies where ``backward.aborted_at`` says; so it must. Or it is refused before, where it adds
        to what a ``loss.backward()`` that died has left in the parameter whose gradient comes first."""

        def interrupt(_: Tensor) -> None:
            raise Interrupted

        self.output(backward.outputs[0])
        target = self._inputs[backward.outputs[0]]
        if backward.aborted_at != INPUT:
            target = next(self.module.blocks[backward.aborted_at].parameters())
        handle = target.register_hook(interrupt)
        try:
            with pytest.raises((Interrupted, RuntimeError), match=INTERRUPTED):
                yield
        finally:
            handle.remove()


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
