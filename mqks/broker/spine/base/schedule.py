"""Everything that is due at a time.

The one rule: an entry is one integer, made of its time and its number, so that a million of them
take 130 MB and are compared without a call. Of one time, the one that was set first is first. What
is set again and again is an `Alarm`, which cannot ring for ever for one moment.
"""

import heapq
from collections.abc import Callable
from typing import Final

from mqks.broker.spine.base.notices import Notices
from mqks.broker.spine.base.turns import Turns

Act = Callable[[], None]

_NUMBER_BITS: Final = 60
_NUMBER: Final = (1 << _NUMBER_BITS) - 1
WALL_LOOK_S: Final = 1.0
"""How often the wall clock is read while an entry depends on it: it may be set."""
RINGS_MAX: Final = 10
"""How often an alarm rings at once for a moment, or for earlier ones, without effect."""
REST_S: Final = 1.0
"""After which it rings again for it."""
_STALE_MIN: Final = 64
_STALE_STEP: Final = 1000


class _Heap:
    """Entries of one clock, in microseconds."""

    __slots__ = ("acts", "heap", "last")

    def __init__(self) -> None:
        self.heap: list[int] = []
        self.acts: dict[int, Act] = {}
        """Of the entries that were not cancelled, by their numbers. A heap cannot lose an entry in
        its middle: the others are left out when they come to the top, or most are such."""
        self.last = 0

    def __len__(self) -> int:
        return len(self.acts)

    def add(self, time_us: int, act: Act) -> int:
        self.last += 1
        self.acts[self.last] = act
        heapq.heappush(self.heap, time_us << _NUMBER_BITS | self.last)
        return self.last

    def cancel(self, number: int) -> None:
        del self.acts[number]
        if len(self.heap) > 2 * len(self.acts) + _STALE_MIN:
            self.heap = [entry for entry in self.heap if entry & _NUMBER in self.acts]
            heapq.heapify(self.heap)

    def next_us(self) -> int | None:
        """When the next entry is due, or earlier: only some cancelled entries are removed."""
        heap, acts = self.heap, self.acts
        for _ in range(_STALE_STEP):
            if not heap or heap[0] & _NUMBER in acts:
                break
            heapq.heappop(heap)
        return heap[0] >> _NUMBER_BITS if heap else None

    def pop(self) -> None:
        """Run the next entry, if it was not cancelled."""
        act = self.acts.pop(heapq.heappop(self.heap) & _NUMBER, None)
        if act is not None:
            act()


class Schedule:
    """`clock` returns monotonic seconds, `now_us` the wall clock in microseconds since 1970. A
    delay uses the first, a point of time the second, even when the clock is set."""

    __slots__ = ("_clock", "_delays", "_points", "notices", "repeats", "wall_us")

    def __init__(
        self, clock: Callable[[], float], now_us: Callable[[], int], notices: Notices | None = None
    ) -> None:
        self._clock = clock
        self.notices = notices or Notices()
        self.repeats = 0
        """How often an alarm was made to rest."""
        self.wall_us = now_us
        """The wall clock in microseconds since 1970."""
        self._delays = _Heap()
        self._points = _Heap()

    def __len__(self) -> int:
        return len(self._delays) + len(self._points)

    def after(self, delay_s: float, act: Act) -> int:
        """Call `act` after this many seconds; return the entry, for `cancel`."""
        return self.at(round((self._clock() + delay_s) * 1_000_000), act, dated=False)

    def at(self, time_us: int, act: Act, *, dated: bool = True) -> int:
        """Call `act` at a time of the wall clock, or of the monotonic clock."""
        if dated:
            return self._points.add(time_us, act) << 1 | 1
        return self._delays.add(time_us, act) << 1

    def clock_us(self) -> int:
        """The monotonic clock in microseconds."""
        return round(self._clock() * 1_000_000)

    def cancel(self, entry: int) -> None:
        """Remove an entry, which must not have been run."""
        (self._points if entry & 1 else self._delays).cancel(entry >> 1)

    def next_s(self) -> float | None:
        """When to call `run_due` next, by the monotonic clock. Called in each turn of the event
        loop."""
        delay_us, point_us = self._delays.next_us(), self._points.next_us()
        due_s = None if delay_us is None else delay_us / 1_000_000
        if point_us is None:
            return due_s
        wait_s = (point_us - self.wall_us()) / 1_000_000
        look_s = self._clock() + min(max(wait_s, 0.0), WALL_LOOK_S)
        return look_s if due_s is None else min(due_s, look_s)

    def run_due(self, turns: Turns) -> None:
        """Do what is due now, as much as a turn allows."""
        turns.begin()
        while self.run_next() and not turns.over:
            pass

    def run_next(self) -> bool:
        """Run the next entry that is due; return whether there was one."""
        for heap, now_us in (
            (self._delays, round(self._clock() * 1_000_000)),
            (self._points, self.wall_us()),
        ):
            due_us = heap.next_us()
            if due_us is not None and due_us <= now_us:
                heap.pop()
                return True
        return False


class Alarm:
    """One time at which `act` is called, on one of the clocks. `act` returns whether it took
    something that was due, so that it may be due again at once. `what` is for the log."""

    __slots__ = (
        *("_act", "_dated", "_due_us", "_entry", "_rings", "_rung_us", "_schedule", "_what"),
    )

    def __init__(
        self, schedule: Schedule, act: Callable[[], bool], *, dated: bool, what: str
    ) -> None:
        self._schedule = schedule
        self._act = act
        self._dated = dated
        self._what = what
        self._entry: int | None = None
        self._due_us = self._rung_us = self._rings = 0
        """When it rings next; when it has rung last, and how often for that moment."""

    @property
    def is_set(self) -> bool:
        return self._entry is not None

    def set(self, due_us: int | None) -> None:
        """Set the time; None: never."""
        if self._entry is not None:
            if due_us == self._due_us:
                return
            self._schedule.cancel(self._entry)
            self._entry = None
        if due_us is not None:
            self._due_us = due_us
            if self._rings >= RINGS_MAX and due_us <= self._rung_us:
                self._entry = self._schedule.after(REST_S, self._ring)
            else:
                self._entry = self._schedule.at(due_us, self._ring, dated=self._dated)

    def _ring(self) -> None:
        self._entry = None
        if self._due_us > self._rung_us:
            self._rings = 0
        self._rung_us = self._due_us
        self._rings = 0 if self._act() else self._rings + 1
        if self._rings >= RINGS_MAX:
            self._schedule.repeats += 1
            self._schedule.notices.timer_repeats(self._what)
