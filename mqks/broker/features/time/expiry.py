"""When the ready messages of one queue expire: by their own TTL, or by the queue's.

The one rule: a message expires at its time or up to `TICK_US` later, even if messages before it in
the queue live longer.

Messages with their own time are in buckets, one for each `TICK_US`, so that those that leave early
need no clean-up. For the queue's TTL it is enough to know when stretches of numbers joined.
"""

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Final

from mqks.limits import SEQ_MAX, STEP_MESSAGES

TICK_US: Final = 10_000
STRETCHES: Final = 4096
"""Messages that joined within this part of the queue's TTL are one stretch: they expire with the
last of them."""
MERGED_US: Final = 1000
STALE_MIN: Final = 1024
OVERDUE: Final = 0
"""The bucket of messages that expired while a consumer held them."""


class Expiry:
    """`clock_us` is monotonic; `wall_us` is microseconds since 1970."""

    __slots__ = (
        *("_buckets", "_clock_us", "_due", "_end", "_own", "_stretches", "_wall_us"),
        "ttl_us",
    )

    def __init__(self, clock_us: Callable[[], int], wall_us: Callable[[], int]) -> None:
        self._clock_us = clock_us
        self._wall_us = wall_us
        self.ttl_us: int | None = None
        """The queue's TTL."""
        self._own: dict[int, int] = {}
        """Number → its bucket."""
        self._buckets: dict[int, set[int]] = {}
        self._due: list[int] = []
        """A heap of the buckets."""
        self._stretches: deque[tuple[int, int, int]] = deque()
        """First number, and when the last and the first of them joined."""
        self._end = 0

    def __bool__(self) -> bool:
        """Whether any message can expire."""
        return bool(self._own) or self.ttl_us is not None

    # -- times of their own

    def add(self, number: int, expires_us: int, joined_us: int = 0) -> None:
        """Add a message that expires at a time of the wall clock, or too long after it joined; 0
        for none."""
        if joined_us and self.ttl_us is not None:
            expires_us = min(expires_us or SEQ_MAX, joined_us + self.ttl_us)
        self.discard((number,))
        if not expires_us:
            return
        bucket = _bucket(expires_us + self._ahead_us())
        self._own[number] = bucket
        self._in(bucket).add(number)

    def add_new(self, numbers: range, expires_us: int) -> None:
        bucket = _bucket(expires_us + self._ahead_us())
        self._own.update(dict.fromkeys(numbers, bucket))
        self._in(bucket).update(numbers)

    def add_each(self, numbers: range, each_us: Sequence[int]) -> None:
        ahead_us = self._ahead_us()
        for number, expires_us in zip(numbers, each_us, strict=True):
            bucket = self._own[number] = _bucket(expires_us + ahead_us)
            self._in(bucket).add(number)

    def _ahead_us(self) -> int:
        """How far the clock of buckets is ahead of the wall clock."""
        return self._clock_us() - self._wall_us()

    def _in(self, bucket: int) -> set[int]:
        """The numbers in a bucket."""
        numbers = self._buckets.get(bucket)
        if numbers is None:
            numbers = self._buckets[bucket] = set()
            heapq.heappush(self._due, bucket)
        return numbers

    def own_us(self, number: int) -> int:
        bucket = self._own.get(number)
        return 0 if bucket is None else self._wall_us() + bucket * TICK_US - self._clock_us()

    def set_us(self, number: int, expires_us: int, joined_us: int) -> int:
        """By how much the wall clock was set since these times were noted, as in `add`."""
        bucket = self._own.get(number, OVERDUE)
        if bucket == OVERDUE:
            return 0
        if joined_us and self.ttl_us is not None:
            expires_us = min(expires_us or SEQ_MAX, joined_us + self.ttl_us)
        set_us = self.own_us(number) - expires_us
        return set_us if abs(set_us) > 2 * TICK_US else 0

    def discard(self, numbers: Iterable[int]) -> None:
        own = self._own
        if isinstance(numbers, range) and len(own) < len(numbers):
            numbers = [number for number in own if number in numbers]
        for number in numbers if own else ():
            bucket = own.pop(number, None)
            if bucket is not None and (others := self._buckets.get(bucket)) is not None:
                others.discard(number)
                if not others:
                    del self._buckets[bucket]
        if len(self._due) > 2 * len(self._buckets) + STALE_MIN:
            self._due = sorted(self._buckets)

    def is_overdue(self, number: int, next_seq: int) -> bool:
        bucket = self._own.get(number)
        is_own = bucket is not None and bucket * TICK_US <= self._clock_us()
        return is_own or number < self.end(next_seq)

    def pop_due(self) -> list[int]:
        """Take the numbers of some messages that are due, in order. They are overdue until they are
        discarded."""
        now, due = self._clock_us() // TICK_US, list[int]()
        while self._due and self._due[0] <= now and len(due) < STEP_MESSAGES:
            bucket = self._due[0]
            numbers = self._buckets.get(bucket)
            while numbers and len(due) < STEP_MESSAGES:
                due.append(numbers.pop())
            if not numbers:
                heapq.heappop(self._due)
                self._buckets.pop(bucket, None)
        self._own.update(dict.fromkeys(due, OVERDUE))
        return sorted(due)

    # -- the queue's TTL

    def set_ttl(self, ttl_us: int | None) -> bool:
        """Set the queue's TTL; return whether it changed. Then the caller must call `joined_at` for
        all messages."""
        is_other, self.ttl_us = ttl_us != self.ttl_us, ttl_us
        if is_other:
            self._stretches.clear()
            self._end = 0
        return is_other and ttl_us is not None

    def joined(self, first: int) -> None:
        if self.ttl_us is not None:
            self._join(first, self._clock_us())

    def joined_at(self, first: int, wall_us: int) -> None:
        self._join(first, self._clock_us() + wall_us - self._wall_us())

    def _join(self, first: int, joined_us: int) -> None:
        assert self.ttl_us is not None
        stretches = self._stretches
        if len(stretches) > 2 * STRETCHES:
            self.end(first)
        if stretches:
            begin, last_us, first_us = stretches[-1]
            if joined_us - first_us <= max(MERGED_US, self.ttl_us // STRETCHES):
                stretches[-1] = begin, max(last_us, joined_us), first_us
                return
        stretches.append((first, joined_us, joined_us))

    def joined_us(self, number: int) -> int:
        place = bisect_right(self._stretches, number, key=itemgetter(0)) - 1
        if place < 0:
            return 0
        return self._wall_us() + self._stretches[place][1] - self._clock_us()

    def end(self, next_seq: int) -> int:
        """Messages below this number have exceeded the queue's TTL."""
        if self.ttl_us is None:
            return 0
        stretches, over_us = self._stretches, self._clock_us() - self.ttl_us
        while stretches and stretches[0][1] <= over_us:
            stretches.popleft()
            self._end = stretches[0][0] if stretches else next_seq
        return self._end

    def next_us(self) -> int | None:
        """When a message may expire next."""
        while self._due and self._due[0] not in self._buckets:
            heapq.heappop(self._due)
        due_us = self._due[0] * TICK_US if self._due else None
        if self.ttl_us is None or not self._stretches:
            return due_us
        end_us = self._stretches[0][1] + self.ttl_us
        return end_us if due_us is None else min(due_us, end_us)


def _bucket(due_us: int) -> int:
    """Of what expires at a time of the monotonic clock."""
    return max(OVERDUE, -(-due_us // TICK_US))
