# SPDX-License-Identifier: Apache-2.0
"""Buckets at run time: a plan, its local accumulation buffer, and the communication buffer it borrows."""

import itertools
from collections.abc import Callable

import torch

from deepspeed.runtime.gradients import arithmetic
from deepspeed.runtime.gradients.arithmetic import add_scaled, add_scaled_each, assign_scaled
from deepspeed.runtime.gradients.autograd_internals import can_copy_into_rows, copy_each, copy_into_rows
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
        self.label = span_label(f"deepspeed.reduce_bucket_{position}", [p.record for p in plan.pieces])  # in profiles
        self.comm_dtype = comm_dtype
        self.accum_dtype = accum_dtype
        self.device = device
        self.slot = position % BufferPool.SLOTS
        self.waiting = 0  # records of which a firing is still awaited
        self.held_back = 0  # 1: never leaves before the sweep
        self.landed = False  # whether this window's shard holds something for this bucket
        self.local: torch.Tensor | None = None  # contributions parked on this rank
        self.local_in_use = False
        pieces = plan.pieces_by_record()
        self.records = list(pieces)
        self._pieces = list(pieces.values())
        self._first_view = [0, *itertools.accumulate(len(own) for own in self._pieces)]
        self._whole = all(piece.whole for piece in plan.pieces)
        self._cut_evenly = plan.rows > 1 and plan.is_cut_evenly()
        # whose slices are slices of its first dimension; others are made 1-D
        self._sliced_as_they_are = [
            len(record.shape) == 1 or (len(record.shape) > 1 and record.shape[0] % plan.rows == 0)
            for record in self.records
        ]
        self._comm_views: tuple[torch.Tensor | None, list[torch.Tensor]] = (None, [])
        self._local_views: list[torch.Tensor] = []

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """One view per piece, parameter by parameter, shaped as the parameter where the piece is all of it."""
        views = []
        for piece in itertools.chain.from_iterable(self._pieces):
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
        present, gradients, absent = self._take(order, Move.SEND)
        if self.local_in_use:
            # sum in the accumulation dtype, round to the communication dtype once
            add_scaled_each(*self._pairs(self._local_views, present, gradients), factor)
            assign_scaled(data, self.local, pre_scale)
            self.local_in_use = False
            return data
        self._copy(buffer, data, present, gradients, absent)
        if factor * pre_scale != 1.0:
            data.mul_(factor * pre_scale)
        return data

    def _copy(
        self,
        buffer: torch.Tensor,
        data: torch.Tensor,
        present: list[int],
        gradients: list[torch.Tensor],
        absent: list[int],
    ) -> None:
        """Write all of ``data``, the front of ``buffer``: gradients, and zeros elsewhere."""
        if self._cut_evenly and len(present) == len(self.records) and can_copy_into_rows(data, gradients):
            sources = [
                gradient if as_it_is and gradient.is_contiguous() else gradient.reshape(-1)
                for gradient, as_it_is in zip(gradients, self._sliced_as_they_are)
            ]
            copy_into_rows(data.view(self.plan.rows, -1), sources)
            return
        copy_each(*self._pairs(self._comm_views_of(buffer), present, gradients))
        for i in absent:
            for piece in self._pieces[i]:
                data[piece.offset : piece.offset + piece.stop - piece.start].zero_()
        for begin, end in self.plan.gaps:
            data[begin:end].zero_()

    def park(self, order: HostOrder, factor: float) -> None:
        """Add ``factor`` times the gradients that lie in ``.grad`` to the local accumulation buffer."""
        if not any(record.unmoved or record.buckets_left for record in self.records):
            return
        if self.local is None:
            self.local = torch.zeros(self.plan.numel, dtype=self.accum_dtype, device=self.device)
            self._local_views = self._views(self.local)
        elif not self.local_in_use:
            self.local.zero_()
        self.local_in_use = True
        present, gradients, _ = self._take(order, Move.PARK)
        add_scaled_each(*self._pairs(self._local_views, present, gradients), factor)

    def _take(self, order: HostOrder, move: Move) -> tuple[list[int], list[torch.Tensor], list[int]]:
        """Take over the gradient of each parameter: positions with one, those gradients, positions without."""
        present, gradients, absent = [], [], []
        here = order.here()
        for i, record in enumerate(self.records):
            gradient = record.gradient_for_bucket(move)
            if gradient is None:
                absent.append(i)
                continue
            if record.streams:
                if record.streams != here:
                    order.wait_for_writers(record.streams, gradient)
                if record.buckets_left == 0:  # else another bucket takes its part, maybe on another stream
                    record.streams.clear()
            present.append(i)
            gradients.append(gradient)
        return present, gradients, absent

    def _pairs(
        self, views: list[torch.Tensor], present: list[int], gradients: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Of the parameters at positions ``present``: the views of their pieces, and these pieces of ``gradients``."""
        if self._whole:
            return (views if len(present) == len(views) else [views[i] for i in present]), gradients
        targets, sources = [], []
        for i, gradient in zip(present, gradients):
            pieces, first = self._pieces[i], self._first_view[i]
            targets += views[first : first + len(pieces)]
            if pieces[0].whole:
                sources.append(gradient)
                continue
            flat, sizes = gradient.reshape(-1), [piece.stop - piece.start for piece in pieces]
            if sum(sizes) == flat.numel():  # a slice costs as much as cutting all of it
                sources += torch.split_with_sizes(flat, sizes)
            else:
                sources += [flat[piece.start : piece.stop] for piece in pieces]
        return targets, sources

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
        for record in self.records:
            record.bucket_landed()

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
