"""The marks of one queue while the journal is read. They are packed: a million of them take 65 MB,
as objects 300 MB.

The one rule: of the marks of one number the one with the highest version counts.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Final

from mqks.broker.spine.base.ranges import Range
from mqks.broker.spine.message.mark import NO_MARK, Mark

RECORD: Final = struct.Struct(">QQIIIBQQQIQ")
"""Number and mark. Big-endian: sorted as bytes they are sorted by number, then by version."""
NUMBER_BYTES: Final = 8
END: Final = (1 << 64, NO_MARK)


def flags_of(mark: Mark) -> int:
    return mark.redelivered | mark.is_dated << 1 | mark.keeps_place << 2


def mark_of(version: int, retry: int, rejects: int, losses: int, flags: int, *times: int) -> Mark:
    is_set = flags & 1 == 1, flags & 2 == 2, flags & 4 == 4
    return Mark(version, retry, rejects, losses, *is_set, *times)


class Marks:
    """The marks of one queue in the order of their numbers."""

    __slots__ = ("_is_sorted", "_last", "_packed")

    def __init__(self) -> None:
        self._packed = bytearray()
        self._last = -1
        self._is_sorted = True

    def add(self, number: int, mark: Mark) -> None:
        self._packed += RECORD.pack(number, *mark[:4], flags_of(mark), *mark[7:])
        self._is_sorted = self._is_sorted and number > self._last
        self._last = number

    def taken(self, items: Iterable[tuple[int, Mark]]) -> Iterator[int]:
        """Add these; yield the number of each as it is added."""
        for number, mark in items:
            self.add(number, mark)
            yield number

    def items(self) -> Iterator[tuple[int, Mark]]:
        self._sort()
        for number, *stored in RECORD.iter_unpack(memoryview(self._packed)):
            yield number, mark_of(*stored)

    def get(self, number: int, default: Mark = NO_MARK) -> Mark:
        self._sort()
        records = range(0, len(self._packed), RECORD.size)
        place = bisect_left(records, number, key=self._number)
        if place < len(records) and self._number(records[place]) == number:
            return mark_of(*RECORD.unpack_from(self._packed, records[place])[1:])
        return default

    @property
    def end(self) -> int:
        """The number behind the last one."""
        self._sort()
        return self._number(len(self._packed) - RECORD.size) + 1 if self._packed else 0

    def among(self, ranges: Iterable[Range]) -> Iterator[tuple[int, Mark]]:
        """The marks of the numbers in these ranges."""
        items = self.items()
        marked, mark = next(items, END)
        for first, count in ranges:
            while marked < first:
                marked, mark = next(items, END)
            while marked < first + count:
                yield marked, mark
                marked, mark = next(items, END)

    def of_each(self, numbers: Iterable[int], default: Mark) -> Iterator[tuple[int, Mark]]:
        """Each of these ascending numbers with its mark."""
        items = self.items()
        marked, mark = next(items, END)
        for number in numbers:
            while marked < number:
                marked, mark = next(items, END)
            yield number, mark if marked == number else default

    def _number(self, place: int) -> int:
        return int.from_bytes(self._packed[place : place + NUMBER_BYTES])

    def _sort(self) -> None:
        if self._is_sorted:
            return
        packed, size = self._packed, RECORD.size
        records = sorted(bytes(packed[at : at + size]) for at in range(0, len(packed), size))
        self._packed = bytearray().join(
            record
            for record, later in pairwise(chain(records, [b""]))
            if record[:NUMBER_BYTES] != later[:NUMBER_BYTES]
        )
        self._is_sorted = True


NO_MARKS: Final = Marks()
"""For a queue without marks; nothing is added to it."""
