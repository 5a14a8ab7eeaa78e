"""Scheduled messages of one queue, which join it at their due time.

The one rule: an entry is one integer, made of the due time, the message's number and a checksum of
the message's id, so that a million of them take 60 MB. A body is in memory until it is on disk, and
again shortly before it is due.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final
from zlib import crc32

from mqks.broker.base.budget import Budget
from mqks.broker.base.ranges import Numbers
from mqks.broker.base.turns import GOES_ON, WAITS, Work, emptied, ordered, slices
from mqks.broker.queue.blocks import MESSAGE_OVERHEAD_BYTES
from mqks.broker.queue.lane import Delivery
from mqks.limits import (
    GONE_MIN,
    NEAR_BYTES_MAX,
    NEAR_MAX,
    SEQ_MAX,
    STEP_BODIES,
    STEP_BYTES,
    STEP_MESSAGES,
)

AHEAD_US: Final = 2_000_000
"""A body is read from disk this long before it is due."""
_CRC_BITS: Final = 32
_CRC: Final = (1 << _CRC_BITS) - 1
_NUMBER_BITS: Final = SEQ_MAX.bit_length()
_NUMBER_SHIFT: Final = _CRC_BITS + 1
_TIME_SHIFT: Final = _NUMBER_SHIFT + _NUMBER_BITS
_NEVER: Final = SEQ_MAX << _TIME_SHIFT


def _number(entry: int) -> int:
    return entry >> _NUMBER_SHIFT & SEQ_MAX


class Delays:
    """Scheduled messages of one clock; times are its microseconds. `memory` counts bodies."""

    __slots__ = (
        *("_anew", "_aside", "_far", "_fresh", "_gone", "_gone_count", "_memory"),
        *("_near", "_reading", "bodies", "bodies_bytes", "bytes", "numbers", "placed"),
    )

    def __init__(self, memory: Budget) -> None:
        self._memory = memory
        self._far: list[int] = []
        """A heap of entries that are not due soon."""
        self._near: list[int] = []
        """A heap of entries that are due soon, with their bodies in memory."""
        self._reading: dict[int, int] = {}
        """Number → entry of messages whose bodies are being read."""
        self._aside: list[int] = []
        """Entries that are moved back to `_far`, in steps."""
        self._gone: dict[int, int] = {}
        """Numbers of messages taken out → how many entries they still have."""
        self._gone_count = 0
        self._anew: dict[int, int] = {}
        """Numbers of those that were added again → their valid entry."""
        self.numbers = Numbers()
        """Those of all scheduled messages."""
        self.placed = Numbers()
        """Those of messages that will return to their old place, as leased ones."""
        self._fresh: list[int] = []
        """Entries whose bodies may not be on disk yet."""
        self.bodies: dict[int, bytes] = {}
        self.bodies_bytes = 0
        """Memory of the bodies."""
        self.bytes = 0
        """Length of all lines; a message taken out while only on disk counts with the mean."""

    def __len__(self) -> int:
        return len(self.numbers)

    # -- adding messages

    def add(self, number: int, line: bytes, id_crc: int, due_us: int, *, place: bool) -> None:
        """Add a message that is in memory, and may not be on disk yet."""
        self._fresh.append(self.restore(number, id_crc, due_us, place=place))
        self.bytes += len(line)
        self._keep(number, line)

    def restore(self, number: int, id_crc: int, due_us: int, *, place: bool) -> int:
        """Add a message that is on disk; the caller sets `bytes`. Return its entry."""
        entry = ((due_us << _NUMBER_BITS | number) << 1 | place) << _CRC_BITS | id_crc
        heapq.heappush(self._far, entry)
        self.numbers.add(number)
        if place:
            self.placed.add(number)
        if number in self._gone:
            self._anew[number] = entry
        return entry

    def _keep(self, number: int, line: bytes) -> None:
        self.bodies[number] = line
        self._count(len(line) + MESSAGE_OVERHEAD_BYTES)

    def _count(self, size: int) -> None:
        self.bodies_bytes += size
        self._memory.used += size

    def _drop(self, number: int) -> bytes | None:
        line = self.bodies.pop(number, None)
        if line is not None:
            self._count(-len(line) - MESSAGE_OVERHEAD_BYTES)
        return line

    def committed(self, end: int, now_us: int) -> Work[None]:
        """Numbers below `end` are on disk: only bodies that are due soon stay in memory."""
        fresh, self._fresh = self._fresh, []
        for some in slices(fresh, STEP_MESSAGES):
            for entry in some:
                if _number(entry) >= end:
                    self._fresh.append(entry)
                elif entry >> _TIME_SHIFT > now_us + AHEAD_US and self._counts(entry):
                    self._drop(_number(entry))
            yield GOES_ON

    # -- what is due

    def next_us(self) -> int | None:
        """The time of the next work."""
        near, far = self._near, self._far
        due_us = near[0] >> _TIME_SHIFT if near and near[0] <= self._first_away else None
        if not far or (len(near) >= NEAR_MAX and near[0] <= far[0]):
            return due_us
        if not (self._may_read or self._is_at_hand(far[0])):
            return due_us
        look_us = (far[0] >> _TIME_SHIFT) - AHEAD_US
        return look_us if due_us is None else min(look_us, due_us)

    @property
    def _first_away(self) -> int:
        """The first entry that is not in `_near` yet. Those behind it wait for it, so that all join
        in order, however long a read takes; one that fails ends the server."""
        first = self._far[0] if self._far else _NEVER
        return min(first, next(iter(self._reading.values()))) if self._reading else first

    @property
    def _may_read(self) -> bool:
        """Whether to read more bodies: not before the last read has ended, and, while many bytes
        are in memory, only what is needed first."""
        if self._reading:
            return False
        is_first = not self._near or self._far[0] < self._near[0]
        return is_first or self.bodies_bytes < NEAR_BYTES_MAX

    def _is_at_hand(self, entry: int) -> bool:
        """Whether its body need not be read."""
        return _number(entry) in self.bodies or not self._counts(entry)

    def to_read(self, now_us: int, bytes_of: Callable[[int], int]) -> list[int]:
        """Prepare some entries that are due soon for `pop_due`. Return the numbers of those that
        are only on disk; `read` takes them. `bytes_of` returns the length of a message."""
        wanted: list[int] = []
        near, far, size = self._near, self._far, 0
        may_read = bool(far) and self._may_read
        end = (now_us + AHEAD_US + 1) << _TIME_SHIFT
        if len(near) >= NEAR_MAX:
            end = min(end, near[0])  # Only those that others wait for.
        for _ in range(STEP_MESSAGES):
            if not far or far[0] >= end:
                break
            if not ((may_read and size < STEP_BYTES) or self._is_at_hand(far[0])):
                break
            entry = heapq.heappop(far)
            number = _number(entry)
            if self._gone and self._let_go(entry):
                continue
            if number in self.bodies:
                heapq.heappush(near, entry)
            else:
                if number in self._reading:
                    self._discount(number)
                self._reading[number] = entry
                wanted.append(number)
                size += bytes_of(number)
        return wanted

    def read(self, numbers: Iterable[int], lines: Mapping[int, bytes]) -> list[int]:
        """These bodies have been read; return the numbers of those that were not found."""
        missing: list[int] = []
        for number in numbers:
            entry = self._reading.pop(number, None)
            if entry is None or (self._gone and self._let_go(entry)):
                continue
            if (line := lines.get(number)) is None:
                missing.append(number)
            else:
                self._keep(number, line)
                heapq.heappush(self._near, entry)
        return missing

    def pop_due(self, now_us: int) -> list[Delivery]:
        """Take messages that are due, in order, as many as one step takes."""
        near, due, size = self._near, list[Delivery](), 0
        last = min(self._first_away, (now_us + 1) << _TIME_SHIFT)
        while near and near[0] <= last and len(due) < STEP_MESSAGES:
            if size >= STEP_BYTES:
                break
            entry = heapq.heappop(near)
            number = _number(entry)
            if self._gone and self._let_go(entry):
                continue
            if number not in self.bodies:  # The clock was set back before it was on disk.
                heapq.heappush(self._far, entry)
                break
            self.numbers.discard(number)
            self.placed.discard(number)
            self._anew.pop(number, None)
            line = self.bodies[number]
            self._drop(number)
            size += len(line)
            due.append((number, line))
        self._forget(size)
        return due

    @property
    def has_promoted(self) -> bool:
        """Whether messages that `promote_all` has made due may be left."""
        firsts = (*self._near[:1], *self._far[:1], *self._reading.values())
        return bool(self._aside) or any(entry >> _TIME_SHIFT == 0 for entry in firsts)

    # -- searching

    def search(self, message_id: bytes) -> Work[list[int]]:
        """Numbers of messages that may have this id."""
        wanted, found = crc32(message_id), set[int]()
        for some in slices(self._all(), STEP_BODIES):
            found.update(_number(entry) for entry in some if entry & _CRC == wanted)
            yield GOES_ON
        return (yield from ordered(found))

    def listed(self, after: int, limit: int) -> Work[list[tuple[int, int]]]:
        """Number and time of the first messages with a number above `after`."""
        found, last = list[tuple[int, int]](), SEQ_MAX
        for some in slices(self._all(), STEP_BODIES):
            more = (entry for entry in some if after < _number(entry) <= last)
            times = {_number(entry): entry >> _TIME_SHIFT for entry in more if self._counts(entry)}
            found = sorted({*found, *times.items()})[:limit]
            last = found[-1][0] if len(found) == limit else SEQ_MAX
            yield GOES_ON
        return found

    def _all(self) -> list[int]:
        return [*self._far, *self._near, *self._reading.values(), *self._aside]

    def _counts(self, entry: int) -> bool:
        """Whether an entry is valid: its message was not taken out."""
        number = _number(entry)
        return number not in self._gone or self._anew.get(number) == entry

    def _let_go(self, entry: int) -> bool:
        """An entry was removed; return whether its message had been taken out before."""
        if self._counts(entry):
            return False
        self._discount(_number(entry))
        return True

    def _discount(self, number: int) -> None:
        self._gone_count -= 1
        self._gone[number] -= 1
        if not self._gone[number]:
            del self._gone[number]
            self._anew.pop(number, None)

    # -- taking messages out

    def remove(self, number: int) -> None:
        """Take out a scheduled message."""
        line = self._drop(number)
        size = self.bytes // len(self) if line is None else len(line)
        self.numbers.discard(number)
        self.placed.discard(number)
        self._gone[number] = self._gone.get(number, 0) + 1
        self._gone_count += 1
        self._anew.pop(number, None)
        self._forget(size)

    def put_off(self, number: int, id_crc: int, due_us: int) -> None:
        """A scheduled message that keeps its place is due at another time."""
        line, size = self.bodies.get(number), self.bytes // len(self)
        self.remove(number)
        if line is None:
            self.restore(number, id_crc, due_us, place=True)
            self.bytes += size
        else:
            self.add(number, line, id_crc, due_us, place=True)

    def _forget(self, size: int) -> None:
        self.bytes = max(0, self.bytes - size) if len(self) else 0

    def take_all(self) -> Iterator[int]:
        """Take out all at once; yield their numbers one by one, since there may be many."""
        entries, gone, anew = self._all(), self._gone, self._anew
        self.numbers, self.placed = Numbers(), Numbers()
        self._count(-self.bodies_bytes)
        self._far, self._near, self._reading, self._aside = [], [], {}, []
        self._gone, self._anew, self._gone_count = {}, {}, 0
        self._fresh, self.bodies, self.bytes = [], {}, 0
        return (
            _number(entry)
            for entry in emptied(entries)
            if _number(entry) not in gone or anew.pop(_number(entry), None) == entry
        )

    @property
    def is_untidy(self) -> bool:
        """Whether most entries belong to messages that were taken out."""
        return self._gone_count > len(self) + GONE_MIN and not self._aside

    def tidy(self) -> Work[None]:
        """Remove the entries of messages that were taken out."""
        yield from self._put_anew(None)

    def promote_all(self) -> Work[None]:
        """Make all scheduled messages due now, whatever the clock says."""
        yield from self._put_anew(0)

    def _put_anew(self, due_us: int | None) -> Work[None]:
        while self._aside:
            yield WAITS
        self._aside, self._far = [*self._far, *self._near, *self._reading.values()][::-1], []
        self._near, self._reading = [], {}
        while self._aside:
            for entry in [self._aside.pop() for _ in range(min(STEP_MESSAGES, len(self._aside)))]:
                if self._let_go(entry):
                    continue
                if due_us is not None:
                    entry = due_us << _TIME_SHIFT | entry & ((1 << _TIME_SHIFT) - 1)
                    if _number(entry) in self._anew:
                        self._anew[_number(entry)] = entry
                heapq.heappush(self._far, entry)
            yield GOES_ON
