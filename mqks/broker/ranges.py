"""Sets of sequence numbers as sorted ranges `(first, count)`.

The one rule: ranges are disjoint, in ascending order and never empty.
"""

from collections.abc import Iterable, Sequence

Range = tuple[int, int]
"""First number and how many."""


def compress(numbers: list[int]) -> list[Range]:
    """Turn distinct numbers into ranges; sorts the list in place.

    What is acked in order is one range, found without looking at each number.
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


def union(ranges: Iterable[Range]) -> list[Range]:
    """Sort ranges and join those that touch or overlap."""
    joined: list[Range] = []
    for first, count in sorted(ranges):
        if joined and first <= joined[-1][0] + joined[-1][1]:
            start, length = joined[-1]
            joined[-1] = (start, max(length, first + count - start))
        else:
            joined.append((first, count))
    return joined


def below(ranges: Iterable[Range], end: int) -> list[Range]:
    """What of the ranges lies below `end`."""
    return [(first, min(count, end - first)) for first, count in ranges if first < end]


def subtract(first: int, end: int, ranges: Sequence[Range]) -> list[Range]:
    """What is left of `first` up to but without `end` when the ranges are taken away."""
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
