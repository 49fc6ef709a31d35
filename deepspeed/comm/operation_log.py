# SPDX-License-Identifier: Apache-2.0
"""What this process does in collectives: the last operations of each lane and the waits that are open.

A **lane** is a sequence of operations that every rank of a process group must issue in the same order: the group
together with a name of its user ("gradients", "parameters", ...). Noting an operation stores references only; text is
made when somebody asks, which is after something went wrong.
"""

import itertools
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import torch.distributed as torch_dist

What = str | tuple[Any, ...] | Callable[[], str]
"""A description: text, parts of a text, or a function that makes it. It must not hold on to tensors."""

RING = 64  # operations kept per lane; a power of two
_DIGEST_MASK = (1 << 61) - 1
_FRAMES = 16  # innermost frames of a stack that are told
# What these call says nothing about why a rank waits.
_OWN_FILES = tuple(os.path.join(os.path.dirname(__file__), name) for name in ("watchdog", "watched_calls.py"))


def describe(what: What) -> str:
    """The text of a description."""
    if isinstance(what, str):
        return what
    if isinstance(what, tuple):
        return " ".join(map(str, what))
    try:
        return what()
    except Exception as error:  # noqa: BLE001 - a faulty description must not hide the report that it is part of
        return f"<its description failed: {error!r}>"


class Operation(NamedTuple):
    """One operation of a lane; ``digest`` is over the keys of all operations before it."""

    number: int
    kind: str
    what: What
    key: int
    digest: int
    time: float


class Lane:
    """Operations that every rank in ``ranks`` must issue in the same order.

    Args:
        name: the same on all ranks.
        ranks: global ranks of the group.

    Attributes:
        count: operations noted so far.
    """

    __slots__ = ("count", "digest", "name", "ranks", "ring", "step_start")

    def __init__(self, name: str, ranks: list[int]) -> None:
        self.name = name
        self.ranks = ranks
        self.count = 0
        self.digest = 0
        self.step_start = 0
        self.ring: list[Operation | None] = [None] * RING

    def note(self, kind: str, what: What = "", key: int = 0) -> None:
        """Record that an operation is issued.

        Args:
            kind: what is done, e.g. ``"reduce bucket"``.
            what: to what; formatted only for a report.
            key: integer that must be equal on all ranks for the same operation, e.g. the bucket's position plus one.
                0: taken from ``what`` where that is text; other descriptions are then compared by kind alone.
        """
        if not key and type(what) is str:
            key = crc32(what.encode())
        number = self.count
        digest = self.digest
        self.ring[number & (RING - 1)] = (number, kind, what, key, digest, time.monotonic())  # type: ignore[call-overload]
        self.digest = (digest * 1000003 + key + 1) & _DIGEST_MASK
        self.count = number + 1

    def operations(self) -> list[Operation]:
        """The operations still remembered, oldest first."""
        return sorted(Operation(*entry) for entry in list(self.ring) if entry is not None)


@dataclass(eq=False, slots=True)
class Wait:
    """A wait that goes on: in ``lane``, for ``what``, since ``since`` (``time.monotonic()``).

    ``interruptible``: it sees to itself. ``reported``: its report has been logged.
    """

    lane: Lane
    what: What
    since: float
    interruptible: bool = False
    reported: bool = False


class OperationLog:
    """The lanes and open waits of this process."""

    def __init__(self) -> None:
        self._lanes: weakref.WeakKeyDictionary[Any, dict[str, Lane]] = weakref.WeakKeyDictionary()
        self._recent: dict[tuple[int, str], tuple[weakref.ref[Any], Lane]] = {}  # saves most of a look-up's time
        self._alone: dict[str, Lane] = {}
        self.waits: dict[int, Wait] = {}
        self.step = 0

    def lane(self, group: Any = None, name: str = "") -> Lane:
        """The lane ``name`` of a process group (None: the world). The same object each time: keep it."""
        if not torch_dist.is_initialized():
            return self._alone.setdefault(name, Lane(name, [0]))
        group = torch_dist.group.WORLD if group is None else group
        recent = self._recent.get((id(group), name))
        if recent is not None and recent[0]() is group:
            return recent[1]
        lanes = self._lanes.setdefault(group, {})
        lane = lanes.get(name)
        if lane is None:
            place = "the world" if group is torch_dist.group.WORLD else f"group {group.group_name}"
            ranks = torch_dist.get_process_group_ranks(group)
            lane = lanes[name] = Lane(f"{name or 'collectives'} of {place}", ranks)
        self._recent = {key: kept for key, kept in self._recent.items() if kept[0]() is not None}
        self._recent[id(group), name] = (weakref.ref(group), lane)
        return lane

    def lanes(self) -> list[Lane]:
        """All lanes of living groups."""
        return [lane for lanes in list(self._lanes.values()) for lane in list(lanes.values())]

    def begin(self, lane: Lane, what: What, interruptible: bool = False) -> Wait:
        """A wait begins; :meth:`end` takes what is returned."""
        wait = Wait(lane, what, time.monotonic(), interruptible)
        self.waits[id(wait)] = wait
        return wait

    def end(self, wait: Wait) -> None:
        """The wait is over, well or not."""
        del self.waits[id(wait)]

    def new_step(self) -> None:
        """A training step begins: reports count operations from here."""
        self.step += 1
        for lane in self.lanes():
            lane.step_start = lane.count

    def oldest_unattended_wait(self) -> Wait | None:
        """The open wait that began first, of those that cannot see to themselves and are not reported yet."""
        waits = [wait for wait in list(self.waits.values()) if not (wait.reported or wait.interruptible)]
        return min(waits, key=lambda wait: wait.since, default=None)

    def state(self, rank: int) -> dict[str, Any]:
        """Everything a report needs about this process, as plain JSON values."""
        now = time.monotonic()
        waits = [
            {"lane": wait.lane.name, "what": describe(wait.what), "seconds": now - wait.since}
            for wait in sorted(list(self.waits.values()), key=lambda wait: wait.since)
        ]
        return {
            "rank": rank,
            "step": self.step,
            "waits": waits,
            "lanes": {lane.name: _lane_state(lane, now) for lane in self.lanes() if lane.count},
            "threads": stacks(),
        }


def _lane_state(lane: Lane, now: float) -> dict[str, Any]:
    operations = lane.operations()
    return {
        "ranks": lane.ranks,
        "count": operations[-1].number + 1 if operations else 0,
        "step_start": lane.step_start,
        "operations": [[o.number, o.kind, describe(o.what), o.key, o.digest, now - o.time] for o in operations],
    }


def stacks() -> list[dict[str, Any]]:
    """Name and innermost frames of the Python threads of this process, the main thread first, without our own."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    result = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        name = names.get(ident, "thread of no Python name")
        if name.startswith("deepspeed-watchdog"):
            continue
        told = itertools.takewhile(lambda f: not f.filename.startswith(_OWN_FILES), traceback.extract_stack(frame))
        frames = list(told)[-_FRAMES:]
        lines = [f"{f.filename}:{f.lineno} in {f.name}: {f.line or ''}".rstrip(": ") for f in frames]
        result.append({"name": name, "main": ident == main, "stack": lines})
    return result
