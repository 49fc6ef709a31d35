# SPDX-License-Identifier: Apache-2.0
"""Communication façade: torch.distributed with optional logging, and the start of the world process group.

Every collective takes, after its own arguments, ``prof`` (log this call although its operation is not selected),
``log_name`` (name to log it under) and ``debug`` (caller's name for the log; found when needed). With logging off these
cost one attribute check. ``group`` None means the world; ranks in ``src`` and ``dst`` are global.
"""

import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

import deepspeed.utils.timer as timer
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import control, store_barrier, watchdog
from deepspeed.comm import torch as torch_backend
from deepspeed.comm.launcher_env import (
    complete_environment,
    in_aml,
    in_aws_sm,
    in_dlts,
    mpi_discovery,
    patch_aml_env_for_torch_nccl_backend,
    patch_aws_sm_env_for_torch_nccl_backend,
)
from deepspeed.comm.reduce_op import ReduceOp
from deepspeed.comm.torch import TorchBackend
from deepspeed.comm.utils import (
    get_debug_log_name,
    get_default_args,
    get_local_rank_from_launcher,
    get_msg_size_from_args,
)
from deepspeed.comm.watched_calls import watch_calls
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout
from deepspeed.utils.comms_logging import CommsLogger, get_caller_func
from deepspeed.utils.logging import log_dist

__all__ = [
    "CommsLogger",
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "TorchBackend",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "comms_logger",
    "configure",
    "destroy_process_group",
    "enable_symm_mem_for_group",
    "gather",
    "get_all_ranks_from_group",
    "get_comm_operation_count",
    "get_global_rank",
    "get_local_rank",
    "get_logged_comm_ops",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_comm_data",
    "has_reduce_scatter_tensor",
    "in_aml",
    "in_aws_sm",
    "in_dlts",
    "inference_all_reduce",
    "init_deepspeed_backend",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "mpi_discovery",
    "new_group",
    "on_destroy",
    "patch_aml_env_for_torch_nccl_backend",
    "patch_aws_sm_env_for_torch_nccl_backend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "reset_log",
    "scatter",
    "send",
    "set_backend",
    "timed_op",
]

cdb: TorchBackend | None = None

timers = timer.SynchronizedWallClockTimer()
timer_summary: dict[str, Any] = {}
comms_logger = CommsLogger()

# Point-to-point calls must not wait for their peer when they are launched: it may be about to send to us.
_POINT_TO_POINT = ("isend", "irecv", "batch_isend_irecv")


class ProcessGroup:
    """A named set of ranks, for backends that have no group object of their own."""

    def __init__(self, comm_id: int, ranks: Sequence[int] = ()) -> None:
        self.ranks = list(ranks)
        self.comm_id = comm_id
        self.size = len(self.ranks)


class P2POp:
    """One point-to-point operation for :func:`batch_isend_irecv`.

    Args:
        op: :func:`isend` or :func:`irecv` of this module or of torch.distributed.
        tensor: what to send, or where to receive.
        peer: global rank of the other side.
    """

    def __init__(
        self, op: Callable[..., Any], tensor: torch.Tensor, peer: int, group: Any = None, tag: int = 0
    ) -> None:
        operations = {isend: torch_dist.isend, irecv: torch_dist.irecv}
        self.op = operations.get(op, op)
        if self.op not in (torch_dist.isend, torch_dist.irecv):
            raise ValueError(f"P2POp needs isend or irecv as operation, got {op!r}")
        self.tensor = tensor
        self.peer = peer
        self.group = group
        self.tag = tag


