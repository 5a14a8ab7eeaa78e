"""The order of a queue with limits for each key: so many unacked messages, deliveries at a rate.

The one rule: a key has a turn only while its limits allow a delivery. Otherwise it is busy,
until one of its messages is acked or returns, or sleeps, until its bucket has a token; so a step
looks at no key in vain, however many are held back.

A bucket that is full need not be known. Buckets are kept in two generations, and the older one goes
when all of its are full.
"""

import heapq
from collections.abc import Iterator
from itertools import chain

from mqks.broker.features.order.keyed import Keyed
from mqks.broker.features.throttle.rate import Rate
from mqks.broker.spine.base.schedule import Alarm
from mqks.broker.spine.base.turns import GOES_ON, Work, emptied, free, slices
from mqks.broker.spine.queue.lane import Delivery
from mqks.broker.spine.queue.order import Taker
from mqks.broker.spine.queue.seams import HeldBack
from mqks.broker.spine.queue.shared import Place
from mqks.limits import PACE_NS, PACED_KEYS_MAX, STEP_MESSAGES


class LimitedKeys(Keyed):
    """Messages without a key have no limit. Without `is_ordered`, keys take turns."""

    __slots__ = (
        *("_alarm", "_asleep", "_busy", "_most", "_older", "_older_ns", "_rate", "_sleeping"),
        *("_young", "_young_ns"),
    )

    def __init__(self, queue: Place, *, is_ordered: bool) -> None:
        super().__init__(queue, is_ordered=is_ordered)
        self._most: int | None = None
        self._rate: Rate | None = None
        self._busy: set[bytes] = set()
        """Keys of which so many messages are unacked, and others ready."""
        self._asleep: set[bytes] = set()
        self._sleeping: list[tuple[int, bytes]] = []
        """A heap of their times."""
        self._alarm = Alarm(queue.shared.schedule, self._wake, dated=False, what="a rate of keys")
        self._young: dict[bytes, int] = {}
        self._older: dict[bytes, int] = {}
        """Key → when its bucket is full."""
        self._young_ns = self._older_ns = 0
        """When all buckets of a generation are full."""

    @property
    def _now_ns(self) -> int:
        return self._queue.shared.schedule.clock_us() * 1000

    def set_limits(self, most: int | None, rate: Rate | None) -> None:
        """Apply these limits from now on. What is delivered stays, and counts; a new rate begins
        with full buckets."""
        if (most, rate) == (self._most, self._rate):
            return
        sleeping: list[tuple[int, bytes]] = []
        if rate != self._rate:
            sleeping, self._sleeping = self._sleeping, sleeping
            self._forget_buckets(2)
        self._most, self._rate = most, rate
        self._is_counting = self.is_ordered or most is not None
        if self._holds or sleeping:
            self._queue.shared.turns.later(self._try_again(sleeping))

    def _try_again(self, sleeping: list[tuple[int, bytes]]) -> Work[None]:
        """What these limits allow has a turn: keys that are held, and those that slept."""
        slept = ([key for _, key in some] for some in slices(sleeping, STEP_MESSAGES))
        for keys in chain(slices([*self._holds], STEP_MESSAGES), slept):
            if self._queue.order is not self:
                return
            for key in keys:
                self._rouse(key)
            self._queue.deliver()
            yield GOES_ON

    # -- turns

    def _is_busy(self, key: bytes) -> bool:
        """Whether as many of its messages are unacked as may be."""
        hold, most = self._holds.get(key), self._most
        return key != b"" and hold is not None and most is not None and hold.count >= most

    def _turn(self, key: bytes) -> None:
        until_ns = 0
        if self._is_busy(key):
            self._busy.add(key)
        elif not (key and self._rate is not None and (until_ns := self._until_ns(key, self._rate))):
            super()._turn(key)
        elif key not in self._asleep:
            self._asleep.add(key)
            heapq.heappush(self._sleeping, (until_ns, key))
            if self._sleeping[0][1] is key:
                self._set_alarm()

    def _next_of(self, key: bytes) -> Delivery | None:
        if self._is_busy(key):  # The limit is lower than when it got its turn.
            self._busy.add(key)
            return None
        return super()._next_of(key)

    def _freed(self, key: bytes) -> None:
        if key in self._busy:
            self._rouse(key)
        elif self.is_ordered:
            super()._freed(key)

    def _rouse(self, key: bytes) -> None:
        """Look again at a key that was held back."""
        waits = self._busy if key in self._busy else self._asleep
        if key in waits:
            waits.remove(key)
            self._turn(key)

    def _hold(self, key: bytes, number: int, taker: Taker) -> None:
        if key and self._rate is not None:
            full_ns = self._rate.taken(self._full_ns(key), self._now_ns, 1)
            self._young[key], self._young_ns = full_ns, max(full_ns, self._young_ns)
        super()._hold(key, number, taker)

    @property
    def holds(self) -> HeldBack | None:
        if self._free or self._able:
            return None
        if self._sleeping:
            schedule = self._queue.shared.schedule
            wait_us = self._sleeping[0][0] // 1000 - schedule.clock_us()
            return HeldBack("rate_per_key", schedule.wall_us() + wait_us)
        return HeldBack("concurrency_per_key") if self._busy else None

    # -- buckets

    def _full_ns(self, key: bytes) -> int:
        """When the bucket of this key is full."""
        return self._young.get(key) or self._older.get(key, 0)

    def _until_ns(self, key: bytes, rate: Rate) -> int:
        """When this key may have its next delivery; 0: now."""
        now_ns = self._now_ns
        if self._young and self._older_ns <= now_ns:
            self._forget_buckets(1)
        full_ns = self._full_ns(key)
        if rate.tokens(full_ns, now_ns):
            is_known = full_ns or len(self._young) + len(self._older) < PACED_KEYS_MAX
            return 0 if is_known else self._older_ns
        return rate.next_ns(full_ns)

    def _forget_buckets(self, generations: int) -> None:
        for _ in range(generations):
            gone, self._older, self._young = self._older, self._young, {}
            self._older_ns, self._young_ns = self._young_ns, 0
            if gone:
                self._queue.shared.turns.later(free(emptied(gone)))

    def _set_alarm(self) -> None:
        """For all that wake within 5 ms at once: each may be another key."""
        first_ns = self._sleeping[0][0] if self._sleeping else None
        due_us = None if first_ns is None else -(-first_ns // PACE_NS) * PACE_NS // 1000
        self._alarm.set(due_us)

    def _wake(self) -> bool:
        sleeping, now_ns = self._sleeping, self._now_ns
        for _ in range(STEP_MESSAGES):
            if not sleeping or sleeping[0][0] > now_ns:
                break
            self._rouse(heapq.heappop(sleeping)[1])
        self._set_alarm()
        self._queue.deliver()
        return True

    # -- end

    def _begin_anew(self) -> None:
        super()._begin_anew()
        gone = self._emptied(self._busy, self._asleep), emptied(self._sleeping)
        self._busy, self._asleep, self._sleeping = set(), set(), []
        self._alarm.set(None)
        self._queue.shared.turns.later(free(chain(*gone)))

    def delete(self) -> Iterator[object]:
        self._alarm.set(None)
        sets = self._emptied(self._busy, self._asleep, self._young, self._older)
        return chain(super().delete(), sets, emptied(self._sleeping))
