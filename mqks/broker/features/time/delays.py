"""Scheduled messages of one queue, which join it at their due time.

The one rule: an entry is one integer, made of the due time, the message's number, whether it is due
by the wall clock, and a checksum of the message's id, so that a million of them take 60 MB. A body
is in memory until it is on disk, and again shortly before it is due.
"""

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from mqks.broker.spine.base.budget import Budget
from mqks.broker.spine.base.ranges import Numbers
from mqks.broker.spine.base.turns import GOES_ON, WAITS, Work, emptied, ordered, slices
from mqks.broker.spine.message.mark import Mark, id_checksums
from mqks.broker.spine.queue.blocks import MESSAGE_OVERHEAD_BYTES
from mqks.broker.spine.queue.lane import Delivery
from mqks.limits import (
    GONE_MIN,
    NEAR_BYTES_MAX,
    NEAR_MAX,
    SCHEDULED_SEQ,
    SEQ_MAX,
    STEP_BODIES,
    STEP_BYTES,
    STEP_MESSAGES,
)

AHEAD_US: Final = 2_000_000
"""A body is read from disk this long before it is due."""
SEARCHES_MAX: Final = 8
"""After so many searches, each through all messages, they are known by the checksums of their ids.
That takes as long as some twenty searches."""
INDEXED: Final = STEP_BODIES // 16
"""Messages whose checksums are kept in one step."""
_CRC_BITS: Final = 32
_CRC: Final = (1 << _CRC_BITS) - 1
_DATED: Final = 1 << _CRC_BITS
_NUMBER_BITS: Final = SEQ_MAX.bit_length()
_NUMBER_SHIFT: Final = _CRC_BITS + 1
_TIME_SHIFT: Final = _NUMBER_SHIFT + _NUMBER_BITS
_UNDATED: Final = (1 << _TIME_SHIFT) - 1 - _DATED
"""The bits of an entry without its time."""
_NEVER: Final = SEQ_MAX << _TIME_SHIFT


def _number(entry: int) -> int:
    return entry >> _NUMBER_SHIFT & SEQ_MAX


class ByChecksum:
    """Numbers by the checksum of their ids, about 20 bytes each. Some may be gone already, and some
    be there twice."""

    __slots__ = ("_buckets", "count")

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[array[int], array[int]]] = {}
        """The first half of a checksum → numbers, and the second half for each."""
        self.count = 0

    def add(self, number: int, crc: int) -> None:
        bucket = self._buckets.get(crc >> 16)
        if bucket is None:
            bucket = self._buckets[crc >> 16] = array("q"), array("H")
        bucket[0].append(number)
        bucket[1].append(crc & 0xFFFF)
        self.count += 1

    def find(self, wanted: Iterable[int], mask: int, living: Numbers) -> Work[set[int]]:
        """Living ones that have one of these checksums, as far as the mask goes."""
        found = set[int]()
        for crc in wanted:
            numbers, ends = self._buckets.get(crc >> 16, ((), ()))
            for start in range(0, len(numbers), STEP_BODIES):
                some = slice(start, start + STEP_BODIES)
                each = zip(numbers[some], ends[some], strict=True)
                of_crc = (number for number, end in each if end & mask == crc & 0xFFFF)
                found.update(number for number in of_crc if number in living)
                yield GOES_ON
        return found


