# SPDX-License-Identifier: Apache-2.0
"""Process groups of the forms of parallelism: data, sequence, tensor/model, and ZeRO's secondary partitions.

Where they come from, first match wins: a device mesh (:data:`mesh_device`), the model-parallel unit (:data:`mpu`, an
object or module of the caller with Megatron's getters), groups made here. Groups made here belong to the world group of
that moment; when the world is another one (destroyed and created again), they are forgotten.

Expert parallelism is not built: its functions raise NotImplementedError.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch.distributed

from deepspeed import comm as dist
from deepspeed.comm.torch import is_alive, timeout_of
from deepspeed.utils.bwc import (
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)

mpu: Any = None
mesh_device: Any = None
expert_tensor_parallel_world_size = 1


class _Reference:
    """Weak reference to a process group: torch keeps groups alive, and a destroyed one must not live on here.

    A group keeps its rendezvous store alive, and the next world of the process would meet the old one's keys there.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = (lambda: None) if group is None else weakref.ref(group)

    def __call__(self) -> Any:
        """The group; None once it is destroyed."""
        group = self._group()
        return group if group is not None and is_alive(group) else None


@dataclass
class _Groups:
    """What was made for one world group."""

    world: _Reference = field(default_factory=_Reference)
    clone: _Reference = field(default_factory=_Reference)
    tensor_parallel: _Reference = field(default_factory=_Reference)
    data_parallel: _Reference = field(default_factory=_Reference)  # across tensor-parallel ranks
    zero_param: _Reference = field(default_factory=_Reference)
    gather: dict[tuple[int, ...], _Reference] = field(default_factory=dict)  # by global ranks
    mesh: Any = None  # the mesh that was there when the world was first seen
    overrides: dict[str, int] = field(default_factory=dict)


_groups = _Groups()


def _current() -> _Groups:
    """The groups of the present world."""
    global _groups, mesh_device
    world = dist.get_world_group() if dist.is_initialized() else None
    if world is None:
        return _Groups(overrides=_groups.overrides)
    if _groups.world() is not world:
        if mesh_device is not None and mesh_device is _groups.mesh:  # seen with the world before: as dead as that
            mesh_device = None
        _groups = _Groups(world=_Reference(world), overrides=_groups.overrides)
    _groups.mesh = mesh_device
    return _groups


def _release_process_group_references(group: Any = None) -> None:
    """Forget ``group`` where it was made here; None: forget everything that was made here, and the mesh."""
    global _groups, mesh_device
    if group is None:
        _groups = _Groups()
        mesh_device = None
        return
    for name in ("clone", "tensor_parallel", "data_parallel", "zero_param"):
        if getattr(_groups, name)() is group:
            setattr(_groups, name, _Reference())
    for ranks in [ranks for ranks, reference in _groups.gather.items() if reference() is group]:
        del _groups.gather[ranks]


dist.on_destroy(_release_process_group_references)


def _mpu_has(name: str) -> bool:
    return mpu is not None and hasattr(mpu, name)


def _mesh_group(dimension: str) -> Any:
    """Group of a dimension of the mesh; None where there is no such dimension."""
    _current()  # drops a dead mesh
    if mesh_device is None or dimension not in (mesh_device.mesh_dim_names or ()):
        return None
    return mesh_device.get_group(mesh_dim=dimension)


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Use ``mpu`` from now on.

    Raises:
        NotImplementedError: ``ep_size`` is not 1 (expert parallelism).
    """
    if ep_size != 1:
        _no_experts("initialize(ep_size > 1)")
    globals()["mpu"] = mpu


def _ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise AssertionError unless ``denominator`` divides ``numerator``."""
    if numerator % denominator != 0:
        raise AssertionError(f"{numerator} is not divisible by {denominator}")


# Data parallelism


def _clone_world_group() -> Any:
    """A group over all ranks with the world's timeout, made once.

    Gradients travel on a group of their own: a collective that a model does on the world group in its backward (such as
    synchronised batch normalisation) may come before a bucket on one rank and after it on another.
    """
    groups = _current()
    clone = groups.clone()
    if clone is None:
        clone = torch.distributed.new_group(timeout=timeout_of(dist.get_world_group()))
        groups.clone = _Reference(clone)
    return clone


