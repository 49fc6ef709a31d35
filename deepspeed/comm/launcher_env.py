# SPDX-License-Identifier: Apache-2.0
"""Ranks and addresses when the launcher did not give them in torch's own variables: Azure ML, SageMaker, MPI."""

import os

from deepspeed.comm.constants import DEFAULT_AML_MASTER_PORT, DEFAULT_AML_NCCL_SOCKET_IFNAME
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.utils.logging import log_dist

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


def in_aml() -> bool:
    """Whether this is an Azure Machine Learning job."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm() -> bool:
    """Whether this is an AWS SageMaker job."""
    return "SM_TRAINING_ENV" in os.environ


def in_dlts() -> bool:
    """Whether this is a job of the Deep Learning Training Service."""
    return "DLTS_JOB_ID" in os.environ


def complete_environment(
    auto_mpi_discovery: bool,
    distributed_port: int,
    verbose: bool,
    rank: int = -1,
    world_size: int = -1,
    init_method: str | None = None,
) -> None:
    """Make sure that the variables torch.distributed needs are set.

    Args:
        auto_mpi_discovery: ask the platform or MPI where variables are missing.
        distributed_port: master port for :func:`mpi_discovery`.
        rank, world_size, init_method: what the caller gave in place of variables.

    Raises:
        RuntimeError: variables are missing and nothing could provide them.
    """
    missing = _missing(rank, world_size, init_method)
    if missing and auto_mpi_discovery:
        if in_aml() and not in_dlts() and "OMPI_COMM_WORLD_RANK" in os.environ:
            patch_aml_env_for_torch_nccl_backend(verbose=verbose)
        elif in_aws_sm() and not in_dlts() and "OMPI_COMM_WORLD_RANK" in os.environ:
            patch_aws_sm_env_for_torch_nccl_backend(verbose=verbose)
        elif not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            # With both set a launcher has spoken; MPI would call each of its processes rank 0 of 1.
            mpi_discovery(distributed_port=distributed_port, verbose=verbose)
        missing = _missing(rank, world_size, init_method)
    if missing:
        raise RuntimeError(_missing_message(missing))


def _missing(rank: int, world_size: int, init_method: str | None) -> list[str]:
    given = set(os.environ)
    if rank >= 0:
        given.add("RANK")
    if world_size > 0:
        given.add("WORLD_SIZE")
    if init_method is not None and init_method != "env://":
        given |= {"MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"}
    return [name for name in _REQUIRED if name not in given]


def _missing_message(missing: list[str]) -> str:
    return (
        f"init_distributed: environment variables {', '.join(missing)} are not set and no MPI launcher was found. "
        "Start the script with `deepspeed` or `torchrun`, or, for one process, set RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 "
        "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
    )


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from MPI.

    mpi4py is asked where it is installed. Without it Open MPI's variables are enough on one node, or on several when
    ``MASTER_ADDR`` is set.

    Raises:
        RuntimeError: neither mpi4py nor Open MPI's variables are there, or the master's address cannot be known.
        AssertionError: ``LOCAL_RANK`` is set and disagrees with MPI.
    """
    try:
        from mpi4py import MPI
    except ImportError:
        found = _from_open_mpi_variables()
    else:
        found = _from_mpi4py(MPI.COMM_WORLD)
    given_local_rank = os.environ.get("LOCAL_RANK")
    if given_local_rank is not None and int(given_local_rank) != int(found["LOCAL_RANK"]):
        raise AssertionError(
            f"LOCAL_RANK={given_local_rank} in the environment, but MPI places this process at local rank "
            f"{found['LOCAL_RANK']}: unset LOCAL_RANK or correct it"
        )
    os.environ.update(found)
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    if verbose:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        log_dist("from MPI: " + " ".join(f"{name}={os.environ[name]}" for name in names), ranks=[0])


def _from_open_mpi_variables() -> dict[str, str]:
    prefix = "OMPI_COMM_WORLD_"
    names = ("RANK", "SIZE", "LOCAL_RANK")
    if any(prefix + name not in os.environ for name in names):
        missing = [name for name in _REQUIRED if name not in os.environ]
        raise RuntimeError(_missing_message(missing) + " (MPI without Open MPI's variables needs mpi4py)")
    rank, size, local_rank = (os.environ[prefix + name] for name in names)
    found = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank}
    if "MASTER_ADDR" not in os.environ:
        if os.environ.get(prefix + "LOCAL_SIZE") != size:
            raise RuntimeError(
                "init_distributed: the Open MPI job spans several nodes and the address of rank 0 is not known: set "
                "MASTER_ADDR or install mpi4py"
            )
        found["MASTER_ADDR"] = "127.0.0.1"
    return found


def _from_mpi4py(comm: object) -> dict[str, str]:
    import socket

    rank = comm.Get_rank()
    names = comm.allgather(socket.gethostname())
    address = os.environ.get("MASTER_ADDR")
    if address is None:
        address = _own_address() if len(set(names)) > 1 else "127.0.0.1"
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(comm.Get_size()),
        "LOCAL_RANK": str(names[:rank].count(names[rank])),
        "MASTER_ADDR": comm.bcast(address, root=0),
    }


def _own_address() -> str:
    """First address of this host, as `hostname -I` lists them."""
    import subprocess

    addresses = subprocess.run(["hostname", "-I"], check=True, capture_output=True, text=True).stdout.split()
    if not addresses:
        raise RuntimeError("`hostname -I` gave no address for this host: set MASTER_ADDR")
    return addresses[0]


def patch_aml_env_for_torch_nccl_backend(master_port: int = 6105, verbose: bool = True) -> None:
    """Set torch's variables from those of Azure ML's Open MPI launcher.

    Args:
        master_port: used where the platform gives an address without a port.
    """
    env = os.environ
    env["RANK"] = env["OMPI_COMM_WORLD_RANK"]
    env["WORLD_SIZE"] = env["OMPI_COMM_WORLD_SIZE"]
    env["LOCAL_RANK"] = env["OMPI_COMM_WORLD_LOCAL_RANK"]
    if int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", "0")) == int(env["WORLD_SIZE"]):
        env["MASTER_ADDR"] = env.get("AZ_BATCHAI_MPI_MASTER_NODE", "127.0.0.1")
        env["MASTER_PORT"] = DEFAULT_AML_MASTER_PORT
    else:
        address, _, port = env["AZ_BATCH_MASTER_NODE"].partition(":")
        env["MASTER_ADDR"] = address
        env.setdefault("MASTER_PORT", port or str(master_port))
    env["NCCL_SOCKET_IFNAME"] = DEFAULT_AML_NCCL_SOCKET_IFNAME
    if verbose:
        log_dist(f"from Azure ML: MASTER_ADDR={env['MASTER_ADDR']} MASTER_PORT={env['MASTER_PORT']}", ranks=[0])


def patch_aws_sm_env_for_torch_nccl_backend(verbose: bool = True) -> None:
    """Set torch's rank variables from those of SageMaker's Open MPI launcher; it sets the master itself."""
    env = os.environ
    env["RANK"] = env["OMPI_COMM_WORLD_RANK"]
    env["WORLD_SIZE"] = env["OMPI_COMM_WORLD_SIZE"]
    env["LOCAL_RANK"] = env["OMPI_COMM_WORLD_LOCAL_RANK"]
    if verbose:
        log_dist(f"from SageMaker: WORLD_SIZE={env['WORLD_SIZE']}", ranks=[0])