# Logging


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Iterable[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Set up the logging of collectives.

    Args:
        deepspeed_config: a :class:`DeepSpeedConfig`, whose ``comms_logger`` section is taken first.
        enabled, prof_all, prof_ops, verbose, debug: override the section's values where not None.
    """
    if deepspeed_config is not None:
        comms_logger.configure(deepspeed_config.comms_config)
    if enabled is not None:
        comms_logger.enabled = enabled
    if prof_all is not None:
        comms_logger.prof_all = prof_all
    if prof_ops is not None:
        comms_logger.prof_ops = list(prof_ops)
    if verbose is not None:
        comms_logger.verbose = verbose
    if debug is not None:
        comms_logger.debug = debug


def timed_op(func: Callable[..., Any]) -> Callable[..., Any]:
    """Log calls of ``func`` (a collective of this module) while the comms logger is on, and have them watched."""
    watched = watch_calls(func)

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not comms_logger.enabled:
            return watched(*args, **kwargs)
        return _logged_call(func, watched, args, kwargs)

    return call


class _LoggedWork:
    """Work handle that reports when it has been waited for."""

    def __init__(self, work: Any, on_done: Callable[[], None]) -> None:
        self._work = work
        self._on_done = on_done

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self._work.wait(*args, **kwargs)
        self._on_done()
        self._on_done = _nothing
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _nothing() -> None:
    return None


def _logged_call(
    func: Callable[..., Any], watched: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``func``, as ``watched``, and file its latency. Collectives are completed here: the latency is all of it."""
    options = {**get_default_args(func), **kwargs}
    if not (options["prof"] or comms_logger.selects(options["log_name"])):
        return watched(*args, **kwargs)
    name = options["log_name"]
    if comms_logger.debug:
        name = get_debug_log_name(options, options["debug"] or get_caller_func(3))
    size = get_msg_size_from_args(func, *args, **kwargs)
    accelerator = get_accelerator()
    accelerator.synchronize()
    start = time.perf_counter()

    def record() -> None:
        accelerator.synchronize()
        group = _group_argument(func, args, kwargs)
        in_group = group is not torch_dist.GroupMember.NON_GROUP_MEMBER
        ranks = torch_dist.get_world_size(group) if in_group else 1
        comms_logger.append(func.__name__, name, (time.perf_counter() - start) * 1e3, size, ranks)

    result = watched(*args, **kwargs)
    if func.__name__ in _POINT_TO_POINT:
        if not isinstance(result, list):
            return None if result is None else _LoggedWork(result, record)
        if result:
            result[-1] = _LoggedWork(result[-1], record)
        return result
    if result is not None and options.get("async_op", False):
        result.wait()
    record()
    return result


@functools.cache
def _group_position(func: Callable[..., Any]) -> int:
    names = func.__code__.co_varnames[: func.__code__.co_argcount]
    return names.index("group") if "group" in names else -1


def _group_argument(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    position = _group_position(func)
    if 0 <= position < len(args):
        return args[position]
    return kwargs.get("group")


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print a table of the logged operations on rank 0; see :meth:`CommsLogger.log_all`. Call it on every rank."""
    if torch_dist.is_initialized():
        torch_dist.barrier()
    summary = comms_logger.log_all(print_log=True, show_straggler=show_straggler, return_dict=return_dict)
    if torch_dist.is_initialized():
        torch_dist.barrier()
    return summary


def reset_log() -> None:
    """Forget the logged operations."""
    comms_logger.reset_data()


def has_comm_data() -> bool:
    """Whether anything was logged."""
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    """Number of logged operations."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """Names of the logged operations."""
    return comms_logger.get_operation_names()


# Collectives


@timed_op
def broadcast(
    tensor: torch.Tensor,
    src: int,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "broadcast",
    debug: str | None = None,
) -> Any:
    """Copy ``tensor`` of global rank ``src`` to every rank of the group."""
    return torch_dist.broadcast(tensor, src, group, async_op)


@timed_op
def broadcast_object_list(
    object_list: list[Any],
    src: int,
    group: Any = None,
    device: torch.device | None = None,
    prof: bool = False,
    log_name: str = "broadcast_object_list",
    debug: str | None = None,
) -> None:
    """Replace the picklable objects in ``object_list`` by those of global rank ``src``."""
    return torch_dist.broadcast_object_list(object_list, src, group, device)


@timed_op
def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather",
    debug: str | None = None,
) -> Any:
    """Gather ``tensor`` of rank ``i`` of the group into ``tensor_list[i]`` on every rank."""
    return torch_dist.all_gather(tensor_list, tensor, group, async_op)


@timed_op
def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: Any = None,
    prof: bool = False,
    log_name: str = "all_gather_object",
    debug: str | None = None,
) -> None:
    """Gather the picklable ``obj`` of rank ``i`` of the group into ``object_list[i]`` on every rank."""
    return torch_dist.all_gather_object(object_list, obj, group)


@timed_op
def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter_tensor",
    debug: str | None = None,
) -> Any:
    """Reduce ``tensor`` (world size x shard) over the group and leave shard ``i`` on rank ``i`` of the group."""
    return torch_backend.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    debug: str | None = None,
) -> Any:
    """:func:`reduce_scatter_tensor` under an older name."""
    return reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op, prof=prof, debug=debug)


@timed_op
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_into_tensor",
    debug: str | None = None,
) -> Any:
    """Gather ``tensor`` of every rank, in group order, into ``output_tensor`` (world size x ``tensor``)."""
    return torch_backend.all_gather_into_tensor(output_tensor, tensor, group, async_op)


def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    debug: str | None = None,
) -> Any:
    """:func:`all_gather_into_tensor` under an older name."""
    return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op, debug=debug)


def has_reduce_scatter_tensor() -> bool:
    """Whether :func:`reduce_scatter_tensor` works: always."""
    return True


def has_all_gather_into_tensor() -> bool:
    """Whether :func:`all_gather_into_tensor` works: always."""
    return True


@timed_op
def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all_single",
    debug: str | None = None,
) -> Any:
    """Send slice ``i`` of ``tensor`` (first dimension) to rank ``i``; ``output`` holds what the ranks sent."""
    return torch_dist.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group, async_op)


@timed_op
def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all",
    debug: str | None = None,
) -> Any:
    """Send ``input_tensor_list[i]`` to rank ``i``; ``output_tensor_list[i]`` holds what rank ``i`` sent."""
    return torch_backend.all_to_all(output_tensor_list, input_tensor_list, group, async_op)


@timed_op
def send(
    tensor: torch.Tensor,
    dst: int,
    group: Any = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "send",
    debug: str | None = None,
) -> None:
    """Send ``tensor`` to global rank ``dst``."""
    return torch_dist.send(tensor, dst, group, tag)


@timed_op
def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "recv",
    debug: str | None = None,
) -> int:
    """Receive into ``tensor`` from global rank ``src`` (None: anyone) and return the sender."""
    return torch_dist.recv(tensor, src, group, tag)


@timed_op
def isend(
    tensor: torch.Tensor,
    dst: int,
    group: Any = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "isend",
    debug: str | None = None,
) -> Any:
    """Start sending ``tensor`` to global rank ``dst``; returns a work handle."""
    return torch_dist.isend(tensor, dst, group, tag)


@timed_op
def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "irecv",
    debug: str | None = None,
) -> Any:
    """Start receiving into ``tensor`` from global rank ``src``; returns a work handle."""
    return torch_dist.irecv(tensor, src, group, tag)


@timed_op
def batch_isend_irecv(
    p2p_op_list: list[Any], prof: bool = False, log_name: str = "batch_isend_irecv", debug: str | None = None
) -> list[Any]:
    """Start the operations (:class:`P2POp` of this module or of torch) together; returns their work handles."""
    operations = [
        torch_dist.P2POp(p2p.op, p2p.tensor, p2p.peer, p2p.group, p2p.tag) if isinstance(p2p, P2POp) else p2p
        for p2p in p2p_op_list
    ]
    return torch_dist.batch_isend_irecv(operations)


@timed_op
def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int = 0,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "gather",
    debug: str | None = None,
) -> Any:
    """Gather ``tensor`` of every rank into ``gather_list`` on global rank ``dst``."""
    return torch_dist.gather(tensor, gather_list, dst, group, async_op)


@timed_op
def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int = 0,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "scatter",
    debug: str | None = None,
) -> Any:
    """Receive into ``tensor`` this rank's entry of ``scatter_list`` of global rank ``src``."""
    return torch_dist.scatter(tensor, scatter_list, src, group, async_op)


@timed_op
def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    prof: bool = False,
    log_name: str = "barrier",
    debug: str | None = None,
) -> Any:
    """Wait until every rank of the group is here."""
    return torch_dist.barrier(group, async_op, device_ids)


@timed_op
def monitored_barrier(
    group: Any = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
    prof: bool = False,
    log_name: str = "monitored_barrier",
    debug: str | None = None,
) -> Any:
    """Barrier on the host, for any backend, that names the ranks which did not come.

    Args:
        timeout: None: the group's own.
        wait_all_ranks: the error names every missing rank, not only the first.

    Raises:
        CollectiveTimeoutError: on every rank, when one did not come within ``timeout``.
    """
    if group is not torch_dist.GroupMember.NON_GROUP_MEMBER:
        store_barrier.monitored_barrier(group, timeout, wait_all_ranks)


@timed_op
def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce",
    debug: str | None = None,
) -> Any:
    """Reduce ``tensor`` over the group into global rank ``dst``; other ranks' tensors are undefined afterwards."""
    return torch_backend.reduce(tensor, dst, op, group, async_op)


