"""Messages of a queue are delivered at a rate: a bucket has tokens, one for each, and fills evenly.

The one rule: it goes by the monotonic clock, and is never fuller than its burst. After a start it
is full: a broker that is often restarted would deliver nothing at a low rate otherwise.
"""

from typing import NamedTuple, Protocol, Self

from mqks.broker.spine.base.schedule import Alarm
from mqks.broker.spine.queue.seams import HeldBack, Throttle
from mqks.broker.spine.queue.shared import Place, Shared
from mqks.limits import PACE_NS

_PERIODS_NS = {"s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}


class Rate(NamedTuple):
    interval_ns: int
    """Of two deliveries, rounded up."""
    burst: int

    @classmethod
    def of(cls, text: str) -> Self:
        """As `set_queue` takes it. Without a burst it is what comes in a tenth of a second: a timer
        may be late."""
        rate, _, burst = text.partition(",")
        count, unit = rate.split("/")
        interval_ns = -(-_PERIODS_NS[unit] // int(count))
        return cls(interval_ns, int(burst) if burst else max(1, 10**8 // interval_ns))

    def tokens(self, full_ns: int, now_ns: int) -> int:
        """Those in a bucket that will be full at this time."""
        return self.burst + min(0, now_ns - full_ns) // self.interval_ns

    def next_ns(self, full_ns: int, count: int = 1) -> int:
        """When so many tokens are in that bucket."""
        return full_ns - (self.burst - min(count, self.burst)) * self.interval_ns

    def taken(self, full_ns: int, now_ns: int, count: int) -> int:
        """When the bucket is full, after so many were taken."""
        return max(full_ns, now_ns) + count * self.interval_ns

    def follow(self, old: "Rate", full_ns: int, now_ns: int) -> int:
        """When the bucket is full that takes over the tokens of one with another rate."""
        return now_ns + max(0, self.burst - old.tokens(full_ns, now_ns)) * self.interval_ns


class Deliverer(Protocol):
    """A queue, or several."""

    @property
    def shared(self) -> Shared: ...
    def deliver(self) -> None: ...


class Paced(Throttle):
    __slots__ = ("_alarm", "_full_ns", "_queue", "_rate")

    def __init__(self, queue: Deliverer, rate: Rate) -> None:
        self._queue = queue
        self._rate = rate
        self._full_ns = self._now_ns
        self._alarm = Alarm(queue.shared.schedule, self._go_on, dated=False, what="a rate")

    @classmethod
    def by_rules(cls, queue: Place, old: Throttle | None) -> Self | None:
        text, part = queue.rules.rate, old if isinstance(old, cls) else None
        if text is None:
            if part is not None:
                part.end()
            return None
        rate = Rate.of(text)
        if part is None:
            return cls(queue, rate)
        part.follow(rate)
        return part

    def follow(self, rate: Rate) -> None:
        """Deliver at this rate from now on."""
        if rate != self._rate:
            self.end()
            self._full_ns = rate.follow(self._rate, self._full_ns, self._now_ns)
            self._rate = rate

    def end(self) -> None:
        self._alarm.set(None)

    @property
    def _now_ns(self) -> int:
        return self._queue.shared.schedule.clock_us() * 1000

    def room(self) -> int:
        rate = self._rate
        tokens = rate.tokens(self._full_ns, self._now_ns)
        if not tokens:
            next_ns = rate.next_ns(self._full_ns, PACE_NS // rate.interval_ns or 1)
            self._alarm.set(-(-next_ns // 1000))
        return tokens

    def delivered(self, count: int) -> None:
        if count:
            self._full_ns = self._rate.taken(self._full_ns, self._now_ns, count)

    def _go_on(self) -> bool:
        self._queue.deliver()
        return True

    @property
    def holds(self) -> HeldBack | None:
        now_ns = self._now_ns
        if self._rate.tokens(self._full_ns, now_ns):
            return None
        wait_us = (self._rate.next_ns(self._full_ns) - now_ns) // 1000
        return HeldBack("rate", self._queue.shared.schedule.wall_us() + wait_us)
