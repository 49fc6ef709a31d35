# SPDX-License-Identifier: Apache-2.0
"""Between a live optimizer of any stage and what stands in checkpoint files."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from deepspeed.checkpoint.optimizer_state import MASTER, SavedParameter, SavedState, Shapes
from deepspeed.checkpoint.storage import CheckpointError
from deepspeed.git_version_info import version
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.fp16.unfused_optimizer import ReplicatedOptimizer
from deepspeed.runtime.gradients.layout import FlatGroup, master_dtype
from deepspeed.runtime.zero.flat_weights import MASTER as RESTING_MASTER
from deepspeed.runtime.zero.partitioned_optimizer import PartitionedOptimizer
from deepspeed.runtime.zero.sharded_parameter import shard_of
from deepspeed.utils.tensor_fragment import fragment_address

WORTH_A_WAIT = 1 << 16  # bytes from which a tensor is copied by another thread
# Of a torch optimizer's settings: how it computes on this device, not what.
IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")


# ---------------------------------------------------------------------------------------------------- to files


def trained_shapes(optimizer: ZeROOptimizer) -> Shapes:
    """Names and shapes of the trained parameters, by parameter group, in the order of the flat groups."""
    shapes: Shapes = [OrderedDict() for _ in optimizer.param_groups]
    for group in optimizer.reducer.layout.groups:
        for record in group.records:
            shapes[group.param_group][record.name] = record.shape
    return shapes


def partitioned_state(optimizer: PartitionedOptimizer, stage: int) -> dict[str, Any]:
    """This rank's entry ``optimizer_state_dict`` of a file of masters and optimizer state (stages 1 to 3).

    Tensors are the live ones, where the dtype allows.
    """
    world_size = optimizer.reducer.channel.world_size
    groups = optimizer.reducer.layout.groups
    common = {
        "zero_stage": stage,
        "loss_scaler": optimizer.loss_scaler,
        "dynamic_loss_scale": optimizer.dynamic_loss_scale,
        "overflow": optimizer.overflow,
        "clip_grad": optimizer.clip_grad,
        "ds_version": version,
    }
    inner, masters = _values_to_save(optimizer)
    if stage == 3:
        return common | {
            "partition_count": world_size,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": masters,
        }
    return common | {
        "base_optimizer_state": inner,
        "single_partition_of_fp32_groups": [
            master[: group.shard_numel - group.padding] for master, group in zip(masters, groups)
        ],
        "group_paddings": [group.padding for group in groups],
        "partition_count": [world_size] * len(groups),
        "param_slice_mappings": [_slice_mapping(group) for group in groups],
        "flat_groups": [_flat_group(group) for group in groups],
    }


def rests_until_written(optimizer: PartitionedOptimizer) -> Callable[[torch.Tensor], bool]:
    """Tells masters and optimizer state, which nobody writes to but ``MasterWeights``, from the rest of a state."""
    weights = optimizer.weights
    resting = {
        tensor.untyped_storage().data_ptr()
        for index, home in enumerate(weights.homes)
        if home.always_resident
        for tensor in weights.tensors(index).values()
    }
    return lambda tensor: tensor.nbytes >= WORTH_A_WAIT and tensor.untyped_storage().data_ptr() in resting


def _values_to_save(optimizer: PartitionedOptimizer) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The inner optimizer's state dict, and the masters; what rests in files is read from there."""
    inner, weights = optimizer.optimizer.state_dict(), optimizer.weights
    order = [stepped for settings in optimizer.optimizer.param_groups for stepped in settings["params"]]
    number = {id(stepped): position for position, stepped in enumerate(order)}
    masters = []
    for index, (stepped, home) in enumerate(zip(weights.stepped, weights.homes)):
        values = weights.values(index)
        master = values[RESTING_MASTER].detach()
        masters.append(master.to(master_dtype(master.dtype)))
        entries = inner["state"].get(number[id(stepped)])
        if entries is not None and not home.always_resident:
            inner["state"][number[id(stepped)]] = {key: values.get(key, entry) for key, entry in entries.items()}
    return inner, masters


