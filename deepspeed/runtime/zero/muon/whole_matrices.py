# SPDX-License-Identifier: Apache-2.0
"""A function of whole matrices, over flat tensors of which each rank has a part.

Each matrix is brought together on one rank, its owner, which applies the function and sends every part back to where
it came from. Owners are chosen so that ranks have equal work, among those that have much of the matrix already: at
stages 1 and 2 most matrices lie on one rank and are not sent at all.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepspeed import comm as dist
from deepspeed.ops.parameter_pieces import ParameterPieces, PartitionedTensors

# Elements that are exchanged together at most, unless one matrix alone is larger. A rank then holds its parts of such a
# batch and those of the matrices that it owns, and one of these whole.
BATCH = 2**26


@dataclass(frozen=True)
class OwnedMatrix:
    """A matrix and the rank that has it whole for a moment."""

    parameter: ParameterPieces
    owner: int

    @property
    def shared(self) -> bool:
        """Whether it lies on more than one rank."""
        return sum(piece.numel > 0 for piece in self.parameter.of_rank) > 1


class WholeMatrices:
    """Applies functions to the matrices of partitioned tensors.

    Args:
        tensors: where the matrices lie.
    """

    def __init__(self, tensors: PartitionedTensors) -> None:
        self.tensors = tensors
        self._plans: dict[torch.Tensor, list[list[OwnedMatrix]]] = {}

    def apply(self, flat: torch.Tensor, values: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each matrix in ``values`` by ``function`` of it. Collective.

        Args:
            flat: which of the partitioned tensors this is.
            values: 1-D, laid out like ``flat``, on any device.
            function: from a matrix to one of the same shape; runs where ``tensors`` communicate.
        """
        if flat not in self._plans:
            self._plans[flat] = batches(self.tensors.of(flat), self.tensors.world_size, BATCH)
        for matrices in self._plans[flat]:
            self._apply_alone([matrix for matrix in matrices if not matrix.shared], values, function)
            shared = [matrix for matrix in matrices if matrix.shared]
            if shared:
                self._apply_shared(shared, values, function)

    def _apply_alone(
        self,
        matrices: list[OwnedMatrix],
        values: torch.Tensor,
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        for matrix in matrices:
            piece = matrix.parameter.of_rank[self.tensors.rank]
            if piece.numel:
                own = values.narrow(0, piece.offset, piece.numel)
                whole = own.view(matrix.parameter.shape).to(self.tensors.device)
                own.copy_(function(whole).reshape(-1))

    def _apply_shared(
        self,
        matrices: list[OwnedMatrix],
        values: torch.Tensor,
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Parts to owners, function, parts back: the same two exchanges on every rank."""
        tensors, ranks = self.tensors, range(self.tensors.world_size)
        pieces = [
            matrix.parameter.of_rank[tensors.rank] for owner in ranks for matrix in matrices if matrix.owner == owner
        ]
        owned = [matrix.parameter for matrix in matrices if matrix.owner == tensors.rank]
        to_owner = [
            sum(matrix.parameter.of_rank[tensors.rank].numel for matrix in matrices if matrix.owner == owner)
            for owner in ranks
        ]
        from_rank = [sum(parameter.of_rank[rank].numel for parameter in owned) for rank in ranks]
        parts = torch.cat([values.narrow(0, piece.offset, piece.numel) for piece in pieces]).to(tensors.device)
        received = parts.new_empty(sum(from_rank))
        dist.all_to_all_single(received, parts, from_rank, to_owner, group=tensors.group)
        self._apply_to_received(owned, received.split(from_rank), function)
        dist.all_to_all_single(parts, received, to_owner, from_rank, group=tensors.group)
        for piece, part in zip(pieces, parts.split([piece.numel for piece in pieces])):
            values.narrow(0, piece.offset, piece.numel).copy_(part)

    def _apply_to_received(
        self,
        owned: list[ParameterPieces],
        of_rank: tuple[torch.Tensor, ...],
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """``of_rank`` holds, end to end, each rank's parts of the matrices this rank owns; they are replaced."""
        position = [0] * len(of_rank)
        for parameter in owned:
            places = [
                (received.narrow(0, start, piece.numel), piece)
                for received, start, piece in zip(of_rank, position, parameter.of_rank)
            ]
            whole = of_rank[0].new_empty(parameter.numel)
            for part, piece in places:
                whole[piece.begin : piece.end] = part
            result = function(whole.view(parameter.shape)).reshape(-1)
            for part, piece in places:
                part.copy_(result[piece.begin : piece.end])
            position = [start + piece.numel for start, piece in zip(position, parameter.of_rank)]


def batches(parameters: list[ParameterPieces], world_size: int, size: int) -> list[list[OwnedMatrix]]:
    """The matrices in order, each with its owner, in batches of at most ``size`` elements. The same on every rank."""
    result: list[list[OwnedMatrix]] = []
    work = [0] * world_size
    room = 0
    for parameter in parameters:
        owner = _owner(parameter, work)
        work[owner] += _cost(parameter.shape)
        if not result or parameter.numel > room:
            result.append([])
            room = size
        result[-1].append(OwnedMatrix(parameter, owner))
        room -= parameter.numel
    return result


def _owner(parameter: ParameterPieces, work: list[int]) -> int:
    """Of the ranks with at least half as much of it as any, the one with the least work so far."""
    largest = max(piece.numel for piece in parameter.of_rank)
    candidates = [rank for rank, piece in enumerate(parameter.of_rank) if 2 * piece.numel >= largest]
    return min(candidates, key=lambda rank: (work[rank], rank))


def _cost(shape: torch.Size) -> int:
    """Of an iteration with products of matrices, in some unit."""
    rows, columns = shape[0], shape.numel() // max(1, shape[0])
    return min(rows, columns) ** 2 * max(rows, columns)
