# SPDX-License-Identifier: Apache-2.0
"""The reducer: moves contributions from *pending* to *reduced*, the same way for every stage and world size.

A **round** sends every bucket once, in a fixed order. During a backward buckets go out as their parameters fire; the
sweep at its end sends the rest. What arrives after its bucket has gone is parked on this rank and goes in a
correcting round, which all ranks agree on in ``synchronize()``. When a bucket goes is policy; that everything goes
exactly once is checked there.

True gradients come out: divided by accumulation count, world size and loss scale, in the shard's dtype.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from deepspeed.comm import watchdog
from deepspeed.runtime.gradients import agreement
from deepspeed.runtime.gradients.accumulation import AccumulationSchedule
from deepspeed.runtime.gradients.backward_scope import BackwardScope
from deepspeed.runtime.gradients.buckets import Bucket
from deepspeed.runtime.gradients.gradient_shard import GradientShard, Keeping, make_shards
from deepspeed.runtime.gradients.host_memory import HostMemory
from deepspeed.runtime.gradients.layout import FlatGroup, ShardLayout
from deepspeed.runtime.gradients.ledger import GradientAccountingError, Ledger, ParameterRecord, Phase, stray_message
from deepspeed.runtime.gradients.streams import HostOrder, order_for
from deepspeed.runtime.gradients.transport import BucketTransport, holds_memory

_serials = itertools.count(1)  # engines are made in the same order on every rank


@dataclass(frozen=True)
class ReductionSettings:
    """Policy and numbers of reduction; none of it changes what is summed.

    Args:
        every_backward: reduce in each backward (stages 2, 3); otherwise only in those of the boundary micro-step (0,
            1).
        overlap: let a collective run while backward goes on.
        persistent_buffers: keep communication buffers between backwards.
        comm_dtype: dtype of collectives; None for each parameter's own.
        accum_dtype: dtype of local accumulation and of the reduced shard (float16 is kept as float32 there: the shard
            holds true gradients, which have no loss scale to keep them in range).
        mean: divide by the world size.
        predivide: share of that division done before the collective.
        prescale: do all of it before.
        gathers_in_backward: a backward gathers weights among the same ranks (stage 3).
        settles_in_backward: a backward that reduced leaves nothing behind, on any rank, because its result is shown
            (stage 0); otherwise what came late may wait for ``step()``.
        host_memory: of shards that rest on the host.
        shard_in_parts: the optimizer takes a shard in several tensors.
    """

    every_backward: bool
    overlap: bool = False
    persistent_buffers: bool = True
    comm_dtype: torch.dtype | None = None
    accum_dtype: torch.dtype = torch.float32
    mean: bool = True
    predivide: float = 1.0
    prescale: bool = False
    gathers_in_backward: bool = False
    settles_in_backward: bool = False
    host_memory: HostMemory = HostMemory()
    shard_in_parts: bool = False


class GradientReducer:
    """Owns the ledger, the buckets and this rank's shards of reduced gradient.

    Args:
        layout: flat groups and bucket plans.
        ledger: records of the same parameters.
        group: process group to average over.
        channel: host-side agreement among the ranks of ``group``.
        schedule: tells boundary micro-steps.
        settings: see ``ReductionSettings``.
    """

    def __init__(
        self,
        layout: ShardLayout,
        ledger: Ledger,
        group: object,
        channel: agreement.Channel,
        schedule: AccumulationSchedule,
        settings: ReductionSettings,
    ) -> None:
        self.layout = layout
        self.ledger = ledger
        ledger.serial = next(_serials)
        self.group = group
        self.channel = channel
        self.schedule = schedule
        self.settings = settings
        self.device = layout.groups[0].device if layout.groups else torch.device("cpu")
        order = order_for(self.device)
        order.watch("gradient reduction")
        self.rests_on_host = any(group.on_host for group in layout.groups)
        self.buckets = self._make_buckets()
        self._buckets_of: list[list[Bucket]] = [[] for _ in ledger.records]
        for bucket in self.buckets:
            for record in bucket.records:
                self._buckets_of[record.index].append(bucket)
        self.shards = make_shards(layout.groups, self._shard_dtype, settings.host_memory, self._keeping())
        self.transport = BucketTransport(
            self.buckets,
            layout.groups,
            self.shards,
            group,
            order,
            settings.overlap,
            watchdog.lane(group, f"gradients of engine {ledger.serial}"),
            ledger.rank,
        )
        self.window_loss_scale = 1.0
        # the scale of other ranks' backwards, for a window in which this rank has none
        self.current_loss_scale: Callable[[], float] = lambda: 1.0
        self._awaited: dict[int, tuple[int, list[int]]] = {}  # by ordinal of the backward: lessons, records per bucket
        self._issued_at_begin = 0  # collectives, when the present backward began
        self._next = 0  # buckets sent in the open round
        self._round_open = False
        self._eager = False  # whether buckets may leave before the sweep
        self._announced: BackwardScope | None = None  # the backward that is running, if every rank knows of it
        self._factor = 1.0
        self.usable = True  # as far as was asked in the last backward

    def _make_buckets(self) -> list[Bucket]:
        buckets = []
        for position, plan in enumerate(self.layout.buckets):
            group = self.layout.groups[plan.group]
            comm_dtype = self.settings.comm_dtype or group.comm_dtype or group.dtype
            buckets.append(Bucket(plan, position, comm_dtype, self._accum_dtype(group), group.device))
        return buckets

    def _accum_dtype(self, group: FlatGroup) -> torch.dtype:
        wide = group.dtype if group.dtype.itemsize > 4 else None
        return wide or self.settings.accum_dtype

    def _shard_dtype(self, group: FlatGroup) -> torch.dtype:
        accum = self._accum_dtype(group)
        return torch.float32 if accum is torch.float16 else accum

    def _keeping(self) -> Keeping:
        if self.layout.replicated or holds_memory(self.device):  # stage 0 publishes views of its shards
            return Keeping.ALWAYS
        return Keeping.PARTS if self.settings.shard_in_parts else Keeping.WINDOW

    # ------------------------------------------------------------------ numbers

    def _unit(self) -> float:
        """True gradient of one ordinary contribution, as a fraction of it, before averaging over ranks."""
        return 1.0 / (self.schedule.steps * self.window_loss_scale)

    def _scales(self, comm_dtype: torch.dtype) -> tuple[float, float]:
        """Factors before and after the collective; their product is the unit over the world size.

        The division comes after the sum, in the shard's dtype, except where the sum could leave the range of float16.
        """
        world = self.channel.world_size if self.settings.mean else 1
        before = 1.0 / world if self.settings.prescale else 1.0 / self.settings.predivide
        if comm_dtype is torch.float16:
            before /= self.schedule.steps
        return before, self._unit() / world / before

    # ------------------------------------------------------------------ one backward

    def begin_backward(self, scope: BackwardScope, fired: ParameterRecord | None = None) -> None:
        """Prepare for the firings of a backward.

        Args:
            scope: of the backward.
            fired: the parameter whose firing is the first that is seen of it, if it was not announced.

        Raises:
            GradientAccountingError: a ``.grad`` was set by hand, and autograd would add to it.
        """
        self.ledger.refuse_strays(fired)
        self._issued_at_begin = self.transport.collectives_issued
        self.usable = True
        if self._idle():
            self.window_loss_scale = scope.loss_scale
        accumulation = 1.0 if scope.scale_by_accumulation else float(self.schedule.steps)
        self._factor = accumulation * self.window_loss_scale / scope.loss_scale
        self._eager = self.reduces_now() and not scope.within_another_engine
        self.ledger.expect()
        if self._eager:
            for bucket, waiting in zip(self.buckets, self._records_awaited()):
                bucket.waiting = waiting + bucket.held_back
        self._announced = scope if scope.announced else None

    def _records_awaited(self) -> list[int]:
        """For each bucket, of how many of its parameters a firing is awaited in the backward that begins. Counted anew
        when the hints have changed."""
        lessons, counts = self._awaited.get(self.ledger.backwards, (-1, []))
        if lessons != self.ledger.lessons:
            counts = [sum(1 for record in bucket.records if record.awaited) for bucket in self.buckets]
            self._awaited[self.ledger.backwards] = self.ledger.lessons, counts
        return counts

    def reduces_now(self) -> bool:
        """Whether a backward of the present micro-step reduces."""
        if self.schedule.deferred_by:
            return False
        return self.settings.every_backward or self.schedule.is_boundary()

    def firing_of(
        self, record: ParameterRecord, locate: Callable[[ParameterRecord], BackwardScope]
    ) -> Callable[[torch.Tensor], None]:
        """The post-accumulate-grad hook of a parameter: autograd has just put a contribution into ``.grad``. It enters
        the books, and the buckets that are complete and whose turn it is are sent.

        One function for each parameter, with all it needs at hand: it runs once per parameter and backward while a
        device waits for the host, and a ``partial`` of a method that called three others took half as long again.

        Args:
            locate: gives the scope of a firing outside of an announced backward.
        """
        buckets, of_this = self.buckets, tuple(self._buckets_of[record.index])
        note_writer = self.order.note_writer if self.order.asynchronous else None

        def on_firing(_: torch.Tensor) -> None:
            scope = self._announced
            if scope is None:
                scope = locate(record)
            if note_writer is not None:
                note_writer(record.streams)
            if record.count() and self._eager:
                for bucket in of_this:
                    bucket.waiting -= 1
                # Not one of this parameter's buckets need be next: those in front may have had nothing to wait for.
                if self._next < len(buckets) and buckets[self._next].waiting == 0:
                    self._advance(scope)

        return on_firing

    def _advance(self, scope: BackwardScope) -> None:
        """Send complete buckets, never out of order."""
        while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0 and self._may_send(scope):
            self._open_round(scope)
            self._send(self.buckets[self._next])

    def hold_back(self, records: Iterable[ParameterRecord]) -> None:
        """Buckets of these parameters leave in the sweep. For parameters that fire at other moments on other ranks, in
        a backward that also gathers weights: a bucket must not come before a gather on one rank and be waited for
        behind it on another."""
        for record in records:
            for bucket in self._buckets_of[record.index]:
                bucket.held_back = 1

    def _may_send(self, scope: BackwardScope) -> bool:
        """Whether a bucket may leave before the sweep. Where the host waits for collectives and backward gathers
        weights, only if that waits for nobody: another rank may wait for a gather that comes later on this one. And
        where nothing may be left behind, only in a backward of all ranks, which can settle at its end."""
        if self.settings.settles_in_backward and not scope.announced:
            return False
        if self.order.asynchronous or not self.settings.gathers_in_backward:
            return True
        if not (scope.announced and self.settings.overlap):
            return False
        return self.transport.waits_for_nobody()

    def end_backward(self, scope: BackwardScope) -> None:
        """The sweep: send what has not been sent, park what came too late or is not reduced now."""
        self._announced = None
        if self._eager and (scope.announced or self._round_open or self.ledger.waiting()):
            self._open_round(scope)
            self._sweep(scope)
        self._park()
        if self._eager:
            self.ledger.learn()
            if self.settings.settles_in_backward and scope.announced:
                self.usable = self.settle(refuses=False)
        self.ledger.backwards += 1
        self._eager = False

    def _sweep(self, scope: BackwardScope) -> None:
        """Send what has not been sent. An exception ends the backward as one in the middle of it does: the other ranks
        wait for the rest."""
        try:
            self._finish_round()
        except BaseException as error:
            self.abort_backward(f"{type(error).__name__} at its end", scope.announced)
            raise

    def abort_backward(self, reason: str, announced: bool = False) -> None:
        """An exception ended the backward: drop its contributions, or make the window unusable if some were reduced.
        ``announced``: every rank runs this backward."""
        self._announced = None
        # a round may also have been asked for by an accessor in the middle of it
        sent, total = self.transport.collectives_issued - self._issued_at_begin, len(self.buckets)
        round_was_open = self._round_open
        for record in self.ledger.records:
            if record.unmoved or record.in_hand is not None:
                record.drop_gradient()
        if round_was_open and not self.transport.failed:
            # other ranks wait for the rest: give them zeros, so that the order of collectives stays whole
            self._finish_round()
        if sent:
            self.ledger.poison = (
                f"a backward was aborted ({reason}) after {sent} of {total} gradient buckets had been reduced"
            )
        self._eager = False
        if round_was_open and announced and self.settings.settles_in_backward and not self.transport.failed:
            self.usable = self.settle(refuses=False)  # as the other ranks do at the end of theirs

    # ------------------------------------------------------------------ rounds

    def _open_round(self, scope: BackwardScope | None) -> None:
        if self._round_open:
            return
        if scope is not None and not scope.announced:
            agreement.agree(
                self.channel, self.ledger, wants_round=True, leftovers=True, loss_scale=self.window_loss_scale
            )
        self._round_open = True
        self._next = 0

    def _finish_round(self) -> None:
        """Send the remaining buckets and wait for all of them."""
        while self._next < len(self.buckets):
            self._send(self.buckets[self._next])
        self.transport.land_all()
        self._round_open = False
        self._next = 0
        self.ledger.reduced = True
        if not self.settings.persistent_buffers:
            self.transport.free_buffers()

    def _send(self, bucket: Bucket) -> None:
        flight = self.transport.begin(bucket, self._factor, *self._scales(bucket.comm_dtype))
        self._next += 1  # before anything can fail: the other ranks have its collective, and must not get it twice
        self.transport.go_on(flight)

    def _park(self) -> None:
        """Move what still lies in ``.grad`` to the local accumulation buffers."""
        if any(record.unmoved for record in self.ledger.records):
            for bucket in self.buckets:
                bucket.park(self.order, self._factor)

    # ------------------------------------------------------------------ end of a window

    def reduce_pending(self, loss_scale: float | None = None) -> None:
        """One round for everything pending. Collective: every rank calls it.

        ``loss_scale`` is that of the other ranks' contributions, where it is known; a rank without any lands with it.
        """
        if self._idle():
            self.window_loss_scale = self.current_loss_scale() if loss_scale is None else loss_scale
        self._open_round(None)
        self._finish_round()

    def _idle(self) -> bool:
        """Whether this rank has contributed nothing to the present window."""
        return self.ledger.empty and not self.ledger.waiting()

    def settle(self, refuses: bool = True) -> bool:
        """Reduce until no rank has anything pending. Collective.

        Returns:
            whether the window is usable.

        Raises:
            GradientAccountingError: on all ranks, when the window is unusable and it is to be refused now.
        """
        strays = self.ledger.strays()
        if strays and not self.ledger.poison:
            self.ledger.poison = stray_message(strays)
        while True:
            leftovers = bool(self.ledger.waiting())
            scale = None if self._idle() else self.window_loss_scale
            verdict = agreement.agree(
                self.channel,
                self.ledger,
                wants_round=False,
                leftovers=leftovers,
                loss_scale=scale,
                refuses=refuses,
            )
            if not verdict.round_wanted and not verdict.leftovers:
                break
            self.reduce_pending(verdict.loss_scale)
            if not verdict.round_wanted:
                break
        self.order.join()
        self.await_host_shards()
        self._check_landed()
        return verdict.usable

    def _check_landed(self) -> None:
        """GradientAccountingError, on all ranks, if a round has ended without one of its buckets: the shards would hold
        what was in their memory before. A window that is unusable already is refused for its own reason."""
        missing = [bucket.position + 1 for bucket in self.buckets if not bucket.landed]
        if self.ledger.reduced and missing and not self.ledger.poison:
            raise GradientAccountingError(
                f"rank {self.ledger.rank}: gradient buckets {missing[:10]} of {len(self.buckets)} were not reduced in"
                " this window, though others were"
            )

    def await_host_shards(self) -> None:
        """What was copied to shards on the host has arrived. The host waits, if there are any."""
        if self.rests_on_host:
            self.order.await_all()

    def local_gradient(self, record: ParameterRecord) -> torch.Tensor:
        """This rank's own part of the window's gradient that no collective has taken: fp32, in the parameter's
        shape."""
        full = torch.zeros(record.numel, dtype=torch.float32, device=record.parameter.device)
        for bucket in self._buckets_of[record.index]:
            bucket.add_local_to(full, record, self._unit())
        return full.view(record.shape)

    def synchronize(self) -> list[GradientShard]:
        """Before the optimizer's step: settle, check the accounts, and return this rank's shards of the true gradient.

        Returns:
            one per flat group, ``shard_numel`` elements, zero in the padding. Valid until ``start_window``; without
            memory if no rank has run a backward.

        Raises:
            GradientAccountingError: a contribution is missing or was counted twice; names the parameters.
        """
        self.settle()
        self.ledger.check_closed()
        if self.transport.in_flight or self._round_open or any(bucket.local_in_use for bucket in self.buckets):
            raise GradientAccountingError(
                f"rank {self.ledger.rank}: a gradient bucket is still in use at the end of the window"
            )
        return self.shards

    def start_window(self) -> None:
        """Begin the next window after a step."""
        keep_local = self.schedule.steps > 1 and not self.settings.every_backward
        for bucket in self.buckets:
            bucket.drop()
            if not keep_local:
                bucket.free_local()
        self.transport.end_window()
        self.ledger.start_window()

    def drop_window(self) -> None:
        """Discard everything of the present window (``zero_grad``)."""
        for record in self.ledger.records:
            record.parked = False
            if record.parameter.grad is not None or record.phase is not Phase.IDLE:
                record.drop_gradient()
        if self.ledger.reduced or self.ledger.poison:
            self.ledger.generation += 1
        self.start_window()

    def destroy(self) -> None:
        """Remove hooks and free every buffer."""
        for record in self.ledger.records:
            if record.handle is not None:
                record.handle.remove()
                record.handle = None
        self.await_host_shards()
        self.transport.destroy()
        for bucket in self.buckets:
            bucket.free_local()
        for shard in self.shards:
            shard.release()

    # ------------------------------------------------------------------ facts

    @property
    def order(self) -> HostOrder:
        """The stream discipline of the device."""
        return self.transport.order

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of communication buffers and local accumulation buffers held now."""
        return self.transport.nbytes + sum(bucket.local_nbytes for bucket in self.buckets)
