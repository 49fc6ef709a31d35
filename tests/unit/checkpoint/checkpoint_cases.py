# SPDX-License-Identifier: Apache-2.0
"""What tests of checkpoints share: a model of all kinds of state, engines over it, and everything that a later run
depends on, to be compared bit by bit."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from unit.graphs import stage_options

WORDS, WIDTH, BATCH = 11, 6, 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ELEMENTWISE = {"AdamW": ["exp_avg", "exp_avg_sq"], "SGD": ["momentum_buffer"], "Adagrad": ["sum"]}


class KeptModel(nn.Module):
    """Tied and frozen weights, buffers of two dtypes, a scalar, an unused layer; sizes that no world size divides.

    Args:
        mixed: with parts in fp64 and in bf16.
    """

    def __init__(self, seed: int = 0, mixed: bool = False, width: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.frozen = nn.Linear(WIDTH, 5).requires_grad_(False)
        self.inner = nn.Linear(5, width)
        self.outer = nn.Linear(width, WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.unused = nn.Linear(3, 2)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.wide = nn.Linear(WIDTH, WIDTH).double() if mixed else None
        self.narrow = nn.Linear(WIDTH, WIDTH).bfloat16() if mixed else None
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, words: Tensor, following: Tensor) -> Tensor:
        hidden = self.words(words)
        if self.training:
            self.seen += torch.tensor([1, words.numel(), 0])
            self.mean.mul_(0.5).add_(self.seen[0] * 0.1)  # the same on every rank: a file holds one rank's buffers
        hidden = self.outer(torch.tanh(self.inner(torch.tanh(self.frozen(hidden))))) + 0.1 * self.mean.to(hidden.dtype)
        if self.wide is not None:
            hidden = hidden + self.wide(hidden.double()).float() + self.narrow(hidden.bfloat16()).float()
        return nn.functional.cross_entropy(self.gain.float() * self.head(hidden).float(), following)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups with settings of their own: matrices, the rest, and one in which nothing is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "lr": 0.03, "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "lr": 0.05, "weight_decay": 0.0},
        {"params": list(model.frozen.parameters()), "lr": 0.7},
    ]


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """One over ``groups_of(model)``."""
    options = {"AdamW": {"betas": (0.8, 0.95)}, "SGD": {"momentum": 0.9, "nesterov": True}, "Adagrad": {}}[kind]
    return getattr(torch.optim, kind)(groups_of(model), lr=0.1, **options)


def make_config(
    stage: int, dtype: str = "fp32", gas: int = 1, zero: dict[str, Any] | None = None, **top: Any
) -> dict[str, Any]:
    """Clipping, a schedule, and in fp16 a loss scale that first overflows and then grows every other step."""
    zero = {"stage": stage, "sub_group_size": 30, **stage_options(stage, DTYPES[dtype]), **(zero or {})}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 20}},
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}
    return config | top


def make_engine(
    config: dict[str, Any], kind: str = "AdamW", model: nn.Module | None = None, seed: int = 0, **options: Any
) -> Any:
    """An engine over a KeptModel."""
    model = KeptModel(seed) if model is None else model
    options.setdefault("optimizer", make_optimizer(kind, model))
    return deepspeed.initialize(model=model, config=config, **options)[0]


def fresh(config: dict[str, Any], kind: str = "AdamW", mixed: bool = False, width: int = 7) -> Any:
    """An engine with other weights and buffers than ``make_engine`` gives, as a new job would have."""
    model = KeptModel(seed=99, mixed=mixed, width=width)
    with torch.no_grad():
        for tensor in (*model.parameters(), model.mean):
            tensor.uniform_(-1, 1)
    return make_engine(config, kind, model)


def micro_batch(step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Words and their followers, different on every rank and in every micro-step."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * rank + step)
    words = torch.randint(WORDS, (2, BATCH), generator=generator)
    return words[0], words[1]


def train(engine: Any, first: int, windows: int) -> list[Any]:
    """Train on; what can be seen of it, step by step."""
    seen = []
    gas = engine.gradient_accumulation_steps()
    for window in range(first, first + windows):
        for micro_step in range(gas):
            loss = engine(*micro_batch(gas * window + micro_step))
            engine.backward(loss)
            engine.step()
            seen.append(loss.item())
        norm = engine.get_global_grad_norm()
        seen += [float(norm) if norm is not None else None, engine.loss_scale(), list(engine.get_lr())]
    return seen


def everything(engine: Any, kind: str = "AdamW") -> dict[str, Any]:
    """Weights, buffers, masters, optimizer state, settings, counters. Collective."""
    state: dict[str, Any] = {}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for name, value in engine.module.state_dict().items():
            state[name] = value.detach().clone()
    state |= kept_by_name(engine, kind)
    for index, group in enumerate(engine.optimizer.param_groups):
        state[f"settings {index}"] = {key: value for key, value in group.items() if key != "params"}
    state["schedule"] = None if engine.lr_scheduler is None else dict(engine.lr_scheduler.state_dict())
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        state[counter] = getattr(engine, counter)
    scaler = getattr(engine.optimizer, "loss_scaler", None)  # in fp32 at stage 0 it is torch's optimizer itself
    state["scaler"] = scaler and {k: value for k, value in vars(scaler).items() if isinstance(value, (int, float))}
    return state


def kept_by_name(engine: Any, kind: str = "AdamW") -> dict[str, Any]:
    """fp32 masters and optimizer state of every trained parameter, whole. Collective."""
    state: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            state[f"master of {name}"] = safe_get_full_fp32_param(parameter).clone()
            for key in ELEMENTWISE[kind] if any(engine.optimizer.state.values()) else ():
                state[f"{key} of {name}"] = safe_get_full_optimizer_state(parameter, key).clone()
    steps = [float(s["step"]) for s in engine.optimizer.state.values() if "step" in s]
    state["step"] = sorted(set(steps))
    return state


def differences(found: Any, expected: Any) -> list[str]:
    """Entries that are not the same bit by bit, or not on both sides."""
    other = sorted(found.keys() ^ expected.keys())
    return other + [key for key in expected if key in found and not _same(found[key], expected[key])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return one == other
