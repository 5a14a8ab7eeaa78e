"""When the deliveries of one consumer must be acked.

The one rule: an entry is a batch of deliveries. What is touched is in a later batch, which counts.
Others and acked deliveries are removed when the entries are checked, at the latest when there are
more than twice as many as the consumer holds.
"""

import heapq
from collections import deque
from itertools import chain
from typing import Final, NamedTuple

from mqks.broker.spine.base.schedule import Alarm, Schedule
from mqks.broker.spine.base.turns import GOES_ON, Turns, Work, emptied, free
from mqks.broker.spine.queue.seams import AckHolder
from mqks.limits import STEP_MESSAGES

STALE_MIN: Final = 4096
NEVER_US: Final = 1 << 62


class DueBatch(NamedTuple):
    due_us: int
    order: int
    """Order of batches that are due at the same time."""
    delivered: list[tuple[bytes, int]]
    """Message ids and numbers."""


class Deadlines:
    __slots__ = (
        *("_again", "_alarm", "_all", "_all_us", "_batches", "_count", "_holder", "_last"),
        *("_order", "_schedule", "_tidying", "_turns", "_unlooked"),
    )

    def __init__(self, schedule: Schedule, turns: Turns, holder: AckHolder) -> None:
        self._schedule = schedule
        self._turns = turns
        self._alarm = Alarm(schedule, self._check_due, dated=False, what="ack timeouts")
        self._holder = holder
        self._batches: list[DueBatch] = []
        """A heap."""
        self._unlooked: list[DueBatch] = []
        """Those that are not tidied yet."""
        self._all: deque[DueBatch] = deque()
        self._all_us = NEVER_US
        """Batches whose deliveries are due at this time instead, in no order."""
        self._tidying = False
        self._count = self._order = 0
        """Deliveries in all of them, and batches so far."""
        self._last = 0
        """The greatest number that was delivered or touched."""
        self._again: dict[int, int] = {}
        """Number → the order of the batch that counts, if it is not the only one."""

    def add(self, delivered: list[tuple[bytes, int]], timeout_us: int | None) -> None:
        """Add deliveries that were just made, or touched, by ascending numbers: the timeout of
        those that were added before begins anew. None: they are never due."""
        due_us = NEVER_US if timeout_us is None else self._schedule.clock_us() + timeout_us
        self._order += 1
        self._push(DueBatch(due_us, self._order, delivered))
        if delivered[0][1] <= self._last:  # It may be in an earlier batch, too.
            self._again.update((number, self._order) for _, number in delivered)
        self._last = max(self._last, delivered[-1][1])
        spare = self._count - STALE_MIN
        if spare > 0 and not self._tidying and spare > 2 * self._holder.unacked_count:
            self._tidying = True
            self._turns.later(self._tidy())
        self._set_alarm()

    def _push(self, batch: DueBatch) -> None:
        self._count += len(batch.delivered)
        heapq.heappush(self._batches, batch)

    def touch_all(self, timeout_us: int) -> None:
        # Without an entry for each: whoever holds a million may touch them every second.
        self._all += self._batches
        self._all += self._unlooked
        self._batches, self._unlooked = [], []
        self._all_us = self._schedule.clock_us() + timeout_us
        self._set_alarm()

    def clear(self) -> None:
        gone, again = [*self._batches, *self._unlooked, *self._all], self._again
        self._batches, self._unlooked, self._all = [], [], deque()
        self._again, self._count = {}, 0
        self._alarm.set(None)
        each = (each for batch in emptied(gone) for each in emptied(batch.delivered))
        self._turns.add(free(chain(each, emptied(again))))

    def _check_due(self) -> bool:
        """Look at some of those that are due: they may have been settled or touched. Return whether
        there were any."""
        late = dict[int, bytes]()
        now_us, room = self._schedule.clock_us(), STEP_MESSAGES
        while room > 0 and self._next_us <= now_us:
            is_of_all = bool(self._all) and self._all_us <= now_us
            batch = self._all.pop() if is_of_all else heapq.heappop(self._batches)
            self._count -= len(batch.delivered)
            if rest := batch.delivered[room:]:
                # More than one step looks at: the next step is due at once.
                del batch.delivered[room:]
                self._push(batch._replace(due_us=now_us, delivered=rest))
            room -= len(batch.delivered)
            late |= {number: message_id for message_id, number in self._held(batch)}
        for number in late:
            self._again.pop(number, None)
        self._set_alarm()
        if late:
            self._holder.too_late([(message_id, number) for number, message_id in late.items()])
        return room < STEP_MESSAGES

    def _held(self, batch: DueBatch) -> list[tuple[bytes, int]]:
        """Those deliveries of a batch that are unacked, and in no later one."""
        counts, order = self._again, batch.order
        held = list[tuple[bytes, int]]()
        for message_id, number in batch.delivered:
            if counts.get(number, order) == order:
                if self._holder.holds(message_id, number):
                    held.append((message_id, number))
                else:
                    counts.pop(number, None)
        return held

    def _tidy(self) -> Work[None]:
        """Remove those that are settled. What is not looked at yet is late by so long."""
        self._unlooked += self._batches
        self._batches = []
        of_all = len(self._all)
        while self._unlooked or of_all:
            room = STEP_MESSAGES
            while room > 0:
                is_of_all = of_all > 0 and bool(self._all)
                of_all = of_all - 1 if is_of_all else 0
                if not (is_of_all or self._unlooked):
                    break
                batch = self._all.popleft() if is_of_all else self._unlooked.pop()
                room -= len(batch.delivered)
                held = self._held(batch)
                self._count += len(held) - len(batch.delivered)
                kept = batch._replace(delivered=held)
                if held and is_of_all:
                    self._all.append(kept)
                elif held:
                    heapq.heappush(self._batches, kept)
            yield GOES_ON
        self._tidying = False
        self._set_alarm()

    @property
    def _next_us(self) -> int:
        first_us = self._batches[0].due_us if self._batches else NEVER_US
        return min(first_us, self._all_us) if self._all else first_us

    def _set_alarm(self) -> None:
        next_us = self._next_us
        self._alarm.set(None if next_us == NEVER_US else next_us)