@timed_op
def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter",
    debug: str | None = None,
) -> Any:
    """Reduce ``input_list[i]`` over the group into ``output`` of rank ``i`` of the group."""
    return torch_backend.reduce_scatter(output, input_list, op, group, async_op)


def has_all_reduce_coalesced() -> bool:
    """Whether :func:`all_reduce_coalesced` works: always."""
    return True


def has_coalescing_manager() -> bool:
    """Whether several collectives can go out as one launch (under NCCL)."""
    return True


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """:func:`all_gather_into_tensor` of each pair, started together."""
    return torch_backend.all_gather_coalesced(output_tensors, input_tensors, group, async_op)


@timed_op
def all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: str | None = None,
) -> Any:
    """Reduce ``tensor`` over the group, in place, on every rank."""
    return torch_backend.all_reduce(tensor, op, group, async_op)


@timed_op
def inference_all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: str | None = None,
) -> Any:
    """:func:`all_reduce`, under the name that inference code calls."""
    return torch_backend.all_reduce(tensor, op, group, async_op)


@timed_op
def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: str | None = None,
) -> Any:
    """:func:`all_reduce` of each tensor, started together."""
    return torch_backend.all_reduce_coalesced(tensors, op, group, async_op)


# Groups and ranks


def is_initialized() -> bool:
    """Whether the world process group exists."""
    return torch_dist.is_available() and torch_dist.is_initialized()


