# SPDX-License-Identifier: Apache-2.0
"""Where the device's memory is scarce, the reduced gradient has memory from its first result to the step alone, part by
part; what is computed is the same, bit by bit. The rule for devices is set for the CPU here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.runtime.gradients import gradient_shard
from deepspeed.runtime.gradients import transport as transport_module
from deepspeed.runtime.gradients.gradient_shard import Keeping
from deepspeed.runtime.gradients.layout import FlatPartition, PerParameter, make_flat_groups
from deepspeed.runtime.gradients.ledger import ParameterRecord
from deepspeed.runtime.gradients.streams import HostOrder
from unit.common import DistributedTest
from unit.graphs import assert_gradients, full_gradients, two_backwards, weights_of
from unit.offload_cases import (
    BF16,
    EXACTLY,
    FP32,
    Case,
    adamw,
    fused_adam,
    make,
    reentrant,
    reference,
    run_window,
    sgd,
)

CASES = [
    Case(optimizer=fused_adam, clip=0.5),
    Case(two_backwards, "tensor.backward", 2, optimizer=sgd, clip=0.5),
    Case(reentrant, "tensor.backward", 2, dtype=BF16, optimizer=fused_adam),
    Case(two_backwards, accumulation=2, dtype=BF16, optimizer=adamw, zero={"overlap_comm": True}),
    Case(optimizer=fused_adam, zero={"reduce_bucket_size": 1000, "reduce_scatter": False}),
]


def shards_of(engine: Any) -> list[Any]:
    return engine.optimizer.reducer.shards


def fill_with_nan(engine: Any) -> None:
    """What is allocated holds whatever was there before: that nobody reads it, every element must show."""
    for shard in shards_of(engine):
        shard._allocate = lambda numel, dtype=shard.dtype: torch.full((numel,), float("nan"), dtype=dtype)


def make_pair(stage: int, case: Case, patch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """An engine that holds the memory of its gradients, and one that does not."""
    patch.setattr(gradient_shard, "LEAST_PART", 8)
    patch.setattr(gradient_shard, "ALIGNMENT", 1)
    patch.setattr(transport_module, "LARGE_BUFFER", 1)
    holding = make(stage, case, case.zero)
    patch.setattr(transport_module, "HOLDING", set())
    sparing = make(stage, case, case.zero)
    fill_with_nan(sparing)
    return holding, sparing


class TestGradientsWithoutLastingMemory(DistributedTest):
    world_size = [1, 2, 3]
    reuse_dist_env = True

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_same_gradients_norms_and_weights(self, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
        for case in CASES:
            holding, sparing = make_pair(stage, case, monkeypatch)
            in_parts = case.optimizer is fused_adam
            assert all(s.keeping is (Keeping.PARTS if in_parts else Keeping.WINDOW) for s in shards_of(sparing))
            for window in range(2):
                expected = reference(sparing, case, window)
                assert not any(shard.memory() for shard in shards_of(sparing)), "a gradient before the first backward"
                for engine in (holding, sparing):
                    run_window(engine, case, window)
                assert_gradients(sparing, expected, case.dtype, f"{case}, window {window}")
                if in_parts and dist.get_world_size() == 1:
                    assert max(len(shard.memory()) for shard in shards_of(sparing)) > 2
                torch.testing.assert_close(full_gradients(sparing), full_gradients(holding), **EXACTLY)
                for engine in (holding, sparing):
                    engine.step()
                    assert engine.was_step_applied()
                assert float(sparing.get_global_grad_norm()) == float(holding.get_global_grad_norm()) > 0
                torch.testing.assert_close(weights_of(sparing.module), weights_of(holding.module), **EXACTLY)
                assert not any(shard.memory() for shard in shards_of(sparing)), "a gradient after the step"
                pools = [engine.optimizer.reducer.transport.pool for engine in (sparing, holding)]
                assert pools[0].nbytes == 0 < pools[1].nbytes
            holding.destroy()
            sparing.destroy()
            monkeypatch.undo()

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_dropped_windows_and_moved_states(self, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """``zero_grad`` lets go of the memory as well; gradients that were moved to the host come back in parts."""
        case = Case(optimizer=fused_adam)
        holding, sparing = make_pair(stage, case, monkeypatch)
        for window in range(2):
            run_window(sparing, case, 7)
            sparing.optimizer.zero_grad()
            assert not any(shard.memory() for shard in shards_of(sparing))
            for engine in (holding, sparing):
                run_window(engine, case, window)
                engine.offload_states(include=["lp_grads"])
                engine.reload_states()
                engine.step()
            torch.testing.assert_close(weights_of(sparing.module), weights_of(holding.module), **EXACTLY)
        holding.destroy()
        sparing.destroy()


class TestMemoryIsLetGoOf(DistributedTest):
    world_size = 2

    def test_not_before_the_current_stream_has_waited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Gradients and communication buffers, each while it is still held, after the side stream was joined."""
        calls: list[str] = []
        given: list[int] = []

        class Recording(HostOrder):
            def join(self) -> None:
                calls.append("join")

            def hold_for_current(self, tensors: Iterable[torch.Tensor]) -> None:
                calls.append("hold")
                given.extend(tensor.data_ptr() for tensor in tensors)

        holding, sparing = make_pair(2, Case(optimizer=fused_adam), monkeypatch)
        reducer = sparing.optimizer.reducer
        reducer.transport.order = Recording()
        run_window(sparing, CASES[0], 0)
        held = {memory.data_ptr() for shard in shards_of(sparing) for memory in shard.memory()}
        held |= {buffer.data.data_ptr() for buffer in reducer.transport.pool.buffers()}
        calls.clear()
        sparing.optimizer.zero_grad()
        assert held and held == set(given) and calls[0] == "join", (calls, held, given)
        assert reducer.transport.pool.nbytes == 0 and not any(shard.memory() for shard in shards_of(sparing))
        holding.destroy()
        sparing.destroy()


