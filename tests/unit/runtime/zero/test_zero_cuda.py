# SPDX-License-Identifier: Apache-2.0
"""Gradients on a CUDA device, with delays put on the streams so that a missing wait becomes a wrong number.

Two ranks share one device over gloo, which reduces CUDA tensors; a single rank runs over NCCL.
"""

import warnings
from argparse import Namespace
from contextlib import contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.runtime.gradients import reducer as reducer_module
from deepspeed.runtime.gradients.streams import SideStream
from deepspeed.runtime.zero import sharded_parameter
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from unit.common import DistributedTest
from unit.graphs import whole_copy
from unit.reference import max_relative_error, reference_gradients

pytestmark = pytest.mark.cuda

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
WIDTH = 67
SLEEP = 2_000_000  # device clock cycles: about a millisecond
WINDOWS = 3


class SharedEncoder(torch.nn.Module):
    """An encoder used on two inputs, once under a reentrant checkpoint, and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 31))
        self.decoder = torch.nn.Linear(31, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


def loss_of(model: torch.nn.Module, batch: torch.Tensor, engine=None) -> torch.Tensor:
    """Through the engine when there is one, and around it."""
    out = (engine or model)(batch)
    again = checkpoint(model.encoder, (batch * 2).requires_grad_(), use_reentrant=True)
    total = (out - batch).square().mean() + again.square().mean()
    return total.float() if engine is not None else total


class SlowReduction(SideStream):
    """Whatever runs on the side stream is late: the main stream must wait for it before it reuses a buffer or steps."""

    @contextmanager
    def side(self):
        with super().side():
            torch.cuda._sleep(SLEEP)
            yield


class SlowBackward(SideStream):
    """Buckets are filled late: the side stream must wait for the main one before it reduces them."""

    def wait_mark(self, mark) -> None:
        super().wait_mark(mark)
        torch.cuda._sleep(SLEEP)


DELAYS = {"no_delay": SideStream, "slow_reduction": SlowReduction, "slow_backward": SlowBackward}


def config_for(stage: int, dtype: torch.dtype, accumulation: int, **zero) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "allgather_bucket_size": 1000, **zero},
    }
    if dtype is torch.bfloat16:
        config["bf16"] = {"enabled": True}
    if dtype is torch.float16:
        config["fp16"] = {"enabled": True, "loss_scale": 256.0}
    return config


def check_windows(rank: int, world: int, dtype: torch.dtype, form: str, config: dict) -> None:
    torch.manual_seed(3)
    model = SharedEncoder()
    accumulation = config["gradient_accumulation_steps"]
    args = Namespace(device_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(11)
    for window in range(WINDOWS):
        batches = [
            [torch.randn(4, WIDTH, generator=generator).to(dtype) for _ in range(accumulation)] for _ in range(world)
        ]
        expected = reference_gradients(whole_copy(model), loss_of, batches)
        for batch in batches[rank]:
            loss = loss_of(engine.module, batch.cuda(), engine)
            if form == "engine":
                engine.backward(loss)
            else:
                (engine.scale(loss) if dtype is torch.float16 else loss).backward()
            if batch is not batches[rank][-1]:
                engine.step()
        actual = {name: safe_get_full_grad(parameter) for name, parameter in model.named_parameters()}
        name, error = max_relative_error(actual, expected)
        assert error < TOLERANCE[dtype], f"window {window}: {name} is off by {error}"
        before = safe_get_full_fp32_param(model.decoder.weight).clone()
        engine.step()
        after = safe_get_full_fp32_param(model.decoder.weight)
        assert engine.was_step_applied() and not torch.equal(before, after)
        with deepspeed.zero.GatheredParameters(model.decoder.weight):
            assert torch.equal(model.decoder.weight.float(), after.to(dtype).float())
    engine.destroy()


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
class TestGradientsOnOneDevice(DistributedTest):
    world_size = 2
    backend = "gloo"

    def test_reused_encoder(self, stage: int, delay: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reducer_module, "order_for", DELAYS[delay])
        monkeypatch.setattr(sharded_parameter, "order_for", DELAYS[delay])
        rank = deepspeed.comm.get_rank()
        for dtype in TOLERANCE:
            for overlap in (False, True):
                for form, accumulation, bucket in (("engine", 1, 500), ("engine", 2, 3000), ("direct", 2, 10**6)):
                    # gloo reduces CUDA tensors by all-reduce and broadcast only
                    zero = {"reduce_scatter": False, "allgather_partitions": False, "overlap_comm": overlap}
                    if stage == 3:
                        zero |= {"stage3_use_all_reduce_for_fetch_params": True, "stage3_prefetch_bucket_size": 5000}
                        zero |= {"stage3_param_persistence_threshold": 100 if overlap else 0}
                    config = config_for(stage, dtype, accumulation, reduce_bucket_size=bucket, **zero)
                    check_windows(rank, 2, dtype, form, config)


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
class TestGradientsOverNccl(DistributedTest):
    """One rank: no collective hides a missing wait by blocking the host."""

    world_size = 1

    def test_reused_encoder(self, stage: int, delay: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reducer_module, "order_for", DELAYS[delay])
        monkeypatch.setattr(sharded_parameter, "order_for", DELAYS[delay])
        for dtype in TOLERANCE:
            for form, accumulation in (("engine", 1), ("engine", 3), ("direct", 2)):
                config = config_for(stage, dtype, accumulation, reduce_bucket_size=700, overlap_comm=True)
                check_windows(0, 1, dtype, form, config)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
class TestNoDeviceSynchronisation(DistributedTest):
    world_size = 1

    def test_in_forward_and_backward(self, stage: int) -> None:
        """The host never waits for the device there; torch raises if it does."""
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        config = config_for(stage, torch.bfloat16, 1, overlap_comm=True, stage3_param_persistence_threshold=100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        batch = torch.randn(4, WIDTH, device="cuda", dtype=torch.bfloat16)
        for step in range(4):
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            try:
                engine.backward(engine(batch).square().mean())
            finally:
                torch.cuda.set_sync_debug_mode("default")
            engine.step()

    def test_at_most_one_in_a_step(self, stage: int) -> None:
        """The host reads the norm, and nothing else."""
        model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        config = config_for(stage, torch.bfloat16, 1) | {"gradient_clipping": 1.0}
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.05, fused=True), config=config
        )
        batch = torch.randn(4, WIDTH, device="cuda", dtype=torch.bfloat16)
        for step in range(4):
            engine.backward(engine(batch).float().square().mean())
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn" if step else "default")
                engine.step()
                torch.cuda.set_sync_debug_mode("default")
            waits = [str(warning.message) for warning in caught if "called a synchronizing" in str(warning.message)]
            assert len(waits) == (1 if step else 0), f"step {step}: {waits}"
