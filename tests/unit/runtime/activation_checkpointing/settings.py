# SPDX-License-Identifier: Apache-2.0
"""Ways to store activations, and how to try one of them without leaving it behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed.runtime.activation_checkpointing import checkpointing


@contextmanager
def unconfigured() -> Iterator[None]:
    """The module as it was imported, inside and afterwards."""
    _forget()
    rng = torch.get_rng_state()
    try:
        yield
    finally:
        _forget()
        torch.set_rng_state(rng)


def _forget() -> None:
    checkpointing._settings = checkpointing._Settings()
    checkpointing.reset()
    checkpointing.get_cuda_rng_tracker().reset()


class ModelParallelUnit:
    """All ranks of the world, or of ``model``, share one model; each is a data-parallel group of its own."""

    def __init__(self, model: Any, data: Any) -> None:
        self._model, self._data = model, data

    def get_tensor_model_parallel_group(self) -> Any:
        return self._model

    def get_tensor_model_parallel_rank(self) -> int:
        return torch.distributed.get_rank(self._model)

    def get_tensor_model_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size(self._model)

    def get_model_parallel_group(self) -> Any:
        return self._model

    def get_data_parallel_group(self) -> Any:
        return self._data

    def get_data_parallel_rank(self) -> int:
        return torch.distributed.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size(self._data)


def all_ranks_share_one_model() -> ModelParallelUnit:
    """Collective."""
    world = range(torch.distributed.get_world_size())
    alone = [torch.distributed.new_group([rank]) for rank in world]
    return ModelParallelUnit(torch.distributed.new_group(list(world)), alone[torch.distributed.get_rank()])
