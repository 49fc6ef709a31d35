# SPDX-License-Identifier: Apache-2.0
"""Partitioning parameters as modules are built (``Init``), and looking at whole ones (``GatheredParameters``)."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from types import MethodType, TracebackType
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.control import ControlChannel
from deepspeed.runtime.config import load_config
from deepspeed.runtime.gradients.host_memory import HostMemory
from deepspeed.runtime.zero import init_patching
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, get_zero_config
from deepspeed.runtime.zero.init_patching import ConstructionPatch
from deepspeed.runtime.zero.parameter_offload import name_external
from deepspeed.runtime.zero.sharded_parameter import (
    ATTRIBUTE,
    NOT_AVAILABLE,
    Gather,
    PartitionedParamStatus,
    ShardedParameter,
    ZeroParamStatus,
    ZeroParamType,
    gather_now,
    plain_tensors,
    ranks_of,
    shard_of,
    shards_of,
    start_gathers,
)
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.utils import groups

__all__ = [
    "DeepSpeedTensorOverride",
    "GatheredParameters",
    "Init",
    "PartitionedParamStatus",
    "ZeroParamStatus",
    "ZeroParamType",
    "convert_to_zero_parameters",
    "get_accelerator",
    "is_zero_param",
    "register_external_parameter",
    "restore_init_context",
    "shutdown_init_context",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

partitioned_param_data_shape = [0]

# The constructors as they are outside of ``Init``; clients read some of them.
_orig_torch_tensor = torch.tensor
_orig_torch_empty = torch.empty
_orig_torch_zeros = torch.zeros
_orig_torch_ones = torch.ones
_orig_torch_full = torch.full
_orig_torch_arange = torch.arange
_orig_torch_eye = torch.eye
_orig_torch_randn = torch.randn

_parameter_ids = itertools.count()


class DeepSpeedTensorOverride(Enum):
    """What ``Init`` overrides of tensors that are constructed inside of it."""

    dtype = 1
    device = 2


DEFAULT_TENSOR_OVERRIDES = [DeepSpeedTensorOverride.dtype, DeepSpeedTensorOverride.device]


# ---------------------------------------------------------------------------------------------------- one parameter


def convert_to_zero_parameters(
    parameters: Iterable[torch.nn.Parameter],
    group: Any,
    shard_device: torch.device | None = None,
    sanity_checks: bool = False,
) -> list[ShardedParameter]:
    """Partition whole parameters, in place: each keeps its identity and gets the ``ds_*`` attributes.

    Args:
        parameters: hold the same values on every rank of ``group``. Those that are partitioned already are left.
        shard_device: where shards are kept; None for each parameter's device.
        sanity_checks: let ``GatheredParameters`` raise when a write would be dropped, and compare each gather with
            the other ranks' before it begins.
    """
    ranks = ranks_of(group)
    if sanity_checks:
        ranks.check_each_gather()
    converted = []
    for parameter in parameters:
        if is_zero_param(parameter):
            continue
        shard = ShardedParameter(parameter, ranks, shard_device)
        _attach(parameter, shard, sanity_checks)
        shard.hide()
        converted.append(shard)
    return converted


def _attach(parameter: torch.nn.Parameter, shard: ShardedParameter, sanity_checks: bool) -> None:
    """The attributes and methods that outside code uses."""
    ranks = shard.ranks
    setattr(parameter, ATTRIBUTE, shard)
    parameter.ds_id = next(_parameter_ids)
    parameter.ds_shape = shard.shape
    parameter.ds_numel = shard.numel
    parameter.ds_numel_aligned = shard.slice_numel * ranks.world_size
    parameter.ds_status = NOT_AVAILABLE
    parameter.ds_param_type = ZeroParamType.PARTITIONED
    parameter.ds_persist = False
    parameter.ds_active_sub_modules = set()
    parameter.ds_process_group = ranks.data_parallel_group
    parameter.ds_zero_partition_rank = ranks.rank
    parameter.ds_zero_partition_world_size = ranks.world_size
    parameter.ds_secondary_tensor = None
    parameter.ds_secondary_tensor_group_size = ranks.world_size
    parameter.ds_secondary_tensor_num_of_groups = 1
    parameter.ds_zero_param_process_group = None
    parameter.ds_enable_sanity_checks = sanity_checks
    parameter.is_external_param = False
    parameter.nvme_swapper = None
    for method in (
        all_gather,
        all_gather_coalesced,
        partition,
        partition_numel,
        aligned_size,
        padding_size,
        ds_summary,
    ):
        setattr(parameter, method.__name__, MethodType(method, parameter))
    parameter.item = MethodType(_item, parameter)
    parameter.convert_to_zero_parameters = functools.partial(_convert_like, parameter)
    parameter.__deepcopy__ = functools.partial(_deepcopy, parameter)
    parameter.__reduce_ex__ = functools.partial(_reduce, parameter)


def all_gather(
    self: torch.nn.Parameter,
    param_list: Sequence[torch.nn.Parameter] | None = None,
    async_op: bool = False,
    hierarchy: int = 0,
) -> Any:
    """Make this parameter, or those of ``param_list``, whole. Collective. With ``async_op``, what to ``wait()`` for."""
    return all_gather_coalesced(self, [self] if param_list is None else param_list, wait=not async_op)


class _Handles:
    """Gathers under way."""

    def __init__(self, gathers: list[Gather]) -> None:
        self._gathers = gathers

    def wait(self, *args: Any, **kwargs: Any) -> None:
        """Make the whole values the parameters' data."""
        for gather in self._gathers:
            if any(shard.gather is gather for shard in gather.shards):
                gather.wait()


