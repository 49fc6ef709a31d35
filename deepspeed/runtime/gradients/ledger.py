# SPDX-License-Identifier: Apache-2.0
"""One record per parameter, and the account of a window's contributions.

For each parameter, at any time,

    true gradient of the window  =  mean over ranks( pending )  +  reduced

where *pending* lies in ``parameter.grad`` or in a bucket's local accumulation buffer, and *reduced* is this rank's
shard of what went through a collective. Every firing of the parameter's AccumulateGrad node delivers one
contribution; contributions are counted when they are seen and again when they are taken over, and both counts must
agree at the end of a window.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import torch


class Phase(IntEnum):
    """Where the contributions of one parameter are on this rank."""

    IDLE = 0  # nothing waits here: no contribution yet, or all of them reduced
    PENDING = 1  # contributions wait in .grad or in the local accumulation buffer
    IN_FLIGHT = 2  # handed to a collective that has not finished
    LATE = 3  # a collective is in flight and more contributions have arrived since


class Move(IntEnum):
    """What can happen to a parameter's contributions."""

    FIRE = 0  # autograd delivered a contribution
    PARK = 1  # moved from .grad to the local accumulation buffer
    SEND = 2  # handed to a collective (zeros when there was nothing)
    LAND = 3  # the collective finished
    DROP = 4  # discarded: aborted backward or zero_grad()


# TRANSITIONS[move][phase] is the phase after a legal move, None where the move is illegal. Tuples, since this is
# looked up several times per parameter and backward.
TRANSITIONS: tuple[tuple[Phase | None, ...], ...] = (
    # IDLE, PENDING, IN_FLIGHT, LATE
    (Phase.PENDING, Phase.PENDING, Phase.LATE, Phase.LATE),  # FIRE
    (None, Phase.PENDING, None, Phase.LATE),  # PARK
    (Phase.IN_FLIGHT, Phase.IN_FLIGHT, None, None),  # SEND
    (None, None, Phase.IDLE, Phase.PENDING),  # LAND
    (Phase.IDLE, Phase.IDLE, Phase.IN_FLIGHT, Phase.IN_FLIGHT),  # DROP
)
AFTER_FIRING = TRANSITIONS[Move.FIRE]
AFTER_SENDING = TRANSITIONS[Move.SEND]
AFTER_LANDING = TRANSITIONS[Move.LAND]
HAS_PENDING = tuple(phase in (Phase.PENDING, Phase.LATE) for phase in Phase)  # by phase
# A member of an enum is looked up in some tens of nanoseconds, which is felt where it is done for each parameter.
IDLE, SEND = Phase.IDLE, Move.SEND


class GradientAccountingError(RuntimeError):
    """The accounts of a gradient do not add up: the step would use a wrong gradient, so it is refused."""


