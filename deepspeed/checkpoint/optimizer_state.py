# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in a checkpoint, parameter by parameter, whatever stage and number of ranks wrote it.

Each kind of file keeps, per rank, ranges of the flattened parameters. ``SavedState`` knows all ranges of all files and
fills any other range from them, so that a checkpoint can be resumed at any stage on any number of ranks. Files are
mapped, not read: a rank touches what it needs.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed.checkpoint.storage import CheckpointError
from deepspeed.runtime.gradients.layout import round_up, slice_numel

MASTER = "fp32"


@dataclass
class SavedRange:
    """Elements ``[begin, end)`` of a parameter, at ``offset`` of some flat tensors of one file."""

    begin: int
    end: int
    offset: int
    tensors: Mapping[str, torch.Tensor]  # by key: the master and what the optimizer keeps


@dataclass
class SavedParameter:
    """Everything that was saved of one parameter."""

    shape: torch.Size
    ranges: list[SavedRange] = field(default_factory=list)
    scalars: dict[str, Any] = field(default_factory=dict)  # entries without dimensions, such as step

    def keys(self) -> set[str]:
        """Names of the entries with one value per element."""
        return {key for saved in self.ranges for key in saved.tensors}

    def fill(self, key: str, target: torch.Tensor, begin: int, end: int) -> None:
        """Write elements ``[begin, end)`` of an entry to ``target``, 1-D, cast to its dtype.

        Raises:
            CheckpointError: not all of them were saved.
        """
        filled = 0
        for saved in self.ranges:
            low, high = max(begin, saved.begin), min(end, saved.end)
            if low < high and key in saved.tensors:
                source = saved.tensors[key].narrow(0, saved.offset + low - saved.begin, high - low)
                target[low - begin : high - begin].copy_(source)
                filled += high - low
        if filled != end - begin:
            raise CheckpointError(f"{filled} of {end - begin} elements of {key!r} are in the files")

    def whole(self, key: str) -> torch.Tensor:
        """An entry in the parameter's shape, in the dtype it was saved in."""
        dtype = next((saved.tensors[key].dtype for saved in self.ranges if key in saved.tensors), torch.float32)
        flat = torch.empty(self.shape.numel(), dtype=dtype)
        self.fill(key, flat, 0, flat.numel())
        return flat.view(self.shape)


def shared_out(shape: torch.Size, fragments: Mapping[int, torch.Tensor], ranks: int) -> SavedParameter:
    """A parameter of which each of so many ranks has saved its padded ``1/ranks``.

    Args:
        fragments: by rank, those that can be read.
    """
    total = shape.numel()
    numel = slice_numel(total, ranks)
    ranges = []
    for rank, fragment in fragments.items():
        begin = min(rank * numel, total)
        ranges.append(SavedRange(begin, min(begin + numel, total), 0, {MASTER: fragment.reshape(-1)}))
    return SavedParameter(shape, ranges)


@dataclass
class SavedState:
    """Optimizer state of a model.

    ``param_groups`` are the settings of each parameter group; ``scaler`` the saved loss scaler, None without one.
    """

    parameters: dict[str, SavedParameter]
    param_groups: list[dict[str, Any]]
    scaler: Any = None


Shapes = list[dict[str, torch.Size]]


def read_zero_files(contents: Iterable[dict[str, Any] | None], param_shapes: Shapes) -> SavedState:
    """State from the optimizer files of all ranks, in the order of ranks.

    Args:
        contents: None for a rank whose file cannot be read; what only that file has cannot be asked for then.
        param_shapes: by parameter group, names and shapes in the order in which they were saved.

    Raises:
        CheckpointError: an arrangement that is not known.
    """
    files = [None if content is None else content["optimizer_state_dict"] for content in contents]
    first = next((file for file in files if file is not None), None)
    if first is None:
        raise CheckpointError("there are no optimizer files")
    parameters = {name: SavedParameter(torch.Size(shape)) for group in param_shapes for name, shape in group.items()}
    read = _read_stage3 if "fp32_flat_groups" in first else _read_stage_1_and_2
    for rank, file in enumerate(files):
        if file is not None:
            read(file, rank, len(files), param_shapes, parameters)
    inner = _inner_state(first)
    return SavedState(parameters, settings_of(inner["param_groups"]), first.get("loss_scaler"))


def _inner_state(file: dict[str, Any]) -> dict[str, Any]:
    inner = file["optimizer_state_dict"] if "fp32_flat_groups" in file else file["base_optimizer_state"]
    if not isinstance(inner, dict) or "param_groups" not in inner:
        raise CheckpointError("optimizer state of the kind elastic_checkpoint is not supported")
    return inner


def settings_of(param_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups of a saved optimizer without the numbers of their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in param_groups]