def is_available() -> bool:
    """Whether torch was built with torch.distributed."""
    return torch_dist.is_available()


_on_destroy: list[Callable[[Any], None]] = [watchdog.on_destroy, control.close_channels]


def on_destroy(callback: Callable[[Any], None]) -> None:
    """Have ``callback(group)`` called before :func:`destroy_process_group` destroys ``group`` (None: all groups)."""
    _on_destroy.append(callback)


def destroy_process_group(group: Any = None) -> None:
    """Destroy ``group``, or every group when it is None or the world."""
    global cdb
    whole_world = group is None or group is torch_dist.group.WORLD
    for callback in _on_destroy:
        callback(None if whole_world else group)
    torch_dist.destroy_process_group(group)
    if whole_world:
        cdb = None


def new_group(ranks: Sequence[int] | None) -> Any:
    """A group of the given global ranks. Every rank of the world must call it, in the same order."""
    return torch_dist.new_group(ranks)


def get_world_group() -> Any:
    """The group of all ranks."""
    return torch_dist.group.WORLD


def get_world_size(group: Any = None) -> int:
    """Number of ranks of the group."""
    return torch_dist.get_world_size(group)


def get_rank(group: Any = None) -> int:
    """This process's rank in the group; -1 outside it."""
    return torch_dist.get_rank(group)


def get_local_rank() -> int:
    """This process's rank within its node, from the launcher's environment."""
    return get_local_rank_from_launcher()


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Global rank of rank ``group_rank`` of the group."""
    return group_rank if group is None else torch_dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Global ranks of the group, in group order."""
    return torch_dist.get_process_group_ranks(torch_dist.group.WORLD if group is None else group)


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """A torch device mesh over the current accelerator. The world group must exist."""
    return _require_backend().init_device_mesh(mesh_shape, mesh_dim_names)


