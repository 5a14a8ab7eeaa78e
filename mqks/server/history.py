"""Rates of the last ten minutes and of the last day, for the charts of the web page.

The one rule: a sample takes constant time and constant memory, however many queues there are. The
busiest ones have a history; of the others some are compared with them at each sample.
"""

from array import array
from collections.abc import Iterable
from itertools import islice
from operator import add
from time import monotonic, time
from typing import Final

import anyio

from mqks.broker.broker import Broker
from mqks.broker.spine.base.turns import slices
from mqks.broker.spine.queue.queue import Queue
from mqks.limits import HISTORY_QUEUES_MAX

INTERVAL_S: Final = 2.0
RECENT: Final = 300
"""Points of ten minutes."""
DAY: Final = 1440
"""Points of a day, a minute each."""
TREND: Final = 5
"""Points of ten seconds: what is drawn small."""
MINUTE: Final = 30
"""Samples of a minute."""
WALK_QUEUES: Final = 500
"""Queues looked at by a sample, to find busier ones: less than a millisecond."""
FADES: Final = 0.995
"""Share of its weight that the activity of a queue keeps at each sample: half after 5 minutes."""
BROKER: Final = ("received", "delivered", "acknowledged", "rejected", "dead", "errors", "held")
"""Rates. The messages of `HELD` stand behind them."""
HELD: Final = ("ready", "unacked", "scheduled")
QUEUE: Final = ("in", "out", "waiting")

Points = list[list[float]]
"""Of each time, in seconds since the epoch, the values."""


class Ring:
    """The last points: a column of monotonic times, and one of 4 bytes for each value."""

    __slots__ = ("_columns", "_most", "_next", "_times")

    def __init__(self, width: int, most: int) -> None:
        self._times = array("d")
        self._columns = [array("f") for _ in range(width)]
        self._most = most
        self._next = 0

    def add(self, time_s: float, values: Iterable[float]) -> None:
        if len(self._times) < self._most:
            self._times.append(time_s)
            for column, value in zip(self._columns, values, strict=True):
                column.append(value)
            return
        at = self._next
        self._times[at] = time_s
        for column, value in zip(self._columns, values, strict=True):
            column[at] = value
        self._next = (at + 1) % self._most

    def change(self, column: int) -> float:
        """How much higher the last value is than the first one."""
        values = self._columns[column]
        return values[self._next - 1] - values[self._next % len(values)] if values else 0.0

    def means(self, column: int, of: int) -> list[float]:
        """Of so many points after the other, always the same ones: what is drawn of the past does
        not change when a point is added."""
        values, first = self._columns[column], self._next
        ordered = [*values[first:], *values[:first]][-first % of :]
        return [sum(some) / len(some) for some in slices(ordered, of)]

    def points(self) -> Points:
        rows = [[*row] for row in zip(self._times, *self._columns, strict=True)]
        return rows[self._next :] + rows[: self._next]


class Series:
    """Points of the last ten minutes, and the means of each minute of a day."""

    __slots__ = ("_count", "_sums", "day", "recent")

    def __init__(self, width: int) -> None:
        self.recent, self.day = Ring(width, RECENT), Ring(width, DAY)
        self._sums = [0.0] * width
        self._count = 0

    def add(self, time_s: float, values: list[float]) -> None:
        self.recent.add(time_s, values)
        self._sums = [total + value for total, value in zip(self._sums, values, strict=True)]
        self._count += 1
        if self._count == MINUTE:
            self.day.add(time_s, [total / MINUTE for total in self._sums])
            self._sums, self._count = [0.0] * len(values), 0


class Tracked:
    """A queue that has a history."""

    __slots__ = ("activity", "came", "series", "waiting")

    def __init__(self, queue: Queue, activity: float) -> None:
        self.series = Series(len(QUEUE))
        self.came, self.waiting = queue.lane.next_seq, _held(queue)
        self.activity = activity
        self.series.recent.add(monotonic(), [0.0, 0.0, self.waiting])

    def sample(self, queue: Queue, time_s: float, passed_s: float) -> None:
        came, waiting = queue.lane.next_seq, _held(queue)
        more = came - self.came
        less = max(0, more - (waiting - self.waiting))
        self.came, self.waiting = came, waiting
        self.series.add(time_s, [more / passed_s, less / passed_s, float(waiting)])
        self.activity = self.activity * FADES + (more + less) * (1 - FADES)


