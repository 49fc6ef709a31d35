# SPDX-License-Identifier: Apache-2.0
"""From ``zero_optimization.offload_optimizer`` to which groups rest where."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.cpu_optimizer import CPUOptimizer
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.gradients.host_memory import HostMemory
from deepspeed.runtime.gradients.layout import FlatGroup, cut_groups, place_on_host
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)
from deepspeed.runtime.zero.sharded_parameter import ShardedParameter
from deepspeed.runtime.zero.state_home import StateHome, homes_in_memory

OffloadConfig = DeepSpeedZeroOffloadOptimizerConfig | DeepSpeedZeroOffloadParamConfig | None


def active(config: OffloadConfig) -> bool:
    """Whether the section moves anything away from the device."""
    return config is not None and config.device != OffloadDeviceEnum.none


def host_memory(config: OffloadConfig) -> HostMemory:
    """How memory of the host is allocated for what the section keeps there."""
    return HostMemory(pinned=config is not None and config.pin_memory)


def place_groups(
    groups: Sequence[FlatGroup], config: DeepSpeedZeroOffloadOptimizerConfig | None, world_size: int, slice_limit: int
) -> list[FlatGroup]:
    """Mark the groups that rest on the host, and cut groups where a rank's part reaches ``slice_limit`` elements, so
    that one can be copied while the next is stepped.

    Raises:
        NotImplementedError: SuperOffload, or files.
    """
    if not active(config):
        return cut_groups(groups, world_size, slice_limit)
    if config.super_offload:
        raise NotImplementedError("offload_optimizer.super_offload is not built; leave it false")
    return cut_groups(place_on_host(groups, world_size, config.ratio), world_size, slice_limit)


def bucket_size(config: DeepSpeedZeroOffloadOptimizerConfig | None, configured: int) -> int:
    """Elements of a bucket: half of what is configured where results leave for the host, since two of them are on their
    way at a time while autograd fills a third, and together they are to be less than two that are configured."""
    return max(1, configured // 2) if active(config) else configured


def state_homes(
    groups: Sequence[FlatGroup],
    config: DeepSpeedZeroOffloadOptimizerConfig | None,
    aio: Mapping[str, Any] | None = None,
) -> list[StateHome]:
    """Where masters and state of each group rest.

    Args:
        aio: section ``aio`` of the config, for files; None: its defaults.

    Raises:
        OSError: ``nvme_path`` is not a folder that files can be made in.
    """
    homes = homes_in_memory(groups)
    if config is None or config.device != OffloadDeviceEnum.nvme:
        return homes
    from deepspeed.runtime.swap_tensor.file_home import FileHome

    in_files = FileHome([group for group in groups if group.on_host], config, aio or AIO_DEFAULT_DICT, dist.get_rank())
    return [in_files if group.on_host else home for group, home in zip(groups, homes)]


def flat_step(optimizer: torch.optim.Optimizer, device: torch.device) -> Callable[..., None]:
    """What steps a flat tensor on ``device``: the optimizer's own ``step_flat``; for one that is made for the host and
    a device of another kind, that of its counterpart there, with the same state.

    Raises:
        NotImplementedError: the optimizer has no such counterpart.
    """
    if device.type == "cpu" or not isinstance(optimizer, CPUOptimizer):
        return optimizer.step_flat
    maximize = any(group.get("maximize") for group in optimizer.param_groups)
    placeholder = [torch.zeros(0, device=device)]
    if type(optimizer) is DeepSpeedCPUAdam and not maximize:
        twin: Any = FusedAdam(placeholder, adam_w_mode=optimizer.adam_w_mode)
    elif type(optimizer) is DeepSpeedCPULion and not maximize:
        twin = FusedLion(placeholder)
    else:
        raise NotImplementedError(
            f"offload_optimizer.ratio below 1 with {type(optimizer).__name__}: no optimizer with the same state steps"
            " the part that stays on the device. Use DeepSpeedCPUAdam or DeepSpeedCPULion, a torch optimizer with"
            ' "zero_force_ds_cpu_optimizer": false, or ratio 1'
        )

    def step(master: Any, gradient: Any, state: Any, group: dict[str, Any], **options: Any) -> None:
        twin.step_flat(master, gradient, state, twin.defaults | group, **options)

    return step


def shard_memory(config: DeepSpeedZeroOffloadParamConfig | None) -> HostMemory | None:
    """How memory for shards of weights that rest on the host is allocated; None where they rest on their device.

    Raises:
        NotImplementedError: files.
    """
    if not active(config):
        return None
    if config.device == OffloadDeviceEnum.nvme:
        return HostMemory(pinned=False)  # on the way to the files
    return host_memory(config)


def shard_store(
    shards: Sequence[ShardedParameter],
    config: DeepSpeedZeroOffloadParamConfig | None,
    aio: Mapping[str, Any] | None = None,
) -> Any:
    """The ``ShardStore`` that ``shards``, which are in memory of the host, rest in from here on; None without files.

    Raises:
        OSError: ``nvme_path`` is not a folder that files can be made in.
        ValueError: a shard does not fit into a buffer.
        SwapError: a shard cannot be written.
    """
    if config is None or config.device != OffloadDeviceEnum.nvme:
        return None
    from deepspeed.runtime.swap_tensor.shard_store import ShardStore

    store = ShardStore(config, aio or AIO_DEFAULT_DICT, dist.get_rank())
    try:
        store.rest(shards)
    except BaseException:
        store.close()  # the model keeps its weights
        raise
    return store