def enable_symm_mem_for_group(group_name: str) -> None:
    """Let torch's symmetric memory use the named group."""
    _require_backend().enable_symm_mem_for_group(group_name)


def _require_backend() -> TorchBackend:
    """The backend object of the world group, adopting a group that the caller made."""
    if not is_initialized():
        raise RuntimeError("there is no process group: call deepspeed.init_distributed() first")
    if cdb is None:
        set_backend()
    return cdb


def set_backend() -> None:
    """Adopt the world group that exists."""
    global cdb
    cdb = TorchBackend(torch_dist.get_backend(), default_pg_timeout, None)


def init_deepspeed_backend(ds_backend: str, timeout: timedelta | None, init_method: str | None) -> None:
    """Communication libraries beside torch.distributed are not built in.

    Raises:
        NotImplementedError: for any name that torch.distributed does not know.
    """
    if ds_backend not in torch_dist.Backend.backend_list:
        raise NotImplementedError(
            f"communication backend {ds_backend!r} is not supported here: use one of torch.distributed's "
            f"({', '.join(torch_dist.Backend.backend_list)})"
        )


# Start


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Create the world process group, or adopt the one that the caller has created.

    The launcher's ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` are used. Where they
    are incomplete, Azure ML, SageMaker or MPI are asked (``auto_mpi_discovery``) and the variables are set.

    Args:
        dist_backend: torch.distributed backend; None: the accelerator's.
        distributed_port: master port where the launcher gave none.
        verbose: log one line on rank 0 (level INFO).
        timeout: of the group; default: ``DEEPSPEED_TIMEOUT`` minutes (10).
        init_method: torch.distributed URL; None: ``env://``.
        dist_init_required: False: the group must exist already; None or True: create it when it does not.
        config: a :class:`DeepSpeedConfig`, for its comms logger section.
        rank, world_size: in place of the environment's, where >= 0.

    Raises:
        RuntimeError: the environment names no rank, or ``dist_init_required`` is False and there is no group.
    """
    configure(deepspeed_config=config)
    if is_initialized():
        set_backend()
        watchdog.start()
        return
    if dist_init_required is False:
        raise RuntimeError(
            "dist_init_required=False, but there is no process group: create it with torch.distributed before, or "
            "leave dist_init_required at None"
        )
    dist_backend = get_accelerator().communication_backend_name() if dist_backend is None else dist_backend
    explicit = rank >= 0 and world_size > 0 and init_method is not None
    if not explicit:
        complete_environment(auto_mpi_discovery, distributed_port, verbose, rank, world_size, init_method)
    if init_method is not None:  # torch reads ranks from the environment for env:// only
        rank = rank if rank >= 0 else int(os.environ["RANK"])
        world_size = world_size if world_size > 0 else int(os.environ["WORLD_SIZE"])
    _bind_device(dist_backend)
    _create_world(dist_backend, timeout, init_method, rank, world_size)
    watchdog.start()
    if verbose:
        log_dist(f"initialised torch.distributed: backend {dist_backend}, {get_world_size()} ranks", ranks=[0])


def _create_world(dist_backend: str, timeout: timedelta, init_method: str | None, rank: int, world_size: int) -> None:
    global cdb
    init_deepspeed_backend(dist_backend.split(",")[0].split(":")[-1], timeout, init_method)
    cdb = TorchBackend(dist_backend, timeout, init_method, rank, world_size)


def _bind_device(dist_backend: str) -> None:
    """NCCL talks through the current device: each local rank must have its own before the first collective."""
    if "nccl" not in dist_backend or not torch.cuda.is_available():
        return
    local_rank, devices = get_local_rank_from_launcher(), torch.cuda.device_count()
    if local_rank < devices:
        torch.cuda.set_device(local_rank)
    elif devices == 1:  # the launcher shows each rank its own device only
        torch.cuda.set_device(0)
    else:
        raise RuntimeError(
            f"LOCAL_RANK={local_rank}, but only {devices} CUDA devices are visible: start at most {devices} ranks on "
            "this node or make more devices visible"
        )
