# SPDX-License-Identifier: Apache-2.0
"""Bytes are counted: what is held after a backward, over many steps, and after an engine is gone."""

from __future__ import annotations

import gc
import os
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.runtime.gradients.ledger import ParameterRecord
from unit.common import DistributedTest
from unit.runtime import engine_cases as cases

WIDTH = 96
PAGE = os.sysconf("SC_PAGE_SIZE")


class Tower(nn.Module):
    """Two branches of about 37,000 parameters each, of which a backward uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))) for _ in range(2))

    def forward(self, x: Tensor, which: tuple[int, ...]) -> Tensor:
        return sum(self.branches[i](x.to(self.branches[0][0].weight.dtype)).float().square().mean() for i in which)


def live_bytes() -> int:
    """Bytes of all storages that Python can reach."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and not found.is_meta:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def settled_bytes() -> int:
    """Live bytes once the transport's threads have let go of the tensors of the last collective."""
    seen = []
    for _ in range(5):
        seen.append(live_bytes())
        time.sleep(0.01)
    return min(seen)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE


def train(engine: Any, step: int) -> None:
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))
    engine.backward(engine(x, [(0,), (1,), (0, 1)][step % 3]))
    engine.step()


class TestHeldBytes(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_stage_2_holds_its_share_and_two_buckets(self, dtype: str) -> None:
        width = cases.DTYPES[dtype].itemsize
        for persistent in (True, False):
            for overlap in (True, False):
                size = 20_000
                zero = {"reduce_bucket_size": size, "contiguous_gradients": persistent, "overlap_comm": overlap}
                engine = cases.make_engine(cases.make_config(2, dtype, gas=2, zero=zero), Tower())
                before = settled_bytes()
                loss = engine(torch.ones(2, WIDTH), (0, 1))
                engine.backward(loss)
                del loss
                reducer = engine._stepper.reducer
                (group,) = reducer.layout.groups
                shard = 4 * group.padded_numel // dist.get_world_size()
                assert [s.nbytes for s in reducer.shards] == [shard], "fp32, one rank's share"
                assert all(p.grad is None for p in engine.module.parameters())
                assert all(bucket.local is None for bucket in reducer.buckets)
                buffers = reducer.transport.pool.nbytes
                assert buffers == reducer.buffer_nbytes
                assert (0 < buffers <= 2 * size * width) if persistent else buffers == 0
                grown = settled_bytes() - before
                slack = 4096  # norms, flags, the loss
                assert shard <= grown <= shard + buffers + slack, f"{dtype} {zero}: {grown} bytes more after backward"
                engine.step()
                engine.destroy()
                del engine, reducer, group

    def test_stages_0_and_1_hold_one_local_buffer_while_they_accumulate(self) -> None:
        for stage in (0, 1):
            engine = cases.make_engine(cases.make_config(stage, gas=2), Tower())
            before = settled_bytes()
            for _ in range(3):
                engine.backward(engine(torch.ones(2, WIDTH), (0, 1)))
                engine.set_gradient_accumulation_boundary(False)
                engine.step()
            reducer = engine._stepper.reducer
            flat = 4 * sum(group.padded_numel for group in reducer.layout.groups)
            assert reducer.buffer_nbytes == flat and all(p.grad is None for p in engine.module.parameters())
            assert flat <= settled_bytes() - before <= flat + 4096
            engine.destroy()
            del engine, reducer

    def test_nothing_grows_over_alternating_branches(self) -> None:
        for stage in (0, 1, 2):
            engine = cases.make_engine(cases.make_config(stage, zero={"reduce_bucket_size": 20_000}), Tower())
            counts = []
            for step in range(50):
                train(engine, step)
                if step in (9, 49):
                    objects = sum(1 for o in gc.get_objects() if issubclass(type(o), (Tensor, ParameterRecord)))
                    counts.append((settled_bytes(), objects))
            assert counts[0][0] == counts[1][0], f"stage {stage}: bytes at step 10 and 50: {counts}"
            assert counts[1][1] <= counts[0][1] + 4, f"stage {stage}: tensors at step 10 and 50: {counts}"
            engine.destroy()


class TestEnginesComeAndGo(DistributedTest):
    world_size = 2

    @pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the resident set from procfs")
    def test_twenty_engines_leave_nothing(self) -> None:
        held, resident = [], []
        for i in range(20):
            engine = cases.make_engine(cases.make_config(i % 3), Tower(), lambda ps: torch.optim.AdamW(ps, lr=1e-3))
            train(engine, 0)
            engine.destroy()
            del engine
            held.append(settled_bytes())
            resident.append(resident_bytes())
        assert len(set(held[3:])) == 1, f"live bytes: {held}"
        one_engine = 4 * 4 * sum(p.numel() for p in Tower().parameters())
        growth = resident[-1] - resident[7]
        assert growth < 4 * one_engine, f"resident set grew by {growth} bytes over 12 engines of about {one_engine}"

    def test_deleting_without_destroy_frees_the_masters_though_the_model_lives(self) -> None:
        """#92"""
        for stage in (0, 1, 2):
            model = Tower()
            engine = cases.make_engine(
                cases.make_config(stage, "bf16"), model, lambda ps: torch.optim.AdamW(ps, lr=1e-3)
            )
            train(engine, 2)
            stepper = engine._stepper
            masters = [p for g in engine.basic_optimizer.param_groups for p in g["params"]]
            watched = [weakref.ref(t) for t in (*masters, stepper, stepper.reducer.shards[0])]
            before = settled_bytes()
            del engine, stepper, masters
            gc.collect()
            assert [w for w in watched if w() is not None] == [], f"stage {stage}"
            elements = sum(p.numel() for p in model.parameters())
            share = elements if stage == 0 else elements / dist.get_world_size()
            freed = before - settled_bytes()
            assert freed >= 12 * share, f"stage {stage}: masters and two moments are {12 * share} bytes, freed {freed}"
            assert all(p.grad is None for p in model.parameters())
            loss = model(torch.ones(2, WIDTH), (0, 1))
            loss.backward()
            assert all(p.grad is not None for p in model.parameters()), "the model is an ordinary model again"

    def test_destroy_twice_and_use_after(self) -> None:
        for stage in (0, 1, 2):
            model = Tower()
            engine = cases.make_engine(cases.make_config(stage), model)
            train(engine, 0)
            engine.destroy()
            engine.destroy()
            assert not any(hasattr(p, "_hp_mapping") for p in model.parameters())
            assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
            with pytest.raises((AssertionError, RuntimeError)):
                engine.backward(engine(torch.ones(2, WIDTH), (0,)))
            again = cases.make_engine(cases.make_config(2 - stage), model)
            train(again, 1)
            assert again.was_step_applied()
