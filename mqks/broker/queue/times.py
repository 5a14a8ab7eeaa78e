"""Messages of one queue that wait for a time: scheduled ones, and those that will expire.

The one rule: each call of `look` is one step; while there is more to do, the next is due at once.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

from mqks.broker.base.schedule import Alarm
from mqks.broker.base.turns import WAITS, Places, Work
from mqks.broker.log.pending import Mark
from mqks.broker.message.expiry import OVERDUE, Expiry
from mqks.broker.message.states import Event
from mqks.broker.queue.deaths import kill_oldest, kill_ready
from mqks.broker.queue.delays import Delays
from mqks.broker.queue.shared import Place
from mqks.errors import MqksError
from mqks.protocol.requests import shown


class Times:
    __slots__ = (
        "_ahead_us",
        "_alarm",
        "_dated_alarm",
        "_dates",
        "_delays",
        "_queue",
        "_schedule",
        "expiry",
        "searches",
    )

    def __init__(self, queue: Place) -> None:
        self._queue = queue
        self._ahead_us = queue.shared.schedule.wall_us() - queue.shared.schedule.clock_us()
        self._schedule = queue.shared.schedule
        self._delays = Delays(queue.shared.memory)
        self._dates = Delays(queue.shared.memory)
        self.expiry = Expiry(self._schedule.clock_us, self._schedule.wall_us)
        queue.lane.expiry = self.expiry
        self.searches = Places(1)
        """For searches by id, each of which may hold 8 MB for a million messages."""
        self._alarm = Alarm(self._schedule, self.do_due, dated=False)
        self._dated_alarm = Alarm(self._schedule, self.do_due, dated=True)

    @property
    def scheduled(self) -> int:
        return len(self._delays) + len(self._dates)

    @property
    def placed(self) -> int:
        return len(self._delays.placed) + len(self._dates.placed)

    @property
    def scheduled_bytes(self) -> int:
        return self._delays.bytes + self._dates.bytes

    # -- scheduled messages

    def add(self, first: int, lines: Sequence[bytes], marks: Sequence[Mark], due_us: int) -> None:
        """Add messages in memory, with consecutive numbers, that are due at this time of their
        clock. The caller calls `set_alarms`."""
        delays = self.of(marks[0])
        for number, (line, mark) in enumerate(zip(lines, marks, strict=True), first):
            delays.add(number, line, mark.id_crc, due_us, place=mark.keeps_place)

    def restore(self, number: int, mark: Mark) -> None:
        """Add a message that is on disk."""
        self.of(mark).restore(number, mark.id_crc, self._due_us(mark), place=mark.keeps_place)

    def restored(self, mean_bytes: float) -> None:
        """All scheduled messages are restored; `mean_bytes` is the approximate length of a line."""
        for delays in self.kinds:
            delays.bytes = round(mean_bytes * len(delays))

    def of(self, mark: Mark) -> Delays:
        """Those by the clock of this mark."""
        return self._dates if mark.is_dated else self._delays

    def _due_us(self, mark: Mark) -> int:
        """Due time by its clock. All are restored at the same moment, so they keep their order."""
        if mark.is_dated:
            return mark.due_us
        return max(0, mark.due_us - self._ahead_us)

    def committed(self, end: int) -> Work[None]:
        """Numbers below `end` are on disk."""
        yield from self._delays.committed(end, self._schedule.clock_us())
        yield from self._dates.committed(end, self._schedule.wall_us())

    def delete(self) -> Iterator[object]:
        """Forget all messages; see `Lane.delete`."""
        self._alarm.set(None)
        self._dated_alarm.set(None)
        return self.take_all()

    # -- requests of clients

    @property
    def kinds(self) -> tuple[Delays, Delays]:
        return self._delays, self._dates

    def take_all(self) -> Iterator[int]:
        """Take out all scheduled messages; yield their numbers one by one."""
        return chain(self._delays.take_all(), self._dates.take_all())

    def promote_all(self) -> Work[None]:
        """Make all scheduled messages join the queue now."""
        for delays in self.kinds:
            yield from delays.promote_all()
        while any(delays.has_promoted for delays in self.kinds):
            self.do_due()
            yield WAITS

    def listed(self, after: int, limit: int) -> Work[list[tuple[int, int]]]:
        """Number and due time, by the wall clock, of the first messages above a number."""
        found = yield from self._delays.listed(after, limit)
        ahead_us = self._schedule.wall_us() - self._schedule.clock_us()
        by_delay = [(number, due_us + ahead_us) for number, due_us in found]
        by_date = yield from self._dates.listed(after, limit)
        return sorted(by_delay + by_date)[:limit]

    def has(self, number: int) -> bool:
        """Whether this message is scheduled."""
        return number in self._delays.numbers or number in self._dates.numbers

    def tidy(self) -> Work[None]:
        for delays in self.kinds:
            if delays.is_untidy:
                yield from delays.tidy()
        self.set_alarms()

    # -- due messages

    def set_alarms(self) -> None:
        due_us = [self._delays.next_us(), self._next_expiry_us()]
        self._alarm.set(min((each for each in due_us if each is not None), default=None))
        self._dated_alarm.set(self._dates.next_us())

    def _next_expiry_us(self) -> int | None:
        lane = self._queue.lane
        oldest = lane.oldest
        if not self.expiry or oldest is None:
            return None
        # One step may not kill all expired messages.
        is_late = oldest < self.expiry.end(lane.next_seq)
        return OVERDUE if is_late else self.expiry.next_us()

    def must_expire(self) -> bool:
        """Whether an expired message is still in the queue. Forgets what cannot expire any more."""
        due_us = self._next_expiry_us()
        return due_us is not None and due_us <= self._schedule.clock_us()

    def do_due(self) -> None:
        """Do one step of what is due."""
        if self._queue.deleted:
            return
        self._take_due(self._delays, self._schedule.clock_us())
        self._take_due(self._dates, self._schedule.wall_us())
        self._expire()
        self._queue.deliver()

    def _take_due(self, delays: Delays, now_us: int) -> None:
        bytes_of = partial(self._queue.shared.facts.bytes_of, self._queue.id)
        if wanted := delays.to_read(now_us, bytes_of):
            self._queue.fetch(wanted, partial(self._bring, delays, wanted))
        if due := delays.pop_due(now_us):
            self._queue.join(due)

    def _bring(self, delays: Delays, wanted: list[int], lines: dict[int, bytes]) -> None:
        missing = delays.read(wanted, lines)
        if missing:
            name = shown(self._queue.name)
            raise MqksError(f"scheduled messages of queue {name} are missing: {missing[:5]}")
        self.do_due()

    def _expire(self) -> None:
        """Kill some of the expired messages."""
        if not self.expiry:
            return
        lane = self._queue.lane
        numbers = [number for number in self.expiry.pop_due() if lane.is_ready(number)]
        if numbers:
            kill_ready(self._queue, numbers, Event.TTL)
        end = self.expiry.end(lane.next_seq)
        oldest = lane.oldest
        if oldest is not None and oldest < end:
            kill_oldest(self._queue, end, Event.TTL)
