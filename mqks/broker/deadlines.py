"""When the deliveries of one consumer must be acked.

The one rule: an entry is a batch of deliveries. Acked deliveries are removed when the entries are
checked, at the latest when there are more than twice as many as the consumer holds.
"""

import heapq
from typing import Final, NamedTuple, Protocol

from mqks.broker.schedule import Alarm, Schedule
from mqks.limits import STEP_MESSAGES

STALE_MIN: Final = 4096


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
    __slots__ = (*("_alarm", "_batches", "_count", "_holder", "_order", "_schedule", "_touched"),)

    def __init__(self, schedule: Schedule, holder: Holder) -> None:
        self._schedule = schedule
        self._alarm = Alarm(schedule, self._look, dated=False)
        self._holder = holder
        self._batches: list[Batch] = []
        """A heap."""
        self._count = self._order = 0
        """Deliveries in all of them, and batches so far."""
        self._touched: dict[int, int] = {}
        """Number → when it is due instead."""

    def add(self, delivered: list[tuple[bytes, int]], timeout_us: int) -> None:
        """Add deliveries that were just made."""
        self._push(self._schedule.clock_us() + timeout_us, delivered)
        if self._count > 2 * self._holder.unacked_count + STALE_MIN:
            self._tidy()
        self._set_alarm()

    def _push(self, due_us: int, delivered: list[tuple[bytes, int]]) -> None:
        self._order += 1
        self._count += len(delivered)
        heapq.heappush(self._batches, Batch(due_us, self._order, delivered))

    def touch(self, number: int, timeout_us: int) -> None:
        """Restart the timeout of an unacked delivery."""
        self._touched[number] = self._schedule.clock_us() + timeout_us

    def touch_all(self, timeout_us: int) -> None:
        due_us = self._schedule.clock_us() + timeout_us
        self._batches = [batch._replace(due_us=due_us) for batch in self._batches]
        self._touched.clear()
        heapq.heapify(self._batches)
        self._set_alarm()

    def clear(self) -> None:
        self._batches, self._count = [], 0
        self._touched.clear()
        self._alarm.set(None)

    def _look(self) -> None:
        late, now_us = list[tuple[bytes, int]](), self._schedule.clock_us()
        while self._batches and self._batches[0].due_us <= now_us and len(late) < STEP_MESSAGES:
            _, _, delivered = heapq.heappop(self._batches)
            self._count -= len(delivered)
            for message_id, number in delivered:
                due_us = self._touched.pop(number, 0)
                if not self._holder.holds(message_id, number):
                    continue
                if due_us > now_us:
                    self._push(due_us, [(message_id, number)])
                else:
                    late.append((message_id, number))
        self._set_alarm()
        if late:
            self._holder.too_late(late)

    def _tidy(self) -> None:
        holds = self._holder.holds
        batches, self._batches, self._count = self._batches, [], 0
        for due_us, _, delivered in batches:
            if held := [each for each in delivered if holds(*each)]:
                self._push(due_us, held)
        held_numbers = {number for batch in self._batches for _, number in batch.delivered}
        self._touched = {each: us for each, us in self._touched.items() if each in held_numbers}

    def _set_alarm(self) -> None:
        self._alarm.set(self._batches[0].due_us if self._batches else None)
