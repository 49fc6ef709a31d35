# SPDX-License-Identifier: Apache-2.0
"""How bytes move: collectives over torch.distributed, with what a backend lacks made up from what it has.

Functions take either :class:`~deepspeed.comm.reduce_op.ReduceOp` or torch's own operators. ``group`` None is the world.
An asynchronous call returns a work handle with ``wait()``; a rank outside the group gets None, as in torch.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed.distributed_c10d import get_backend_config

from deepspeed.constants import default_pg_timeout

from .backend import Backend
from .reduce_op import ReduceOp

_TORCH_OPS = {
    ReduceOp.SUM: torch_dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: torch_dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: torch_dist.ReduceOp.MIN,
    ReduceOp.MAX: torch_dist.ReduceOp.MAX,
    ReduceOp.BAND: torch_dist.ReduceOp.BAND,
    ReduceOp.BOR: torch_dist.ReduceOp.BOR,
    ReduceOp.BXOR: torch_dist.ReduceOp.BXOR,
    ReduceOp.AVG: torch_dist.ReduceOp.AVG,
}

# Newer torch renames these two and warns on every call of the old name.
_all_gather_single = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
_reduce_scatter_single = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor

_SUM = torch_dist.ReduceOp.SUM

_NEVER = (sys.maxsize, 0)

# Backend -> feature -> torch release from which it is used. Gloo lacks these in torch 2.4, where reduce_scatter_tensor
# returns the *sum* whatever the operator, without an error; in 2.13 it has them, but its list all_to_all refuses
# tensors of different sizes. Releases between take the longer way, which is right in all of them. What is not listed
# works in every release that this package supports.
_NATIVE_SINCE: dict[str, dict[str, tuple[int, int]]] = {
    "gloo": {"reduce_scatter": (2, 13), "avg": (2, 13), "all_to_all": _NEVER},
}
_TORCH_RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


@functools.cache
def _has(backend: str, feature: str) -> bool:
    return _TORCH_RELEASE >= _NATIVE_SINCE.get(backend, {}).get(feature, (0, 0))


@functools.cache
def _backend_of_device(config: str, device_type: str) -> str:
    """Backend for a device type from torch's ``cpu:gloo,cuda:nccl`` notation."""
    pairs = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return pairs.get(device_type, config)


def _group_has(feature: str, tensor: torch.Tensor, group: Any) -> bool:
    if group is torch_dist.GroupMember.NON_GROUP_MEMBER:
        return True  # torch answers such a call itself
    return _has(_backend_of_device(get_backend_config(group), tensor.device.type), feature)


def to_torch_op(op: ReduceOp | torch_dist.ReduceOp) -> torch_dist.ReduceOp:
    """torch's operator for ``op``; torch's own operators pass through.

    Raises:
        ValueError: ``ReduceOp.UNUSED``, which stands for no operation.
    """
    if not isinstance(op, ReduceOp):
        return op
    try:
        return _TORCH_OPS[op]
    except KeyError:
        raise ValueError(f"{op} is not a reduction that a collective can do") from None


def _is_avg(op: Any) -> bool:
    return op == torch_dist.ReduceOp.AVG


def timeout_of(group: Any) -> timedelta:
    """The group's own timeout, where its backend tells, else the package's default."""
    devices = [torch.device(name) for name in ("cuda", "cpu") if torch.device(name) in group._device_types]
    options = [getattr(group._get_backend(device), "options", None) for device in devices]
    known = [option._timeout for option in options if option is not None]
    return known[0] if known else default_pg_timeout


def is_alive(group: Any) -> bool:
    """Whether ``group`` was not destroyed, by whatever call."""
    return group in torch_dist.distributed_c10d._world.pg_map


class Noop:
    """Handle of an operation that had nothing to do."""

    def wait(self, timeout: timedelta | None = None) -> None:
        return None


class StagedWork:
    """Handle of an operation that needs a step on this rank after the communication.

    Args:
        work: the communication's own handle.
        copy_back: run once, by the first :meth:`wait`.
    """

    def __init__(self, work: Any, copy_back: Callable[[], None] | None) -> None:
        self._work = work
        self._copy_back = copy_back

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is None:
            self._work.wait()
        else:
            self._work.wait(timeout)
        if self._copy_back is not None:
            copy_back, self._copy_back = self._copy_back, None
            copy_back()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed() and self._copy_back is None


class _WorkList:
    """Handle of several operations."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _finish(work: Any, async_op: bool, then: Callable[[], None]) -> Any:
    """Run ``then`` after the asynchronous ``work``: now, or when the caller waits."""
    staged = StagedWork(work, then)
    if async_op:
        return staged
    staged.wait()
    return None


def _divide_(tensors: Sequence[torch.Tensor], group: Any) -> None:
    size = torch_dist.get_world_size(group)
    for tensor in tensors:
        tensor.div_(size)


# Reductions


def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Reduce ``tensor`` over the group, in place, on every rank."""
    if op is ReduceOp.SUM:  # the common one, without the comparisons below, which cost microseconds
        return torch_dist.all_reduce(tensor, _SUM, group, async_op)
    op = to_torch_op(op)
    if _is_avg(op) and not _group_has("avg", tensor, group):
        work = torch_dist.all_reduce(tensor, _SUM, group, async_op=True)
        return _finish(work, async_op, lambda: _divide_([tensor], group))
    return torch_dist.all_reduce(tensor, op, group, async_op)


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """:func:`all_reduce` of each tensor, started together."""
    return _coalesced(
        [functools.partial(all_reduce, tensor, op, group) for tensor in tensors], tensors, group, async_op
    )