class ParameterRecord:
    """The one home of what is known about one parameter's gradient on this rank.

    Args:
        parameter: a leaf that requires grad, with at least one element.
        name: for messages.
        index: position among all records; the same on every rank.
        shape: of the gradient. A parameter that is partitioned at the moment does not show its own.
        comm_dtype: in which the gradient is communicated unless all gradients are in another; None: the parameter's.
    """

    __slots__ = (
        "parameter", "name", "index", "shape", "numel", "comm_dtype", "phase", "unmoved", "seen", "taken", "in_hand",
        "buckets", "buckets_left", "to_land", "parked", "awaited", "fired_in_backward", "streams", "handle",
        "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        name: str,
        index: int,
        shape: torch.Size | None = None,
        comm_dtype: torch.dtype | None = None,
    ) -> None:
        self.parameter = parameter
        self.name = name
        self.index = index
        self.shape = parameter.shape if shape is None else shape
        self.numel = self.shape.numel()
        self.comm_dtype = parameter.dtype if comm_dtype is None else comm_dtype
        self.phase = Phase.IDLE
        self.unmoved = 0  # contributions that lie in .grad
        self.seen = 0  # contributions of this window, by the hook
        self.taken = 0  # contributions of this window, by whoever moved them out of .grad
        self.in_hand: torch.Tensor | None = None  # gradient of which some buckets have still to copy their part
        self.buckets = 1  # in how many buckets this parameter lies
        self.buckets_left = 0  # of them, how many have still to copy theirs in the present pass over the buckets
        self.to_land = 0  # of them, how many are still to come back from a collective
        self.parked = False  # whether the local accumulation buffers hold something of this parameter
        self.awaited = 0  # firings still expected before its buckets are worth sending
        self.fired_in_backward = 0
        self.streams: list[int] = []  # handles of device streams on which what is not taken yet was written
        self.handle: torch.utils.hooks.RemovableHandle | None = None

    def move(self, move: Move) -> None:
        """Make a legal move; GradientAccountingError with name, phase and move otherwise."""
        after = TRANSITIONS[move][self.phase]
        if after is None:
            raise GradientAccountingError(
                f"parameter {self.name!r}: illegal move {move.name} in phase {self.phase.name}"
                f" ({self.seen} contributions seen, {self.taken} taken over in this window)"
            )
        self.phase = after

    def count(self) -> bool:
        """Enter the contribution that has just arrived into the books; True with the last firing that is awaited."""
        self.fired_in_backward += 1
        self.awaited -= 1
        # A custom function may return None for this input: autograd fires the hook then, but delivers nothing.
        if self.parameter.grad is not None:
            self.phase = AFTER_FIRING[self.phase]
            self.unmoved += 1
            self.seen += 1
        return self.awaited == 0

    def take_gradient(self) -> torch.Tensor | None:
        """Move what lies in ``.grad`` out of it, so that a later firing starts afresh. None when there is nothing."""
        parameter = self.parameter
        gradient = parameter.grad
        if gradient is None:
            return None
        if not self.unmoved:
            raise GradientAccountingError(stray_message([self]))
        parameter.grad = None
        self.taken += self.unmoved
        self.unmoved = 0
        return gradient.to_dense() if gradient.is_sparse else gradient

    def gradient_for_bucket(self, move: Move) -> torch.Tensor | None:
        """The gradient of which the next bucket copies what lies in it; buckets ask in their order, each once, and all
        get the same one.

        ``move`` is SEND or PARK and is made with the first bucket.
        """
        if self.buckets_left == 0:
            if move is SEND:
                after = AFTER_SENDING[self.phase]
                if after is None:
                    self.move(SEND)  # raises
                self.phase = after
                self.to_land = self.buckets
                self.parked = False
            elif not self.unmoved:
                return None  # begins no pass: parking visits only buckets in which something waits
            else:
                self.move(Move.PARK)
                self.parked = True
            if self.buckets == 1:
                return self.take_gradient()
            self.in_hand = self.take_gradient()
            self.buckets_left = self.buckets
        self.buckets_left -= 1
        gradient = self.in_hand
        if self.buckets_left == 0:
            self.in_hand = None
        return gradient

    def bucket_landed(self) -> None:
        """One of its buckets came back from the collective."""
        self.to_land -= 1
        if self.to_land == 0:
            after = AFTER_LANDING[self.phase]
            if after is None:
                self.move(Move.LAND)  # raises
            self.phase = after

    def drop_gradient(self) -> None:
        """Discard what lies in ``.grad``; it counts as never seen. What was parked by earlier backwards stays."""
        self.parameter.grad = None
        self.seen -= self.unmoved
        self.unmoved = 0
        self.in_hand = None
        if not self.parked:
            self.move(Move.DROP)

    def start_window(self) -> None:
        """Forget the counts of the last window; only legal when nothing waits."""
        self.seen = self.taken = self.unmoved = 0
        self.fired_in_backward = 0
        self.parked = False
        self.phase = IDLE
        self.streams.clear()