def all_gather_coalesced(
    self: torch.nn.Parameter,
    params: Iterable[torch.nn.Parameter],
    safe_mode: bool = False,
    quantize: bool = False,
    wait: bool = False,
) -> Any:
    """Begin to make ``params`` whole, in as few collectives as their kinds allow; what to ``wait()`` for."""
    if quantize:
        raise NotImplementedError("all_gather_coalesced(quantize=True): quantized weights are not built")
    handles = _Handles(start_gathers(shard_of(parameter) for parameter in params))
    if wait:
        handles.wait()
        return None
    return handles


def partition(
    self: torch.nn.Parameter,
    param_list: Sequence[torch.nn.Parameter] | None = None,
    hierarchy: int = 0,
    has_been_updated: bool = False,
    free_data: bool = True,
) -> None:
    """Let go of whole values. With ``has_been_updated`` they become the new values first; every rank has the same."""
    for parameter in [self] if param_list is None else param_list:
        shard = shard_of(parameter)
        if shard.full is None and shard.gather is None:
            continue
        if has_been_updated:
            shard.write(parameter.data)
        if free_data:
            _let_go(shard)


def _let_go(shard: ShardedParameter) -> None:
    if shard.coordinator is not None:
        shard.coordinator.forget(shard)
    shard.hide()


def partition_numel(self: torch.nn.Parameter) -> int:
    """Elements of a shard, padding included."""
    return shard_of(self).slice_numel


def aligned_size(self: torch.nn.Parameter) -> int:
    """Elements of all shards, padding included."""
    return self.ds_numel_aligned


def padding_size(self: torch.nn.Parameter) -> int:
    """Elements of padding."""
    return self.ds_numel_aligned - self.ds_numel


def ds_summary(self: torch.nn.Parameter, use_debug_name: bool = False) -> dict[str, Any]:
    """What is known of the parameter, for messages."""
    return {
        "id": shard_of(self).name if use_debug_name else self.ds_id,
        "status": self.ds_status.name,
        "numel": self.numel(),
        "ds_numel": self.ds_numel,
        "shape": tuple(self.shape),
        "ds_shape": tuple(self.ds_shape),
        "requires_grad": self.requires_grad,
        "grad_shape": None if self.grad is None else tuple(self.grad.shape),
        "persist": self.ds_persist,
        "active_sub_modules": self.ds_active_sub_modules,
        "ds_tensor.shape": tuple(self.ds_tensor.shape),
    }


