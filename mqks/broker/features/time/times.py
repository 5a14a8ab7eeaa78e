"""Messages of one queue that wait for a time: scheduled ones, and those that will expire.

The one rule: each call of `do_due` is one step; while there is more to do, the next is due at once.

A queue has this from its first such message, or its first TTL, until a second after the last one:
without it publishes, deliveries and returns ask for no time. It does not go at once, since a queue
whose messages are leased one by one would make it anew for each of them; and not while bodies are
being read or a search goes on, which come back to this object.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from mqks.broker.features.death.deaths import kill_oldest, kill_ready
from mqks.broker.features.time.delays import Delays
from mqks.broker.features.time.expiry import OVERDUE, Expiry
from mqks.broker.spine.base.places import Places
from mqks.broker.spine.base.schedule import Alarm
from mqks.broker.spine.base.turns import WAITS, Work
from mqks.broker.spine.message.mark import Mark
from mqks.broker.spine.message.states import Event
from mqks.broker.spine.queue.shared import Place
from mqks.errors import MqksError
from mqks.protocol.requests import shown

LINGER_US: Final = 1_000_000
"""So long it stays when nothing waits."""
SET_US: Final = 1_000
"""A change of the wall clock by less is not followed: both clocks are never read at once."""


class Times:
    __slots__ = (
        *("_ahead_us", "_alarm", "_dated_alarm", "_ends_us", "_queue", "_schedule"),
        *("delays", "expiry", "searches"),
    )

    def __init__(self, queue: Place) -> None:
        self._queue = queue
        self._schedule = queue.shared.schedule
        self._ahead_us = self._measured_us()
        """How far the wall clock is ahead of the clock of `delays`, as they have it."""
        self.delays = Delays(queue.shared.memory)
        self.expiry = Expiry(self._schedule.clock_us, self._schedule.wall_us)
        queue.lane.expiry = self.expiry
        self.searches = Places(1)
        """For searches by id, each of which may hold 8 MB for a million messages."""
        what = f"times of queue {shown(queue.name)}"
        self._alarm = Alarm(self._schedule, self.do_due, dated=False, what=what)
        self._dated_alarm = Alarm(self._schedule, self.do_due, dated=True, what=what)
        self._ends_us: int | None = None
        """When it goes, if nothing waits until then."""

    def _measured_us(self) -> int:
        return self._schedule.wall_us() - self._schedule.clock_us()

    # -- scheduled messages

    def add(
        self, first: int, lines: Sequence[bytes], marks: Sequence[Mark], due_us: Sequence[int]
    ) -> None:
        """Add messages in memory, with consecutive numbers, that are due at these times of their
        clocks. The caller calls `set_alarms`."""
        if any(mark.is_dated for mark in marks):
            ahead_us, both = self._ahead(), zip(due_us, marks, strict=True)
            due_us = [each_us - ahead_us * mark.is_dated for each_us, mark in both]
        self.delays.add(first, lines, marks, due_us)

    def restore(self, number: int, mark: Mark) -> None:
        """Add a message that is on disk. All are restored at the same moment, so they keep their
        order. Only the wall clock knows when it is due: it may be wrong now, and be set later."""
        self.delays.restore(number, mark, mark.due_us - self._ahead_us, is_dated=True)

    def restored(self, mean_bytes: float) -> None:
        self.delays.bytes = round(mean_bytes * len(self.delays))

    def committed(self, end: int, aside_end: int) -> Work[None]:
        yield from self.delays.committed(end, aside_end, self._schedule.clock_us())

    def delete(self) -> Iterator[object]:
        """Forget all messages; see `Lane.delete`."""
        self._alarm.set(None)
        self._dated_alarm.set(None)
        return self.delays.forget_all()

    @property
    def is_over(self) -> bool:
        """Whether no message waits for a time, and nobody for this object."""
        return not self.expiry and self.delays.is_over and not len(self.searches)

    # -- requests of clients

    def promote_all(self) -> Work[None]:
        """Make all scheduled messages join the queue now."""
        yield from self.delays.promote_all()
        while self.delays.has_promoted:
            self.do_due()
            yield WAITS

    def listed(self, after: int | None, limit: int) -> Work[list[tuple[int, int]]]:
        """Number and due time, by the wall clock, of the first messages above a number; with None,
        of those that are due first, in this order."""
        delays = self.delays
        found = yield from delays.soonest(limit) if after is None else delays.listed(after, limit)
        ahead_us = self._ahead()
        return [(number, due_us + ahead_us) for number, due_us in found]

    def tidy(self) -> Work[None]:
        if self.delays.is_untidy:
            yield from self.delays.tidy()
        self.set_alarms()

    # -- the wall clock

    def _ahead(self) -> int:
        """How far the wall clock is ahead: while something depends on that, as it was when `do_due`
        has measured it."""
        if not self.delays.dated:
            self._ahead_us = self._measured_us()
        return self._ahead_us

    def _follow_clock(self) -> bool:
        """Whether the wall clock was set: then what depends on it is put into the heap anew."""
        before_us = self._ahead()
        if not self.delays.dated or self.delays.is_moving:
            return False
        for _ in range(2):  # The system may stop the process between the two clocks.
            measured_us = self._measured_us()
            if abs(measured_us - before_us) < SET_US:
                return False
        self._ahead_us = measured_us
        self._queue.shared.turns.add(self._shift(before_us - measured_us))
        return True

    def _shift(self, by_us: int) -> Work[None]:
        yield from self.delays.shift_dated(by_us)
        self.do_due()

    # -- due messages

    def set_alarms(self) -> None:
        if self.is_over:
            if self._ends_us is None:
                self._ends_us = self._schedule.clock_us() + LINGER_US
                self._alarm.set(self._ends_us)
                self._dated_alarm.set(None)
            return
        self._ends_us = None
        delays = self.delays
        next_us, expiry_us = delays.next_us(), self._next_expiry_us()
        both_us = [each for each in (next_us, expiry_us) if each is not None]
        self._alarm.set(min(both_us, default=None))
        if next_us is not None:
            # A little later than the other alarm: it is the first only if the wall clock was set
            # forward, and the monotonic clock does not show that.
            follows = delays.dated and not delays.is_moving
            next_us = next_us + self._ahead_us + SET_US if follows else None
        self._dated_alarm.set(next_us)

    def _next_expiry_us(self) -> int | None:
        if not self.expiry:
            return None
        lane = self._queue.lane
        oldest = lane.blocks.first
        if oldest is None:
            return None
        # One step may not kill all expired messages.
        is_late = oldest < self.expiry.end(lane.next_seq)
        return OVERDUE if is_late else self.expiry.next_us()

    def expires(self) -> bool:
        due_us = self._next_expiry_us()
        return due_us is not None and due_us <= self._schedule.clock_us()

    def do_due(self) -> bool:
        """Do one step of what is due; return whether there was something."""
        if self._queue.deleted or self._follow_clock():
            return False
        if self._ends_us is not None and self.is_over:
            self._queue.untimed()
            return True
        delays, now_us = self.delays, self._schedule.clock_us()
        far = delays.far
        bytes_of = partial(self._queue.shared.facts.bytes_of, self._queue.id)
        if wanted := delays.to_read(now_us, bytes_of):
            self._queue.fetch(wanted, partial(self._bring, wanted))
        due, since_us = delays.pop_due(now_us)
        if due:
            self._queue.shared.features.returns.join(self._queue, due, since_us)
        has_expired = self._expire()
        self._queue.deliver()
        return bool(due or has_expired or delays.far != far)

    def _bring(self, wanted: list[int], lines: dict[int, bytes]) -> None:
        missing = self.delays.read(wanted, lines)
        if missing:
            name = shown(self._queue.name)
            raise MqksError(f"scheduled messages of queue {name} are missing: {missing[:5]}")
        self.do_due()

    def _expire(self) -> bool:
        """Kill some of the expired messages; return whether there were any."""
        if not self.expiry:
            return False
        lane = self._queue.lane
        expired = self.expiry.pop_due()
        if numbers := [number for number in expired if lane.is_ready(number)]:
            kill_ready(self._queue, numbers, Event.TTL)
        end = self.expiry.end(lane.next_seq)
        oldest = lane.blocks.first
        if oldest is not None and oldest < end:
            kill_oldest(self._queue, end, Event.TTL)
            return True
        return bool(expired)


def timed(queue: Place) -> Times:
    """The times of a queue, which it has from now on."""
    times = queue.timed()
    assert isinstance(times, Times)
    return times