def _get_data_parallel_group() -> Any:
    """Ranks that hold the same model shard and see different samples."""
    group = _mesh_group("data_parallel")
    if group is not None:
        return group
    if _mpu_has("get_data_parallel_group"):
        return mpu.get_data_parallel_group()
    made_here = _current().data_parallel()
    if made_here is not None:
        return made_here
    if _get_sequence_parallel_world_size() > 1:
        raise RuntimeError(
            "sequence parallelism is on, but the mpu has no get_data_parallel_group(): add it, or ask for "
            "_get_sequence_data_parallel_group(), the ranks that ZeRO shards over"
        )
    return _clone_world_group()


def _get_data_parallel_group_ranks() -> list[int]:
    """Global ranks of the data-parallel group."""
    return dist.get_all_ranks_from_group(_get_data_parallel_group())


def _get_data_parallel_world_size() -> int:
    """Number of data-parallel ranks."""
    if _mesh_group("data_parallel") is None:
        if _mpu_has("get_data_parallel_world_size"):
            return mpu.get_data_parallel_world_size()
        if _mpu_has("get_sequence_parallel_world_size"):
            return dist.get_world_size() // mpu.get_sequence_parallel_world_size()
    return dist.get_world_size(_get_data_parallel_group())


def _get_data_parallel_rank() -> int:
    """This process's rank among the data-parallel ranks."""
    if _mesh_group("data_parallel") is None:
        if _mpu_has("get_data_parallel_rank"):
            return mpu.get_data_parallel_rank()
        if _mpu_has("get_sequence_parallel_world_size"):
            return dist.get_rank() // mpu.get_sequence_parallel_world_size()
    return dist.get_rank(_get_data_parallel_group())


def get_data_parallel_group() -> Any:
    """Ranks that hold the same model shard and see different samples."""
    return _get_data_parallel_group()


def get_data_parallel_world_size() -> int:
    """Number of data-parallel ranks."""
    return _get_data_parallel_world_size()


def get_data_parallel_rank() -> int:
    """This process's rank among the data-parallel ranks."""
    return _get_data_parallel_rank()


def _get_broadcast_src_rank() -> int:
    """Global rank whose parameters the others of the (sequence and) data-parallel group take."""
    return dist.get_global_rank(_get_sequence_data_parallel_group(), 0)


# Sequence parallelism


def _get_sequence_parallel_group() -> Any:
    """Ranks that share the tokens of a sample.

    Raises:
        KeyError: there is no sequence parallelism.
    """
    group = _mesh_group("sequence_parallel")
    if group is not None:
        return group
    if _mpu_has("get_sequence_parallel_group"):
        return mpu.get_sequence_parallel_group()
    raise KeyError("there is no sequence-parallel group: neither the device mesh nor the mpu defines one")


def _get_sequence_parallel_world_size() -> int:
    """Number of ranks that share a sample; 1 without sequence parallelism."""
    group = _mesh_group("sequence_parallel")
    if group is not None:
        return dist.get_world_size(group)
    return mpu.get_sequence_parallel_world_size() if _mpu_has("get_sequence_parallel_world_size") else 1


def _get_sequence_parallel_rank() -> int:
    """This process's rank among those that share a sample; 0 without sequence parallelism."""
    group = _mesh_group("sequence_parallel")
    if group is not None:
        return dist.get_rank(group)
    return mpu.get_sequence_parallel_rank() if _mpu_has("get_sequence_parallel_rank") else 0


def _get_sequence_data_parallel_group() -> Any:
    """Ranks that hold the same model shard, whatever samples or tokens they see: the ranks that ZeRO shards over."""
    if _mpu_has("get_sequence_data_parallel_group"):
        return mpu.get_sequence_data_parallel_group()
    if _get_sequence_parallel_world_size() > 1:
        if _get_model_parallel_world_size() > 1:
            raise RuntimeError(
                "sequence and model parallelism are both on: the mpu must define get_sequence_data_parallel_group()"
            )
        return _clone_world_group()
    return _get_data_parallel_group()


def _get_sequence_data_parallel_world_size() -> int:
    """Number of ranks that ZeRO shards over."""
    return dist.get_world_size(_get_sequence_data_parallel_group())


def _get_sequence_data_parallel_rank() -> int:
    """This process's rank among those that ZeRO shards over."""
    return dist.get_rank(_get_sequence_data_parallel_group())


# Tensor and model parallelism


