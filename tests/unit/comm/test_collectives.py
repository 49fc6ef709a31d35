# SPDX-License-Identifier: Apache-2.0
"""Every collective of the façade gives the right numbers, on backends that have it and on those that do not."""

import pytest
import torch
import torch.distributed as torch_dist

import deepspeed.comm as dist
from deepspeed.comm import torch as torch_backend
from unit.common import DistributedTest

OPS = {"SUM": 6.0, "AVG": 2.0, "MAX": 3.0, "MIN": 1.0, "PRODUCT": 6.0}  # of 1, 2, 3


@pytest.fixture(params=["native", "emulated"])
def route(request):
    return request.param


def choose(route, monkeypatch):
    """Let the backend's own operations be used, or act as if gloo were the one of torch 2.4."""
    if route == "emulated":
        monkeypatch.setattr(torch_backend, "_TORCH_RELEASE", (2, 4))
    torch_backend._has.cache_clear()


class TestReductions(DistributedTest):
    world_size = 3
    reuse_dist_env = True

    @pytest.mark.parametrize("async_op", [False, True])
    @pytest.mark.parametrize("op", list(OPS))
    def test_all_forms(self, op, async_op, route, monkeypatch):
        choose(route, monkeypatch)
        rank, expected = dist.get_rank(), OPS[op]
        op = dist.ReduceOp[op]

        def finish(work):
            assert (work is not None) == async_op
            if async_op:
                work.wait()

        tensor = torch.full((5,), rank + 1.0)
        finish(dist.all_reduce(tensor, op=op, async_op=async_op))
        assert tensor.tolist() == [expected] * 5

        tensor = torch.full((5,), rank + 1.0)
        finish(dist.reduce(tensor, 1, op=op, async_op=async_op))
        assert rank != 1 or tensor.tolist() == [expected] * 5

        whole = torch.arange(3.0).repeat_interleave(2) * 0 + rank + 1.0
        whole[4:] *= 10
        kept = whole.clone()
        shard = torch.empty(2)
        finish(dist.reduce_scatter_tensor(shard, whole, op=op, async_op=async_op))
        scale = 1 if rank < 2 else 1000 if op is dist.ReduceOp.PRODUCT else 10
        assert shard.tolist() == [expected * scale] * 2
        assert torch.equal(whole, kept)

        shard = torch.empty(2)
        pieces = list(whole.split(2))
        finish(dist.reduce_scatter(shard, pieces, op=op, async_op=async_op))
        assert shard.tolist() == [expected * scale] * 2
        assert torch.equal(torch.cat(pieces), kept)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_averages_in_every_dtype(self, dtype, route, monkeypatch):
        choose(route, monkeypatch)
        tensor = torch.full((4,), dist.get_rank() + 1, dtype=dtype)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        shard = torch.empty(2, dtype=dtype)
        dist.reduce_scatter_tensor(shard, torch.full((6,), dist.get_rank() + 1, dtype=dtype), op=dist.ReduceOp.AVG)
        assert tensor.tolist() == [2.0] * 4 and shard.tolist() == [2.0] * 2

    def test_average_over_a_subgroup_divides_by_its_size(self, route, monkeypatch):
        choose(route, monkeypatch)
        group = dist.new_group([0, 2])
        tensor = torch.tensor([dist.get_rank() + 1.0])
        if dist.get_rank() != 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group)
        assert tensor.item() == 2.0

    def test_torch_operators_are_accepted(self):
        tensor = torch.tensor([dist.get_rank()])
        dist.all_reduce(tensor, torch_dist.ReduceOp.MAX)
        assert tensor.item() == 2

    def test_unused_is_refused(self):
        with pytest.raises(ValueError, match="UNUSED"):
            dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.UNUSED)

    @pytest.mark.parametrize("async_op", [False, True])
    def test_coalesced(self, async_op):
        rank = dist.get_rank()
        tensors = [torch.full((size,), float(rank)) for size in (1, 3)]
        outputs = [torch.empty(3), torch.empty(9)]
        works = [
            dist.all_gather_coalesced(outputs, [t.clone() for t in tensors], async_op=async_op),
            dist.all_reduce_coalesced(tensors, async_op=async_op),
        ]
        for work in works:
            assert (work is not None) == async_op
            if async_op:
                work.wait()
        assert [t.tolist() for t in tensors] == [[3.0], [3.0] * 3]
        assert outputs[0].tolist() == [0, 1, 2] and outputs[1].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert dist.all_reduce_coalesced([]) is None