def _slice_mapping(group: FlatGroup) -> "OrderedDict[str, fragment_address]":
    return OrderedDict(
        (record.name, fragment_address(numel=end - begin, start=start))
        for _, record, begin, end, start in group.local_ranges()
    )


def _flat_group(group: FlatGroup) -> dict[str, Any]:
    offsets = {record.name: offset for record, offset in zip(group.records, group.offsets)}
    return {"offsets": offsets, "padded_numel": group.padded_numel, "param_group": group.param_group}


def replicated_state(optimizer: ReplicatedOptimizer) -> dict[str, Any]:
    """The entry ``optimizer`` of a stage 0 model file, with the live tensors."""
    inner = optimizer.optimizer.state_dict()
    if not optimizer.has_masters:
        return inner
    scaler = optimizer.loss_scaler
    # DeepSpeed wants a count of steps here also where the scale never changes
    state = {"dynamic_loss_scale": scaler.dynamic, "cur_iter": 0, "optimizer_state_dict": inner}
    state |= {key: value for key, value in vars(scaler).items() if isinstance(value, (int, float))}
    flat = _flat_inner_state(inner, optimizer) if isinstance(optimizer, FP16_Optimizer) else None
    if flat is None:
        return state | {"fp32_groups": [[master.detach() for master in group] for group in optimizer.fp32_groups]}
    masters = [_end_to_end(group) for group in optimizer.fp32_groups]
    return state | {"optimizer_state_dict": flat, "fp32_groups_flat": masters, "clip_grad": optimizer.clip_grad}


def _end_to_end(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0)


def _flat_inner_state(inner: dict[str, Any], optimizer: FP16_Optimizer) -> dict[str, Any] | None:
    """State as of one flat parameter per group, as DeepSpeed has with a fused optimizer; None where that cannot be: a
    group of several dtypes, or parameters with different kinds of state."""
    flat: dict[str, Any] = {"state": {}, "param_groups": []}
    for index, (group, masters) in enumerate(zip(inner["param_groups"], optimizer.fp32_groups)):
        states = [inner["state"].get(number, {}) for number in group["params"]]
        keys = [list(state) for state in states]
        if any(one != keys[0] for one in keys) or len({master.dtype for master in masters}) > 1:
            return None
        flat["param_groups"].append(group | {"params": [index] if masters else []})
        if keys and keys[0]:
            flat["state"][index] = {
                key: states[0][key] if key == "step" else _end_to_end(state[key] for state in states) for key in keys[0]
            }
    return flat


# ---------------------------------------------------------------------------------------------------- from files


@torch.no_grad()
def restore(optimizer: ZeROOptimizer, saved: SavedState) -> bool:
    """Take masters, optimizer state, settings and loss scale from ``saved``; the model's weights do not follow yet.

    Returns:
        False when the masters were not saved (an fp32 model at stage 0, whose weights are its masters).

    Raises:
        CheckpointError: another model or other parameter groups; nothing was changed then.
    """
    check_same_model(optimizer, saved)
    if isinstance(optimizer, PartitionedOptimizer):
        complete = _restore_partitioned(optimizer, saved)
    else:
        complete = _restore_replicated(optimizer, saved)
    for group, settings in zip(optimizer.param_groups, saved.param_groups):
        group.update({key: value for key, value in settings.items() if key not in IMPLEMENTATION})
    _restore_scaler(optimizer.loss_scaler, saved.scaler)
    return complete