def _split_world(tensor_model_parallel_size: int, data_parallel_size: int | None) -> tuple[Any, Any]:
    """(tensor-parallel group, data-parallel group) of this rank. Tensor-parallel ranks are consecutive."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    _ensure_divisibility(world_size, tensor_model_parallel_size)
    rows = world_size // tensor_model_parallel_size
    if data_parallel_size is not None and data_parallel_size != rows:
        raise AssertionError(
            f"data_parallel_size={data_parallel_size} x tensor_model_parallel_size={tensor_model_parallel_size} is not "
            f"the world size {world_size}"
        )
    size = tensor_model_parallel_size
    own_tensor = own_data = None
    for start in range(0, world_size, size):
        group = dist.new_group(list(range(start, start + size)))
        own_tensor = group if start <= rank < start + size else own_tensor
    for column in range(size):
        group = dist.new_group(list(range(column, world_size, size)))
        own_data = group if rank % size == column else own_data
    return own_tensor, own_data


def _init_tp_groups_with_new_group(tensor_model_parallel_size: int = 1, data_parallel_size: int | None = None) -> None:
    """Make tensor- and data-parallel groups. A collective of the world."""
    groups = _current()
    tensor_group, data_group = _split_world(tensor_model_parallel_size, data_parallel_size)
    groups.tensor_parallel, groups.data_parallel = _Reference(tensor_group), _Reference(data_group)


def _init_tp_mesh_device(tensor_model_parallel_size: int = 1, data_parallel_size: int | None = None) -> None:
    """Make a device mesh ``(data_parallel, tensor_parallel)``. A collective of the world."""
    global mesh_device
    _current()
    _ensure_divisibility(dist.get_world_size(), tensor_model_parallel_size)
    rows = dist.get_world_size() // tensor_model_parallel_size if data_parallel_size is None else data_parallel_size
    mesh_device = dist.initialize_mesh_device((rows, tensor_model_parallel_size), ("data_parallel", "tensor_parallel"))


def _create_model_parallel(model_parallel_size_: int) -> tuple[Any, Any]:
    """Make and return (data-parallel group, model-parallel group). A collective of the world."""
    tensor_group, data_group = _split_world(model_parallel_size_, None)
    return data_group, tensor_group


def get_tensor_model_parallel_group() -> Any:
    """Ranks that share a model; None where each rank holds all of it."""
    group = _mesh_group("tensor_parallel")
    if group is not None:
        return group
    if mpu is not None:
        return bwc_tensor_model_parallel_group(mpu)
    return _current().tensor_parallel()


def get_model_parallel_group() -> Any:
    """As :func:`get_tensor_model_parallel_group`."""
    return get_tensor_model_parallel_group()


def set_tensor_model_parallel_world_size(world_size: int) -> None:
    """Make :func:`get_tensor_model_parallel_world_size` return this."""
    _groups.overrides["world_size"] = world_size


def get_tensor_model_parallel_world_size() -> int:
    """Number of ranks that share a model."""
    if "world_size" in _groups.overrides:
        return _groups.overrides["world_size"]
    if mpu is not None and _mesh_group("tensor_parallel") is None:
        return bwc_tensor_model_parallel_world_size(mpu)
    group = get_tensor_model_parallel_group()
    return 1 if group is None else dist.get_world_size(group)


def get_model_parallel_world_size() -> int:
    """As :func:`get_tensor_model_parallel_world_size`."""
    return get_tensor_model_parallel_world_size()


def set_tensor_model_parallel_rank(rank: int) -> None:
    """Make :func:`get_tensor_model_parallel_rank` return this."""
    _groups.overrides["rank"] = rank


def get_tensor_model_parallel_rank() -> int:
    """This process's rank among those that share a model."""
    if "rank" in _groups.overrides:
        return _groups.overrides["rank"]
    if mpu is not None and _mesh_group("tensor_parallel") is None:
        return bwc_tensor_model_parallel_rank(mpu)
    group = get_tensor_model_parallel_group()
    return 0 if group is None else dist.get_rank(group)


def get_model_parallel_rank() -> int:
    """As :func:`get_tensor_model_parallel_rank`."""
    return get_tensor_model_parallel_rank()


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first of those that share this process's model."""
    group = get_tensor_model_parallel_group()
    return dist.get_rank() if group is None else dist.get_global_rank(group, 0)


def _get_model_parallel_world_size() -> int:
    """Number of ranks that share a model, pipeline stages included where the mpu counts them."""
    if _mpu_has("get_model_parallel_world_size"):
        return mpu.get_model_parallel_world_size()
    return get_tensor_model_parallel_world_size()


