# SPDX-License-Identifier: Apache-2.0
"""The model's weights as views of flat tensors, and this rank's fp32 master slices of them."""

import torch

from deepspeed.runtime.gradients.layout import FlatGroup, ShardLayout, master_dtype


class FlatWeights:
    """One flat tensor per flat group, in the group's dtype, of which the parameters become views; and the masters.

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
        flat = torch.zeros(group.padded_numel, dtype=group.dtype, device=group.device)
        for record, offset in zip(group.records, group.offsets):
            parameter = record.parameter
            view = flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
        return flat

    def own_slice(self, index: int) -> torch.Tensor:
        """This rank's slice of a flat tensor."""
        group = self.layout.groups[index]
        return self.flats[index].narrow(0, group.shard_start, group.shard_numel)

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
        """Free the masters; the parameters keep their flat tensors."""
        self.masters = []
