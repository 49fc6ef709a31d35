# SPDX-License-Identifier: Apache-2.0
"""Process groups of each form of parallelism, and that none outlives its world."""

import gc
import os
import types
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist

import deepspeed.comm as dist
from deepspeed.comm.torch import timeout_of
from deepspeed.utils import groups
from unit.common import DistributedTest

EXPERT_FUNCTIONS = [name for name in vars(groups) if name.startswith(("_get", "_create")) and "expert" in name]


@pytest.mark.parametrize("name", EXPERT_FUNCTIONS)
def test_expert_parallelism_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"expert parallelism.*{name}"):
        getattr(groups, name)(2)


def test_there_are_expert_functions():
    assert len(EXPERT_FUNCTIONS) > 15


def test_initialize_with_experts():
    with pytest.raises(NotImplementedError, match="expert"):
        groups.initialize(ep_size=2)


def reduce_over(group):
    tensor = torch.tensor([1.0 * 10 ** dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    return int(tensor.item())


def start_world(meeting_place):
    """A world of its own store: with ``env://`` a fast rank may still meet the server of the world before."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_distributed(init_method=f"file://{meeting_place}", rank=rank, world_size=size)


class TestWithoutMpu(DistributedTest):
    world_size = 2
    init_distributed = False

    def test_data_parallel_group_is_its_own_with_the_worlds_timeout(self):
        dist.init_distributed(timeout=timedelta(seconds=55))
        group = groups._get_data_parallel_group()
        assert group is not dist.get_world_group() and group is groups._clone_world_group()
        assert timeout_of(group) == timedelta(seconds=55)
        assert reduce_over(group) == 11
        assert groups._get_data_parallel_world_size() == groups.get_data_parallel_world_size() == 2
        assert groups._get_data_parallel_rank() == groups.get_data_parallel_rank() == dist.get_rank()
        assert groups._get_data_parallel_group_ranks() == [0, 1]
        assert groups._get_broadcast_src_rank() == 0

    def test_no_sequence_or_model_parallelism(self):
        dist.init_distributed()
        assert groups._get_sequence_parallel_world_size() == 1 and groups._get_sequence_parallel_rank() == 0
        with pytest.raises(KeyError, match="sequence"):
            groups._get_sequence_parallel_group()
        assert groups._get_sequence_data_parallel_group() is groups._get_data_parallel_group()
        assert groups._get_sequence_data_parallel_world_size() == 2
        assert groups._get_sequence_data_parallel_rank() == dist.get_rank()
        assert groups._get_model_parallel_world_size() == groups.get_tensor_model_parallel_world_size() == 1
        assert groups.get_tensor_model_parallel_group() is None and groups.get_model_parallel_rank() == 0
        assert groups.get_tensor_model_parallel_src_rank() == dist.get_rank()

    @pytest.mark.parametrize("by", ["facade", "torch"])
    def test_nothing_outlives_the_world(self, by, tmp_path):
        made = []
        for world in range(3):
            start_world(tmp_path / str(world))
            assert not groups._zero_param_parallel_is_initialized() and groups.mesh_device is None
            made.append(groups._get_data_parallel_group())
            assert reduce_over(made[-1]) == 11
            groups._create_zero_param_parallel_group(1)
            assert groups._zero_param_parallel_is_initialized()
            (dist if by == "facade" else torch_dist).destroy_process_group()
        assert len({id(group) for group in made}) == 3

    def test_mesh_does_not_outlive_the_world(self, tmp_path):
        start_world(tmp_path / "first")
        groups._init_tp_mesh_device(2)
        assert groups._get_data_parallel_world_size() == 1
        torch_dist.destroy_process_group()
        start_world(tmp_path / "second")
        assert groups._get_data_parallel_world_size() == 2

    def test_groups_are_not_kept_alive(self, tmp_path):
        start_world(tmp_path / "world")
        references = [weakref.ref(groups._clone_world_group()), weakref.ref(dist.get_world_group())]
        torch_dist.destroy_process_group()
        gc.collect()
        assert [reference() for reference in references] == [None, None]

    @pytest.mark.parametrize("by", ["facade", "torch"])
    def test_destroyed_group_is_forgotten(self, by):
        dist.init_distributed()
        first = groups._clone_world_group()
        (dist if by == "facade" else torch_dist).destroy_process_group(first)
        second = groups._clone_world_group()
        assert second is not first and reduce_over(second) == 11


class TestModelParallel(DistributedTest):
    world_size = 4

    def test_groups_made_here(self):
        rank = dist.get_rank()
        groups._init_tp_groups_with_new_group(2)
        assert dist.get_all_ranks_from_group(groups.get_tensor_model_parallel_group()) == [[0, 1], [2, 3]][rank // 2]
        assert groups._get_data_parallel_group_ranks() == [[0, 2], [1, 3]][rank % 2]
        assert groups.get_tensor_model_parallel_world_size() == groups.get_data_parallel_world_size() == 2
        assert (groups.get_tensor_model_parallel_rank(), groups.get_data_parallel_rank()) == (rank % 2, rank // 2)
        assert groups.get_tensor_model_parallel_src_rank() == rank // 2 * 2
        assert groups._get_broadcast_src_rank() == rank % 2
        groups.set_tensor_model_parallel_world_size(8)
        groups.set_tensor_model_parallel_rank(5)
        assert (groups.get_model_parallel_world_size(), groups.get_model_parallel_rank()) == (8, 5)

    def test_sizes_that_do_not_fit(self):
        with pytest.raises(AssertionError, match="4 is not divisible by 3"):
            groups._init_tp_groups_with_new_group(3)
        with pytest.raises(AssertionError, match="world size 4"):
            groups._init_tp_groups_with_new_group(2, data_parallel_size=4)

    def test_returned_groups(self):
        data, model = groups._create_model_parallel(2)
        assert dist.get_all_ranks_from_group(model) == [[0, 1], [2, 3]][dist.get_rank() // 2]
        assert dist.get_all_ranks_from_group(data) == [[0, 2], [1, 3]][dist.get_rank() % 2]

    def test_mesh(self):
        groups._init_tp_mesh_device(2)
        rank = dist.get_rank()
        assert groups._get_data_parallel_group_ranks() == [[0, 2], [1, 3]][rank % 2]
        assert groups.get_tensor_model_parallel_world_size() == 2
        assert groups.get_tensor_model_parallel_rank() == rank % 2

    def test_secondary_partitions(self):
        groups._create_zero_param_parallel_group(2)
        rank = dist.get_rank()
        assert groups._get_zero_param_intra_parallel_group_ranks() == [[0, 1], [2, 3]][rank // 2]
        assert groups._get_zero_param_intra_parallel_rank_in_mygroup() == rank % 2
        assert groups._get_zero_param_intra_parallel_group_world_size() == 2

    def test_megatron_style_mpu(self):
        rank = dist.get_rank()
        data, model = groups._create_model_parallel(2)
        mpu = types.SimpleNamespace(
            get_model_parallel_group=lambda: model,
            get_model_parallel_world_size=lambda: 2,
            get_model_parallel_rank=lambda: rank % 2,
            get_data_parallel_group=lambda: data,
            get_data_parallel_world_size=lambda: 2,
            get_data_parallel_rank=lambda: rank // 2,
        )
        groups.initialize(mpu=mpu)
        assert groups._get_data_parallel_group() is groups._get_sequence_data_parallel_group() is data
        assert groups.get_model_parallel_group() is model
        assert (groups._get_data_parallel_world_size(), groups._get_data_parallel_rank()) == (2, rank // 2)
        assert (groups._get_model_parallel_world_size(), groups.get_tensor_model_parallel_rank()) == (2, rank % 2)
        assert groups._get_broadcast_src_rank() == rank % 2

    def test_mpu_with_sequence_functions_only(self):
        """As Ulysses gives it: consecutive ranks share a sample, ZeRO shards over all."""
        rank = dist.get_rank()
        _, sequence = groups._create_model_parallel(2)
        groups.mpu = types.SimpleNamespace(
            get_sequence_parallel_group=lambda: sequence,
            get_sequence_parallel_world_size=lambda: 2,
            get_sequence_parallel_rank=lambda: rank % 2,
        )
        assert groups._get_sequence_parallel_group() is sequence
        assert (groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()) == (2, rank % 2)
        assert (groups._get_data_parallel_world_size(), groups._get_data_parallel_rank()) == (2, rank // 2)
        assert groups._get_sequence_data_parallel_world_size() == 4
        assert groups._get_broadcast_src_rank() == 0
        with pytest.raises(RuntimeError, match="get_data_parallel_group"):
            groups._get_data_parallel_group()
