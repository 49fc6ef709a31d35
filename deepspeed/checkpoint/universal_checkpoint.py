# SPDX-License-Identifier: Apache-2.0
"""Universal checkpoints from the side of single parameters; conversion is in ``ds_to_universal``, and loading a whole
one is ``engine.load_checkpoint`` with ``checkpoint.load_universal``."""

import os
import types
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from deepspeed.checkpoint import storage
from deepspeed.checkpoint.optimizer_state import MASTER
from deepspeed.checkpoint.storage import CheckpointError
from deepspeed.checkpoint.universal_state import entry_of
from deepspeed.utils.tensor_fragment import safe_set_full_fp32_param, safe_set_full_optimizer_state


@dataclass
class SubparamShape:
    """For ``universal_checkpoint_info``: parameters that are several ones fused along ``partition_dim``.

    ``shape`` has a tuple of sizes in the place of a dimension that is made of parts of these sizes.
    """

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int


def load_hp_checkpoint_state(
    self: torch.nn.Parameter, folder: str, tp_rank: int, tp_world_size: int, ep_rank: int = 0, ep_size: int = 1
) -> int | float | None:
    """Give a parameter of an engine its fp32 master and optimizer state from ``OUT/<tag>_universal/zero/<name>``.

    Every rank calls it.

    Returns:
        the number of steps, None where it was not saved.

    Raises:
        NotImplementedError: the parameter is split over tensor or expert parallel ranks.
        CheckpointError: entries are missing or of another size.
    """
    if tp_world_size != 1 or ep_size != 1:
        raise NotImplementedError("universal checkpoints of tensor or expert parallel models are not built")
    if not os.path.isfile(os.path.join(folder, f"{MASTER}.pt")):
        raise CheckpointError(f"{os.path.join(folder, MASTER)}.pt is missing")
    shape = getattr(self, "ds_shape", self.shape)
    step = None
    for file in sorted(os.listdir(folder)):
        key, suffix = os.path.splitext(file)
        if suffix != ".pt":
            continue
        value = entry_of(storage.read_tensors(os.path.join(folder, file), storage.checkpoints_are_trusted()))
        if key == "step":
            step = value.item() if isinstance(value, torch.Tensor) else value
        elif not isinstance(value, torch.Tensor) or value.numel() != shape.numel():
            raise CheckpointError(f"{os.path.join(folder, file)} does not fit a parameter of shape {tuple(shape)}")
        elif key == MASTER:
            safe_set_full_fp32_param(self, value.view(shape))
        else:
            safe_set_full_optimizer_state(self, value.view(shape), key)
    return step


def enable_universal_checkpoint(param_list: Iterable[torch.nn.Parameter]) -> None:
    """Give parameters the method ``load_hp_checkpoint_state``."""
    for parameter in param_list:
        parameter.load_hp_checkpoint_state = types.MethodType(load_hp_checkpoint_state, parameter)
