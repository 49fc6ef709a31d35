# SPDX-License-Identifier: Apache-2.0
"""Paths of a checkpoint's files, and tensors that can be written without what they are views of."""

import os
from typing import Any

import torch

from deepspeed.checkpoint import files
from deepspeed.checkpoint.host_copies import map_state

_HOST = torch.device("cpu")


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Path of the model file of a model-parallel rank, given as it is written there (two digits)."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}{files.MODEL_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Path of the optimizer file of a rank."""
    return os.path.join(base_folder, files.optim_file(dp_rank, mp_rank, bf16=False))


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """Path of the file of a pipeline's layer, whose id is given as it is written there (``layer_03``)."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}{files.MODEL_SUFFIX}")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = _HOST) -> Any:
    """A copy of nested lists, tuples and dicts whose tensors are clones on ``device``, each with memory of its own.

    ``torch.save`` writes the whole memory that a tensor is a view of: a weight that lies in a flat buffer would bring
    all others along. Entries that are the same tensor (tied weights) stay the same tensor. What is neither tensor nor
    one of these containers is handed on as it is.
    """

    def clone(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, copy=True, memory_format=torch.contiguous_format)

    return map_state(item, clone)
