# SPDX-License-Identifier: Apache-2.0
"""This rank's fp32 master weights, and the model's weights that follow them: views of flat tensors, or shards."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deepspeed.runtime.gradients.layout import FlatGroup, ShardLayout, master_dtype
from deepspeed.runtime.zero.sharded_parameter import ShardedParameter, shard_of


class MasterWeights:
    """One master per flat group, laid out like this rank's shard of the group's gradient.

    The inner optimizer steps on ``stepped``: the masters themselves, or, where masters are kept in less than it
    computes in, tensors that hold them in that dtype for the time of a step.

    Args:
        layout: where each parameter lies.
        kept_in: dtype of the masters of weights that are no wider; None: fp32, or the weights' own if that is wider.
        stepped_in: dtype of the step and hence of the optimizer's state; None: that of the masters.
    """

    def __init__(
        self, layout: ShardLayout, kept_in: torch.dtype | None = None, stepped_in: torch.dtype | None = None
    ) -> None:
        self.layout = layout
        self.flats: list[torch.Tensor] = []
        self.masters: list[torch.Tensor] = []
        with torch.no_grad():
            for group in layout.groups:
                self.flats.append(self._flatten(group))
                low = kept_in is not None and group.dtype.itemsize <= kept_in.itemsize
                dtype = kept_in if low else master_dtype(group.dtype)
                self.masters.append(self.own_slice(group.index).detach().to(dtype, copy=True))
        self.stepped = [
            self._stepped(master, stepped_in if master.dtype is kept_in else None) for master in self.masters
        ]
        for tensor in self.stepped:
            tensor.requires_grad_()

    @staticmethod
    def _stepped(master: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        return master if dtype in (None, master.dtype) else master.to(dtype)

    @contextmanager
    def stepping(self, gradients: list[torch.Tensor]) -> Iterator[None]:
        """The time of a step: ``stepped`` hold the masters and ``gradients``; afterwards the masters are updated."""
        for tensor, master, gradient in zip(self.stepped, self.masters, gradients):
            if tensor is not master:
                tensor.data = master.to(tensor.dtype)
            tensor.grad = gradient if gradient.dtype == tensor.dtype else gradient.to(tensor.dtype)
        try:
            yield
        finally:
            for tensor, master in zip(self.stepped, self.masters):
                tensor.grad = None
                if tensor is not master:
                    master.copy_(tensor)
            self.free_copies()

    def free_copies(self) -> None:
        """Between steps: only the masters hold values."""
        for tensor, master in zip(self.stepped, self.masters):
            if tensor is not master:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

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
        self.masters, self.stepped = [], []


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
