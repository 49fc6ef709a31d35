# SPDX-License-Identifier: Apache-2.0
"""Offload on a CUDA device: the cases of ``offload_cases``, delays on the streams, memory of device and host."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.profiling.memory import memory_breakdown
from deepspeed.runtime.gradients import host_landing
from deepspeed.runtime.gradients import reducer as reducer_module
from deepspeed.runtime.gradients.host_memory import HostMemory
from deepspeed.runtime.gradients.streams import SideStream
from deepspeed.runtime.zero import sharded_parameter
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import get_state_devices
from unit.common import DistributedTest
from unit.offload_cases import BF16, CASES, ON_HOST, Case, adamw, compare, cpu_adam, reentrant, two_backwards

pytestmark = pytest.mark.cuda
SLEEP = 2_000_000  # device clock cycles: about a millisecond
WIDTH, LAYERS, BUCKET = 2048, 24, 2 * 2048 * 2048
ON_HOST_3 = {"offload_param": {"device": "cpu"}, **ON_HOST}


class SlowSide(SideStream):
    """Whatever runs on the side stream is late: copies to and from the host must be waited for."""

    @contextmanager
    def side(self):
        with super().side():
            torch.cuda._sleep(SLEEP)
            yield


def slow(device: torch.device) -> SideStream:
    return SlowSide(device)


class TestOnTheDevice(DistributedTest):
    world_size = 1
    requires_cuda_env = True
    exec_timeout = 300.0

    @pytest.mark.parametrize("late", [False, True], ids=["", "late"])
    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_cases(self, stage: int, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_landing, "STAGE", 7)
        if late:
            monkeypatch.setattr(reducer_module, "order_for", slow)
            monkeypatch.setattr(sharded_parameter, "order_for", slow)
        for case in CASES[late::2]:
            compare(stage, case, case.offload)

    def test_stage_3(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reducer_module, "order_for", slow)
        monkeypatch.setattr(sharded_parameter, "order_for", slow)
        for offload in (
            {"offload_param": {"device": "cpu"}},
            ON_HOST_3,
            {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        ):
            compare(3, Case(reentrant, accumulation=4, optimizer=adamw, clip=0.5), offload)
            compare(3, Case(two_backwards, dtype=BF16, optimizer=cpu_adam, clip=0.5), offload)

    def test_pinned_memory(self) -> None:
        memory = HostMemory()
        for numel in (1, 5, 4096, 1_000_003):
            tensor = memory.empty(numel, torch.float32)
            assert tensor.is_pinned() and tensor.numel() == numel
            assert tensor[-1:].is_pinned() and tensor.fill_(2).cuda().sum().item() == 2 * numel
        assert not HostMemory(pinned=False).empty(5, torch.float32).is_pinned()


def make_large(stage: int, zero: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BUCKET,
            "sub_group_size": 4 * WIDTH * WIDTH,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": WIDTH * WIDTH,
            "stage3_max_live_parameters": 3 * WIDTH * WIDTH,
            "stage3_max_reuse_distance": 0,
            **zero,
        },
    }
    optimizer = DeepSpeedCPUAdam if "offload_optimizer" in zero else FusedAdam
    return deepspeed.initialize(model=model, optimizer=optimizer(model.parameters(), lr=1e-4), config=config)[0]


def allocated_by_libraries() -> int:
    """Bytes allocated once matrices have been multiplied on the streams of forward and backward."""
    matrix = torch.ones(256, 256, device="cuda", dtype=BF16, requires_grad=True)
    (matrix @ matrix).sum().backward()
    matrix.grad = None
    del matrix
    return torch.cuda.memory_allocated()


def train(engine: Any, steps: int) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(8, WIDTH, device="cuda", dtype=BF16)).float().square().mean())
        engine.step()


class TestMemory(DistributedTest):
    world_size = 1
    requires_cuda_env = True
    exec_timeout = 300.0

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_device_and_host(self, stage: int) -> None:
        """Device: weights and at most two buckets (communication, ``.grad``, the way to the host), and activations.
        Host: 16 bytes per parameter, and two buffers for weights."""
        before = allocated_by_libraries()
        numel, bucket = LAYERS * WIDTH * WIDTH, 2 * BUCKET
        engine = make_large(stage, ON_HOST)
        train(engine, 2)
        torch.cuda.reset_peak_memory_stats()
        train(engine, 2)
        found = memory_breakdown(engine)
        peak = torch.cuda.max_memory_allocated() - before
        print(
            f"stage {stage}: peak {peak / 2**20:.1f} MiB, weights {2 * numel / 2**20:.1f}, bucket {bucket / 2**20:.1f}"
        )
        print(found)
        assert peak <= 2 * numel + 2 * bucket + 2**21
        assert found.on_host == 16 * numel + 4 * len(engine.optimizer.reducer.layout.groups)  # and counts of steps
        assert engine.optimizer.weights.staging.nbytes == 2 * 2 * 4 * WIDTH * WIDTH
        assert all(memory.is_pinned() for shard in engine.optimizer.reducer.shards for memory in shard.memory())

    def test_weights_on_the_host(self) -> None:
        before = allocated_by_libraries()
        engine = make_large(3, ON_HOST_3)
        train(engine, 2)
        torch.cuda.reset_peak_memory_stats()
        train(engine, 2)
        peak, numel = torch.cuda.max_memory_allocated() - before, LAYERS * WIDTH * WIDTH
        print(f"weights on the host: peak {peak / 2**20:.1f} MiB of {2 * numel / 2**20:.1f}")
        assert peak <= 2 * 4 * WIDTH * WIDTH + 2 * 2 * BUCKET + 2**26
        assert all(p.ds_tensor.is_pinned() for p in engine.module.parameters())

    def test_moving_states(self) -> None:
        before = allocated_by_libraries()
        for stage in (1, 3):
            engine = make_large(stage, {})
            train(engine, 1)
            held = torch.cuda.memory_allocated() - before
            for non_blocking in (False, True):
                engine.offload_states(non_blocking=non_blocking)
                left = torch.cuda.memory_allocated() - before
                print(f"stage {stage}: {held / 2**20:.1f} MiB held, {left / 2**20:.1f} left")
                assert left < 0.05 * held
                assert get_state_devices(engine, OffloadStateTypeEnum.hp_params) == {torch.device("cpu")}
                engine.reload_states(non_blocking=non_blocking)
                train(engine, 1)
            engine.destroy()
            del engine
