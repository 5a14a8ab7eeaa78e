"""At most so many messages of a queue are unacked or leased, whoever holds them.

The one rule: it counts nothing itself. What consumers hold is asked of them, and not again before
all of that room is used: a queue may have many.
"""

from typing import Self

from mqks.broker.spine.queue.seams import HeldBack, Throttle
from mqks.broker.spine.queue.shared import Place


class Concurrency(Throttle):
    __slots__ = ("_leased", "_most", "_queue", "_room", "_stale")

    def __init__(self, queue: Place) -> None:
        self._queue = queue
        self._most = self._room = self._leased = 0
        """`_room` is so much, or less, while as many messages are leased."""
        self._stale = True
        """There may be more."""

    @classmethod
    def by_rules(cls, queue: Place, old: Throttle | None) -> Self | None:
        most = queue.rules.concurrency
        if most is None:
            return None
        part = old if isinstance(old, cls) else cls(queue)
        part._most, part._room, part._stale = most, 0, True
        return part

    def room(self) -> int:
        queue = self._queue
        if (self._room <= 0 and self._stale) or queue.leased != self._leased:
            self._leased, self._stale = queue.leased, False
            self._room = self._most - queue.unacked - self._leased
        return max(0, self._room)

    def delivered(self, count: int) -> None:
        self._room -= count
        self._stale = True  # Consumers without manual ack hold nothing.

    def freed(self) -> None:
        self._stale = True
        if self._room <= 0:
            self._queue.shared.turns.due[self._queue] = None

    @property
    def holds(self) -> HeldBack | None:
        return None if self.room() else HeldBack("concurrency")
