"""When the deliveries of one consumer must be acked.

The one rule: an entry is a batch of deliveries. Acked deliveries are removed when the entries are
checked, at the latest when there are more than twice as many as the consumer holds.
"""

import heapq
from itertools import chain
from typing import Final, NamedTuple, Protocol

from mqks.broker.base.schedule import Alarm, Schedule
from mqks.broker.base.turns import GOES_ON, Turns, Work, emptied
from mqks.broker.queue.lane import let_go
from mqks.limits import STEP_MESSAGES

STALE_MIN: Final = 4096
TICK_US: Final = 10_000
"""Those that were touched within this time are one batch again."""


class Batch(NamedTuple):
    due_us: int
    order: int
    """Order of batches that are due at the same time."""
    delivered: list[tuple[bytes, int]]
    """Message ids and numbers."""


class Holder(Protocol):
    """The owner of the deliveries: a consumer."""

    @property
    def unacked_count(self) -> int: ...

    def holds(self, message_id: bytes, number: int) -> bool: ...

    def too_late(self, late: list[tuple[bytes, int]]) -> None:
        """These were not acked in time."""


class Deadlines:
    __slots__ = (
        *("_alarm", "_batches", "_count", "_holder", "_last", "_order", "_schedule"),
        *("_touched", "_touched_all", "_turns"),
    )

    def __init__(self, schedule: Schedule, turns: Turns, holder: Holder) -> None:
        self._schedule = schedule
        self._turns = turns
        self._alarm = Alarm(schedule, self._look, dated=False)
        self._holder = holder
        self._batches: list[Batch] = []
        """A heap."""
        self._count = self._order = 0
        """Deliveries in all of them, and batches so far."""
        self._last = 0
        """The greatest number that was delivered."""
        self._touched: dict[int, int] = {}
        """Number → when it is due instead, if that is later."""
        self._touched_all = (0, 0)
        """The same of all batches up to this one."""

    def add(self, delivered: list[tuple[bytes, int]], timeout_us: int) -> None:
        """Add deliveries that were just made, by ascending numbers."""
        due_us = self._schedule.clock_us() + timeout_us
        self._push(Batch(due_us, self._next, delivered))
        if delivered[0][1] <= self._last:  # It may be in an earlier batch, too.
            self._touched.update((number, due_us) for _, number in delivered)
        self._last = max(self._last, delivered[-1][1])
        if self._count > 2 * self._holder.unacked_count + STALE_MIN:
            self._turns.later(self._tidy())
        self._set_alarm()

    @property
    def _next(self) -> int:
        self._order += 1
        return self._order

    def _push(self, batch: Batch) -> None:
        self._count += len(batch.delivered)
        heapq.heappush(self._batches, batch)

    def touch(self, number: int, timeout_us: int) -> None:
        """Restart the timeout of an unacked delivery."""
        self._touched[number] = self._schedule.clock_us() + timeout_us

    def touch_all(self, timeout_us: int) -> None:
        self._touched_all = self._order, self._schedule.clock_us() + timeout_us

    def clear(self) -> None:
        gone, touched = self._batches, self._touched
        self._batches, self._touched, self._count = [], {}, 0
        self._alarm.set(None)
        each = (each for batch in emptied(gone) for each in emptied(batch.delivered))
        self._turns.add(let_go(chain(each, emptied(touched))))

    def _look(self) -> None:
        """Look at some of those that are due: they may have been settled or touched."""
        late, again = dict[int, bytes](), dict[int, list[tuple[bytes, int]]]()
        now_us, room = self._schedule.clock_us(), STEP_MESSAGES
        last, all_us = self._touched_all
        while room > 0 and self._batches and self._batches[0].due_us <= now_us:
            due_us, order, delivered = heapq.heappop(self._batches)
            self._count -= len(delivered)
            if len(delivered) > room:
                self._push(Batch(due_us, order, delivered[room:]))
                del delivered[room:]
            room -= len(delivered)
            for message_id, number in delivered:
                if not self._holder.holds(message_id, number):
                    self._touched.pop(number, None)
                    continue
                due_us = max(self._touched.get(number, 0), all_us if order <= last else 0)
                if due_us > now_us:
                    again.setdefault(-(-due_us // TICK_US), []).append((message_id, number))
                else:
                    late[number] = message_id
                    self._touched.pop(number, None)
        for tick, some in again.items():
            self._push(Batch(tick * TICK_US, self._next, some))
        self._set_alarm()
        if late:
            self._holder.too_late([(message_id, number) for number, message_id in late.items()])

    def _tidy(self) -> Work[None]:
        """Remove those that are settled. What is not looked at yet is late by so long."""
        batches, self._batches, self._count = self._batches, [], 0
        while batches:
            room = STEP_MESSAGES
            while batches and room > 0:
                due_us, order, delivered = batches.pop()
                room -= len(delivered)
                held = [each for each in delivered if self._holder.holds(*each)]
                if len(held) < len(delivered):
                    numbers = {number for _, number in held}
                    for _, number in delivered:
                        if number not in numbers:
                            self._touched.pop(number, None)
                if held:
                    self._push(Batch(due_us, order, held))
            yield GOES_ON
        self._set_alarm()

    def _set_alarm(self) -> None:
        self._alarm.set(self._batches[0].due_us if self._batches else None)
