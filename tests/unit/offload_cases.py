# SPDX-License-Identifier: Apache-2.0
"""Cases of training with an offloaded optimizer, and their comparison with float64 autograd and with the same run in
memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
import deepspeed.comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from unit.graphs import (
    TOLERANCE,
    Batch,
    assert_gradients,
    encoder_twice,
    expected_gradients,
    full_gradients,
    make_batch,
    make_model,
    mse,
    my_batch,
    run_micro_step,
    stage_options,
    two_backwards,
    weights_of,
)

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
ON_HOST = {"offload_optimizer": {"device": "cpu"}}
NOT_PINNED = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
NARROW = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
    "data_types": {"grad_accum_dtype": "bf16"},
}
EXACTLY = {"rtol": 0.0, "atol": 0.0}
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.125, momentum=0.5)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def cpu_adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Steps tensor by tensor, writing the model's weights in the same pass."""
    return DeepSpeedCPUAdam(parameters, lr=0.02, weight_decay=0.1)


def fused_adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The same where the state is on a CUDA device."""
    return FusedAdam(parameters, lr=0.02, weight_decay=0.1)


def reentrant(call: Callable[..., Tensor], module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    """A part used three times, twice under a reentrant checkpoint; a head that only some ranks' losses need."""
    again = checkpoint(module.encoder, batch.y.clone().requires_grad_(), use_reentrant=True)
    nested = checkpoint(module.core, module.encoder(batch.x), use_reentrant=True)
    loss = mse(call(batch.x), batch.target) + again.square().mean() + nested.square().mean()
    yield loss + mse(module(batch.y, head=1), batch.target) * float(batch.rank % 2)


class Case(NamedTuple):
    losses: Callable = encoder_twice
    form: str = "engine.backward"
    accumulation: int = 1
    dtype: torch.dtype = FP32
    optimizer: Optimizer = sgd
    clip: float = 0.0
    zero: dict[str, Any] = {}
    config: dict[str, Any] = {}
    offload: dict[str, Any] = ON_HOST
    exact: bool = True  # False: sums of squares are added in another order, which the norm and clipping show


CASES = [
    Case(),
    Case(two_backwards, "tensor.backward", 4, optimizer=adamw, clip=0.5),
    Case(reentrant, dtype=BF16, optimizer=cpu_adam, clip=0.5),
    Case(two_backwards, accumulation=4, dtype=BF16, optimizer=cpu_adam, clip=0.05),
    Case(reentrant, "tensor.backward", 4, dtype=FP16),
    Case(two_backwards, optimizer=cpu_adam, clip=0.5, offload={**ON_HOST, "sub_group_size": 9}, exact=False),
    Case(reentrant, accumulation=4, zero={"contiguous_gradients": False, "reduce_scatter": False}, optimizer=adamw),
    Case(dtype=BF16, optimizer=cpu_adam, config=NARROW, zero={"overlap_comm": True}),
    Case(two_backwards, accumulation=4, optimizer=adamw, offload=NOT_PINNED),
]


def make(stage: int, case: Case, zero: dict[str, Any]) -> Any:
    model = make_model()
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 50, **stage_options(stage, case.dtype), **zero},
        "bf16": {"enabled": case.dtype is BF16},
        "fp16": {"enabled": case.dtype is FP16, "loss_scale": 256.0},
        **case.config,
    }
    make_optimizer = case.optimizer
    if make_optimizer is cpu_adam and "offload_optimizer" not in zero and torch.cuda.is_available():
        make_optimizer = fused_adam
    optimizer = make_optimizer(list(model.parameters()))
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def run_window(engine: Any, case: Case, window: int) -> None:
    """All backwards of a window, up to its last ``step()``."""
    for micro_step in range(case.accumulation):
        if micro_step:
            engine.step()
        run_micro_step(engine, case.losses, case.form, my_batch(engine, window, micro_step, case.dtype))


def reference(engine: Any, case: Case, window: int) -> dict[str, Tensor]:
    """The gradients of a window at the engine's present weights, in float64. Collective."""
    steps = range(case.accumulation)
    return expected_gradients(
        engine.module,
        case.losses,
        lambda rank: [make_batch(rank, window, step, case.dtype) for step in steps],
        case.accumulation,
    )


def _adds_in_the_same_order(stage: int, case: Case) -> bool:
    """Stage 1 reduces in each backward where gradients are offloaded. On several ranks it may depend on time which of
    several contributions of one backward a bucket takes along. And among more than two ranks an element's place in its
    bucket, which is a smaller one where gradients are offloaded, decides on whose side its sum begins."""
    ranks = dist.get_world_size()
    certain = ranks == 1 or (ranks == 2 and case.losses is not reentrant)
    return certain and (stage > 1 or case.accumulation == 1)


def _rounding(stage: int, case: Case, device: torch.device) -> dict[str, float]:
    """By what a run in memory and an offloaded one may differ."""
    if _adds_in_the_same_order(stage, case) and device.type == "cpu":
        return EXACTLY if case.exact else {"rtol": 1e-5, "atol": 1e-7}
    # Sums are rounded where they are communicated; or another processor computes the update, which rounds weights.
    allowed = 1e-5 if case.dtype is FP32 else TOLERANCE[case.dtype]
    return {"rtol": allowed, "atol": allowed / 10 if case.dtype is FP32 else allowed}


def compare(stage: int, case: Case, offload: dict[str, Any], windows: int = 2) -> None:
    """Train in memory and offloaded side by side."""
    engines = [make(stage, case, case.zero), make(stage, case, {**case.zero, **offload})]
    rounding = _rounding(stage, case, engines[0].device)
    for window in range(windows):
        expected = reference(engines[1], case, window)
        for engine in engines:
            run_window(engine, case, window)
        assert_gradients(engines[1], expected, case.dtype, f"{case}, window {window}")
        gradients = [full_gradients(engine) for engine in engines]
        for engine in engines:
            engine.step()
            assert engine.was_step_applied()
        norms = [float(engine.get_global_grad_norm()) for engine in engines]
        assert norms[0] > 0 and norms[1] == pytest.approx(norms[0], rel=max(rounding["rtol"], 1e-7), abs=0.0), case
        first = window == 0 and dist.get_world_size() == 1 and _adds_in_the_same_order(stage, case)
        torch.testing.assert_close(gradients[1], gradients[0], **(EXACTLY if first else rounding))
        torch.testing.assert_close(weights_of(engines[1].module), weights_of(engines[0].module), **rounding)
    for engine in engines:
        engine.destroy()
