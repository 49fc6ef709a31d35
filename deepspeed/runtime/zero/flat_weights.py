# SPDX-License-Identifier: Apache-2.0
"""This rank's fp32 master weights, and the model's weights that follow them: views of flat tensors, or shards."""

import torch

from deepspeed.runtime.gradients.layout import FlatGroup, ShardLayout, master_dtype
from deepspeed.runtime.zero.sharded_parameter import ShardedParameter, shard_of


class MasterWeights:
    """One master per flat group, laid out like this rank's shard of the group's gradient.

    Args:
        layout: where each parameter lies.
    """

    def __init__(self, layout: ShardLayout) -> None:
        self.layout = layout
        self.flats: list[torch.Tensor] = []
        self.masters: list[torch.Tensor] = []
        with torch.no_grad():
            for group in layout.groups:
                self.flats.append(self._flatten(group))
                self.masters.append(self.own_slice(group.index).detach().to(master_dtype(group.dtype), copy=True))
        for master in self.masters:
            master.requires_grad_()

    def _flatten(self, group: FlatGroup) -> torch.Tensor:
        """Bring the group's weights into one tensor in the group's dtype."""
        raise NotImplementedError

    def own_slice(self, index: int) -> torch.Tensor:
        """This rank's part of the weights of a group."""
        raise NotImplementedError

    @torch.no_grad()
    def write_own_slices(self) -> None:
        """Masters to weights, rounded."""
        for index, master in enumerate(self.masters):
            self.own_slice(index).copy_(master)

    @torch.no_grad()
    def read_own_slices(self) -> None:
        """Weights to masters."""
        for index, master in enumerate(self.masters):
            master.copy_(self.own_slice(index))

    def release(self) -> None:
        """Free the masters; the parameters keep their weights."""
        self.masters = []


class FlatWeights(MasterWeights):
    """Stages 1 and 2: every rank has all weights; the parameters become views of one flat tensor per flat group."""

    def _flatten(self, group: FlatGroup) -> torch.Tensor:
        flat = torch.zeros(group.padded_numel, dtype=group.dtype, device=group.device)
        for record, offset in zip(group.records, group.offsets):
            view = flat.narrow(0, offset, record.numel).view(record.shape)
            view.copy_(record.parameter.data)
            record.parameter.data = view
        return flat

    def own_slice(self, index: int) -> torch.Tensor:
        group = self.layout.groups[index]
        return self.flats[index].narrow(0, group.shard_start, group.shard_numel)


class ShardWeights(MasterWeights):
    """Stage 3: a rank has its shards alone; those of a flat group become views of one flat tensor."""

    def _flatten(self, group: FlatGroup) -> torch.Tensor:
        flat = torch.zeros(group.shard_numel, dtype=group.dtype, device=group.device)
        for record, own in zip(group.records, group.own):
            shard = shard_of(record.parameter)
            shard.move_shard(flat.narrow(0, own.shard_begin, shard.slice_numel))
        return flat

    def own_slice(self, index: int) -> torch.Tensor:
        return self.flats[index]

    def shards(self) -> list[ShardedParameter]:
        """All parameters that have masters."""
        return [shard_of(record.parameter) for group in self.layout.groups for record in group.records]
