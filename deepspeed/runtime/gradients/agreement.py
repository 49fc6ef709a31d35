# SPDX-License-Identifier: Apache-2.0
"""What ranks must agree on before they reduce: one small message on the host, never on a device.

``engine.backward`` is called by every rank, so its reductions need no agreement. A plain ``loss.backward()`` may
happen on some ranks only, or a different number of times. Such a backward asks before its first collective, and
``step()`` asks before it uses the gradients; the two questions travel in the same message, so that a rank in
``step()`` learns that another one still reduces and takes part with what it has. Hence any number of backwards per
rank is right, and none can hang because of the count.
"""

import struct
from dataclasses import dataclass
from typing import Protocol

from deepspeed.runtime.gradients.ledger import GradientAccountingError, Ledger


class Channel(Protocol):
    """Host-side agreement among the ranks of one process group."""

    rank: int
    world_size: int

    def all_reduce_max(self, values: "list[int]", what: str) -> "list[int]": ...

    def gather(self, obj: object, what: str) -> "list[object]": ...


@dataclass
class Verdict:
    """What the ranks say together."""

    round_wanted: bool  # some rank is about to reduce the contributions of a backward
    leftovers: bool  # some rank has contributions that no round has taken
    loss_scale: float | None = None  # of the contributions of this window, None where no rank has any
    usable: bool = True  # False: a rank's window is not, and step() will refuse


_NO_SCALE = -1  # below the bits of every positive float


def agree(
    channel: Channel,
    ledger: Ledger,
    *,
    wants_round: bool,
    leftovers: bool,
    loss_scale: float | None = None,
    refuses: bool = True,
) -> Verdict:
    """Exchange the flags of this rank for those of all ranks.

    Args:
        wants_round: this rank is about to reduce the contributions of a backward.
        leftovers: this rank has contributions that no round has taken.
        loss_scale: of this rank's contributions in this window, None when it has none.
        refuses: raise where the window is unusable; otherwise nothing is left over in it, and ``step()`` will refuse.

    Raises:
        GradientAccountingError: on every rank, when some rank's window is unusable, ranks are in different windows, or
            their contributions have different loss scales; or when ranks ask about different engines.
    """
    if channel.world_size == 1:
        if wants_round or not ledger.poison:
            return Verdict(wants_round, leftovers, loss_scale)
        if refuses:
            _refuse(channel, ledger)
        return Verdict(False, False, usable=False)
    bits = _NO_SCALE if loss_scale is None else struct.unpack("<q", struct.pack("<d", loss_scale))[0]
    message = [
        int(wants_round),
        int(leftovers),
        int(bool(ledger.poison)),
        ledger.generation,
        -ledger.generation,
        bits,
        -bits if bits != _NO_SCALE else -(1 << 63),
        ledger.serial,
        -ledger.serial,
    ]
    what = "a reduction in loss.backward()" if wants_round else "whether all gradients of this step are reduced"
    wanted, left, poisoned, newest, minus_oldest, largest, minus_smallest, last, minus_first = channel.all_reduce_max(
        message, what
    )
    if last != -minus_first:
        serials = channel.gather(ledger.serial, "which engine reduces")
        raise GradientAccountingError(
            f"rank {ledger.rank}: ranks reduce the gradients of different engines at the same time (the n-th engine"
            f" made, by rank: {serials}). With several engines in one loss.backward(), every rank must reach them in"
            " the same order; use engine.backward(loss), which does not depend on the order"
        )
    one_scale = largest in (_NO_SCALE, -minus_smallest)
    if not wanted and (poisoned or newest != -minus_oldest or not one_scale):
        if refuses:
            _refuse(channel, ledger, loss_scale)
        return Verdict(False, False, usable=False)
    scale = None if largest == _NO_SCALE else struct.unpack("<d", struct.pack("<q", largest))[0]
    return Verdict(bool(wanted), bool(left), scale)


def _refuse(channel: Channel, ledger: Ledger, loss_scale: float | None = None) -> None:
    """Every rank is here: say which rank is the reason, and let none go on with this window."""
    states = channel.gather((ledger.poison, ledger.generation, loss_scale), "the reason why this step is refused")
    reasons = [f"rank {rank}: {poison}" for rank, (poison, _, _) in enumerate(states) if poison]
    generations = [generation for _, generation, _ in states]
    scales = [scale for _, _, scale in states]
    if len(set(scales) - {None}) > 1:
        reasons.append(f"the loss scale of the window's backwards differs between ranks, by rank: {scales}")
    if not reasons:
        reasons = [
            "ranks dropped reduced gradients a different number of times (zero_grad() after a backward), by rank: "
            f"{generations}; every rank must drop or keep a window together"
        ]
    ledger.generation = max(generations)
    ledger.poison = ledger.poison or "; ".join(reasons)
    raise GradientAccountingError(
        "the gradients of this window are unusable, no rank may step with them. "
        + "; ".join(reasons)
        + ". Call engine.zero_grad() on every rank to start a new window"
    )