def _entries(inner: dict[str, Any], index: int, master: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Elementwise entries of a flat group, the master among them, and the others."""
    elementwise, scalars = {MASTER: master}, {}
    for key, value in inner["state"].get(index, {}).items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            elementwise[key] = value.reshape(-1)
        else:
            scalars[key] = value
    return elementwise, scalars


def _read_stage3(
    file: dict[str, Any], rank: int, ranks: int, param_shapes: Shapes, parameters: dict[str, SavedParameter]
) -> None:
    inner = _inner_state(file)
    names = ((name, shape) for group in param_shapes for name, shape in group.items())
    for index, master in enumerate(file["fp32_flat_groups"]):
        elementwise, scalars = _entries(inner, index, master)
        position = 0
        while position < master.numel():
            name, shape = next(names, (None, None))
            if name is None:
                raise CheckpointError(f"sub-group {index} holds more elements than the parameters on record")
            total = torch.Size(shape).numel()
            numel = slice_numel(total, ranks)
            begin = min(rank * numel, total)
            saved = parameters[name]
            saved.ranges.append(SavedRange(begin, min(begin + numel, total), position, elementwise))
            saved.scalars.update(scalars)
            position += numel


def scalars_of_stage3(file: dict[str, Any], param_shapes: Shapes) -> dict[str, dict[str, Any]]:
    """Entries without dimensions of each parameter, from the optimizer state of the first of the ranks at stage 3."""
    parameters = {name: SavedParameter(torch.Size(shape)) for group in param_shapes for name, shape in group.items()}
    _read_stage3(file, 0, file["partition_count"], param_shapes, parameters)
    return {name: parameter.scalars for name, parameter in parameters.items()}


def _read_stage_1_and_2(
    file: dict[str, Any], rank: int, ranks: int, param_shapes: Shapes, parameters: dict[str, SavedParameter]
) -> None:
    inner = _inner_state(file)
    masters = file["single_partition_of_fp32_groups"]
    flat_groups = file.get("flat_groups") or list(_flat_groups_of(param_shapes, ranks, file))
    for index, (group, master) in enumerate(zip(flat_groups, masters)):
        elementwise, scalars = _entries(inner, index, master)
        slice_size = group["padded_numel"] // ranks
        start = rank * slice_size
        for name, offset in group["offsets"].items():
            saved = parameters[name]
            total = saved.shape.numel()
            low, high = max(offset, start), min(offset + total, start + slice_size)
            saved.scalars.update(scalars)
            if low < high:
                saved.ranges.append(SavedRange(low - offset, high - offset, low - start, elementwise))


def _flat_groups_of(param_shapes: Shapes, ranks: int, file: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Where each parameter lies, for files that do not say so: end to end, padded to twice the ranks."""
    paddings = file.get("param_alignment_paddings")
    for index, group in enumerate(param_shapes):
        offsets, position = {}, 0
        for place, (name, shape) in enumerate(group.items()):
            offsets[name] = position
            position += torch.Size(shape).numel()
            if paddings and paddings[index]:
                position += paddings[index][place]
        yield {"offsets": offsets, "padded_numel": round_up(position, 2 * ranks)}


def read_whole_state(
    optimizer: dict[str, Any],
    names: list[list[str]],
    shapes: Mapping[str, torch.Size],
    weights: Mapping[str, torch.Tensor] | None = None,
) -> SavedState:
    """State from a stage 0 file.

    Args:
        optimizer: the entry ``optimizer`` of the model file.
        names: of the optimizer's parameters, by parameter group.
        shapes: of these parameters.
        weights: of the model, which are the masters where the file has none (fp32 models).
    """
    inner = optimizer.get("optimizer_state_dict", optimizer)
    _check_groups(inner["param_groups"], names, "fp32_groups_flat" in optimizer)
    parameters: dict[str, SavedParameter] = {}
    for g, group in enumerate(names):
        indices = inner["param_groups"][g]["params"]
        if "fp32_groups_flat" in optimizer and group:
            flat = optimizer["fp32_groups_flat"][g].reshape(-1)
            if len(indices) == 1:
                parameters |= _parts_of_flat(flat, inner["state"].get(indices[0], {}), group, shapes)
                continue
            masters = list(flat.split([shapes[name].numel() for name in group]))
        elif "fp32_groups" in optimizer:
            masters = optimizer["fp32_groups"][g]
        else:
            masters = None if weights is None else [weights[name] for name in group]
        for position, (name, index) in enumerate(zip(group, indices)):
            numel = shapes[name].numel()
            elementwise, scalars = _split_entries(inner["state"].get(index, {}), numel)
            if masters is not None:
                elementwise[MASTER] = masters[position].reshape(-1)
            parameters[name] = SavedParameter(shapes[name], [SavedRange(0, numel, 0, elementwise)], scalars)
    scaler = {key: value for key, value in optimizer.items() if key in _SCALER_KEYS}
    return SavedState(parameters, settings_of(inner["param_groups"]), scaler or None)


def _check_groups(saved: list[dict[str, Any]], names: list[list[str]], flat: bool) -> None:
    """CheckpointError for other parameter groups than ``names``; of flat ones each has one parameter."""
    sizes, own = [len(group["params"]) for group in saved], [len(group) for group in names]
    if len(sizes) < len(own) or any(one != other and not (flat and one == 1) for one, other in zip(sizes, own)):
        raise CheckpointError(f"the saved optimizer has other parameter groups (sizes {sizes}) than this one ({own})")


def _split_entries(state: dict[str, Any], numel: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Entries with one value per element, flattened, and the others."""
    elementwise: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() == numel and key != "step":
            elementwise[key] = value.reshape(-1)
        else:
            scalars[key] = value
    return elementwise, scalars


def _parts_of_flat(
    master: torch.Tensor, state: dict[str, Any], names: list[str], shapes: Mapping[str, torch.Size]
) -> dict[str, SavedParameter]:
    """Parameters that lie end to end in one flat master and its state."""
    elementwise, scalars = _split_entries(state, master.numel())
    elementwise[MASTER] = master
    parameters, position = {}, 0
    for name in names:
        numel = shapes[name].numel()
        part = SavedRange(0, numel, position, elementwise)
        parameters[name] = SavedParameter(shapes[name], [part], dict(scalars))
        position += numel
    if position > master.numel():
        raise CheckpointError(
            f"the flat master of {names[:3]}... has {master.numel()} elements, and they have {position}"
        )
    return parameters


_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "scale_window", "scale_factor")
