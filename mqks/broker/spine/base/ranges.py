"""Sets of sequence numbers: as sorted ranges `(first, count)`, and as bits, `Numbers`.

The one rule: ranges are disjoint, in ascending order and never empty.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Final

Range = tuple[int, int]
"""First number and count."""

_BLOCK_BITS: Final = 8
_IN_BLOCK: Final = (1 << _BLOCK_BITS) - 1


class Numbers:
    """A set that is small for close numbers: a million consecutive ones take 0.5 MB, instead of
    100 MB as a Python set."""

    __slots__ = ("_count", "blocks")

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        """Number of a block → bits of the numbers in it."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for place, bits in [*self.blocks.items()]:
            while bits:
                lowest = bits & -bits
                yield (place << _BLOCK_BITS) + lowest.bit_length() - 1
                bits ^= lowest

    def __contains__(self, number: int) -> bool:
        return self.blocks.get(number >> _BLOCK_BITS, 0) >> (number & _IN_BLOCK) & 1 == 1

    def add(self, number: int) -> None:
        if number not in self:
            place = number >> _BLOCK_BITS
            self.blocks[place] = self.blocks.get(place, 0) | 1 << (number & _IN_BLOCK)
            self._count += 1

    def discard(self, number: int) -> None:
        if number in self:
            place = number >> _BLOCK_BITS
            bits = self.blocks.pop(place) ^ 1 << (number & _IN_BLOCK)
            if bits:
                self.blocks[place] = bits
            self._count -= 1


def among(numbers: Sequence[int], known: Collection[int]) -> Sequence[int]:
    """Of these numbers those of which something is `known`, or simply all: the shorter one is
    iterated over."""
    if isinstance(numbers, range) and len(known) < len(numbers):
        return [number for number in known if number in numbers]
    return numbers


def compress(numbers: list[int]) -> list[Range]:
    """Turn distinct numbers into ranges; sorts the list in place.

    Numbers acked in order are one range, found without checking each number.
    """
    if not numbers:
        return []
    numbers.sort()
    first, last = numbers[0], numbers[-1]
    if last - first + 1 == len(numbers):
        return [(first, len(numbers))]
    ranges = []
    previous = first
    for number in numbers:
        if number > previous + 1:
            ranges.append((first, previous + 1 - first))
            first = number
        previous = number
    ranges.append((first, previous + 1 - first))
    return ranges


def numbers(ranges: Iterable[Range]) -> Iterator[int]:
    return chain.from_iterable(range(first, first + count) for first, count in ranges)


def union(ranges: Iterable[Range]) -> list[Range]:
    """Sort ranges and join those that touch or overlap."""
    joined: list[Range] = []
    start = end = -1
    for first, count in sorted(ranges):
        if first > end:
            if end >= 0:
                joined.append((start, end - start))
            start = end = first
        if first + count > end:
            end = first + count
    if end >= 0:
        joined.append((start, end - start))
    return joined


def below(ranges: Iterable[Range], end: int) -> list[Range]:
    """The parts of the ranges below `end`."""
    return [(first, min(count, end - first)) for first, count in ranges if first < end]


def within(ranges: Sequence[Range], first: int, end: int) -> Iterator[Range]:
    """The parts of the ranges from `first` on and below `end`."""
    for position in range(max(0, bisect_left(ranges, (first + 1,)) - 1), len(ranges)):
        start, count = ranges[position]
        if start >= end:
            return
        low, high = max(first, start), min(end, start + count)
        if low < high:
            yield low, high - low


def subtract(first: int, end: int, ranges: Sequence[Range]) -> list[Range]:
    """The numbers from `first` on and below `end` that are not in the ranges."""
    left = []
    for start, count in ranges:
        if start >= end:
            break
        if start + count <= first:
            continue
        if start > first:
            left.append((first, start - first))
        first = start + count
    if first < end:
        left.append((first, end - first))
    return left


def has_number(ranges: Sequence[Range], number: int) -> bool:
    """Whether one of the ranges has this number."""
    place = bisect_right(ranges, number, key=itemgetter(0)) - 1
    return place >= 0 and number < sum(ranges[place])
