# SPDX-License-Identifier: Apache-2.0
"""Buckets at run time: a plan, its local accumulation buffer, and the communication buffer it borrows."""

from collections.abc import Callable

import torch

from deepspeed.runtime.gradients import arithmetic
from deepspeed.runtime.gradients.arithmetic import add_scaled, add_scaled_each, assign_scaled
from deepspeed.runtime.gradients.autograd_internals import copy_each
from deepspeed.runtime.gradients.gradient_shard import GradientShard
from deepspeed.runtime.gradients.layout import BucketPlan
from deepspeed.runtime.gradients.ledger import Move, ParameterRecord
from deepspeed.runtime.gradients.streams import HostOrder
from deepspeed.utils.nvtx import span_label


class CommBuffer:
    """A 1-D buffer for one bucket at a time, with the mark after which it may be written again."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.empty(numel, dtype=dtype, device=device)
        self.mark: object | None = None  # device event after the last use


class BufferPool:
    """Two communication buffers per dtype and device, so that one is filled while the other is reduced."""

    SLOTS = 2

    def __init__(self) -> None:
        self._sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        self._buffers: dict[tuple[torch.dtype, torch.device, int], CommBuffer] = {}

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Announce the size of a bucket; nothing is allocated yet."""
        self._sizes[dtype, device] = max(numel, self._sizes.get((dtype, device), 0))

    def get(self, slot: int, dtype: torch.dtype, device: torch.device) -> CommBuffer:
        """The buffer of a slot, allocated at first use."""
        key = (dtype, device, slot)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = CommBuffer(self._sizes[dtype, device], dtype, device)
        return buffer

    def clear(self) -> None:
        """Free the buffers; the next use allocates anew."""
        self._buffers.clear()

    def buffers(self) -> list[CommBuffer]:
        """Those that are held now."""
        return list(self._buffers.values())

    @property
    def largest(self) -> int:
        """Elements of the largest bucket, 0 without one."""
        return max(self._sizes.values(), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(buffer.data.nbytes for buffer in self._buffers.values())


class Bucket:
    """One unit of communication.

    Args:
        plan: what it covers and how it is reduced.
        position: place in the fixed order in which buckets go out.
        comm_dtype: dtype of the collective.
        accum_dtype: dtype of local accumulation.
        device: where the gradients are.
    """

    def __init__(
        self,
        plan: BucketPlan,
        position: int,
        comm_dtype: torch.dtype,
        accum_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.position = position
        records = [piece.record for piece in plan.pieces]
        self.label = span_label(f"deepspeed.reduce_bucket_{position}", records)  # in profiles
        self.comm_dtype = comm_dtype
        self.accum_dtype = accum_dtype
        self.device = device
        self.slot = position % BufferPool.SLOTS
        self.waiting = 0  # records of which a firing is still awaited
        self.held_back = 0  # 1: never leaves before the sweep
        self.landed = False  # whether this window's shard holds something for this bucket
        self.local: torch.Tensor | None = None  # contributions parked on this rank
        self.local_in_use = False
        self._whole = [piece.whole for piece in plan.pieces]
        self._comm_views: tuple[torch.Tensor | None, list[torch.Tensor]] = (None, [])
        self._local_views: list[torch.Tensor] = []

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """One view per piece, shaped as the parameter where the piece is all of it."""
        views = []
        for piece in self.plan.pieces:
            view = buffer.narrow(0, piece.offset, piece.stop - piece.start)
            views.append(view.view(piece.record.shape) if piece.whole else view)
        return views

    def _comm_views_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        if self._comm_views[0] is not buffer:
            self._comm_views = (buffer, self._views(buffer))
        return self._comm_views[1]

    def fill(self, buffer: torch.Tensor, order: HostOrder, factor: float, pre_scale: float) -> torch.Tensor:
        """Move all pending contributions into ``buffer``: ``pre_scale * (factor * gradients + local)``.

        Returns the part of ``buffer`` that is this bucket.
        """
        data = buffer.narrow(0, 0, self.plan.numel)
        views = self._comm_views_of(buffer)
        present, gradients, absent = self._take(views, order, Move.SEND)
        if self.local_in_use:
            # sum in the accumulation dtype, round to the communication dtype once
            add_scaled_each([self._local_views[i] for i in present], gradients, factor)
            assign_scaled(data, self.local, pre_scale)
            self.local_in_use = False
            return data
        copy_each(views if len(present) == len(views) else [views[i] for i in present], gradients)
        for i in absent:
            views[i].zero_()
        for begin, end in self.plan.gaps:
            data[begin:end].zero_()
        if factor * pre_scale != 1.0:
            data.mul_(factor * pre_scale)
        return data

    def park(self, order: HostOrder, factor: float) -> None:
        """Add ``factor`` times the gradients that lie in ``.grad`` to the local accumulation buffer."""
        if not any(piece.record.unmoved or piece.record.pieces_left for piece in self.plan.pieces):
            return
        if self.local is None:
            self.local = torch.zeros(self.plan.numel, dtype=self.accum_dtype, device=self.device)
            self._local_views = self._views(self.local)
        elif not self.local_in_use:
            self.local.zero_()
        self.local_in_use = True
        present, gradients, _ = self._take(self._local_views, order, Move.PARK)
        add_scaled_each([self._local_views[i] for i in present], gradients, factor)

    def _take(
        self, views: list[torch.Tensor], order: HostOrder, move: Move
    ) -> tuple[list[int], list[torch.Tensor], list[int]]:
        """Take over the gradient of each piece: positions with one, those gradients, positions without."""
        present, gradients, absent = [], [], []
        for i, (piece, whole) in enumerate(zip(self.plan.pieces, self._whole)):
            record = piece.record
            gradient = record.next_piece(move)
            if gradient is None:
                absent.append(i)
                continue
            if record.streams:
                order.wait_for_writers(record.streams, gradient)
            present.append(i)
            gradients.append(gradient if whole else gradient.reshape(-1)[piece.start : piece.stop])
        return present, gradients, absent

    def land(
        self,
        parts: list[torch.Tensor],
        shard: GradientShard,
        scale: float,
        deliver: Callable[..., None] = arithmetic.deliver,
    ) -> None:
        """Add ``scale`` times the sum of ``parts``, the reduced result, to this rank's shard if it keeps any of it.

        ``deliver`` is that of ``arithmetic``, or does the same for a shard elsewhere.
        """
        if parts:
            offset = self.plan.shard_offset
            for target, begin, end in shard.pieces(offset, offset + parts[0].numel()):
                deliver(target, [part[begin:end] for part in parts], scale, add=self.landed)
        self.landed = True
        for piece in self.plan.pieces:
            piece.record.piece_landed()

    def add_local_to(self, full: torch.Tensor, record: ParameterRecord, scale: float) -> None:
        """Add ``scale`` times what is parked here of a parameter to ``full``, 1-D over the parameter's elements."""
        if self.local_in_use:
            for piece in self.plan.pieces:
                if piece.record is record:
                    numel = piece.stop - piece.start
                    add_scaled(full[piece.start : piece.stop], self.local.narrow(0, piece.offset, numel), scale)

    def drop(self) -> None:
        """Forget parked and landed contributions."""
        self.local_in_use = False
        self.landed = False

    def free_local(self) -> None:
        """Give the local accumulation buffer back."""
        self.local = None
        self._local_views = []
        self.local_in_use = False

    def forget_views(self) -> None:
        """Let go of the communication buffer."""
        self._comm_views = (None, [])

    @property
    def local_nbytes(self) -> int:
        return 0 if self.local is None else self.local.nbytes
