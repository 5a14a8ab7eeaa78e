"""Limits that several queues have in common: those whose rules name the same one.

The one rule: a queue that is not served as far as it could be is in the line, once, and those in
it take turns, each with its part of what may be delivered. At its turn a queue that takes less than
its part leaves the line: nobody waits for one that has no message, or no consumer.

What the queues hold is not added up for each delivery: of a queue it is known as so many, or more,
and counted again only when all of the limit is used. While messages of ended consumers return in
steps, they still count: some may wait for a delay, which is to be leased.
"""

import re
from bisect import bisect_left, insort
from typing import Any, NamedTuple, Self

from mqks.broker.features.throttle.rate import Paced, Rate
from mqks.broker.spine.queue.order import UNLIMITED
from mqks.broker.spine.queue.seams import HeldBack, Throttle
from mqks.broker.spine.queue.shared import Place, Shared
from mqks.limits import STEP_MESSAGES


class CommonTerms(NamedTuple):
    """What the policy of a queue says of its limit."""

    name: str
    concurrency: int | None
    rate: tuple[int, int, str] | None
    """Lower for a lower rate, and of one rate for a lower burst; its text is the last item."""

    @classmethod
    def of(cls, text: str) -> Self:
        """As `set_queue` takes it."""
        found = re.fullmatch(r"([^,]+)(?:,concurrency=(\d+))?(?:,rate=(.+))?", text)
        assert found is not None
        name, most, paced = found.groups()
        rate = paced and Rate.of(paced)
        speed = (-rate.interval_ns, rate.burst, paced) if rate else None
        return cls(name, int(most) if most else None, speed)


def _state(values: list[Any], value: Any, by: int) -> None:
    if value is not None and by > 0:
        insort(values, value)
    elif value is not None:
        del values[bisect_left(values, value)]


class CommonLimit:
    """Of the values that queues state for it, the lowest count."""

    __slots__ = (
        *("_each", "_grant", "_left", "_most", "_paced", "_rates", "_turn", "concurrency", "held"),
        *("line", "name", "queues", "rate", "shared", "stale"),
    )

    def __init__(self, name: str, shared: Shared) -> None:
        self.name = name
        self.shared = shared
        self.queues = 0
        """Number of its queues."""
        self._most: list[int] = []
        self._rates: list[tuple[int, int, str]] = []
        """What they state, the lowest first."""
        self.concurrency: int | None = None
        self.rate: str | None = None
        self.held = 0
        """At least so many messages are unacked or leased."""
        self.stale: dict[CommonThrottle, None] = {}
        """Queues that may hold fewer than they are counted with."""
        self.line: dict[CommonThrottle, None] = {}
        self._paced: Paced | None = None
        self._turn: CommonThrottle | None = None
        """Whose turn it is, and how many messages it may still have."""
        self._grant = self._each = self._left = 0
        """In a round each gets as many; and so many turns are left of it."""

    def state(self, terms: CommonTerms, by: int) -> None:
        """One more queue states these terms, or, with -1, one fewer."""
        self.queues += by
        _state(self._most, terms.concurrency, by)
        _state(self._rates, terms.rate, by)
        self.concurrency = self._most[0] if self._most else None
        self.rate = self._rates[0][-1] if self._rates else None
        if self.queues:
            self.shared.limits[self.name] = self
        else:
            del self.shared.limits[self.name]
        self._set_pace()
        self.deliver()

    def _set_pace(self) -> None:
        paced = self._paced
        if self.rate is None:
            self._paced = None
            if paced is not None:
                paced.end()
        elif paced is None:
            self._paced = Paced(self, Rate.of(self.rate))
        else:
            paced.follow(Rate.of(self.rate))

    def deliver(self) -> None:
        """Those in the line have their turns, in this turn of the loop or the next one."""
        if self.line:
            self.shared.turns.due[self] = None

    def go_on(self) -> None:
        """One turn of the first in the line."""
        room = self.room()
        if not (room and self.line):
            return
        if self._left <= 0:
            self._left = len(self.line)
            self._each = room // self._left or 1
        self._left -= 1
        self._grant = self._each
        self._turn = next(iter(self.line))
        del self.line[self._turn]
        self._turn.queue.go_on()
        self._turn = None
        self.deliver()

    def room(self) -> int:
        """How many messages of all queues may be delivered now."""
        room = UNLIMITED
        if self.concurrency is not None:
            if self.held >= self.concurrency and self.stale:
                self._count()
            room = max(0, self.concurrency - self.held)
        return min(room, self._paced.room()) if room and self._paced is not None else room

    def room_of(self, member: "CommonThrottle") -> int:
        room = self.room()
        if member is self._turn:
            room = min(room, self._grant)
        elif len(self.line) > (member in self.line):
            room = 0
        if not room and member.queue.ready:
            self.line[member] = None
            self.deliver()
        return room

    def delivered(self, member: "CommonThrottle", count: int) -> None:
        if member is self._turn:
            self._grant -= count
        if self._paced is not None:
            self._paced.delivered(count)
        member.add(count)
        self.stale[member] = None

    def _count(self) -> None:
        """Count what queues hold, until there is room."""
        for _ in range(min(len(self.stale), STEP_MESSAGES)):
            member = next(iter(self.stale))
            del self.stale[member]
            member.count()
            if self.concurrency is None or self.held < self.concurrency:
                return
        if self.stale:
            self.deliver()

    def told(self) -> dict[str, Any]:
        """As in `stats limits`."""
        return {
            "name": self.name,
            "queues": self.queues,
            "concurrency": self.concurrency,
            "rate": self.rate,
            "held": self.held,
            "waiting": len(self.line),
        }

    @property
    def holds(self) -> HeldBack:
        paced = self._paced and self._paced.holds
        return HeldBack("limit", paced.until_us if paced else None)