def check_same_model(optimizer: ZeROOptimizer, saved: SavedState) -> None:
    """CheckpointError for other names, shapes or parameter groups."""
    own = {record.name: record.shape for record in optimizer.reducer.ledger.records}
    missing = [name for name in own if name not in saved.parameters]
    unexpected = [name for name in saved.parameters if name not in own and saved.parameters[name].shape.numel()]
    shapes = _other_shapes(own, saved)
    if missing or unexpected or shapes:
        raise CheckpointError(
            "the optimizer state in the checkpoint is of another model:"
            f" missing {missing[:5]}, unexpected {unexpected[:5]}, other shapes {shapes[:5]}"
            f" ({len(missing)}, {len(unexpected)} and {len(shapes)} in all). Load with load_optimizer_states=False to"
            " take the weights alone"
        )
    if len(saved.param_groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the saved optimizer has {len(saved.param_groups)} parameter groups, this one"
            f" {len(optimizer.param_groups)}"
        )


def _other_shapes(own: dict[str, torch.Size], saved: SavedState) -> list[str]:
    return [
        f"{name}: {tuple(saved.parameters[name].shape)} saved, {tuple(shape)} here"
        for name, shape in own.items()
        if name in saved.parameters and saved.parameters[name].shape != shape
    ]


def _restore_partitioned(optimizer: PartitionedOptimizer, saved: SavedState) -> bool:
    complete = True
    for batch in optimizer.weights.visit():
        for index in batch:
            complete = _restore_group(optimizer, saved, optimizer.reducer.layout.groups[index]) and complete
    return complete


def _restore_group(optimizer: PartitionedOptimizer, saved: SavedState, group: FlatGroup) -> bool:
    """Master and state of one flat group, which is resident."""
    parts = [saved.parameters[record.name] for record in group.records]
    keys = sorted(set().union(*(part.keys() for part in parts)))
    stepped, master = optimizer.weights.stepped[group.index], optimizer.weights.masters[group.index].data
    state: dict[str, Any] = {}
    before = optimizer.state.get(stepped, {})
    for key in keys:
        if key == MASTER:
            target = master
        else:
            target = _memory_for(before.get(key), group.shard_numel, stepped.dtype, master.device)
            state[key] = target
        _fill_flat(group, parts, key, target)
    for part in reversed(parts):
        state |= _scalars(part, optimizer.param_groups[group.param_group], master.device)
    _set_state(optimizer, stepped, state)
    return MASTER in keys


