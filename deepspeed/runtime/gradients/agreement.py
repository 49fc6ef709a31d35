# SPDX-License-Identifier: Apache-2.0
"""What ranks must agree on before they reduce: one small message on the host, never on a device.

``engine.backward`` is called by every rank, so its reductions need no agreement. A plain ``loss.backward()`` may
happen on some ranks only, or a different number of times. Such a backward asks before its first collective, and
``step()`` asks before it uses the gradients; the two questions travel in the same message, so that a rank in
``step()`` learns that another one still reduces and takes part with what it has. Hence any number of backwards per
rank is right, and none can hang because of the count.
"""

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


def agree(channel: Channel, ledger: Ledger, *, wants_round: bool, leftovers: bool) -> Verdict:
    """Exchange the flags of this rank for those of all ranks.

    Raises:
        GradientAccountingError: on every rank, when some rank's window is unusable or ranks are in different windows.
    """
    if channel.world_size == 1:
        verdict = Verdict(wants_round, leftovers)
        if not wants_round and ledger.poison:
            _refuse(channel, ledger)
        return verdict
    message = [
        int(wants_round),
        int(leftovers),
        int(bool(ledger.poison)),
        ledger.generation,
        -ledger.generation,
    ]
    what = "a reduction in loss.backward()" if wants_round else "whether all gradients of this step are reduced"
    wanted, left, poisoned, newest, minus_oldest = channel.all_reduce_max(message, what)
    if not wanted and (poisoned or newest != -minus_oldest):
        _refuse(channel, ledger)
    return Verdict(bool(wanted), bool(left))


def _refuse(channel: Channel, ledger: Ledger) -> None:
    """Every rank is here: say which rank is the reason, and let none go on with this window."""
    states = channel.gather((ledger.poison, ledger.generation), "the reason why this step is refused")
    reasons = [f"rank {rank}: {poison}" for rank, (poison, _) in enumerate(states) if poison]
    generations = [generation for _, generation in states]
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
