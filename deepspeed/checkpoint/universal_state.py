# SPDX-License-Identifier: Apache-2.0
"""The files of a universal checkpoint, and reading them.

::

    OUT/latest_universal                      text: the name of the folder below
    OUT/<tag>_universal/*_model_states.pt     as they were
    OUT/<tag>_universal/zero/optimizer_state.pt                  settings, loss scale
    OUT/<tag>_universal/zero/<parameter>/{fp32,exp_avg,...}.pt   whole entries, one file each

There are two kinds. From stages 1 and 2 an entry is ``{"param": tensor, "cat_dim": 0}`` and ``step.pt`` a number. From
stage 3 it is a flat tensor; the number of steps stands in ``optimizer_state.pt``. Both are read at any stage.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from deepspeed.checkpoint import storage
from deepspeed.checkpoint.optimizer_state import (
    MASTER,
    SavedParameter,
    SavedRange,
    SavedState,
    Shapes,
    scalars_of_stage3,
    settings_of,
)
from deepspeed.checkpoint.storage import CheckpointError

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"  # key of the model file
LATEST_UNIVERSAL = "latest_universal"
ZERO_FOLDER = "zero"
OPTIMIZER_STATE = "optimizer_state.pt"
PARAM = "param"
CAT_DIM = "cat_dim"
_SUFFIX = ".pt"
_NO_TENSOR_BELOW = 4096  # bytes: smaller files may hold a number instead of a tensor


def read_latest_universal(load_dir: str) -> str:
    """The folder that ``latest_universal`` names.

    Raises:
        ValueError: there is no such file.
    """
    path = os.path.join(load_dir, LATEST_UNIVERSAL)
    if not os.path.isfile(path):
        raise ValueError(
            f"there is no file {path}. Give a tag, or make a universal checkpoint first: python -m"
            " deepspeed.checkpoint.ds_to_universal --input_folder CHECKPOINTS/TAG --output_folder"
            f" {os.path.join(load_dir, 'TAG_universal')}"
        )
    with open(path, encoding="utf-8") as stream:
        return stream.read().strip()


def parameter_folder(folder: str, name: str) -> str:
    """Where the entries of a parameter are.

    Raises:
        CheckpointError: the name leads out of the checkpoint.
    """
    if not name or os.path.isabs(name) or ".." in name.split("/"):
        raise CheckpointError(f"{folder}: a parameter named {name!r} has no folder in a universal checkpoint")
    return os.path.join(folder, ZERO_FOLDER, name)


class _Entries(Mapping[str, torch.Tensor]):
    """Entries of one parameter, flat. A file is mapped when its entry is asked for, and let go of with the tensor."""

    def __init__(self, paths: dict[str, str], shape: torch.Size) -> None:
        self._paths = paths
        self._shape = shape

    def __getitem__(self, key: str) -> torch.Tensor:
        tensor = entry_of(storage.read_tensors(self._paths[key], storage.checkpoints_are_trusted()))
        if not isinstance(tensor, torch.Tensor) or tensor.numel() != self._shape.numel():
            found = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise CheckpointError(f"{self._paths[key]} holds {found}, the parameter has shape {tuple(self._shape)}")
        return tensor.reshape(-1)

    def __contains__(self, key: object) -> bool:
        return key in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def entry_of(content: Any) -> Any:
    """What a file of either kind says: a tensor, or a number."""
    return content[PARAM] if isinstance(content, dict) and PARAM in content else content


def _read_parameter(folder: str, name: str, shape: torch.Size) -> SavedParameter:
    place = parameter_folder(folder, name)
    if not os.path.isfile(os.path.join(place, MASTER + _SUFFIX)):
        raise CheckpointError(f"{os.path.join(place, MASTER + _SUFFIX)} is missing: {name!r} has no weights there")
    paths, scalars = {}, {}
    for file in sorted(os.listdir(place)):
        key, suffix = os.path.splitext(file)
        if suffix != _SUFFIX:
            continue
        path = os.path.join(place, file)
        if os.path.getsize(path) < _NO_TENSOR_BELOW:
            value = entry_of(storage.read_tensors(path, storage.checkpoints_are_trusted()))
            # The one element of a parameter without dimensions is an entry like others; a count of steps is not.
            is_tensor = isinstance(value, torch.Tensor) and (value.dim() > 0 or (shape == () and key != "step"))
            if not is_tensor:
                scalars[key] = value
                continue
        paths[key] = path
    whole = SavedRange(0, shape.numel(), 0, _Entries(paths, shape))
    return SavedParameter(shape, [whole], scalars)


def read_universal(folder: str, param_shapes: Shapes | None) -> SavedState:
    """State of a universal checkpoint; entries are mapped when they are used.

    Args:
        folder: ``OUT/<tag>_universal``.
        param_shapes: of the model file: names and shapes, by parameter group.

    Raises:
        CheckpointError: this is not a universal checkpoint, or files are missing.
    """
    path = os.path.join(folder, ZERO_FOLDER, OPTIMIZER_STATE)
    if not os.path.isfile(path) or not param_shapes:
        raise CheckpointError(
            f"{folder} is not a universal checkpoint ({path} is missing). 'checkpoint.load_universal' is for those that"
            " deepspeed.checkpoint.ds_to_universal has made; other checkpoints are loaded without it"
        )
    common = storage.read_tensors(path, storage.checkpoints_are_trusted())
    parameters = {
        name: _read_parameter(folder, name, torch.Size(shape))
        for group in param_shapes
        for name, shape in group.items()
    }
    if "fp32_flat_groups" in common:
        for name, scalars in scalars_of_stage3(common, param_shapes).items():
            parameters[name].scalars.update(scalars)
    groups = common.get("param_groups")
    if groups is None:
        raise CheckpointError(f"{path} has no 'param_groups': the settings of the optimizer are missing")
    return SavedState(parameters, settings_of(groups), common.get("loss_scaler"))