def _item(self: torch.nn.Parameter) -> Any:
    """The value of a parameter of one element. Collective unless it is whole."""
    shard = shard_of(self)
    was_hidden = shard.full is None
    gather_now([shard])
    value = self.data.item()
    if was_hidden and shard.free:
        _let_go(shard)
    return value


def _convert_like(parameter: torch.nn.Parameter, param_list: Iterable[torch.nn.Parameter]) -> None:
    """Partition others over the same ranks."""
    convert_to_zero_parameters(param_list, parameter.ds_process_group)


def _deepcopy(parameter: torch.nn.Parameter, memo: dict[int, Any]) -> torch.nn.Parameter:
    """An ordinary copy of a whole parameter.

    Raises:
        RuntimeError: the parameter is partitioned at the moment.
    """
    copied = memo[id(parameter)] = _ordinary(parameter)
    return copied


def _reduce(parameter: torch.nn.Parameter, protocol: int) -> Any:
    """What pickle writes of a whole parameter: an ordinary one.

    Raises:
        RuntimeError: the parameter is partitioned at the moment.
    """
    return _ordinary(parameter).__reduce_ex__(protocol)


def _ordinary(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    shard = shard_of(parameter)
    if shard.full is None:
        raise RuntimeError(
            f"parameter {shard.name} is partitioned, a copy would be empty. Copy or pickle the module under"
            " deepspeed.zero.GatheredParameters(module.parameters())"
        )
    return torch.nn.Parameter(parameter.data.clone(), parameter.requires_grad)


# ------------------------------------------------------------------------------------------ external parameters


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Let ``module``'s forward and backward have ``parameter``, which another module owns, whole.

    Not needed for parameters that ``module`` reaches as attributes of modules: those are noticed.

    Raises:
        RuntimeError: ``parameter`` is not a parameter.
    """
    if not isinstance(parameter, torch.nn.Parameter):
        raise RuntimeError(f"register_external_parameter needs a torch.nn.Parameter, got {type(parameter).__name__}")
    name_external(module, parameter)
    parameter.is_external_param = True
    _collect_again(module)


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Take ``register_external_parameter`` back.

    Raises:
        RuntimeError: it was not registered.
    """
    known = module.__dict__.get("_external_params", {})
    if id(parameter) not in known:
        raise RuntimeError("the parameter is not registered as an external parameter of the module")
    del known[id(parameter)]
    _collect_again(module)


def _collect_again(module: torch.nn.Module) -> None:
    unit = module.__dict__.get("_ds_unit")
    if unit is not None and unit.offload is not None:
        unit.collect()


# ---------------------------------------------------------------------------------------------------- whole values


class GatheredParameters:
    """Makes partitioned parameters whole for a block of code. Every rank enters and leaves together.

    Args:
        params: a parameter or any number of them; those that are not partitioned are passed over.
        modifier_rank: this rank's values at the end (rank of the world) become everybody's new values, and the
            optimizer's master weights follow; None: changes are dropped.
        fwd_module: gather for the forward of this module, as ``register_external_parameter`` does, too.
        enabled: False does nothing.

    Raises:
        RuntimeError: a parameter is held by a context already; was moved to another device or given another shape
            inside; or, with ``zero_optimization.enable_sanity_checks``, was changed without ``modifier_rank``.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        if not enabled:
            return
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        self.shards = shards_of(given)
        self.enabled = bool(self.shards)
        self.params = [shard.parameter for shard in self.shards]
        self.src_rank = modifier_rank
        if fwd_module is not None:
            for parameter in self.params:
                register_external_parameter(fwd_module, parameter)
        self._shown: dict[ShardedParameter, torch.Tensor] = {}  # to compare with, for sanity checks

    def __enter__(self) -> None:
        if not self.enabled:
            return
        held = [shard.name for shard in self.shards if shard.held]
        if held:
            raise RuntimeError(
                f"parameters {held[:4]} are held by another GatheredParameters already; the inner context could not"
                " tell whose changes count. Gather each parameter in one context"
            )
        # Values that are there anyway are shown as a copy, and put back at the end: whether they were changed inside
        # may differ from rank to rank, what is gathered later must not.
        for shard in self.shards:
            if shard.gather is not None:
                shard.gather.wait()
        for shard in self.shards:
            shard.aside = shard.full
        gather_now(self.shards)
        with plain_tensors():
            for shard in self.shards:
                shard.held += 1
                if shard.aside is not None or shard.aliased:
                    shard.show(shard.full.clone())
                if shard.parameter.ds_enable_sanity_checks and self.src_rank is None:
                    self._shown[shard] = shard.full.clone()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.enabled:
            return
        for shard in self.shards:
            shard.held -= 1
        try:
            if self.src_rank is not None and kind is None:
                self._spread()
            else:
                self._drop_writes()
                if kind is None:
                    self._refuse_dropped_writes()
        finally:
            self._leave()

    def _spread(self) -> None:
        """Give everybody the values of the modifying rank."""
        self._check_whole()
        for shard in self.shards:
            ranks = shard.ranks
            data = shard.parameter.data
            whole = data.to(shard.dtype).contiguous()
            if ranks.world_size > 1 and shard.numel:
                with torch.no_grad(), torch.inference_mode(False):
                    dist.broadcast(whole, src=self.src_rank, group=ranks.group)
            former = shard.shard.clone()
            shard.write(whole)
            link = getattr(shard.parameter, "_ds_link", None)
            if link is not None:
                link.optimizer.take_changed_weights(link, former)

    def _check_whole(self) -> None:
        """On every rank alike, since all are about to send or receive. Collective."""
        fault = self._fault_here()
        ranks = self.shards[0].ranks
        if ranks.world_size > 1:
            channel = ControlChannel(ranks.group)
            what = "whether the weights of GatheredParameters can be spread"
            (anywhere,) = channel.all_reduce_max([int(bool(fault))], what)
            if anywhere:
                told = channel.gather(fault, what)
                fault = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)
        if fault:
            raise RuntimeError(f"{fault} at the end of GatheredParameters; change values in place")

    def _fault_here(self) -> str:
        for shard in self.shards:
            data = shard.parameter.data
            if data.shape != shard.shape or data.device != shard.device:
                return (
                    f"parameter {shard.name} was of shape {tuple(shard.shape)} on {shard.device} and is of shape"
                    f" {tuple(data.shape)} on {data.device}"
                )
        return ""

    def _drop_writes(self) -> None:
        """Graphs that saved values which are about to be put back must not be used any more."""
        for shard in self.shards:
            data = shard.parameter.data
            if data.shape != shard.shape or data.device != shard.device:
                shard.dropped += 1
                continue
            own = shard.own_slice(data.reshape(-1))
            if not torch.equal(own, shard.shard[: own.numel()].to(own.device)):
                shard.dropped += 1

    def _refuse_dropped_writes(self) -> None:
        changed = [shard.name for shard, shown in self._shown.items() if _was_written(shard, shown)]
        if changed:
            raise RuntimeError(
                f"parameters {changed[:4]} were changed inside GatheredParameters without modifier_rank; the change"
                " would be dropped. Pass the rank whose values are to count"
            )

    def _leave(self) -> None:
        self._shown.clear()
        for shard in self.shards:
            if shard.aside is not None:
                shard.show(shard.aside)
                shard.aside = None
            elif not shard.parameter.ds_active_sub_modules:
                _let_go(shard)
            elif shard.aliased:
                shard.show(shard.shard)  # in use still, by a backward that died: not of this context's copy, which ages


def _was_written(shard: ShardedParameter, shown: torch.Tensor) -> bool:
    """Whether the whole value differs, bit by bit, from what was shown."""
    data, shown = shard.parameter.data, shown[: shard.numel]
    if data.shape != shard.shape or data.device != shown.device or data.dtype != shown.dtype:
        return True
    return not torch.equal(data.contiguous().view(-1).view(torch.uint8), shown.view(torch.uint8))


# ---------------------------------------------------------------------------------------------------- construction


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype | None, target_device: torch.device | None
) -> Callable[..., torch.Tensor]:
    """A tensor constructor whose floating-point results have ``target_fp_dtype``, on ``target_device``.

    A ``device=`` of the call wins, and so does ``with torch.device(...)`` around it, so that code which builds on the
    meta device still does.
    """
    return init_patching.fp_tensor_constructor(fn, target_fp_dtype, target_device)


def shutdown_init_context() -> None:
    """Lift the patches of all open ``Init`` contexts."""
    init_patching.shutdown_all()


def restore_init_context() -> None:
    """Put them back."""
    init_patching.restore_all()


class Init:
    """Context in which each module's parameters are partitioned as soon as the module is built.

    So a model needs memory for one rank's share and its largest module. Each parameter's initial values are those of
    the group's first rank.

    Args:
        module: partition the parameters of this module now; the object is not used as a context then.
        data_parallel_group: ranks to partition over; default all.
        mem_efficient_linear: kept for compatibility; saved weights need no memory with any operator.
        remote_device: "cpu" keeps shards on the host until an engine takes them over; None or "none" on the device.
        pin_memory: pin such shards.
        config_dict_or_path: configuration; its ``zero_optimization`` section and precision are used. ``config`` is its
            older name.
        enabled: False does nothing.
        dtype: of floating-point parameters; default that of the configuration, without one fp16 where the accelerator
            has it, else bf16.
        mpu: model-parallel unit that names the data-parallel group.
        tensor_overrides: whether tensors constructed inside get the dtype and the device.

    Raises:
        RuntimeError: the group has one rank though the environment says that there are more.
        NotImplementedError: a feature that is not built, by name.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Sequence[DeepSpeedTensorOverride] = tuple(DEFAULT_TENSOR_OVERRIDES),
    ) -> None:
        self.enabled = enabled
        if not enabled:
            return
        given = config_dict_or_path if config_dict_or_path is not None else config
        settings = load_config(given) if given is not None else None
        zero = get_zero_config(settings or {})
        _refuse_unbuilt(
            zero_quantized_weights=zero_quantized_weights,
            zero_quantized_nontrainable_weights=zero_quantized_nontrainable_weights,
            param_swapper=param_swapper is not None,
            remote_device_nvme=remote_device == "nvme",
        )
        if not dist.is_initialized():
            dist.init_distributed()
        self.ds_process_group = _group(data_parallel_group, sequence_data_parallel_group, mpu)
        self.rank = dist.get_rank(self.ds_process_group)
        self.dp_world_size = dist.get_world_size(self.ds_process_group)
        self.dtype = dtype if dtype is not None else _dtype_of(settings)
        self.local_device = torch.device(get_accelerator().current_device_name())
        self.remote_device = _remote_device(remote_device, zero)
        self.pin_memory = pin_memory
        self.sanity_checks = zero.enable_sanity_checks
        if module is not None:
            for child in module.modules():
                self._partition_module(child)
            return
        self._patch = ConstructionPatch(
            on_module_built=self._partition_module,
            dtype=self.dtype,
            device=self.local_device,
            overrides=set(tensor_overrides),
            patch_linear=False,
            module_apply=_apply_to_whole if zero.override_module_apply else None,
            wrap=lambda *args, **kwargs: zero_wrapper_for_fp_tensor_constructor(*args, **kwargs),
            wrap_initialiser=_initialise_whole,
        )

    @property
    def num_partitions(self) -> int:
        return self.dp_world_size

    def get_partition_rank(self) -> int:
        """This rank in the group."""
        return self.rank

    def get_dp_process_group(self) -> Any:
        return self.ds_process_group

    def get_partition_dp_group(self, param: torch.nn.Parameter) -> Any:
        return param.ds_process_group

    def __enter__(self) -> "Init":
        if self.enabled:
            self._patch.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            self._patch.remove(failed=kind is not None)

    def _partition_module(self, module: torch.nn.Module) -> None:
        """Partition what a module owns and is whole still."""
        fresh = [p for p in module.parameters(recurse=False) if not is_zero_param(p)]
        for parameter in fresh:
            prepare_whole(parameter, self.dtype, self.local_device, self.ds_process_group)
        shards = convert_to_zero_parameters(fresh, self.ds_process_group, self.remote_device, self.sanity_checks)
        if self.pin_memory and self.remote_device is not None:
            for shard in shards:
                shard.move_shard(HostMemory().copy_of(shard.shard), away=True)
        for buffer in module.buffers(recurse=False):
            if buffer is not None and not buffer.is_meta:
                buffer.data = buffer.data.to(self.local_device)