class TestCopies(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    def test_gathers_and_broadcast(self):
        rank = dist.get_rank()
        mine = torch.tensor([rank, rank + 10])
        pieces = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(pieces, mine)
        flat = torch.empty(4, dtype=mine.dtype)
        dist.all_gather_into_tensor(flat, mine)
        also_flat = torch.empty(4, dtype=mine.dtype)
        dist.allgather_fn(also_flat, mine)
        assert torch.cat(pieces).tolist() == flat.tolist() == also_flat.tolist() == [0, 10, 1, 11]
        dist.broadcast(mine, src=1)
        assert mine.tolist() == [1, 11]

    def test_gather_and_scatter(self):
        rank = dist.get_rank()
        gathered = [torch.empty(1), torch.empty(1)] if rank == 1 else None
        dist.gather(torch.tensor([rank + 1.0]), gathered, dst=1)
        assert rank == 0 or torch.cat(gathered).tolist() == [1.0, 2.0]
        received = torch.empty(1)
        dist.scatter(received, [torch.tensor([7.0]), torch.tensor([8.0])] if rank == 0 else None, src=0)
        assert received.item() == 7.0 + rank

    def test_objects(self):
        everyone = [None, None]
        dist.all_gather_object(everyone, {"rank": dist.get_rank()})
        assert everyone == [{"rank": 0}, {"rank": 1}]
        objects = [("from", dist.get_rank())]
        dist.broadcast_object_list(objects, src=1)
        assert objects == [("from", 1)]

    @pytest.mark.parametrize("async_op", [False, True])
    def test_all_to_all_with_uneven_parts(self, async_op):
        rank = dist.get_rank()
        to_send = [torch.full((1,), 10.0 * rank), torch.full((2,), 10.0 * rank + 1)]
        received = [torch.empty(rank + 1), torch.empty(rank + 1)]
        work = dist.all_to_all(received, to_send, async_op=async_op)
        if async_op:
            work.wait()
        assert [t.tolist() for t in received] == [[0.0 + rank] * (rank + 1), [10.0 + rank] * (rank + 1)]
        single = torch.empty(2)
        dist.all_to_all_single(single, torch.tensor([rank, rank + 10.0]))
        assert single.tolist() == ([0.0, 1.0] if rank == 0 else [10.0, 11.0])

    def test_point_to_point(self):
        rank, peer = dist.get_rank(), 1 - dist.get_rank()
        sent, received = torch.tensor([float(rank)]), torch.empty(1)
        works = [dist.isend(sent, peer), dist.irecv(received, peer)]
        for work in works:
            work.wait()
        assert received.item() == peer
        received.zero_()
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        ):
            work.wait()
        assert received.item() == peer
        if rank == 0:
            dist.send(torch.tensor([5.0]), 1)
        else:
            assert dist.recv(received, 0) == 0 and received.item() == 5.0
        with pytest.raises(ValueError, match="isend or irecv"):
            dist.P2POp(dist.send, sent, peer)

    def test_ranks_and_groups(self):
        rank = dist.get_rank()
        assert dist.get_world_size() == 2 and dist.get_local_rank() == rank
        group = dist.new_group([1])
        assert dist.get_rank(group) == (0 if rank == 1 else -1)
        if rank == 1:
            assert dist.get_global_rank(group, 0) == 1 and dist.get_all_ranks_from_group(group) == [1]
        assert dist.get_global_rank(None, 1) == 1 and dist.get_all_ranks_from_group() == [0, 1]
        dist.barrier()
        dist.monitored_barrier()
        mesh = dist.initialize_mesh_device((2, 1), ("data_parallel", "tensor_parallel"))
        assert dist.get_world_size(mesh.get_group("data_parallel")) == 2
