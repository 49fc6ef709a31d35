# SPDX-License-Identifier: Apache-2.0
"""The way of a bucket: filled, through its collective, and into this rank's shard. Which bucket goes when is the
reducer's."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepspeed.comm import watchdog
from deepspeed.runtime.gradients import collectives
from deepspeed.runtime.gradients.arithmetic import deliver
from deepspeed.runtime.gradients.buckets import Bucket, BufferPool, CommBuffer
from deepspeed.runtime.gradients.gradient_shard import GradientShard
from deepspeed.runtime.gradients.host_landing import HostLanding
from deepspeed.runtime.gradients.layout import FlatGroup
from deepspeed.runtime.gradients.streams import HostOrder
from deepspeed.utils.nvtx import profiler_range

# Device types on which freed memory goes back to the system: new pages each step cost more than holding them does.
HOLDING = {"cpu"}

# Bytes of a communication buffer from which it is worth making its views anew in each window.
LARGE_BUFFER = 1 << 25


def holds_memory(device: torch.device) -> bool:
    """Whether memory of gradients is kept between windows on this device."""
    return device.type in HOLDING


@dataclass(eq=False)
class InFlight:
    """A bucket on its way, with the buffers it borrows until it lands."""

    bucket: Bucket
    buffers: list[CommBuffer]
    reduction: collectives.Reduction
    scale: float


class BucketTransport:
    """Communication buffers, and the collectives that are under way.

    Args:
        buckets: all that will be sent.
        groups: the flat groups they are of.
        shards: where their results go, one per flat group.
        group: process group to sum over.
        order: stream discipline of the device.
        overlap: let a collective run while backward goes on.
        lane: where the watchdog is told of collectives.
        rank: for messages.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        groups: Sequence[FlatGroup],
        shards: Sequence[GradientShard],
        group: object,
        order: HostOrder,
        overlap: bool,
        lane: watchdog.Lane,
        rank: int,
    ) -> None:
        self.pool = BufferPool()
        for bucket in buckets:
            self.pool.reserve(bucket.plan.numel, bucket.comm_dtype, bucket.device)
        device = groups[0].device if groups else torch.device("cpu")
        # With half a bucket there (in fp32), the communication buffers and .grad are still below two whole ones.
        self.landing = HostLanding(device, self.pool.largest // 2)
        self.collectives_issued = 0
        self.bytes_communicated = 0
        self.failed = False  # nothing can be sent any more: other ranks stop waiting by their timeout
        self._buckets = buckets
        self._groups = groups
        self._shards = shards
        self._group = group
        self.order = order
        self._overlap = overlap
        self._lane = lane
        self._rank = rank
        self._holds_memory = holds_memory(device)
        self.in_flight: list[InFlight] = []  # whose results have not been added to the shards

    # ------------------------------------------------------------------ there and back

    def begin(self, bucket: Bucket, factor: float, before: float, after: float) -> InFlight:
        """Fill a buffer with what a bucket has pending and begin its collective; ``go_on`` follows, once the caller has
        noted that the bucket is sent.

        Args:
            factor: on gradients that lie in ``.grad``, beside those that were parked.
            before: factor on the sum of both before the collective.
            after: factor on its result.
        """
        buffers = [self._free_buffer(bucket, bucket.slot)]
        if collectives.needs_scratch(bucket.plan.collective, bucket.device, self._group):
            buffers.append(self._free_buffer(bucket, 1 - bucket.slot))
        self._lane.note("reduce bucket", bucket.label, key=bucket.position + 1)
        try:
            reduction = self._reduce(bucket, buffers, factor, before)
        except BaseException:
            self.failed = True  # what the bucket has taken is lost, so that it cannot be sent again
            raise
        flight = InFlight(bucket, buffers, reduction, after)
        self.in_flight.append(flight)
        return flight

    def _reduce(self, bucket: Bucket, buffers: list[CommBuffer], factor: float, before: float) -> collectives.Reduction:
        plan = bucket.plan
        scratch = buffers[1].data.narrow(0, 0, plan.numel) if len(buffers) > 1 else None
        with torch.no_grad(), profiler_range(bucket.label):
            data = bucket.fill(buffers[0].data, self.order, factor, before)
            # Before the side stream is let go on: so it waits for whoever had this memory before.
            if plan.result is not None:
                begin, end = plan.result
                self._shards[plan.group].provide(plan.shard_offset, plan.shard_offset + end - begin)
            self.order.fork()
            with self.order.side():
                reduction = collectives.reduce_buffer(
                    data, plan.collective, plan.owner, plan.result, self._group, scratch
                )
        self.collectives_issued += 1
        self.bytes_communicated += data.nbytes
        return reduction

    def go_on(self, flight: InFlight) -> None:
        """Land what was begun where that makes nobody wait, or where nothing is to overlap with it."""
        if self.order.asynchronous or not self._overlap:
            self.land_all()
        if not self._overlap:
            self.order.wait_mark(flight.buffers[0].mark)

    def _free_buffer(self, bucket: Bucket, slot: int) -> CommBuffer:
        """The buffer of a slot, once nothing uses it any more."""
        buffer = self.pool.get(slot, bucket.comm_dtype, bucket.device)
        while any(buffer in flight.buffers for flight in self.in_flight):
            self._land(self.in_flight.pop(0))
        self.order.wait_mark(buffer.mark)
        return buffer

    def land_all(self) -> None:
        """Add the results of all collectives to the shards. The host waits for them where there are no streams."""
        while self.in_flight:
            self._land(self.in_flight.pop(0))

    @torch.no_grad()
    def _land(self, flight: InFlight) -> None:
        bucket = flight.bucket
        with self.order.side():
            if flight.reduction.work is not None:
                self._await(flight.reduction.work, bucket)
            away = self._groups[bucket.plan.group].on_host
            add = self.landing.deliver if away else deliver
            bucket.land(flight.reduction.parts, self._shards[bucket.plan.group], flight.scale, add)
            for buffer in flight.buffers:
                buffer.mark = self.order.mark()

    def _await(self, work: object, bucket: Bucket) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self.failed = True
            names = [piece.record.name for piece in bucket.plan.pieces]
            raise watchdog.explained(
                error,
                f"rank {self._rank}: gradient bucket {bucket.position + 1} of {len(self._buckets)} (parameters"
                f" {names[0]} to {names[-1]}) was not reduced",
                "Either another rank failed, whose log has the first error, or the ranks did not call engine.backward()"
                " equally often",
            ) from error

    def waits_for_nobody(self) -> bool:
        """Whether every collective that was begun is over, so that sending another bucket cannot make the host wait."""
        return all(flight.reduction.work is None or flight.reduction.work.is_completed() for flight in self.in_flight)

    # ------------------------------------------------------------------ memory

    def free_buffers(self) -> None:
        """Between rounds: let go of the communication buffers."""
        self.order.join()  # the side stream may still read them
        self.order.hold_for_current(buffer.data for buffer in self.pool.buffers())
        self.pool.clear()
        for bucket in self._buckets:
            bucket.forget_views()

    def end_window(self) -> None:
        """Between windows, where memory of the device is held only while it is needed: forward has more use for it."""
        if self._holds_memory:
            return
        self.order.join()  # the side stream may still write there
        for shard in self._shards:
            shard.end_window(self.order)
        if any(buffer.data.nbytes >= LARGE_BUFFER for buffer in self.pool.buffers()):
            self.free_buffers()

    def destroy(self) -> None:
        """Free every buffer."""
        self.pool.clear()
        self.landing.clear()
        for bucket in self._buckets:
            bucket.forget_views()

    @property
    def nbytes(self) -> int:
        """Bytes of communication buffers held now."""
        return self.pool.nbytes + self.landing.nbytes