# ZeRO's secondary partitions (a copy of the parameters within a few ranks)


def _get_gather_group(group: Any) -> Any:
    """A group over the same ranks, on which partitioned parameters are gathered; made once. A collective of its
    members."""
    if dist.get_world_size(group) == 1:
        return group
    ranks = tuple(dist.get_all_ranks_from_group(group))
    known = _current().gather
    made = known[ranks]() if ranks in known else None
    if made is None:
        made = torch.distributed.new_group(list(ranks), timeout=timeout_of(group), use_local_synchronization=True)
        known[ranks] = _Reference(made)
    return made


def _create_zero_param_parallel_group(group_size: int) -> None:
    """Make groups of ``group_size`` consecutive ranks. A collective of the world."""
    groups = _current()
    world_size, rank = dist.get_world_size(), dist.get_rank()
    size = min(group_size, world_size)
    _ensure_divisibility(world_size, size)
    for start in range(0, world_size, size):
        group = dist.new_group(list(range(start, start + size)))
        if start <= rank < start + size:
            groups.zero_param = _Reference(group)


def _get_zero_param_intra_parallel_group() -> Any:
    """This rank's secondary-partition group, None where there is none."""
    return _current().zero_param()


def _zero_param_parallel_is_initialized() -> bool:
    """Whether secondary-partition groups were made."""
    return _current().zero_param() is not None


def _get_zero_param_intra_parallel_rank_in_mygroup() -> int:
    """This process's rank in its secondary-partition group; its global rank where there is none."""
    return dist.get_rank(_current().zero_param())


def _get_zero_param_intra_parallel_group_world_size() -> int:
    """Size of the secondary-partition group; the world size where there is none."""
    return dist.get_world_size(_current().zero_param())


def _get_zero_param_intra_parallel_group_ranks() -> list[int]:
    """Global ranks of the secondary-partition group; all where there is none."""
    return dist.get_all_ranks_from_group(_current().zero_param())


def _get_local_all_to_all_group() -> NoReturn:
    """Groups within and across nodes for quantised gradient exchange: not built."""
    raise NotImplementedError("hierarchical all-to-all groups (zero_quantized_gradients) are not supported here")


# Expert parallelism


def _no_experts(name: str) -> NoReturn:
    raise NotImplementedError(f"expert parallelism (MoE) is not supported here: groups.{name}")


def _expert_function(name: str) -> Callable[..., NoReturn]:
    def function(*args: Any, **kwargs: Any) -> NoReturn:
        _no_experts(name)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = "Expert parallelism: not built, raises NotImplementedError."
    return function


_create_expert_and_data_parallel = _expert_function("_create_expert_and_data_parallel")
_get_expert_parallel_ranks = _expert_function("_get_expert_parallel_ranks")
_create_expert_data_and_model_parallel = _expert_function("_create_expert_data_and_model_parallel")
_get_max_expert_size = _expert_function("_get_max_expert_size")
_get_max_expert_size_name = _expert_function("_get_max_expert_size_name")
_get_max_expert_parallel_group = _expert_function("_get_max_expert_parallel_group")
_get_expert_parallel_group = _expert_function("_get_expert_parallel_group")
_get_expert_parallel_group_ranks = _expert_function("_get_expert_parallel_group_ranks")
_get_expert_parallel_group_dict = _expert_function("_get_expert_parallel_group_dict")
_get_expert_data_parallel_group = _expert_function("_get_expert_data_parallel_group")
_get_expert_data_parallel_group_ranks = _expert_function("_get_expert_data_parallel_group_ranks")
_get_expert_data_parallel_group_dict = _expert_function("_get_expert_data_parallel_group_dict")
_get_expert_broadcast_src_rank = _expert_function("_get_expert_broadcast_src_rank")
_get_expert_parallel_world_size = _expert_function("_get_expert_parallel_world_size")
_get_expert_data_parallel_world_size = _expert_function("_get_expert_data_parallel_world_size")
_get_expert_parallel_rank = _expert_function("_get_expert_parallel_rank")
_get_expert_parallel_src_rank = _expert_function("_get_expert_parallel_src_rank")
_get_expert_data_parallel_rank = _expert_function("_get_expert_data_parallel_rank")
_get_expert_model_parallel_world_size = _expert_function("_get_expert_model_parallel_world_size")
