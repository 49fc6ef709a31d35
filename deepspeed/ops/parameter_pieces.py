# SPDX-License-Identifier: Apache-2.0
"""What an optimizer must know of the flat tensors that it steps on, if it looks at whole parameters.

Under ZeRO an optimizer steps on this rank's part of a flat group. Most update elementwise and need to know no more;
LAMB needs norms of parameters and Muon whole matrices, and both get ``PartitionedTensors``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed import comm as dist


@dataclass(frozen=True)
class Piece:
    """Elements ``[begin, end)`` of a parameter, which a rank has at ``offset`` of its flat tensor; none if empty."""

    begin: int = 0
    end: int = 0
    offset: int = 0

    @property
    def numel(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class ParameterPieces:
    """One parameter: its shape, and which rank has what of it."""

    name: str
    shape: torch.Size
    of_rank: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return self.shape.numel()


class PartitionedTensors:
    """Which parameters each flat tensor of an optimizer consists of; the same on every rank but for the tensors.

    Args:
        parameters: of each flat tensor, in the order in which they lie.
        rank: this one, within ``group``.
        group: process group over which the parameters are partitioned.
        device: whose tensors ``group`` communicates.
    """

    def __init__(
        self,
        parameters: Mapping[torch.Tensor, Sequence[ParameterPieces]],
        rank: int,
        group: Any,
        device: torch.device,
    ) -> None:
        self._parameters = dict(parameters)
        self.rank = rank
        self.group = group
        self.device = device

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)

    def of(self, flat: torch.Tensor) -> Sequence[ParameterPieces]:
        """The parameters that ``flat`` consists of.

        Raises:
            KeyError: an unknown tensor; tensors are told apart by identity.
        """
        if flat not in self._parameters:
            raise KeyError(f"a tensor of {flat.numel()} elements is none of the flat tensors that were partitioned")
        return self._parameters[flat]

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a small tensor over all ranks. Collective."""
        if self.world_size == 1:
            return values
        shared = values.to(self.device)
        dist.all_reduce(shared, group=self.group)
        return shared.to(values.device)
