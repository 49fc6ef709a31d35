# SPDX-License-Identifier: Apache-2.0
"""Start of the world group: from the launcher, from MPI, adopted, or refused with the reason."""

import os
import sys
import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist

import deepspeed.comm as dist
from deepspeed.comm import comm, launcher_env
from deepspeed.comm.torch import timeout_of
from unit.common import DistributedTest

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def bare_environment(monkeypatch):
    for name in list(os.environ):
        if name in VARIABLES or name.startswith(("OMPI_", "AZ", "SM_", "DLTS")):
            monkeypatch.delenv(name)
    for name in (*VARIABLES, "NCCL_SOCKET_IFNAME"):  # undone afterwards, whatever the test's code sets
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    return monkeypatch


def open_mpi(monkeypatch, rank, size, local_rank, local_size):
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    for name, value in values.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))


@pytest.mark.parametrize("present", [(), ("RANK", "WORLD_SIZE"), ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")])
@pytest.mark.parametrize("auto", [True, False])
def test_missing_variables_are_named(bare_environment, present, auto):
    for name in present:
        bare_environment.setenv(name, "1")
    with pytest.raises(RuntimeError) as caught:
        dist.init_distributed("gloo", auto_mpi_discovery=auto)
    named = str(caught.value).split("are not set")[0]
    for name in VARIABLES:
        if name != "RANK":  # part of LOCAL_RANK
            assert (name in named) == (name not in present)


def test_open_mpi_on_one_node(bare_environment):
    open_mpi(bare_environment, 3, 4, 3, 4)
    dist.mpi_discovery(distributed_port=1234)
    assert [os.environ[name] for name in VARIABLES] == ["3", "4", "3", "127.0.0.1", "1234"]


def test_open_mpi_on_several_nodes_needs_the_master(bare_environment):
    open_mpi(bare_environment, 3, 4, 1, 2)
    with pytest.raises(RuntimeError, match="MASTER_ADDR"):
        dist.mpi_discovery()
    bare_environment.setenv("MASTER_ADDR", "10.0.0.1")
    dist.mpi_discovery()
    assert [os.environ[name] for name in VARIABLES] == ["3", "4", "1", "10.0.0.1", "29500"]


def test_conflicting_local_rank(bare_environment):
    open_mpi(bare_environment, 1, 2, 1, 2)
    bare_environment.setenv("LOCAL_RANK", "0")
    with pytest.raises(AssertionError, match="LOCAL_RANK=0"):
        dist.mpi_discovery()


def test_mpi4py(bare_environment):
    world = types.SimpleNamespace(
        Get_rank=lambda: 2,
        Get_size=lambda: 4,
        allgather=lambda own: ["first", "first", "second", "second"],
        bcast=lambda value, root: "10.1.1.1",
    )
    bare_environment.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=types.SimpleNamespace(COMM_WORLD=world)))
    bare_environment.setattr(launcher_env, "_own_address", lambda: "10.2.2.2")
    dist.mpi_discovery()
    assert [os.environ[name] for name in VARIABLES] == ["2", "4", "0", "10.1.1.1", "29500"]


def test_a_launcher_that_spoke_is_not_overruled_by_mpi(bare_environment):
    """mpi4py without mpirun calls each process rank 0 of 1."""
    bare_environment.setenv("RANK", "1")
    bare_environment.setenv("WORLD_SIZE", "2")
    bare_environment.setattr(launcher_env, "mpi_discovery", lambda **_: pytest.fail("MPI was asked"))
    with pytest.raises(RuntimeError, match="MASTER_ADDR, MASTER_PORT, LOCAL_RANK"):
        launcher_env.complete_environment(True, 29500, False)


@pytest.mark.parametrize("single_node", [True, False])
def test_azure_ml(bare_environment, single_node):
    open_mpi(bare_environment, 1, 4, 1, 4 if single_node else 2)
    bare_environment.setenv("AZUREML_EXPERIMENT_ID", "e")
    bare_environment.setenv("AZ_BATCHAI_MPI_MASTER_NODE", "10.0.0.7")
    bare_environment.setenv("AZ_BATCH_MASTER_NODE", "10.0.0.8:6000")
    assert dist.in_aml() and not dist.in_aws_sm() and not dist.in_dlts()
    launcher_env.complete_environment(True, 29500, False)
    master = ["10.0.0.7", "54965"] if single_node else ["10.0.0.8", "6000"]
    assert [os.environ[name] for name in VARIABLES] == ["1", "4", "1", *master]
    assert os.environ["NCCL_SOCKET_IFNAME"] == "^docker0,lo"


def test_sagemaker(bare_environment):
    open_mpi(bare_environment, 1, 4, 1, 4)
    bare_environment.setenv("SM_TRAINING_ENV", "{}")
    bare_environment.setenv("MASTER_ADDR", "algo-1")
    bare_environment.setenv("MASTER_PORT", "7777")
    launcher_env.complete_environment(True, 29500, False)
    assert [os.environ[name] for name in VARIABLES] == ["1", "4", "1", "algo-1", "7777"]


def test_unknown_backend_is_refused(bare_environment):
    for name, value in zip(VARIABLES, ("0", "1", "0", "127.0.0.1", "29500"), strict=True):
        bare_environment.setenv(name, value)
    with pytest.raises(NotImplementedError, match="ccl"):
        dist.init_distributed("ccl")


@pytest.mark.parametrize("local_rank, devices, bound", [(1, 2, 1), (1, 1, 0), (0, 4, 0)])
def test_nccl_rank_is_bound_to_its_device(monkeypatch, local_rank, devices, bound):
    chosen = []
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    comm._bind_device("gloo")
    assert chosen == []
    comm._bind_device("cpu:gloo,cuda:nccl")
    assert chosen == [bound]


def test_more_ranks_than_devices(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match=r"LOCAL_RANK=3, but only 2"):
        comm._bind_device("nccl")


class TestStart(DistributedTest):
    world_size = 2
    init_distributed = False

    def test_from_the_launcher(self):
        assert not dist.is_initialized()
        with pytest.raises(RuntimeError, match="dist_init_required=False"):
            dist.init_distributed(dist_init_required=False)
        dist.init_distributed(timeout=timedelta(seconds=77), verbose=False)
        assert dist.is_initialized() and dist.get_world_size() == 2
        assert dist.get_rank() == int(os.environ["RANK"])
        assert timeout_of(dist.get_world_group()) == timedelta(seconds=77)
        assert torch_dist.get_backend() == "gloo" and comm.cdb.world_size == 2

    def test_positional_backend_port_and_timeout(self):
        dist.init_distributed("gloo", distributed_port=29500, timeout=timedelta(minutes=1))
        assert torch_dist.get_backend() == "gloo"

    def test_adopts_the_callers_group(self):
        torch_dist.init_process_group("gloo", timeout=timedelta(seconds=33))
        world = torch_dist.group.WORLD
        for required in (None, True, False):
            dist.init_distributed(dist_init_required=required)
        assert torch_dist.group.WORLD is world and timeout_of(world) == timedelta(seconds=33)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2.0

    def test_other_rendezvous(self, tmp_path):
        rank = int(os.environ["RANK"])
        for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
            os.environ.pop(name)
        dist.init_distributed("gloo", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2)
        assert dist.get_rank() == rank

    def test_comes_back_after_destruction(self, tmp_path):
        rank = int(os.environ["RANK"])
        for world in range(3):
            dist.init_distributed(init_method=f"file://{tmp_path}/{world}", rank=rank, world_size=2)
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            assert tensor.item() == 2.0
            dist.destroy_process_group()
            assert not dist.is_initialized() and comm.cdb is None
