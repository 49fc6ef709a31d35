# SPDX-License-Identifier: Apache-2.0
"""With an offloaded optimizer a gradient is the same as without: against float64 autograd, and bit by bit against the
same run in memory. On a machine without a device the copies are made all the same."""

from __future__ import annotations

import pytest

import deepspeed.comm as dist
from deepspeed.runtime.gradients import host_landing
from unit.common import DistributedTest
from unit.graphs import two_backwards
from unit.offload_cases import BF16, CASES, ON_HOST, Case, adamw, compare, cpu_adam, make, reentrant


class TestSameAsInMemory(DistributedTest):
    world_size = [1, 2, 3]
    reuse_dist_env = True

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_gradients_norms_and_weights(self, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """All cases at every stage, a third of them on each number of ranks."""
        monkeypatch.setattr(host_landing, "STAGE", 7)  # so that results come in several pieces
        for case in CASES[(stage + dist.get_world_size()) % 3 :: 3]:
            compare(stage, case, case.offload)

    @pytest.mark.parametrize("which", ["weights", "weights and state", "half of the state"])
    def test_stage_3(self, which: str) -> None:
        offload = {
            "weights": {"offload_param": {"device": "cpu"}},
            "weights and state": {"offload_param": {"device": "cpu"}, **ON_HOST},
            "half of the state": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        }[which]
        cut = which == "half of the state"
        compare(3, Case(reentrant, accumulation=4, optimizer=adamw, clip=0.5, exact=not cut), offload)
        compare(3, Case(two_backwards, dtype=BF16, optimizer=cpu_adam, clip=0.5, exact=not cut), offload)


class TestShareOnTheHost(DistributedTest):
    world_size = 2

    def test_ratio(self) -> None:
        """Parameters are taken in order until the share is reached."""
        for ratio, expected in ((0.0, 0.0), (0.3, 0.3), (1.0, 1.0)):
            engine = make(3, Case(), {"offload_optimizer": {"device": "cpu", "ratio": ratio}, "sub_group_size": 20})
            groups = engine.optimizer.reducer.layout.groups
            share = sum(group.shard_numel for group in groups if group.on_host) / sum(g.shard_numel for g in groups)
            assert expected <= share < expected + 0.35 and (share == expected or 0 < ratio < 1), (ratio, share)
            assert engine.zero_partial_offload() == ratio
            engine.destroy()