class Delays:
    """Scheduled messages; times are microseconds of the monotonic clock. `memory` counts bodies.

    Entries wait in `_far`, a heap. Two seconds before it is due an entry goes to `_near`, another
    heap, and its body is read if it is only on disk; so bodies are in memory for what is due soon,
    and a message is never late because of the disk. As many go there as fit into NEAR_MAX and
    NEAR_BYTES_MAX, but always the first one, or nothing would go on. A message joins the queue when
    nothing in `_far` is due before it: then all join in the order of their times.
    A heap can't lose an entry in its middle. What is taken out stays in its heap, is counted in
    `_gone`, and is dropped when it comes to the top; when most entries are such, the heap is made
    anew. A message that was taken out and comes again has a second entry, and `_anew` says which of
    them counts. All entries change when the clock is set or all are made due: a million of them,
    so it is done in steps. The heaps are put aside, each step moves some into a new one, and what
    is due meanwhile waits only for those aside that may be due before it.
    """

    __slots__ = (
        *("_anew", "_aside", "_by_checksum", "_early", "_far", "_fresh", "_gone", "_gone_count"),
        *("_memory", "_near", "_reading", "_searches", "bodies", "bodies_bytes", "bytes"),
        *("dated", "numbers", "placed"),
    )

    def __init__(self, memory: Budget) -> None:
        self._memory = memory
        self._far: list[int] = []
        """A heap of entries that are not due soon."""
        self._near: list[int] = []
        """A heap of entries that are due soon, with bodies that are in memory or being read."""
        self._reading: dict[int, int] = {}
        """Number → entry of messages whose bodies are being read."""
        self._aside: list[list[int]] = []
        """Heaps of entries that are put into `_far` anew, in steps."""
        self._early = 0
        """By how much they may become smaller."""
        self._gone: dict[int, int] = {}
        """Numbers of messages taken out → how many entries they still have."""
        self._gone_count = 0
        self._anew: dict[int, int] = {}
        """Numbers of those that were added again → their valid entry."""
        self._by_checksum: ByChecksum | None = None
        """Of all scheduled messages, after some searches."""
        self._searches = 0
        """Those without it."""
        self.numbers = Numbers()
        """Those of all scheduled messages."""
        self.placed = Numbers()
        """Those of messages that will return to their old place, as leased ones."""
        self.dated = False
        """Some may be due by the wall clock."""
        self._fresh: list[int] = []
        """Entries whose bodies may not be on disk yet."""
        self.bodies: dict[int, bytes] = {}
        self.bodies_bytes = 0
        """Memory of the bodies."""
        self.bytes = 0
        """Length of all lines; a message taken out while only on disk counts with the mean."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def far(self) -> int:
        """Number of entries that are not due soon."""
        return len(self._far)

    # -- adding messages

    def add(
        self, first: int, lines: Sequence[bytes], marks: Sequence[Mark], due_us: Sequence[int]
    ) -> None:
        """Add messages in memory, with consecutive numbers, that may not be on disk yet."""
        fresh, bodies, size = self._fresh, self.bodies, 0
        for number, (line, mark, each_us) in enumerate(
            zip(lines, marks, due_us, strict=True), first
        ):
            fresh.append(self.restore(number, mark, each_us, is_dated=mark.is_dated))
            bodies[number] = line
            size += len(line)
        self.bytes += size
        self._count(size + len(lines) * MESSAGE_OVERHEAD_BYTES)

    def restore(self, number: int, mark: Mark, due_us: int, *, is_dated: bool) -> int:
        """Add a message that is on disk; the caller sets `bytes`. Return its entry."""
        timed = (due_us << _NUMBER_BITS | number) << 1 | is_dated
        entry = timed << _CRC_BITS | mark.id_crc
        heapq.heappush(self._far, entry)
        self.numbers.add(number)
        self._index(number, mark.id_crc)
        if mark.keeps_place:
            self.placed.add(number)
        if is_dated:
            self.dated = True
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

    def committed(self, end: int, aside_end: int, now_us: int) -> Work[None]:
        """Numbers below `end` are on disk, and those of messages with a delay below `aside_end`:
        only bodies that are due soon stay in memory."""
        fresh, self._fresh = self._fresh, []
        for some in slices(fresh, STEP_MESSAGES):
            for entry in some:
                number = _number(entry)
                if number >= (end if number < SCHEDULED_SEQ else aside_end):
                    self._fresh.append(entry)
                # A body that is due soon would have to be read back at once.
                elif entry >> _TIME_SHIFT > now_us + AHEAD_US and self._counts(entry):
                    self._drop(number)
            yield GOES_ON

    # -- what is due

    def next_us(self) -> int | None:
        """The time of the next work."""
        near, far = self._near, self._far
        # The first one may wait for those before it that are not near yet, or for its body.
        waits = not near or near[0] > self._first_away or _number(near[0]) in self._reading
        due_us = None if waits else near[0] >> _TIME_SHIFT
        if not far or (len(near) >= NEAR_MAX and near[0] <= far[0]):
            return due_us
        if not (self._may_read or self._is_at_hand(far[0])):
            return due_us
        look_us = (far[0] >> _TIME_SHIFT) - AHEAD_US
        return look_us if due_us is None else min(look_us, due_us)

    @property
    def _first_away(self) -> int:
        """Up to here all entries are in `_near`. Those behind wait, so that all join in order."""
        first = self._far[0] if self._far else _NEVER
        return min([first, *(heap[0] - self._early for heap in self._aside)])

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
            heapq.heappush(near, entry)
            if number not in self.bodies:
                self._reading[number] = entry
                wanted.append(number)
                size += bytes_of(number)
        return wanted

    def read(self, numbers: Iterable[int], lines: Mapping[int, bytes]) -> list[int]:
        """These bodies have been read; return the numbers of those that were not found."""
        missing: list[int] = []
        for number in numbers:
            entry = self._reading.pop(number, None)
            if entry is None or not self._counts(entry):
                continue
            if (line := lines.get(number)) is None:
                missing.append(number)
            else:
                self._keep(number, line)
        return missing

    def pop_due(self, now_us: int) -> tuple[list[Delivery], list[int]]:
        """Take messages that are due, in order, as many as one step takes, and since when each is;
        0: somebody wanted it."""
        near, due, since_us, size = self._near, list[Delivery](), list[int](), 0
        last = min(self._first_away, (now_us + 1) << _TIME_SHIFT)
        while near and near[0] <= last and len(due) < STEP_MESSAGES and size < STEP_BYTES:
            entry = heapq.heappop(near)
            number = _number(entry)
            if self._gone and self._let_go(entry):
                continue
            if (line := self.bodies.pop(number, None)) is None:
                # Not read yet, or let go: the clock was set back before it was on disk.
                heapq.heappush(near if number in self._reading else self._far, entry)
                break
            self.numbers.discard(number)
            self.placed.discard(number)
            self._anew.pop(number, None)
            size += len(line)
            due.append((number, line))
            since_us.append(entry >> _TIME_SHIFT)
        self._count(-size - len(due) * MESSAGE_OVERHEAD_BYTES)
        self._forget(size)
        return due, since_us

    @property
    def is_moving(self) -> bool:
        """Whether entries are being put into the heap anew."""
        return bool(self._aside)

    @property
    def has_promoted(self) -> bool:
        """Whether messages that `promote_all` has made due may be left."""
        firsts = (*self._near[:1], *self._far[:1])
        return self.is_moving or any(entry >> _TIME_SHIFT <= 0 for entry in firsts)

    # -- searching

    def search(self, message_id: bytes) -> Work[list[int]]:
        """Numbers of messages that may have this id, or are of this group. The caller lets only one
        search at a time."""
        mask, wanted = id_checksums(message_id)
        found = set[int]()
        known = self._by_checksum
        if known is None and self._searches >= SEARCHES_MAX:
            known = self._by_checksum = ByChecksum()
            for some in slices(self._all(), INDEXED):
                for entry in some:
                    known.add(_number(entry), entry & _CRC)
                yield GOES_ON
            self._searches = 0
        if known is not None:
            found = yield from known.find(wanted, mask, self.numbers)
        else:
            self._searches += 1
            for some in slices(self._all(), STEP_BODIES):
                found.update(_number(entry) for entry in some if entry & mask in wanted)
                yield GOES_ON
        return (yield from ordered(found))

    def _index(self, number: int, crc: int) -> None:
        known = self._by_checksum
        if known is not None:
            known.add(number, crc)
            if known.count > 2 * len(self.numbers) + GONE_MIN:
                self._by_checksum = None  # Most of them are gone.

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

    def soonest(self, limit: int) -> Work[list[tuple[int, int]]]:
        """Number and time of the messages that are due first, in this order."""
        first = list[int]()
        for some in slices(self._all(), STEP_BODIES):
            first = heapq.nsmallest(limit, chain(first, filter(self._counts, some)))
            yield GOES_ON
        return [(_number(entry), entry >> _TIME_SHIFT) for entry in first]

    def each(self) -> Iterator[list[int]]:
        """The numbers of all, some at a time."""
        for some in slices(self._all(), STEP_BODIES):
            yield [_number(entry) for entry in filter(self._counts, some)]

    def _all(self) -> list[int]:
        return [*chain(self._far, self._near, *self._aside)]

    def _counts(self, entry: int) -> bool:
        """Whether an entry is valid: its message was not taken out."""
        number = _number(entry)
        return number not in self._gone or self._anew.get(number) == entry

    def _let_go(self, entry: int) -> bool:
        """An entry was removed; return whether its message had been taken out before."""
        if self._counts(entry):
            return False
        number = _number(entry)
        self._gone_count -= 1
        self._gone[number] -= 1
        if not self._gone[number]:
            del self._gone[number]
            self._anew.pop(number, None)
        return True

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

    def put_off(self, number: int, mark: Mark, due_us: int) -> None:
        """A scheduled message is due at another time."""
        # Its old entry stays in its heap, and is one of those taken out.
        line, size = self.bodies.get(number), self.bytes // len(self)
        self.remove(number)
        if line is None:
            self.restore(number, mark, due_us, is_dated=mark.is_dated)
            self.bytes += size
        else:
            self.add(number, [line], [mark], [due_us])

    def _forget(self, size: int) -> None:
        self.bytes = max(0, self.bytes - size) if len(self) else 0
        self.dated = self.dated and len(self) > 0

    @property
    def is_over(self) -> bool:
        """Whether nothing is scheduled, being read, or put into the heap anew."""
        return not (len(self.numbers) or self._reading or self._aside)

    def take_all(self) -> Iterator[int]:
        """Take out all at once; yield their numbers one by one, since there may be many."""
        gone, anew = self._gone, self._anew
        return (
            _number(entry)
            for entry in self.forget_all()
            if _number(entry) not in gone or anew.pop(_number(entry), None) == entry
        )

    def forget_all(self) -> Iterator[int]:
        """Take out all at once; yield their entries, also of those taken out before."""
        entries = self._all()
        self.numbers, self.placed = Numbers(), Numbers()
        self._count(-self.bodies_bytes)
        self._far, self._near, self._aside, self._reading = [], [], [], {}
        self._gone, self._anew, self._gone_count = {}, {}, 0
        self._fresh, self.bodies, self.bytes, self.dated = [], {}, 0, False
        self._by_checksum = None
        return emptied(entries)

    # -- putting entries into the heap anew

    @property
    def is_untidy(self) -> bool:
        """Whether most entries belong to messages that were taken out."""
        return self._gone_count > len(self) + GONE_MIN and not self.is_moving

    def tidy(self) -> Work[None]:
        """Remove the entries of messages that were taken out."""
        yield from self._put_anew(lambda entry: entry, 0)

    def promote_all(self) -> Work[None]:
        """Make all scheduled messages due now, whatever the clock says."""
        yield from self._put_anew(lambda entry: entry & _UNDATED, _NEVER)

    def shift_dated(self, by_us: int) -> Work[None]:
        """The wall clock was set: what depends on it is due so much later."""
        by = by_us << _TIME_SHIFT
        yield from self._put_anew(lambda e: e + by if e & _DATED else e, max(0, -by))

    def _put_anew(self, change: Callable[[int], int], early: int) -> Work[None]:
        """Change each entry, which becomes smaller by `early` at most. The first ones are first:
        what is due meanwhile waits only for those that may be due before it."""
        while self._aside:
            yield WAITS
        self._aside = [heap for heap in (self._far, self._near) if heap]
        self._far, self._near, self._early = [], [], early
        while self._aside:
            heap = self._aside[-1]
            for _ in range(min(STEP_MESSAGES, len(heap))):
                entry = heapq.heappop(heap)
                if self._let_go(entry):
                    continue
                changed = change(entry)
                if _number(entry) in self._anew:
                    self._anew[_number(entry)] = changed
                heapq.heappush(self._far, changed)
            if not heap:
                self._aside.pop()
            yield GOES_ON