@dataclass
class Ledger:
    """All records of a model and the state of the current accumulation window."""

    records: list[ParameterRecord]
    rank: int = 0
    serial: int = 0  # which engine of this process: the same number on every rank
    backwards: int = 0  # finished backwards of this window
    reduced: bool = False  # whether anything of this window went through a collective
    generation: int = 0  # windows that were dropped with reduced content in them
    poison: str = ""  # why this window's gradient is unusable, empty when it is fine
    expected_firings: dict[int, list[int]] = field(default_factory=dict)  # by ordinal of the backward, then by record
    lessons: int = 0  # how often something new was learnt

    @property
    def empty(self) -> bool:
        """Whether no backward has finished since the window began."""
        return self.backwards == 0

    def waiting(self) -> list[ParameterRecord]:
        """Records with contributions that no collective has taken."""
        return [record for record in self.records if HAS_PENDING[record.phase]]

    def learn(self) -> None:
        """Remember how often each parameter fired in the backward that just ended: the hint for the next window.

        A parameter that ever fired in a backward of this ordinal is waited for from then on, so that branches which
        alternate do not make their bucket leave too early each time.
        """
        last = self.expected_firings.get(self.backwards)
        now = [record.fired_in_backward for record in self.records]
        if now == last:
            return
        if last is not None:
            now = [fired or min(before, 1) for fired, before in zip(now, last)]
        self.expected_firings[self.backwards] = now
        self.lessons += 1

    def expect(self) -> None:
        """Set how many firings each parameter is waited for in the backward that begins; one where nothing is known."""
        expected = self.expected_firings.get(self.backwards)
        for record, firings in zip(self.records, itertools.repeat(1) if expected is None else expected):
            record.fired_in_backward = 0
            record.awaited = firings

    def strays(self) -> list[ParameterRecord]:
        """Records whose ``.grad`` was set by hand: no hook saw it, so it must neither be used nor be lost in
        silence."""
        return [record for record in self.records if record.parameter.grad is not None and not record.unmoved]

    def refuse_strays(self, fired: ParameterRecord | None = None) -> None:
        """Raise GradientAccountingError if a ``.grad`` was set by hand, except that of ``fired``, to which autograd has
        just added."""
        strays = [record for record in self.strays() if record is not fired]
        if strays:
            raise GradientAccountingError(stray_message(strays))

    def check_closed(self) -> None:
        """Raise GradientAccountingError unless every contribution seen was reduced exactly once."""
        wrong = [
            record
            for record in self.records
            if record.seen != record.taken
            or record.phase is not IDLE
            or record.in_hand is not None
            or record.parameter.grad is not None
        ]
        if wrong:
            raise GradientAccountingError(
                f"rank {self.rank}: the gradient of {len(wrong)} parameters is incomplete at the end of the window"
                f" after {self.backwards} backwards: {describe(wrong)}. Nothing was updated; call zero_grad() to"
                " start a"
                " new window"
            )

    def start_window(self) -> None:
        """Begin the next window."""
        for record in self.records:
            record.start_window()
        self.backwards = 0
        self.reduced = False
        self.poison = ""


def stray_message(records: list[ParameterRecord]) -> str:
    """What to tell a user who assigned to ``.grad``."""
    names = ", ".join(record.name for record in records[:5])
    return (
        f"{len(records)} parameters have a .grad that no backward produced ({names}); the optimizer would never see it."
        " Use deepspeed.utils.safe_set_full_grad(parameter, value) to set a gradient, or set .grad to None"
    )


def describe(records: Iterable[ParameterRecord], limit: int = 5) -> str:
    """Names and counts of the first few records, for messages."""
    records = list(records)
    parts = []
    for record in records[:limit]:
        stray = ", .grad set by hand" if record.parameter.grad is not None and not record.unmoved else ""
        parts.append(f"{record.name} ({record.phase.name}, {record.seen} seen, {record.taken} taken over{stray})")
    if len(records) > limit:
        parts.append(f"and {len(records) - limit} more")
    return "; ".join(parts)
