"""What waits for its turn, or for a place.

The one rule: nobody waits for all that another one has.
"""

from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice
from typing import TypeVar

from mqks.broker.spine.base.turns import WAITS, Work

T = TypeVar("T")


class Rounds(dict[T, Hashable]):
    """What waits for its turn, and the party that it belongs to. Parties take turns, so that nobody
    waits for all that another one has; what one of them has is in order."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        super().__init__()
        self._lines: OrderedDict[Hashable, OrderedDict[T, None]] = OrderedDict()
        """By party, the next one first."""

    def add(self, item: T, party: Hashable) -> None:
        """What waits already keeps its place."""
        if item not in self:
            self[item] = party
            self._lines.setdefault(party, OrderedDict())[item] = None

    def next(self) -> T:
        """Take out the next one."""
        party = next(iter(self._lines))
        item = next(iter(self._lines[party]))
        self.discard(item)
        if party in self._lines:
            self._lines.move_to_end(party)
        return item

    def discard(self, item: T) -> None:
        if item in self:
            party = self.pop(item)
            del self._lines[party][item]
            if not self._lines[party]:
                del self._lines[party]


class Places:
    """A limited number of places. Others wait, and get a place in their order of arrival."""

    __slots__ = ("_line", "_places")

    def __init__(self, places: int) -> None:
        self._places = places
        self._line: list[object] = []

    def __len__(self) -> int:
        """Number of those that have a place or wait for one."""
        return len(self._line)

    def take(self) -> Work[object]:
        """Wait for a place; return it, for `leave`."""
        ticket = object()
        self._line.append(ticket)
        while ticket not in islice(self._line, self._places):
            yield WAITS
        return ticket

    def leave(self, ticket: object) -> None:
        self._line.remove(ticket)


def one_at_a_time(busy: dict[bytes, Places], name: bytes, work: Work[T]) -> Work[T]:
    """Do a work after all earlier ones of this name; `busy` has the names of those that are not
    done."""
    places = busy.setdefault(name, Places(1))
    place = yield from places.take()
    try:
        return (yield from work)
    finally:
        places.leave(place)
        if not places:
            del busy[name]
