#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Whole fp32 weights from a ZeRO checkpoint (stages 1 to 3), as a state dict or as files.

This file is copied into every folder of checkpoints and runs there alone: it needs torch and nothing else::

    python zero_to_fp32.py . exported                         # exported/pytorch_model.bin, or shards and an index
    python zero_to_fp32.py . exported --safe_serialization    # exported/model.safetensors

Checkpoint files are mapped, not read, and no class named in them is run: tensors and plain data become themselves,
everything else an inert stand-in.
"""

import argparse
import ctypes
import io
import json
import math
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch

debug = 0
device = torch.device("cpu")

OUTPUT_DTYPE_NAMES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16,
    "fp32": torch.float32, "float32": torch.float32,
}  # fmt: skip

_OPTIM_FILE = re.compile(r"^(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt$")
_MODEL_FILE = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")


# ---------------------------------------------------------------------------------------------------- reading files


class StandIn:
    """In place of an object whose class is not plain data: takes its attributes, and any call, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __new__(cls, *args: Any, **kwargs: Any) -> "StandIn":
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Entries of a dict's subclass are dropped."""

    def append(self, item: Any) -> None:
        """Items of a list's subclass are dropped."""

    def extend(self, items: Iterable[Any]) -> None:
        """As ``append``."""


_PLAIN_BUILTINS = {"set", "frozenset", "complex", "bytearray", "slice", "range", "int", "float", "bool", "str"}
_PLAIN = {
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("_codecs", "encode"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"),
}


def _plain_tensor(rebuild: Callable[..., Any], kind: Any, args: tuple[Any, ...], attributes: Any) -> Any:
    """A tensor that was saved with attributes of its own, or of a subclass, without those."""
    return rebuild(*args)


class _PlainUnpickler(pickle.Unpickler):
    """Knows tensors and containers; any other name in a file becomes a ``StandIn``, never code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN or (module in ("builtins", "__builtin__") and name in _PLAIN_BUILTINS):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _plain_tensor
        if name == "ZeroStageEnum":
            return int
        return type(name, (StandIn,), {"__module__": module})


def _load_plainly(stream: Any, **kwargs: Any) -> Any:
    return _PlainUnpickler(stream, **kwargs).load()


class _PlainPickle:
    """What ``torch.load`` takes as a pickle module."""

    Unpickler = _PlainUnpickler
    load = staticmethod(_load_plainly)

    @staticmethod
    def loads(data: bytes, **kwargs: Any) -> Any:
        return _load_plainly(io.BytesIO(data), **kwargs)


def _read(path: str) -> Any:
    """Contents of a checkpoint file, its tensors mapped from the disk."""
    try:
        return torch.load(path, map_location=device, pickle_module=_PlainPickle, weights_only=False, mmap=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise RuntimeError(f"checkpoint file {path} is damaged or incomplete ({error})") from error


# ---------------------------------------------------------------------------------------------------- finding files


def atoi(text: str) -> int | str:
    """A number where ``text`` is one, else ``text``."""
    return int(text) if text.isdigit() else text


def natural_keys(text: str) -> list[int | str]:
    """Sort key under which rank 10 comes after rank 9."""
    return [atoi(part) for part in re.split(r"(\d+)", text)]


def get_checkpoint_files(checkpoint_dir: str, glob_pattern: str) -> list[str]:
    """Paths in a folder whose names fit a shell pattern, by rank.

    Raises:
        FileNotFoundError: none does.
    """
    import glob

    found = sorted(glob.glob(os.path.join(glob.escape(checkpoint_dir), glob_pattern)), key=natural_keys)
    if not found:
        raise FileNotFoundError(f"there is no file {glob_pattern} in {checkpoint_dir}")
    return found


def _ranked_files(folder: str, pattern: re.Pattern[str]) -> list[str]:
    """Paths of the files of all ranks, rank 0 first; empty when there is none.

    Raises:
        FileNotFoundError: a rank's file is missing between others.
        ValueError: weights are split over model-parallel ranks.
    """
    found: dict[int, str] = {}
    for name in os.listdir(folder):
        match = pattern.match(name)
        if match is None:
            continue
        if int(match[2]) != 0:
            raise ValueError(
                f"{folder} holds weights of several model-parallel ranks ({name}), which do not add up to one state"
                " dict here. Convert it to a universal checkpoint"
            )
        found[int(match[1] or 0)] = os.path.join(folder, name)
    missing = sorted(set(range(len(found))) - set(found))
    if missing:
        raise FileNotFoundError(f"in {folder} the files of ranks {missing} are missing beside those of {sorted(found)}")
    return [found[rank] for rank in range(len(found))]


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """Paths of the files of masters and optimizer state in a tag's folder, by rank.

    Raises:
        FileNotFoundError: there is none (also at stage 0), or one is missing between others.
    """
    found = _ranked_files(checkpoint_dir, _OPTIM_FILE)
    if not found:
        raise FileNotFoundError(f"there is no file *_optim_states.pt in {checkpoint_dir}")
    return found


def get_model_state_files(checkpoint_dir: str) -> list[str]:
    """Paths of the model files in a tag's folder, by rank: one, or one per rank at stage 3.

    Raises:
        FileNotFoundError: there is none, or one is missing between others.
    """
    found = _ranked_files(checkpoint_dir, _MODEL_FILE)
    if not found:
        raise FileNotFoundError(f"there is no file *_model_states.pt in {checkpoint_dir}")
    return found


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """Path of the first rank's model file in a tag's folder.

    Raises:
        FileNotFoundError: no such folder or file.
    """
    if not os.path.isdir(checkpoint_dir):
        raise FileNotFoundError(f"folder {checkpoint_dir} does not exist")
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if zero_stage == 3 else "mp_rank_00_model_states.pt"
    path = os.path.join(checkpoint_dir, name)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {name} in {checkpoint_dir}")
    return path


# ---------------------------------------------------------------------------------------------------- contents


@dataclass
class zero_model_state:
    """What a model file says: ``buffers`` by name, shapes of trained parameters by group, aliases of tied parameters as
    ``(alias, stored name)``, and of frozen parameters shapes and this rank's fragments by name."""

    buffers: dict[str, torch.Tensor]
    param_shapes: list[dict[str, torch.Size]]
    shared_params: list[tuple[str, str]]
    ds_version: Any
    frozen_param_shapes: dict[str, torch.Size] | None
    frozen_param_fragments: dict[str, torch.Tensor] | None
    rest: dict[str, torch.Tensor] = field(default_factory=dict)
    """Other tensors of the module: at stage 1 DeepSpeed keeps frozen weights nowhere else."""


def parse_model_states(files: Sequence[str]) -> list[zero_model_state]:
    """What the model files of all ranks say.

    Raises:
        ValueError: a file holds something else.
        TypeError: a stage 0 checkpoint, which has no partitions to put together.
    """
    return [_parse_model_state(path) for path in files]


def _parse_model_state(path: str) -> zero_model_state:
    content = _read(path)
    if not isinstance(content, dict) or "module" not in content:
        raise ValueError(f"{path} is not a model file: it has no entry 'module'")
    module, shapes = content["module"], content.get("param_shapes")
    if module is None or content.get("num_experts"):
        kind = "a pipeline" if module is None else "experts"
        raise ValueError(f"{path} is of a model with {kind}; parts of its weights are in other files")
    if shapes is None:
        raise TypeError(
            f"{path} is of ZeRO stage 0: nothing is partitioned. torch.load it, its entry 'module' is the state dict"
        )
    shapes = shapes if isinstance(shapes, list) else [shapes]
    shared = content.get("shared_params") or {}
    aliases = list(shared.items()) if isinstance(shared, dict) else [tuple(pair) for pair in shared]
    names = set(content.get("buffer_names") or ())
    frozen = content.get("frozen_param_shapes")
    known = names.union(frozen or (), (alias for alias, _ in aliases), *shapes)
    tensors = {name: value for name, value in module.items() if isinstance(value, torch.Tensor)}
    if len(tensors) < len(module):
        warnings.warn(f"left out, since they are not tensors: {sorted(set(module) - set(tensors))}", stacklevel=2)
    return zero_model_state(
        buffers={name: value for name, value in tensors.items() if name in names},
        param_shapes=[{name: torch.Size(shape) for name, shape in group.items()} for group in shapes],
        shared_params=aliases,
        ds_version=content.get("ds_version"),
        frozen_param_shapes=frozen,
        frozen_param_fragments=content.get("frozen_param_fragments"),
        rest={name: value for name, value in tensors.items() if name not in known},
    )


def _read_optim_files(files: Sequence[str], folder: str) -> list[dict[str, Any]]:
    """Entries ``optimizer_state_dict`` of all ranks.

    Raises:
        ValueError: not of ZeRO, or another number of files than there were ranks.
    """
    states = []
    for path in files:
        content = _read(path)
        if not isinstance(content, dict) or "optimizer_state_dict" not in content:
            raise ValueError(f"{path} is not an optimizer file: it has no entry 'optimizer_state_dict'")
        state = content["optimizer_state_dict"]
        if "fp32_flat_groups" not in state and "single_partition_of_fp32_groups" not in state:
            raise ValueError(f"{path} holds no fp32 weights of ZeRO stage 1, 2 or 3")
        # the optimizer's own state is not needed here, and mapped files stay open as long as their tensors live
        kept = ("zero_stage", "partition_count", "param_slice_mappings", "param_alignment_paddings")
        masters = ("fp32_flat_groups", "single_partition_of_fp32_groups")
        states.append({key: state[key] for key in kept + masters if key in state})
    count = states[0].get("partition_count", len(states))
    ranks = max(count) if isinstance(count, (list, tuple)) else count
    if ranks != len(states):
        raise ValueError(f"{folder} was saved by {ranks} data-parallel ranks and holds the files of {len(states)}")
    return states


def _stage(state: dict[str, Any]) -> int:
    # the bf16 optimizer of DeepSpeed's stage 1 does not say
    return int(state.get("zero_stage", 3 if "fp32_flat_groups" in state else 1))


def _masters(state: dict[str, Any]) -> list[torch.Tensor]:
    key = "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"
    return [tensor.reshape(-1) for tensor in state[key]]


def parse_optim_states(files: Sequence[str], ds_checkpoint_dir: str) -> tuple[int, int, list[list[torch.Tensor]]]:
    """ZeRO stage, number of ranks, and for each rank its flat fp32 tensors.

    Raises:
        ValueError: not of ZeRO, or another number of files than there were ranks.
    """
    states = _read_optim_files(files, ds_checkpoint_dir)
    return _stage(states[0]), len(states), [_masters(state) for state in states]


# ---------------------------------------------------------------------------------------------------- parameters


def zero3_partitioned_param_info(unpartitioned_numel: int, world_size: int) -> tuple[int, int]:
    """Elements of a stage 3 parameter on each rank, and how many of the last ones are padding."""
    numel = -(-unpartitioned_numel // world_size)
    return numel, numel * world_size - unpartitioned_numel


class GatheredTensor:
    """A parameter that is put together when ``contiguous()`` asks for it.

    Args:
        flat_groups: tensors that lie end to end, one list of them per rank.
        flat_groups_offset: where each tensor of a list begins, and the end of the last one.
        offset: where the parameter begins, the same for each rank.
        partitioned_numel: its elements on each rank, with padding.
        shape: of the parameter. Its elements are those of rank 0, then of rank 1, and so on, cut to this size.
    """

    def __init__(
        self,
        flat_groups: Sequence[Sequence[torch.Tensor]],
        flat_groups_offset: Sequence[int],
        offset: int,
        partitioned_numel: int,
        shape: torch.Size,
    ) -> None:
        self.flat_groups = flat_groups
        self.flat_groups_offset = flat_groups_offset
        self.offset = offset
        self.partitioned_numel = partitioned_numel
        self.shape = torch.Size(shape)
        own = next((tensor.dtype for tensors in flat_groups for tensor in tensors), torch.float32)
        self.dtype = torch.float32 if own.is_floating_point else own

    def numel(self) -> int:
        return self.shape.numel()

    def contiguous(self) -> torch.Tensor:
        """The whole parameter in new memory; fp32, unless it does not hold floating-point numbers."""
        return self.gather(self.dtype)

    def gather(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole parameter in new memory and another dtype."""
        flat = torch.empty(self.numel(), dtype=dtype)
        position = 0
        for tensors in self.flat_groups:
            wanted = min(self.partitioned_numel, flat.numel() - position)
            for piece in self._pieces(tensors, wanted):
                flat[position : position + piece.numel()].copy_(piece)
                position += piece.numel()
        if position != flat.numel():
            raise RuntimeError(f"the checkpoint holds {position} of {flat.numel()} elements of a parameter")
        return flat.view(self.shape)

    def _pieces(self, tensors: Sequence[torch.Tensor], wanted: int) -> Iterator[torch.Tensor]:
        """Elements ``[offset, offset + wanted)`` of tensors that lie end to end."""
        end = self.offset + wanted
        for begin, tensor in zip(self.flat_groups_offset, tensors):
            low, high = max(self.offset, begin), min(end, begin + tensor.numel())
            if low < high:
                yield tensor[low - begin : high - begin]


def _offsets(tensors: Sequence[torch.Tensor]) -> list[int]:
    offsets = [0]
    for tensor in tensors:
        offsets.append(offsets[-1] + tensor.numel())
    return offsets


def _whole(tensor: torch.Tensor, shape: torch.Size) -> GatheredTensor:
    flat = tensor.reshape(-1)
    return GatheredTensor([[flat]], [0, flat.numel()], 0, flat.numel(), shape)


def _trained_stage_1_and_2(states: list[dict[str, Any]], model: zero_model_state) -> dict[str, GatheredTensor]:
    """Each group is one flat tensor, cut into one slice per rank."""
    by_rank = [_masters(state) for state in states]
    slices_of = [list(slices) for slices in zip(*by_rank)]
    places = _places_on_record(states, slices_of) or _places_end_to_end(states, model)
    trained = {}
    for name, shape in ((name, shape) for group in model.param_shapes for name, shape in group.items()):
        if shape.numel() == 0:
            trained[name] = _whole(torch.empty(0), shape)
            continue
        if name not in places:
            raise ValueError(f"no optimizer file says where parameter {name} lies")
        group, offset = places[name]
        trained[name] = GatheredTensor([slices_of[group]], _offsets(slices_of[group]), offset, shape.numel(), shape)
    return trained


def _places_on_record(states: list[dict[str, Any]], slices_of: list[list[torch.Tensor]]) -> dict[str, tuple[int, int]]:
    """Group and offset of each parameter, from what each rank says about its slice."""
    places: dict[str, tuple[int, int]] = {}
    for rank, state in enumerate(states):
        for group, mapping in enumerate(state.get("param_slice_mappings") or ()):
            begin = _offsets(slices_of[group])[rank]
            for name, address in mapping.items():
                if address.numel > 0:
                    places.setdefault(name, (group, begin + address.start))
    return places


def _places_end_to_end(states: list[dict[str, Any]], model: zero_model_state) -> dict[str, tuple[int, int]]:
    """The same for files that do not say so: parameters in order, each with its padding."""
    places = {}
    paddings = states[0].get("param_alignment_paddings")
    for group, shapes in enumerate(model.param_shapes):
        offset = 0
        for index, (name, shape) in enumerate(shapes.items()):
            places[name] = (group, offset)
            offset += shape.numel() + (paddings[group][index] if paddings and paddings[group] else 0)
    return places


def _trained_stage_3(states: list[dict[str, Any]], model: zero_model_state) -> dict[str, GatheredTensor]:
    """Each rank has a padded part of every parameter, in the order of the parameters."""
    by_rank = [_masters(state) for state in states]
    offsets = _offsets(by_rank[0])
    trained, position = {}, 0
    for name, shape in ((name, shape) for group in model.param_shapes for name, shape in group.items()):
        numel, _ = zero3_partitioned_param_info(shape.numel(), len(states))
        trained[name] = GatheredTensor(by_rank, offsets, position, numel, shape)
        position += numel
    for rank, tensors in enumerate(by_rank):
        if _offsets(tensors)[-1] != position:
            raise ValueError(
                f"rank {rank} saved {_offsets(tensors)[-1]} elements, the parameters on record have {position} on each"
                f" of {len(states)} ranks"
            )
    return trained


def _frozen(models: list[zero_model_state], stage: int) -> dict[str, GatheredTensor]:
    """Parameters that nobody trained."""
    shapes = models[0].frozen_param_shapes or {}
    frozen = {}
    for name, shape in shapes.items():
        shape = torch.Size(shape)
        fragments = [model.frozen_param_fragments[name].reshape(-1) for model in models if model.frozen_param_fragments]
        if stage < 3:
            frozen[name] = _whole(fragments[0], shape)
        else:
            numel, _ = zero3_partitioned_param_info(shape.numel(), len(models))
            frozen[name] = GatheredTensor([[fragment] for fragment in fragments], [0, numel], 0, numel, shape)
    if stage < 3:
        frozen.update((name, _whole(value, value.shape)) for name, value in models[0].rest.items())
    return frozen


StateDict = dict[str, Any]  # name -> tensor or GatheredTensor


def _lazy_state_dict(folder: str, exclude_frozen_parameters: bool) -> StateDict:
    """Buffers, frozen parameters, trained ones, further names of tied ones."""
    model_files = get_model_state_files(folder)
    models = parse_model_states(model_files[:1])
    states = _read_optim_files(get_optim_files(folder), folder)
    stage = _stage(states[0])
    if stage == 3 and models[0].frozen_param_shapes and not exclude_frozen_parameters:
        if len(model_files) != len(states):
            raise ValueError(f"{folder} holds {len(model_files)} model files for {len(states)} ranks")
        models += parse_model_states(model_files[1:])
    state: StateDict = dict(models[0].buffers)
    if not exclude_frozen_parameters:
        state.update(_frozen(models, stage))
    state.update((_trained_stage_3 if stage == 3 else _trained_stage_1_and_2)(states, models[0]))
    state.update((alias, state[name]) for alias, name in models[0].shared_params if name in state)
    if debug:
        for name, value in state.items():
            print(f"{name}: {tuple(value.shape)} {value.dtype}", file=sys.stderr)
    return state


def to_torch_tensor(
    state_dict: StateDict, return_empty_tensor: bool = False, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Tensors in memory of their own for the entries of a lazy state dict; entries that are one stay one.

    Args:
        return_empty_tensor: memory of the right shapes and dtypes, not filled.
        dtype: for floating-point entries; default fp32 for parameters and their own for buffers.
    """
    made: dict[int, torch.Tensor] = {}
    for value in state_dict.values():
        if id(value) not in made:
            wanted = _dtype_of(value, dtype)
            made[id(value)] = torch.empty(value.shape, dtype=wanted) if return_empty_tensor else _copy(value, wanted)
    return {name: made[id(value)] for name, value in state_dict.items()}


def _dtype_of(value: Any, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and value.dtype.is_floating_point else value.dtype


def _copy(value: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, GatheredTensor):
        return value.gather(dtype)
    return value.to(dtype, copy=True, memory_format=torch.contiguous_format)


# ---------------------------------------------------------------------------------------------------- state dicts


def _folder_of(checkpoint_dir: str, tag: str | None) -> str:
    if tag is None:
        latest = os.path.join(checkpoint_dir, "latest")
        if not os.path.isfile(latest):
            raise ValueError(f"there is no file {latest}, which names the last checkpoint; say which with a tag")
        with open(latest, encoding="utf-8") as stream:
            tag = stream.read().strip()
    folder = os.path.join(checkpoint_dir, str(tag))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"folder {folder} does not exist")
    return folder


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> StateDict:
    """Whole weights of a ZeRO checkpoint: names and shapes of the plain model's ``state_dict()``.

    Args:
        checkpoint_dir: the folder given to ``save_checkpoint``.
        tag: which checkpoint; default what ``latest`` names.
        exclude_frozen_parameters: without parameters that nobody trained.
        lazy_mode: parameters as ``GatheredTensor``, put together by ``.contiguous()`` one by one, while the
            checkpoint's files stay where they are.

    Returns:
        by name, tensors in host memory: parameters in fp32, buffers in their own dtype. Tied names share one tensor.

    Raises:
        ValueError: no ``latest``; files of another kind, or of another number of ranks.
        FileNotFoundError: no folder of this tag, or a file of it is missing.
        TypeError: a checkpoint of stage 0, whose model file holds whole weights.
        RuntimeError: a damaged file.
    """
    state = _lazy_state_dict(_folder_of(checkpoint_dir, tag), exclude_frozen_parameters)
    return state if lazy_mode else to_torch_tensor(state)


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str, tag: str | None = None
) -> torch.nn.Module:
    """Put the whole weights of a ZeRO checkpoint into a plain model, in its own dtype and on its own device.

    Returns:
        ``model``. Names that did not fit are in a warning.

    Raises:
        RuntimeError: another shape, or no name fits at all. Otherwise as ``get_fp32_state_dict_from_zero_checkpoint``.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    result = model.load_state_dict(state, strict=False)
    if state and len(result.unexpected_keys) == len(state):
        raise RuntimeError(
            f"no weight of checkpoint {checkpoint_dir} fits the model: it has {sorted(state)[:5]}, the model"
            f" {sorted(model.state_dict())[:5]}"
        )
    if result.missing_keys or result.unexpected_keys:
        warnings.warn(
            f"weights of checkpoint {checkpoint_dir} fit in part: not in the checkpoint {result.missing_keys}, not in"
            f" the model {result.unexpected_keys}",
            stacklevel=2,
        )
    return model


# ---------------------------------------------------------------------------------------------------- files


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def _bytes_of(size: int | str | None) -> float:
    """Bytes that ``5GB``, ``500MiB`` or a number means; None is without limit."""
    if size is None:
        return math.inf
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(size).upper())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise ValueError(f"max_shard_size must be a size like '5GB', '500MiB' or a number of bytes, got {size!r}")
    return float(match[1]) * _UNITS[match[2]]


def _nbytes(value: Any, dtype: torch.dtype | None) -> int:
    return value.shape.numel() * _dtype_of(value, dtype).itemsize


def _cut_shards(state: StateDict, dtype: torch.dtype | None, limit: float, repeat_tied: bool) -> list[list[str]]:
    """Names for each file, none over ``limit`` bytes except with a single weight; names of one weight stay together.

    Args:
        repeat_tied: whether the format writes a tied weight once per name.
    """
    names_of: dict[int, list[str]] = {}
    for name, value in state.items():
        names_of.setdefault(id(value), []).append(name)
    shards: list[list[str]] = [[]]
    filled = 0
    for names in names_of.values():
        size = _nbytes(state[names[0]], dtype) * (len(names) if repeat_tied else 1)
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1] += names
        filled += size
    return shards


class _Progress:
    """A line on standard error that is written over, where that is a terminal."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.visible = sys.stderr.isatty()

    def advance(self, size: int) -> None:
        self.done += size
        if self.visible:
            share = self.done / max(self.total, 1)
            bar = "#" * round(30 * share)
            sys.stderr.write(f"\r[{bar:<30}] {share:4.0%}  {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB")
            sys.stderr.flush()

    def end(self) -> None:
        if self.visible:
            sys.stderr.write("\n")


Report = Callable[[int], None]


def _write_torch(path: str, state: StateDict, dtype: torch.dtype | None, advance: Report) -> None:
    tensors: dict[int, torch.Tensor] = {}
    for value in state.values():
        if id(value) not in tensors:
            tensors[id(value)] = _copy(value, _dtype_of(value, dtype))
            advance(_nbytes(value, dtype))
    torch.save({name: tensors[id(value)] for name, value in state.items()}, path)


_SAFETENSORS_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def _write_safetensors(path: str, state: StateDict, dtype: torch.dtype | None, advance: Report) -> None:
    """Eight bytes of header size, a JSON header, and the bytes of one tensor after the other.

    Written here rather than by the library of that name, which wants all tensors of a file in memory and refuses
    tied ones.
    """
    if sys.byteorder != "little":
        raise RuntimeError("safetensors files are little-endian, this machine is not; write pytorch_model.bin instead")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, value in state.items():
        kind = _SAFETENSORS_NAMES.get(_dtype_of(value, dtype))
        if kind is None:
            raise ValueError(f"safetensors has no dtype for {name} ({value.dtype}); write pytorch_model.bin instead")
        end = position + _nbytes(value, dtype)
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for value in state.values():
            _write_bytes(stream, _copy(value, _dtype_of(value, dtype)))
            advance(_nbytes(value, dtype))


def _write_bytes(stream: BinaryIO, tensor: torch.Tensor) -> None:
    if tensor.nbytes:
        # numpy, which has no bfloat16 and need not be there, is not asked for the bytes
        stream.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    dtype: torch.dtype = torch.float32,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the whole weights of a ZeRO checkpoint to files that load without this package.

    ``pytorch_model.bin`` (or ``model.safetensors``) when one file is enough, else ``pytorch_model-00001-of-0000n.bin``
    and so on with ``pytorch_model.bin.index.json``, the form that transformers reads. What an earlier
    export has left under these names goes away. Memory: one file's weights, or one weight with safetensors.

    Args:
        checkpoint_dir: the folder given to ``save_checkpoint``.
        output_dir: made if it does not exist.
        dtype: of floating-point weights and buffers.
        max_shard_size: largest file, such as ``5GB``, or bytes; None for a single file.
        safe_serialization: safetensors files.
        tag: which checkpoint; default what ``latest`` names.
        exclude_frozen_parameters: without parameters that nobody trained.

    Raises:
        ValueError: a size or a dtype that cannot be. Otherwise as ``get_fp32_state_dict_from_zero_checkpoint``.
    """
    limit = _bytes_of(max_shard_size)
    state = _lazy_state_dict(_folder_of(checkpoint_dir, tag), exclude_frozen_parameters)
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    shards = _cut_shards(state, dtype, limit, repeat_tied=safe_serialization)
    files = [f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}" for number in range(1, len(shards) + 1)]
    files = [stem + suffix] if len(shards) == 1 else files
    os.makedirs(output_dir, exist_ok=True)
    total = sum(_nbytes(value, dtype) for value in state.values())
    distinct = sum(_nbytes(value, dtype) for value in {id(value): value for value in state.values()}.values())
    progress = _Progress(total if safe_serialization else distinct)
    write = _write_safetensors if safe_serialization else _write_torch
    for file, names in zip(files, shards):
        part = os.path.join(output_dir, file + ".part")
        write(part, {name: state[name] for name in names}, dtype, progress.advance)
        os.replace(part, os.path.join(output_dir, file))
    progress.end()
    _remove_earlier(output_dir, stem, suffix, set(files))
    if len(files) > 1:
        weight_map = {name: file for file, names in zip(files, shards) for name in names}
        with open(os.path.join(output_dir, f"{stem}{suffix}.index.json"), "w", encoding="utf-8") as stream:
            json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, stream, indent=2, sort_keys=True)
            stream.write("\n")


def _remove_earlier(output_dir: str, stem: str, suffix: str, written: set[str]) -> None:
    """Files of an earlier export: whoever reads the folder would take a stale single file for the weights."""
    pattern = re.compile(rf"{stem}(?:-\d{{5}}-of-\d{{5}})?{re.escape(suffix)}(?:\.index\.json)?")
    for name in os.listdir(output_dir):
        if pattern.fullmatch(name) and name not in written:
            os.remove(os.path.join(output_dir, name))


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """``convert_zero_checkpoint_to_state_dict`` with fp32 weights."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


# ---------------------------------------------------------------------------------------------------- command line


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Arguments of this program and of ``zero_to_torch.py``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("checkpoint_dir", help="folder of checkpoints, which holds 'latest' and this program")
    parser.add_argument("output_dir", help="folder for the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="largest file (default 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors files")
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint (default: what 'latest' names)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="without parameters nobody trained")
    parser.add_argument("-d", "--debug", action="store_true", help="print every name with shape and dtype")
    return parser


def run(arguments: argparse.Namespace, dtype: torch.dtype) -> None:
    """Do what the arguments say."""
    global debug
    debug = int(arguments.debug)
    convert_zero_checkpoint_to_state_dict(
        arguments.checkpoint_dir,
        arguments.output_dir,
        dtype=dtype,
        max_shard_size=arguments.max_shard_size,
        safe_serialization=arguments.safe_serialization,
        tag=arguments.tag,
        exclude_frozen_parameters=arguments.exclude_frozen_parameters,
    )


def main(args: Sequence[str] | None = None) -> None:
    """The program."""
    run(argument_parser("Whole fp32 weights from a ZeRO checkpoint.").parse_args(args), torch.float32)


if __name__ == "__main__":
    main()
