# SPDX-License-Identifier: Apache-2.0
"""The order in which modules used their parameters in the last iteration: a hint for what to gather ahead and what to
keep.

The order may change at any step. A wrong hint costs time, never a wrong number. It depends on the sequence of modules
alone, not on timing, so that ranks which run the same modules get the same hints.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

Event = TypeVar("Event")
Item = TypeVar("Item")


class UsageOrder(Generic[Event, Item]):
    """Learns the events of an iteration and finds its place again when the next one takes another way.

    Args:
        size_of: size of an item.
        reuse_distance: items that are used again before so much else was used are worth keeping.
        longest: most events that are learnt; without an end of the iteration the record must not grow for ever.
    """

    def __init__(
        self,
        size_of: Callable[[Item], int],
        reuse_distance: int,
        longest: int = 100_000,
    ) -> None:
        self._size_of = size_of
        self._reuse_distance = reuse_distance
        self._longest = longest
        self._learnt: list[Event] = []
        self._learnt_used: list[list[Item]] = []
        self._places: dict[Event, list[int]] = {}
        self._kept: list[frozenset[Item]] = []
        self._events: list[Event] = []  # of the present iteration
        self._used: list[list[Item]] = []  # what each of them used
        self._next = 0
        self.looked_ahead = 0  # place up to which somebody has looked; moves back when the order changes

    def __len__(self) -> int:
        return len(self._learnt)

    def visit(self, event: Event, items: Iterable[Item]) -> int | None:
        """Note that ``event`` happens now and uses ``items``; its place in the learnt order, None where it is unknown
        there."""
        if len(self._events) < self._longest:
            self._events.append(event)
            self._used.append(list(items))
        place = self._next
        if not (place < len(self._learnt) and self._learnt[place] == event):
            place = self._find(event)
            if place is None:
                return None
            self.looked_ahead = place + 1
        self._next = place + 1
        self.looked_ahead = max(self.looked_ahead, place + 1)
        return place

    def _find(self, event: Event) -> int | None:
        places = self._places.get(event)
        if not places:
            return None
        later = bisect_left(places, self._next)
        return places[later] if later < len(places) else places[0]

    def ahead(self) -> Iterator[Event]:
        """The events that are expected, from where the last look ended. Each is given once."""
        while self.looked_ahead < len(self._learnt):
            self.looked_ahead += 1
            yield self._learnt[self.looked_ahead - 1]

    def beyond(self, count: int) -> list[Event]:
        """The next ``count`` events that ``ahead`` has not given yet; it gives them still."""
        return self._learnt[self.looked_ahead : self.looked_ahead + count]

    def step_back(self) -> None:
        """The last event that ``ahead`` gave is to be given again."""
        self.looked_ahead -= 1

    def keeps(self, place: int | None) -> frozenset[Item]:
        """Items of the event at ``place`` that are used again soon."""
        return frozenset() if place is None or place >= len(self._kept) else self._kept[place]

    def finish(self) -> None:
        """The iteration is over: learn its order."""
        if self._events and (self._events != self._learnt or self._used != self._learnt_used):
            self._learnt = self._events
            self._learnt_used = self._used
            self._places = {}
            for place, event in enumerate(self._learnt):
                self._places.setdefault(event, []).append(place)
            self._kept = self._find_kept()
        self._events, self._used = [], []
        self._next = self.looked_ahead = 0

    def forget(self) -> None:
        """Start anew."""
        self._learnt, self._learnt_used, self._places, self._kept = [], [], {}, []
        self._events, self._used = [], []
        self._next = self.looked_ahead = 0

    def _find_kept(self) -> list[frozenset[Item]]:
        used = self._learnt_used
        before = [0]  # size of everything used before each place
        for items in used:
            before.append(before[-1] + sum(map(self._size_of, items)))
        next_use: dict[Item, int] = {}
        kept: list[frozenset[Item]] = [frozenset()] * len(used)
        for place in reversed(range(len(used))):
            kept[place] = frozenset(
                item
                for item in used[place]
                if item in next_use and before[next_use[item]] - before[place + 1] <= self._reuse_distance
            )
            for item in used[place]:
                next_use[item] = place
        return kept