@torch.no_grad()
def prepare_whole(parameter: torch.nn.Parameter, dtype: torch.dtype | None, device: torch.device, group: Any) -> None:
    """Bring a whole parameter into its dtype and to its device, and give it the values of the group's first rank.

    Raises:
        ValueError: it is on the meta device.
    """
    if parameter.is_meta:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is on the meta device and has no values to partition;"
            " build the module inside deepspeed.zero.Init, without a meta device, or materialise it first"
        )
    data = parameter.data.to(device)
    if dtype is not None and data.is_floating_point():
        data = data.to(dtype)
    data = data.contiguous()
    if data.numel() and dist.get_world_size(group) > 1:
        dist.broadcast(data, src=dist.get_global_rank(group, 0), group=group)
    parameter.grad = None
    parameter.data = data


def _apply_to_whole(module: torch.nn.Module, fn: Callable[[torch.nn.Module], None]) -> torch.nn.Module:
    """``Module.apply`` for partitioned modules: ``fn`` sees whole parameters, and its changes on rank 0 count."""
    for child in module.children():
        child.apply(fn)
    with GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0):
        fn(module)
    return module


def _initialise_whole(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``function`` of ``torch.nn.init``, also for a parameter that is partitioned already: constructors initialise what
    their children own (``torch.nn.MultiheadAttention`` does), and a write to an empty tensor would be lost."""

    @functools.wraps(function)
    def initialise(*args: Any, **kwargs: Any) -> torch.Tensor:
        shard = shard_of(args[0] if args else kwargs.get("tensor"))
        if shard is None or shard.full is not None:
            return function(*args, **kwargs)
        source = dist.get_global_rank(shard.ranks.data_parallel_group, 0)
        with GatheredParameters(shard.parameter, modifier_rank=source):
            return function(*args, **kwargs)

    return initialise


def _group(data_parallel_group: Any, sequence_data_parallel_group: Any, mpu: Any) -> Any:
    for group in (data_parallel_group, sequence_data_parallel_group):
        if group is not None:
            return group
    if mpu is not None:
        return mpu.get_data_parallel_group()
    return groups._get_data_parallel_group()


def _dtype_of(settings: dict[str, Any] | None) -> torch.dtype | None:
    if settings is None:
        return torch.float16 if get_accelerator().is_fp16_supported() else torch.bfloat16
    for section, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16)):
        chosen = settings.get(section)
        if isinstance(chosen, dict) and chosen.get("enabled") is True:
            return dtype
    return torch.float32


def _remote_device(remote_device: str | None, zero: DeepSpeedZeroConfig) -> torch.device | None:
    chosen = remote_device
    if chosen is None and zero.offload_param is not None:
        chosen = zero.offload_param.device
    if chosen in (None, "none"):
        return None
    if chosen == "nvme":
        raise NotImplementedError("zero.Init with offload_param.device nvme: parameter offload is not built")
    return torch.device(chosen)


def _refuse_unbuilt(**requested: bool) -> None:
    for feature, wanted in requested.items():
        if wanted:
            raise NotImplementedError(f"zero.Init: {feature} is not built")


def get_allgather_dtype(param: torch.nn.Parameter, param_ds_tensor: torch.Tensor) -> torch.dtype:
    """dtype in which a parameter is gathered: that of its shard."""
    return param_ds_tensor.dtype
