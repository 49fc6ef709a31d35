# SPDX-License-Identifier: Apache-2.0
"""A small model with parts to reuse, data that differ per rank, and the float64 reference for any sequence of
backwards: what the tests of gradients under ZeRO share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.utils import safe_get_full_grad
from unit.reference import max_relative_error

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
# Elements up to which weights stay whole at stage 3: none, some and all weights of small models, by dtype, so that
# tests of all dtypes meet all three.
PERSISTENT = {torch.float32: 0, torch.float16: 12, torch.bfloat16: 100_000}


class ReusableNet(nn.Module):
    """Encoder, square core, two heads; 120 parameters in shapes that no world size divides."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
        self.core = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        return self.heads[head](self.core(self.encoder(x)))


class Batch(NamedTuple):
    """Inputs x, y: (8, 5); target: (8, 3); and where in training it belongs."""

    x: Tensor
    y: Tensor
    target: Tensor
    rank: int
    window: int
    micro_step: int

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return self._replace(x=function(self.x), y=function(self.y), target=function(self.target))


def whole_copy(module: nn.Module) -> nn.Module:
    """An ordinary copy of a module that an engine may have partitioned. Collective."""
    with deepspeed.zero.GatheredParameters(module.parameters()):
        return copy.deepcopy(module)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole weights. Collective."""
    with deepspeed.zero.GatheredParameters(module.parameters()):
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def stage_options(stage: int, dtype: torch.dtype) -> dict[str, Any]:
    """Options of stage 3 that make small models as awkward as large ones; none for the other stages."""
    if stage < 3:
        return {}
    return {"stage3_param_persistence_threshold": PERSISTENT[dtype], "stage3_prefetch_bucket_size": 40}


Losses = Callable[[Callable[..., Tensor], nn.Module, Batch], Iterable[Tensor]]
"""From the engine (to call), its bare module and a batch to losses; each is sent backward before the next is made."""


def make_batch(rank: int, window: int, micro_step: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    """Any rank can make any rank's."""
    generator = torch.Generator().manual_seed(100_000 * rank + 1_000 * window + micro_step)
    x, y, target = (torch.randn(8, width, generator=generator).to(dtype) for width in (5, 5, 3))
    return Batch(x, y, target, rank, window, micro_step)


def my_batch(engine: Any, window: int, micro_step: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    """The batch of this rank on its device."""
    return make_batch(dist.get_rank(), window, micro_step, dtype).map(lambda tensor: tensor.to(engine.device))


def make_model(seed: int = 7) -> ReusableNet:
    torch.manual_seed(seed)
    return ReusableNet()


def make_engine(
    model: nn.Module,
    stage: int,
    dtype: torch.dtype = torch.float32,
    accumulation: int = 1,
    zero: dict[str, Any] | None = None,
    loss_scale: float = 256.0,
    **config: Any,
) -> Any:
    """An engine with SGD, no clipping, and buckets smaller than the model."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 50, **stage_options(stage, dtype), **(zero or {})},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype is torch.bfloat16},
        "fp16": {"enabled": dtype is torch.float16, "loss_scale": loss_scale},
        **config,
    }
    return deepspeed.initialize(model=model, optimizer=torch.optim.SGD(trained, lr=0.125), config=settings)[0]


def send_backward(engine: Any, loss: Tensor, form: str, retain_graph: bool = False) -> None:
    """``form`` is "engine.backward" or "tensor.backward"."""
    if form == "engine.backward":
        engine.backward(loss, retain_graph=retain_graph)
    elif engine.fp16_enabled():
        engine.scale(loss).backward(retain_graph=retain_graph)
    else:
        loss.backward(retain_graph=retain_graph)


def run_micro_step(engine: Any, losses: Losses, form: str, batch: Batch) -> None:
    for loss in losses(engine, engine.module, batch):
        send_backward(engine, loss, form)


def expected_gradients(
    module: nn.Module, losses: Losses, batches_of: Callable[[int], Iterable[Batch]], divisor: float
) -> dict[str, Tensor]:
    """Sum over ranks and their batches, by plain autograd in float64 at the module's present weights, over the world
    size and ``divisor``. Zeros for what was not used."""
    wide = whole_copy(module)
    wide.zero_grad(set_to_none=True)
    wide.cpu().double()
    for rank in range(dist.get_world_size()):
        for batch in batches_of(rank):
            for loss in losses(wide, wide, batch.map(lambda tensor: tensor.double())):
                loss.backward()
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad) / (dist.get_world_size() * divisor)
        for name, p in wide.named_parameters()
        if p.requires_grad
    }


def full_gradients(engine: Any) -> dict[str, Tensor]:
    """What the optimizer would see now. Collective."""
    return {
        name: safe_get_full_grad(parameter).clone()
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }


def assert_gradients(engine: Any, expected: dict[str, Tensor], dtype: torch.dtype, what: str = "") -> None:
    """Collective."""
    worst, error = max_relative_error(full_gradients(engine), expected)
    assert error <= TOLERANCE[dtype], f"{what}: {worst} has relative error {error:.3g}"


def mse(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def encoder_twice(call: Callable[..., Tensor], module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    """One loss: through the engine, and through a part of the bare module."""
    yield mse(call(batch.x), batch.target) + module.encoder(batch.y).square().mean()


def two_backwards(call: Callable[..., Tensor], module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    """Two losses one after the other, the second one around the engine and through the other head."""
    yield mse(call(batch.x), batch.target)
    yield mse(module(batch.y, head=1), batch.target)
