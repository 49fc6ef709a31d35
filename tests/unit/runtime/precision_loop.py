# SPDX-License-Identifier: Apache-2.0
"""Mixed-precision training written out by hand, in one process and without this package: what engines must equal.

It takes every rank's batches, runs plain autograd on each in the dtype of the model, sums in float64, and keeps master
weights, loss scale, norm and clipping itself.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, CLASSES, SAMPLES = 5, 3, 4
CLIP_EPSILON = 1e-6
INITIAL_SCALE, SCALE_WINDOW, HYSTERESIS, LEAST_SCALE = 16.0, 3, 2, 1.0

Batch = tuple[Tensor, Tensor]


class MixedNet(nn.Module):
    """123 trained elements in sizes that divide by nothing: a layer used twice, a normalisation that may have another
    dtype, one element alone, one layer that nobody uses, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, 7)
        self.norm = nn.LayerNorm(7)
        self.inner = nn.Linear(7, 7, bias=False)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor([1.25]))
        self.last = nn.Linear(7, CLASSES, bias=False)
        self.unused = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.norm(_into(self.norm, torch.tanh(self.first(_into(self.first, x)))))
        for _ in range(2):
            hidden = torch.tanh(self.inner(_into(self.inner, hidden)) + self.frozen(_into(self.frozen, hidden)))
        logits = self.gain * self.last(_into(self.last, hidden))
        return nn.functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), y)


def _into(layer: nn.Module, x: Tensor) -> Tensor:
    return x.to(layer.weight.dtype)


def batches_of(rank: int, window: int, micro_steps: int) -> list[Batch]:
    """One rank's batches of a window, different for each rank, window and micro-step."""
    generator = torch.Generator().manual_seed(1000 * window + rank)
    return [
        (torch.randn(SAMPLES, WIDTH, generator=generator), torch.randint(CLASSES, (SAMPLES,), generator=generator))
        for _ in range(micro_steps)
    ]


@dataclass(frozen=True)
class Recipe:
    """One way of mixing dtypes.

    Args:
        config: what the engine is told.
        weights: dtype of the model's weights, by default and by the beginning of a name.
        autocast: dtype of an autocast around the forward.
        masters: dtype in which masters are kept, at least the weights' own.
        stepped: dtype in which the optimizer computes and keeps its state, at least the masters' own.
        scaled: whether there is a dynamic loss scale.
        tolerance: relative error of gradients, norms and updates.
        exact: the same for the first window, where weights have not been rounded differently yet.
    """

    name: str
    config: dict[str, Any]
    weights: torch.dtype = torch.float32
    exceptions: dict[str, torch.dtype] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    masters: torch.dtype = torch.float32
    stepped: torch.dtype = torch.float32
    scaled: bool = False
    tolerance: float = 1e-5
    exact: float | None = None
    stages: tuple[int, ...] = (0, 1, 2, 3)

    def dtype_of(self, name: str) -> torch.dtype:
        return next((d for beginning, d in self.exceptions.items() if name.startswith(beginning)), self.weights)

    def cast(self, model: nn.Module) -> nn.Module:
        """Give each parameter the dtype that it has in training. In place."""
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(self.dtype_of(name))
        return model


@dataclass
class Window:
    """What one window came to."""

    gradients: dict[str, Tensor]  # true ones, float64, before clipping
    sizes: dict[str, float]  # root mean square of the norms of the contributions, which may cancel in the gradient
    norm: float
    clipped_norm: float | None
    applied: bool
    scale_before: float
    scale_after: float


class PlainLoop:
    """Trains a copy of ``model`` as ``world`` ranks would.

    Args:
        optimizer: makes the torch optimizer from tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
        micro_steps: int,
        clip: float,
    ) -> None:
        self.model = recipe.cast(copy.deepcopy(model))
        self.recipe, self.micro_steps, self.clip = recipe, micro_steps, clip
        self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.masters = {n: self._wide(p.detach(), recipe.masters) for n, p in self.trained.items()}
        self._stepped = {n: self._wide(m, recipe.stepped).requires_grad_() for n, m in self.masters.items()}
        self.optimizer = optimizer(list(self._stepped.values()))
        self.path = dict.fromkeys(self.masters, 0.0)  # how far each master has gone, there and back
        self.scale = INITIAL_SCALE if recipe.scaled else 1.0
        self._hysteresis, self._clean = HYSTERESIS, 0

    @staticmethod
    def _wide(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype if tensor.dtype.itemsize <= dtype.itemsize else tensor.dtype, copy=True)

    def run(self, batches_per_rank: Sequence[Sequence[Batch]], factor: Callable[[int, int], float]) -> Window:
        """One window; ``factor(rank, micro_step)`` multiplies a loss."""
        scale = self.scale
        total = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in self.trained.items()}
        squares = dict.fromkeys(total, 0.0)
        for rank, batches in enumerate(batches_per_rank):
            for step, batch in enumerate(batches):
                for name, gradient in self._gradients(batch, factor(rank, step) * scale).items():
                    total[name] += gradient.double()
                    squares[name] += gradient.double().square().sum().item()
        contributions = self.micro_steps * len(batches_per_rank)
        share = 1.0 / (scale * contributions)
        gradients = {n: g * share for n, g in total.items()}
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        applied = math.isfinite(norm)
        clipping = 1.0 / max(1.0, (norm + CLIP_EPSILON) / self.clip) if self.clip else 1.0
        if applied:
            self._step({n: g * clipping for n, g in gradients.items()})
        self._adapt(applied)
        sizes = {n: math.sqrt(square / contributions) / scale for n, square in squares.items()}
        return Window(gradients, sizes, norm, norm * clipping if applied else None, applied, scale, self.scale)

    def _gradients(self, batch: Batch, factor: float) -> dict[str, Tensor]:
        autocast = self.recipe.autocast
        with nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast):
            loss = self.model(*batch)
        (loss * factor).backward()
        found = {n: p.grad for n, p in self.trained.items() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return found

    @torch.no_grad()
    def _step(self, gradients: dict[str, Tensor]) -> None:
        for name, tensor in self._stepped.items():
            tensor.copy_(self.masters[name])
            tensor.grad = gradients[name].to(tensor.dtype)
        self.optimizer.step()
        for name, parameter in self.trained.items():
            self.path[name] += (self._stepped[name].double() - self.masters[name].double()).norm().item()
            self.masters[name].copy_(self._stepped[name])
            parameter.copy_(self.masters[name])

    def _adapt(self, clean: bool) -> None:
        if not self.recipe.scaled:
            return
        if clean:
            self._clean += 1
            if self._clean % SCALE_WINDOW == 0:
                self.scale *= 2
                self._hysteresis = HYSTERESIS
            return
        self._clean = 0
        if self._hysteresis > 1:
            self._hysteresis -= 1
        else:
            self.scale = max(self.scale / 2, LEAST_SCALE)