class TestMemoryFollowsBackward(DistributedTest):
    world_size = 1

    def test_a_part_has_memory_once_something_landed_in_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With buckets of few elements; in a second window, in which it is known what fires."""
        case = Case(optimizer=fused_adam, zero={"reduce_bucket_size": 8})
        holding, sparing = make_pair(2, case, monkeypatch)
        run_window(sparing, case, 0)
        sparing.step()
        seen: list[int] = []
        first = next(sparing.module.parameters())
        first.register_hook(lambda gradient: seen.append(sum(shard.nbytes for shard in shards_of(sparing))))
        run_window(sparing, case, 1)
        whole = sum(4 * shard.numel for shard in shards_of(sparing))
        assert 0 < seen[0] < whole and sum(shard.nbytes for shard in shards_of(sparing)) == whole, (seen, whole)
        holding.destroy()
        sparing.destroy()


def test_cuts_are_between_parameters_and_cover_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(3,), (256,), (5, 5), (1,), (128, 7), (2,)]
    records = [ParameterRecord(torch.nn.Parameter(torch.zeros(s)), str(i), i) for i, s in enumerate(shapes)]
    for least, alignment in ((1, 1), (40, 1), (1, 128), (10_000, 1)):
        monkeypatch.setattr(gradient_shard, "LEAST_PART", least)
        monkeypatch.setattr(gradient_shard, "ALIGNMENT", alignment)
        for world in (1, 2, 3):
            for rank in range(world):
                for layout_of in (FlatPartition, PerParameter):
                    (group,) = layout_of(make_flat_groups([records]), rank, world, 10_000).groups
                    ranges = gradient_shard.cut_between_parameters(group)
                    assert ranges[0][0] == 0 and ranges[-1][1] == group.shard_numel
                    assert all(before[1] == after[0] for before, after in zip(ranges, ranges[1:]))
                    assert all(begin % alignment == 0 for begin, _ in ranges)
                    shard = gradient_shard.GradientShard(group, FP32, torch.zeros, Keeping.PARTS)
                    shard.provide(0, shard.numel)
                    assert torch.equal(shard.flat(), torch.zeros(group.shard_numel))
                    for _, _, begin, end, start in group.local_ranges():
                        assert shard.narrow(0, start, end - begin).numel() == end - begin
    with pytest.raises(IndexError, match="lie in several"):
        monkeypatch.setattr(gradient_shard, "LEAST_PART", 1)
        monkeypatch.setattr(gradient_shard, "ALIGNMENT", 1)
        (group,) = FlatPartition(make_flat_groups([records]), 0, 1, 10_000).groups
        gradient_shard.GradientShard(group, FP32, torch.zeros).narrow(0, 0, group.shard_numel)
