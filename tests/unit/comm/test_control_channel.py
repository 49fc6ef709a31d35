# SPDX-License-Identifier: Apache-2.0
"""Host-side agreements: right numbers, their own connection, and errors that say what went wrong."""

import gc
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist

import deepspeed.comm as dist
from deepspeed.comm import control
from deepspeed.comm.control import ControlChannel
from unit.common import DistributedTest


def test_one_process_without_a_group_agrees_with_itself():
    channel = ControlChannel()
    assert (channel.rank, channel.world_size) == (0, 1)
    assert channel.all_reduce_max([3, -4]) == [3, -4]
    assert channel.gather({"a": 1}) == [{"a": 1}]


class TestAgreement(DistributedTest):
    world_size = 3

    def test_maximum_and_gather(self):
        rank = dist.get_rank()
        channel = ControlChannel(dist.get_world_group())
        big = 2**62 + rank  # exact in int64, not in a float
        assert channel.all_reduce_max([rank, -rank, big]) == [2, 0, 2**62 + 2]
        assert channel.all_reduce_max([7]) == [7]
        assert channel.all_reduce_max([]) == []
        assert channel.gather("x" * rank * 1000) == ["", "x" * 1000, "x" * 2000]

    def test_without_gloo_the_group_itself_is_used(self, monkeypatch):
        monkeypatch.setattr(torch_dist, "is_gloo_available", lambda: False)
        channel = ControlChannel()
        assert channel._link.gloo is None
        assert channel.all_reduce_max([dist.get_rank(), 5]) == [2, 5]
        assert channel.gather(dist.get_rank()) == [0, 1, 2]

    def test_only_members_of_a_subgroup_call(self):
        rank = dist.get_rank()
        group = dist.new_group([0, 2])
        if rank == 1:
            with pytest.raises(RuntimeError, match="global rank 1 is not in the process group"):
                ControlChannel(group)
        else:
            channel = ControlChannel(group)
            assert (channel.rank, channel.world_size) == (rank // 2, 2)
            assert channel.all_reduce_max([rank]) == [2]
        # Ranks have made different numbers of connections by now, and can still meet.
        assert ControlChannel().all_reduce_max([rank]) == [2]

    def test_does_not_mix_with_collectives_of_the_group(self):
        """Ranks interleave agreements and collectives differently; on one connection this would exchange them."""
        rank = dist.get_rank()
        channel = ControlChannel()
        tensor = torch.tensor([float(rank)])
        if rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            agreed = channel.all_reduce_max([100 + rank])
            work.wait()
        else:
            agreed = channel.all_reduce_max([100 + rank])
            dist.all_reduce(tensor)
        assert agreed == [102] and tensor.item() == 3.0


class TestLifetime(DistributedTest):
    world_size = 2

    def test_one_connection_per_group(self):
        first, second = ControlChannel(), ControlChannel(dist.get_world_group())
        assert first._link is second._link
        assert ControlChannel(dist.new_group([0, 1]))._link is not first._link
        assert len(control._links) == 2

    def test_destroyed_group_takes_its_connection_along(self):
        group = dist.new_group([0, 1])
        channel = ControlChannel(group)
        gloo = weakref.ref(channel._link.gloo)
        dist.destroy_process_group(group)
        gc.collect()
        assert gloo() is None and not control._links
        with pytest.raises(RuntimeError, match=r"rank \d of 2.*agree on the overflow flag.*destroyed"):
            channel.all_reduce_max([1], what="the overflow flag")

    @pytest.mark.parametrize("by", ["facade", "torch"])
    def test_new_world_gets_a_new_connection(self, by, tmp_path):
        rank = dist.get_rank()
        for round_number in range(3):
            channel = ControlChannel()
            assert channel.all_reduce_max([rank + round_number]) == [1 + round_number]
            assert len(control._links) == 1
            (dist if by == "facade" else torch_dist).destroy_process_group()
            # Not env://: a fast rank may still meet the server of the world before.
            dist.init_distributed(init_method=f"file://{tmp_path}/{round_number}", rank=rank, world_size=2)

    def test_group_of_the_same_name_made_again(self):
        """Same store, same group name: the second connection must not read the first one's addresses."""
        for _ in range(3):
            link = control._Link(dist.get_world_group(), dist.get_rank(), 2)
            assert link.all_reduce_max([dist.get_rank()]) == [1]
            link.close()


class TestFailure(DistributedTest):
    world_size = 2
    init_distributed = False

    def test_silent_peer_is_reported(self):
        dist.init_distributed(timeout=timedelta(seconds=2))
        channel = ControlChannel()
        if dist.get_rank() == 0:
            start = time.monotonic()
            with pytest.raises(RuntimeError) as caught:
                channel.all_reduce_max([1], what="the number of corrections")
            assert 1 < time.monotonic() - start < 20
            for part in ("rank 0 of 2", "the number of corrections", "DEEPSPEED_TIMEOUT", "other ranks' logs"):
                assert part in str(caught.value)
        else:
            time.sleep(4)