class History:
    """In memory only: a restart begins anew."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._series = Series(len(BROKER) + len(HELD))
        self._counted = self._counters()
        self._tracked: dict[Queue, Tracked] = {}
        self._walked: dict[Queue, int] = {}
        """Numbers of some other queues at the last sample."""
        self._walk_first = 0
        self._walk_held = self._held = [0] * len(HELD)
        """Messages of the queues that this round has walked, and of all in the last round."""
        self._found = set[bytes]()
        self._found_before = set[bytes]()
        self._before_s = monotonic()

    async def run(self) -> None:
        while True:
            await anyio.sleep(INTERVAL_S)
            self.sample()

    def points(self, queue: bytes | None, *, day: bool) -> Points | None:
        """Those of the broker, or of a queue; None for a queue that is none of the busiest."""
        if (series := self._series_of(queue)) is None:
            return None
        # By the wall clock as it goes now: it may have been set.
        ahead_s = time() - monotonic()
        points = (series.day if day else series.recent).points()
        return [[round(at_s + ahead_s, 1), *values] for at_s, *values in points]

    def trend(self, queue: bytes | None, column: int) -> list[float]:
        """One value of the points of the last ten minutes, as means of ten seconds; empty for a
        queue that is none of the busiest."""
        series = self._series_of(queue)
        return [] if series is None else series.recent.means(column, TREND)

    def _series_of(self, queue: bytes | None) -> Series | None:
        if queue is None:
            return self._series
        found = self._broker.queues.get(queue)
        tracked = None if found is None else self._tracked.get(found)
        return None if tracked is None else tracked.series

    def growth(self, queue: bytes) -> int:
        """How many more messages a queue has than ten minutes ago, as far as is known."""
        series = self._series_of(queue)
        return 0 if series is None else round(series.recent.change(2))

    def is_dead_letter_queue(self, name: bytes) -> bool:
        """Whether the policy of a queue names this one, as far as was found lately."""
        return name in self._found or name in self._found_before

    def sample(self) -> None:
        now_s = monotonic()
        passed_s, self._before_s = max(0.001, now_s - self._before_s), now_s
        counted = self._counters()
        pairs = zip(counted, self._counted, strict=True)
        rates = [(now - before) / passed_s for now, before in pairs]
        self._counted = counted
        for queue, tracked in [*self._tracked.items()]:
            if queue.deleted:
                del self._tracked[queue]
            else:
                tracked.sample(queue, now_s, passed_s)
        self._compare()
        self._walk()
        self._series.add(now_s, [*rates, *self._held])

    def _counters(self) -> list[int]:
        told = self._broker.shared.counters
        return [
            *(told.published, told.delivered, told.consumed, told.rejected),
            *(sum(told.dead.values()), told.errors, self._broker.loop_held),
        ]

    def _compare(self) -> None:
        """Give those that were walked the place of less busy ones."""
        for queue, came in self._walked.items():
            if queue.deleted:
                continue
            activity = (queue.lane.next_seq - came) * (1 - FADES)
            # While there is room even idle ones are kept: small brokers have charts of every queue.
            if len(self._tracked) >= HISTORY_QUEUES_MAX:
                if not activity:
                    continue
                least = min(self._tracked, key=lambda each: self._tracked[each].activity)
                if activity <= self._tracked[least].activity:
                    continue
                del self._tracked[least]
            self._tracked[queue] = Tracked(queue, activity)

    def _walk(self) -> None:
        first, end = self._walk_first, self._walk_first + WALK_QUEUES
        some = [*islice(self._broker.queues.values(), first, end)]
        self._found.update(each.rules.dead_letters for each in some if each.rules.dead_letters)
        held = zip(*((each.ready, each.unacked, each.scheduled) for each in some), strict=True)
        walked = [*map(sum, held)] or [0] * len(HELD)
        self._walk_held = [*map(add, self._walk_held, walked)]
        self._walk_first = end
        if len(some) < WALK_QUEUES:
            self._walk_first = 0
            self._held, self._walk_held = self._walk_held, [0] * len(HELD)
            self._found_before, self._found = self._found, set()
        self._walked = {each: each.lane.next_seq for each in some if each not in self._tracked}


def _held(queue: Queue) -> int:
    return queue.ready + queue.unacked + queue.scheduled
