# SPDX-License-Identifier: Apache-2.0
"""What tests of the engine share: a model of awkward sizes, its data, engines over it, comparison with float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.utils import safe_get_full_grad
from unit.graphs import stage_options, weights_of
from unit.reference import max_relative_error, reference_gradients
from unit.simple_model import rank_batches

WIDTH = 5
MICRO_BATCH = 2
MOST_USES = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Norm-wise relative error of the worst parameter. The faults to be found are of the order of 0.3 to 1.
TOLERANCE = {"fp32": 1e-5, "bf16": 0.02, "fp16": 0.005}

Batch = tuple[Tensor, Tensor, int]


class OddModel(nn.Module):
    """147 trainable elements in parameters whose sizes divide by nothing, one submodule of which a variable number of
    uses counts, one never used, one frozen, one scalar parameter. Every rank runs the same modules, as stage 3
    needs."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, 7)
        self.shared = nn.Linear(7, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.last = nn.Linear(7, WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor, uses: int = 1) -> Tensor:
        hidden = torch.tanh(self.first(x))
        for use in range(MOST_USES):
            again = torch.tanh(self.shared(self.frozen(hidden)) + hidden)
            hidden = torch.where(torch.tensor(use < uses), again, hidden)
        logits = self.gain * self.last(hidden)
        return nn.functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), y)


TRAINABLE = sum(p.numel() for p in OddModel().parameters() if p.requires_grad)
LARGEST = 49


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return model(*batch)


def batches_of(rank: int, micro_steps: int, dtype: str = "fp32", seed: int = 0) -> list[Batch]:
    """Different data on every rank and micro-step; one or two uses of the shared module count."""
    pairs = rank_batches(rank, micro_steps, MICRO_BATCH, WIDTH, DTYPES[dtype], seed)
    return [(x, y, 1 + (rank + step) % 2) for step, (x, y) in enumerate(pairs)]


def make_config(stage: int, dtype: str = "fp32", gas: int = 1, zero: dict[str, Any] | None = None, **top: Any) -> dict:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **stage_options(stage, DTYPES[dtype]), **(zero or {})},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    config.update(top)
    return config


def make_engine(config: dict, model: nn.Module | None = None, optimizer: Any = None, **kwargs: Any) -> Any:
    """An engine under plain SGD unless another optimizer, or one in the config, is given."""
    if optimizer is None and "optimizer" not in config:

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.1)

    model = OddModel() if model is None else model
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, **kwargs)[0]


def twin_of(engine: Any) -> nn.Module:
    """A plain copy of the engine's model with its present weights, in fp32."""
    twin = OddModel()
    twin.load_state_dict(weights_of(engine.module))
    return twin


def gradients_of(engine: Any) -> dict[str, Tensor]:
    """Full true gradient of each trainable parameter. Collective."""
    return {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters() if p.requires_grad}


def run_window(engine: Any, batches: list[Batch]) -> Tensor:
    """Forward and backward over all micro-steps of a window, without the last ``step()``; this rank's losses."""
    losses = []
    for i, batch in enumerate(batches):
        loss = engine(*batch)
        losses.append(loss.detach().float())
        engine.backward(loss)
        if i < len(batches) - 1:
            engine.step()
    return torch.stack(losses)


def check_window(
    engine: Any, dtype: str = "fp32", seed: int = 0, tolerance: float | None = None, note: str = ""
) -> None:
    """Run one window up to the boundary backward and compare its gradient with float64."""
    world, rank, gas = dist.get_world_size(), dist.get_rank(), engine.gradient_accumulation_steps()
    data = [batches_of(r, gas, dtype, seed) for r in range(world)]
    expected = reference_gradients(twin_of(engine), loss_of, data, DTYPES[dtype])
    run_window(engine, data[rank])
    name, error = max_relative_error(gradients_of(engine), expected)
    assert error <= TOLERANCE[dtype], f"{note}: gradient of {name} is off by {error:.2g}"


def check_same_on_all_ranks(model: nn.Module, note: str = "") -> None:
    """Weights are bitwise the same on every rank."""
    for name, weight in weights_of(model).items():
        everyone = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, weight.contiguous())
        assert all(torch.equal(one, everyone[0]) for one in everyone), f"{note}: ranks differ in {name}"