def reduce(tensor: torch.Tensor, dst: int, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Reduce ``tensor`` over the group into global rank ``dst``; other ranks' tensors are undefined afterwards."""
    op = to_torch_op(op)
    if _is_avg(op) and not _group_has("avg", tensor, group):
        work = torch_dist.reduce(tensor, dst, _SUM, group, async_op=True)
        return _finish(work, async_op, lambda: _divide_([tensor], group))
    return torch_dist.reduce(tensor, dst, op, group, async_op)


def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduce ``input_tensor`` (world size x shard) over the group and leave shard ``i`` on rank ``i`` of the group.

    Args:
        output_tensor: contiguous, numel of the input / world size.
        input_tensor: contiguous, same dtype; left unchanged.
    """
    if op is ReduceOp.SUM:
        return _reduce_scatter_single(output_tensor, input_tensor, _SUM, group, async_op)
    op = to_torch_op(op)
    if _is_avg(op) and not _group_has("avg", input_tensor, group):
        work = _reduce_scatter_single(output_tensor, input_tensor, _SUM, group, async_op=True)
        return _finish(work, async_op, lambda: _divide_([output_tensor], group))
    if op != _SUM and not _group_has("reduce_scatter", input_tensor, group):
        reduced = input_tensor.detach().clone()
        shard = reduced.view(torch_dist.get_world_size(group), -1)[torch_dist.get_rank(group)]
        work = torch_dist.all_reduce(reduced, op, group, async_op=True)
        return _finish(work, async_op, lambda: _copy_(output_tensor, shard.view_as(output_tensor)))
    return _reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduce ``input_list[i]`` over the group into ``output`` of rank ``i`` of the group."""
    op = to_torch_op(op)
    if not _group_has("reduce_scatter", output, group):
        summed = [tensor.detach().clone() for tensor in input_list]
        mine = summed[torch_dist.get_rank(group)]
        work = _WorkList([all_reduce(tensor, op, group, async_op=True) for tensor in summed])
        return _finish(work, async_op, lambda: _copy_(output, mine))
    if _is_avg(op) and not _group_has("avg", output, group):
        work = torch_dist.reduce_scatter(output, list(input_list), _SUM, group, async_op=True)
        return _finish(work, async_op, lambda: _divide_([output], group))
    return torch_dist.reduce_scatter(output, list(input_list), op, group, async_op)


def _copy_(destination: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        destination.copy_(source)


# Copies


def broadcast(tensor: torch.Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
    """Copy ``tensor`` of global rank ``src`` to every rank of the group."""
    return torch_dist.broadcast(tensor, src, group, async_op)


def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Gather ``tensor`` of rank ``i`` of the group into ``tensor_list[i]`` on every rank."""
    return torch_dist.all_gather(tensor_list, tensor, group, async_op)


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Gather ``input_tensor`` of every rank, in group order, into ``output_tensor`` (world size x input)."""
    return _all_gather_single(output_tensor, input_tensor, group, async_op)


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """:func:`all_gather_into_tensor` of each pair, started together."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    calls = [functools.partial(all_gather_into_tensor, out, inp, group) for out, inp in pairs]
    return _coalesced(calls, input_tensors, group, async_op)


def _coalesced(calls: Sequence[Callable[..., Any]], tensors: Sequence[torch.Tensor], group: Any, async_op: bool) -> Any:
    """Issue ``calls``: as one launch under NCCL, else one asynchronous call after the other."""
    if not calls:
        return Noop() if async_op else None
    device = tensors[0].device
    one_launch = device.type == "cuda" and _backend_of_device(get_backend_config(group), "cuda") == "nccl"
    if one_launch:
        with get_coalescing_manager(group, device, [], async_op) as manager:
            for call in calls:
                call(async_op=async_op)
        return manager if async_op else None
    work = _WorkList([call(async_op=True) for call in calls])
    if async_op:
        return work
    work.wait()
    return None


def has_coalescing_manager() -> bool:
    """Whether several collectives can go out as one launch (where the backend is NCCL)."""
    return True


def has_all_reduce_coalesced() -> bool:
    """Whether :func:`all_reduce_coalesced` exists."""
    return True


def get_coalescing_manager(group: Any, device: torch.device, reqs: Any, async_op: bool) -> AbstractContextManager[Any]:
    """torch's context that turns the collectives inside into one launch. ``reqs`` is accepted and not used."""
    return torch_dist.distributed_c10d._coalescing_manager(group=group, device=device, async_ops=async_op)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Send slice ``i`` of ``input`` (first dimension) to rank ``i``; ``output`` holds what the ranks sent, in order."""
    return torch_dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Send ``input_tensor_list[i]`` to rank ``i``; ``output_tensor_list[i]`` holds what rank ``i`` sent."""
    if not _group_has("all_to_all", output_tensor_list[0], group):
        flat_input = torch.cat([tensor.reshape(-1) for tensor in input_tensor_list])
        output_sizes = [tensor.numel() for tensor in output_tensor_list]
        flat_output = flat_input.new_empty(sum(output_sizes))
        input_sizes = [tensor.numel() for tensor in input_tensor_list]
        work = torch_dist.all_to_all_single(flat_output, flat_input, output_sizes, input_sizes, group, async_op=True)

        def unflatten() -> None:
            for tensor, piece in zip(output_tensor_list, flat_output.split(output_sizes), strict=True):
                _copy_(tensor, piece.view_as(tensor))

        return _finish(work, async_op, unflatten)
    return torch_dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)


class TorchBackend(Backend):
    """The world process group as an object, with the collectives of this module as its methods.

    Creating it creates the world group, or adopts the one that exists.

    Args:
        backend: torch.distributed backend name, e.g. ``nccl``, ``gloo``, ``cpu:gloo,cuda:nccl``.
        timeout: of the world group.
        init_method: torch.distributed URL; None: ``env://``.
        rank, world_size: -1: from the environment.
    """

    def __init__(
        self,
        backend: str,
        timeout: timedelta,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ) -> None:
        super().__init__(name=name)
        if not torch_dist.is_initialized():
            self.init_process_group(backend, timeout, init_method, rank, world_size)
        self.backend = torch_dist.get_backend()
        self.world_rank = torch_dist.get_rank()
        self.world_size = torch_dist.get_world_size()
        self.initialized = True

    @classmethod
    def get_all_gather_function(cls) -> Callable[..., Any]:
        return _all_gather_single

    @classmethod
    def get_reduce_scatter_function(cls) -> Callable[..., Any]:
        return _reduce_scatter_single

    def init_process_group(
        self, backend: str, timeout: timedelta, init_method: str | None, rank: int, world_size: int
    ) -> None:
        """Create the world group (see :func:`torch.distributed.init_process_group`)."""
        torch_dist.init_process_group(
            backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size
        )

    def is_initialized(self) -> bool:
        return torch_dist.is_initialized()

    def has_all_gather_into_tensor(self) -> bool:
        return True

    def has_reduce_scatter_tensor(self) -> bool:
        return True

    all_reduce = staticmethod(all_reduce)
    all_reduce_coalesced = staticmethod(all_reduce_coalesced)
    reduce = staticmethod(reduce)
    reduce_scatter = staticmethod(reduce_scatter)
    reduce_scatter_tensor = staticmethod(reduce_scatter_tensor)
    broadcast = staticmethod(broadcast)
    all_gather = staticmethod(all_gather)
    all_gather_into_tensor = staticmethod(all_gather_into_tensor)
    all_gather_base = staticmethod(all_gather_into_tensor)
    all_gather_coalesced = staticmethod(all_gather_coalesced)
    all_to_all_single = staticmethod(all_to_all_single)
    all_to_all = staticmethod(all_to_all)

    broadcast_object_list = staticmethod(torch_dist.broadcast_object_list)
    all_gather_object = staticmethod(torch_dist.all_gather_object)
    send = staticmethod(torch_dist.send)
    recv = staticmethod(torch_dist.recv)
    isend = staticmethod(torch_dist.isend)
    irecv = staticmethod(torch_dist.irecv)
    batch_isend_irecv = staticmethod(torch_dist.batch_isend_irecv)
    gather = staticmethod(torch_dist.gather)
    scatter = staticmethod(torch_dist.scatter)
    barrier = staticmethod(torch_dist.barrier)
    monitored_barrier = staticmethod(torch_dist.monitored_barrier)
    get_rank = staticmethod(torch_dist.get_rank)
    get_world_size = staticmethod(torch_dist.get_world_size)
    get_backend = staticmethod(torch_dist.get_backend)
    new_group = staticmethod(torch_dist.new_group)
    get_global_rank = staticmethod(torch_dist.get_global_rank)
    destroy_process_group = staticmethod(torch_dist.destroy_process_group)

    def inference_all_reduce(self, tensor: torch.Tensor, op: Any, group: Any = None) -> Any:
        return all_reduce(tensor, op, group)

    def get_world_group(self) -> Any:
        return torch_dist.group.WORLD

    def init_device_mesh(self, mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
        """A torch device mesh over the current accelerator."""
        from deepspeed.accelerator import get_accelerator

        device_type = get_accelerator().device_name().split(":")[0]
        return torch_dist.device_mesh.init_device_mesh(device_type, mesh_shape, mesh_dim_names=mesh_dim_names)

    def enable_symm_mem_for_group(self, group_name: str) -> None:
        """Let torch's symmetric memory use the named group."""
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(group_name)