def _memory_for(kept: Any, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor to be filled: the one that is there, since new memory costs as much as reading, if it is such a one."""
    if isinstance(kept, torch.Tensor) and (kept.shape, kept.dtype, kept.device) == (torch.Size([numel]), dtype, device):
        return kept
    return torch.empty(numel, dtype=dtype, device=device)


def _fill_flat(group: FlatGroup, parts: list[SavedParameter], key: str, target: torch.Tensor) -> None:
    """Fill this rank's shard of a flat group. Where nothing was saved, optimizer state is zero and a master stays."""
    position = 0
    for place, _, begin, end, start in group.local_ranges():
        # A parameter that never had a gradient may have no state beside others that do.
        if key in parts[place].keys():
            if key != MASTER:
                target[position:start].zero_()
            position = start + end - begin
            parts[place].fill(key, target[start:position], begin, end)
    if key != MASTER:
        target[position:].zero_()


def _set_state(optimizer: ZeROOptimizer, stepped: torch.Tensor, state: dict[str, Any]) -> None:
    """State of one tensor that the inner optimizer steps on; an empty one is as before the first step."""
    if state:
        optimizer.state[stepped] = state
    else:
        optimizer.state.pop(stepped, None)


def _restore_replicated(optimizer: ReplicatedOptimizer, saved: SavedState) -> bool:
    complete = True
    settings = {record: group.param_group for group in optimizer.reducer.layout.groups for record in group.records}
    for record, master in optimizer.masters.items():
        part = saved.parameters[record.name]
        state: dict[str, Any] = {}
        for key in sorted(part.keys()):
            target = master.data if key == MASTER else torch.zeros_like(master, requires_grad=False)
            part.fill(key, target.view(-1), 0, record.numel)
            if key != MASTER:
                state[key] = target
        complete = complete and MASTER in part.keys()
        state |= _scalars(part, optimizer.param_groups[settings[record]], master.device)
        _set_state(optimizer, master, state)
    return complete


@torch.no_grad()
def restore_masters(optimizer: ZeROOptimizer, saved: SavedState, strict: bool = True) -> None:
    """Take the masters alone.

    Raises:
        CheckpointError: other shapes, or missing weights with ``strict``; nothing was changed then.
    """
    records = optimizer.reducer.ledger.records
    missing = [record.name for record in records if record.name not in saved.parameters]
    if missing and strict:
        raise CheckpointError(f"weights of {missing[:5]} ({len(missing)} in all) are not in the checkpoint")
    shapes = _other_shapes({record.name: record.shape for record in records}, saved)
    if shapes:
        raise CheckpointError(f"weights in the checkpoint have other shapes: {shapes[:5]} ({len(shapes)} in all)")
    if isinstance(optimizer, PartitionedOptimizer):
        for batch in optimizer.weights.visit():
            for index in batch:
                _restore_group_master(optimizer, saved, optimizer.reducer.layout.groups[index])
        return
    for record, master in optimizer.masters.items():
        if record.name in saved.parameters:
            saved.parameters[record.name].fill(MASTER, master.data.view(-1), 0, record.numel)


def _restore_group_master(optimizer: PartitionedOptimizer, saved: SavedState, group: FlatGroup) -> None:
    master = optimizer.weights.masters[group.index].data
    for _, record, begin, end, start in group.local_ranges():
        if record.name in saved.parameters:
            saved.parameters[record.name].fill(MASTER, master[start : start + end - begin], begin, end)


@torch.no_grad()
def fill_parameter(parameter: torch.nn.Parameter, saved: SavedParameter) -> None:
    """Give a parameter that nobody trains its saved values, or this rank's part of them. No communication.

    Raises:
        CheckpointError: another shape.
    """
    shard = shard_of(parameter)
    shape = parameter.shape if shard is None else shard.shape
    if shape != saved.shape:
        raise CheckpointError(f"a frozen weight was saved in shape {tuple(saved.shape)} and has {tuple(shape)} here")
    if shard is None:
        parameter.data.copy_(saved.whole(MASTER))
    elif shard.full is None and shard.aside is None:
        shard.await_copies()
        mine = shard.shard
        saved.fill(MASTER, mine[: shard.end - shard.begin], shard.begin, shard.end)
        shard.put(mine)
        shard.written()
    else:
        shard.write(saved.whole(MASTER).to(shard.device))


def _scalars(part: SavedParameter, settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Entries without dimensions. torch's optimizers count steps in tensors; others may have saved a number.

    Args:
        settings: of the parameter group: whether its implementation wants the count on the device.
    """
    on_device = settings.get("fused") or settings.get("capturable")
    entries = {}
    for key, value in part.scalars.items():
        if key == "step" and not isinstance(value, torch.Tensor):
            value = torch.tensor(float(value))
        if isinstance(value, torch.Tensor):
            value = value.detach().to(device if on_device else "cpu", copy=True)
        entries[key] = value
    return entries


def _restore_scaler(scaler: LossScalerBase, saved: Any) -> None:
    """Numbers of a saved loss scaler, where both are dynamic."""
    if saved is None:
        return
    values = saved if isinstance(saved, dict) else vars(saved)
    if scaler.dynamic and values.get("cur_scale") is not None:
        for key in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
            if key in values and key in vars(scaler):
                setattr(scaler, key, values[key])


def weights_follow(optimizer: ZeROOptimizer) -> None:
    """Give the model the values of the masters. Collective."""
    if isinstance(optimizer, PartitionedOptimizer):
        optimizer.update_lp_params()
    else:
        optimizer.write_weights()