class CommonThrottle(Throttle):
    """A queue with such a limit."""

    __slots__ = ("_held", "_is_kept", "_leased", "_text", "limit", "queue", "terms")

    def __init__(self, queue: Place, text: str) -> None:
        self.queue = queue
        self.terms = CommonTerms.of(text)
        self._text = text
        limits, name = queue.shared.limits, self.terms.name
        self.limit: CommonLimit = limits.get(name) or CommonLimit(name, queue.shared)
        self.limit.state(self.terms, 1)
        self._held = self._leased = 0
        """With how many it counts; and how many of its messages were leased then."""
        self._is_kept = False
        """It was to be counted while messages of it returned."""
        self.count()

    @classmethod
    def by_rules(cls, queue: Place, old: Throttle | None) -> Self | None:
        text, part = queue.rules.limit, old if isinstance(old, cls) else None
        if part is not None and part._text == text:
            return part
        # The new one first: a limit keeps what it knows, if only its values change.
        new = None if text is None else cls(queue, text)
        if part is not None:
            part._leave()
        return new

    def _leave(self) -> None:
        limit = self.limit
        limit.line.pop(self, None)
        limit.stale.pop(self, None)
        self.add(-self._held)
        limit.state(self.terms, -1)

    def add(self, count: int) -> None:
        """It holds so many more."""
        self._held += count
        self.limit.held += count

    def count(self) -> None:
        queue = self.queue
        self._is_kept = bool(queue.returning)
        if not self._is_kept:
            self._leased = queue.leased
            self.add(queue.unacked + self._leased - self._held)

    def room(self) -> int:
        return self.limit.room_of(self)

    def delivered(self, count: int) -> None:
        self.limit.delivered(self, count)

    def freed(self) -> None:
        self.limit.stale[self] = None
        self.limit.deliver()

    def ended(self) -> None:
        queue = self.queue
        if (leased := queue.leased) != self._leased:
            self.add(leased - self._leased)
            self._leased = leased
            self.freed()
        elif self._is_kept and not queue.returning:
            self._is_kept = False
            self.freed()

    @property
    def holds(self) -> HeldBack | None:
        is_held = self in self.limit.line or not self.limit.room()
        return self.limit.holds if is_held else None
