# SPDX-License-Identifier: Apache-2.0
"""What an optimizer that looks at whole parameters is told of the flat tensors that it steps on."""

from collections.abc import Sequence

import torch

from deepspeed.ops.parameter_pieces import ParameterPieces, PartitionedTensors, Piece
from deepspeed.runtime.gradients.layout import FlatGroup, PerParameter, ShardLayout, slice_numel


def partitioned_tensors(
    layout: ShardLayout, stepped: Sequence[torch.Tensor], group: object, device: torch.device
) -> PartitionedTensors:
    """The parameters of each flat tensor, with every rank's part of them.

    Args:
        layout: of stages 1 to 3.
        stepped: the tensor of each flat group that the optimizer steps on.
        group: data-parallel process group.
        device: whose tensors it communicates.
    """
    parameters = {
        tensor: [
            ParameterPieces(
                record.name,
                torch.Size(record.shape),
                tuple(_piece(layout, flat, position, rank) for rank in range(layout.world_size)),
            )
            for position, record in enumerate(flat.records)
        ]
        for flat, tensor in zip(layout.groups, stepped)
    }
    return PartitionedTensors(parameters, layout.rank, group, device)


def _piece(layout: ShardLayout, flat: FlatGroup, position: int, rank: int) -> Piece:
    numel, offset = flat.records[position].numel, flat.offsets[position]
    if isinstance(layout, PerParameter):
        width = slice_numel(numel, layout.world_size)
        begin = min(rank * width, numel)
        return Piece(begin, min(begin + width, numel), offset)
    start = rank * flat.shard_numel
    begin, end = max(offset, start), min(offset + numel, start + flat.shard_numel)
    return Piece(begin - offset, end - offset, begin - start) if begin < end else Piece()
