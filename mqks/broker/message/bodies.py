"""Bodies of messages in memory: of consecutive numbers, and of returned messages by number.

The one rule: a message anywhere in it costs as much as the first one.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from mqks.broker.base.turns import emptied

NO_BODY: Final = b""
"""Stands for a hole."""

BLOCK: Final = 1024
"""Most numbers in one sorted block."""


class Stretch:
    """Bodies of consecutive numbers: a list whose first places, `_gone`, are taken. A deque would
    take the longer for a place the farther it is from both ends."""

    __slots__ = ("_gone", "_lines")

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._gone = 0

    def __len__(self) -> int:
        return len(self._lines) - self._gone

    def __getitem__(self, place: int) -> bytes:
        return self._lines[self._gone + place]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._lines[self._gone :])

    def extend(self, lines: Sequence[bytes]) -> None:
        self._lines.extend(lines)

    def take(self, count: int) -> list[bytes]:
        """Remove the first ones, at most so many."""
        lines, end = self._lines, self._gone + count
        if end >= len(lines):
            taken = lines[self._gone :] if self._gone else lines
            self._lines, self._gone = [], 0
            return taken
        taken = lines[self._gone : end]
        if 2 * end > len(lines):
            del lines[:end]
            self._gone = 0
        else:
            lines[self._gone : end] = [NO_BODY] * count
            self._gone = end
        return taken

    def put_back(self, lines: Sequence[bytes]) -> None:
        """Put these in front of the others."""
        start = max(0, self._gone - len(lines))
        self._lines[start : self._gone] = lines
        self._gone = start

    def take_last(self, count: int) -> list[bytes]:
        """Remove the last ones, at most so many."""
        start = max(self._gone, len(self._lines) - count)
        taken = self._lines[start:]
        if start > self._gone:
            del self._lines[start:]
        else:
            self._lines, self._gone = [], 0
        return taken

    def blank(self, place: int) -> int:
        """Remove one body, leaving a hole; return its length."""
        place += self._gone
        size = len(self._lines[place])
        self._lines[place] = NO_BODY
        return size

    def emptied(self) -> Iterator[object]:
        """Take out and yield all, see `turns.emptied`."""
        return emptied(self._lines)


class Returned:
    """Messages by number, in ascending order: in sorted blocks, each with its greatest number."""

    __slots__ = ("_count", "_lasts", "_lines", "_numbers")

    def __init__(self) -> None:
        self._count = 0
        self._lasts: list[int] = []
        self._numbers: list[array[int]] = []
        self._lines: list[list[bytes]] = []

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return zip(chain(*self._numbers), chain(*self._lines), strict=True)

    def __contains__(self, number: int) -> bool:
        return self.get(number) is not None

    @property
    def first(self) -> int:
        """The smallest number; there must be one."""
        return self._numbers[0][0]

    def get(self, number: int) -> bytes | None:
        block = bisect_left(self._lasts, number)
        if block == len(self._lasts):
            return None
        numbers = self._numbers[block]
        place = bisect_left(numbers, number)
        return self._lines[block][place] if numbers[place] == number else None

    def add(self, number: int, line: bytes) -> None:
        """Add a message whose number is not there."""
        block = bisect_left(self._lasts, number)
        self._count += 1
        if block == len(self._lasts):
            if not block or len(self._numbers[-1]) == BLOCK:
                self._lasts.append(number)
                self._numbers.append(array("q", (number,)))
                self._lines.append([line])
                return
            block -= 1
            self._lasts[block] = number
        numbers, lines = self._numbers[block], self._lines[block]
        place = bisect_left(numbers, number)
        numbers.insert(place, number)
        lines.insert(place, line)
        if len(numbers) > BLOCK:
            half = BLOCK // 2
            self._lasts.insert(block, numbers[half - 1])
            self._numbers[block : block + 1] = numbers[:half], numbers[half:]
            self._lines[block : block + 1] = lines[:half], lines[half:]

    def pop(self, number: int) -> bytes | None:
        """Remove a message; None if it is not there."""
        block = bisect_left(self._lasts, number)
        if block == len(self._lasts):
            return None
        numbers = self._numbers[block]
        place = bisect_left(numbers, number)
        return self._pop(block, place) if numbers[place] == number else None

    def pop_first(self) -> tuple[int, bytes]:
        return self.first, self._pop(0, 0)

    def _pop(self, block: int, place: int) -> bytes:
        self._count -= 1
        numbers, lines = self._numbers[block], self._lines[block]
        del numbers[place]
        line = lines.pop(place)
        if not numbers:
            del self._lasts[block], self._numbers[block], self._lines[block]
        elif place == len(numbers):
            self._lasts[block] = numbers[-1]
        return line

    def after(self, first: int, count: int) -> list[int]:
        """The first numbers from `first` on, at most so many."""
        found: list[int] = []
        for block in range(bisect_left(self._lasts, first), len(self._lasts)):
            numbers = self._numbers[block]
            start = 0 if found else bisect_left(numbers, first)
            found += numbers[start : start + count - len(found)]
            if len(found) == count:
                break
        return found

    def before(self, end: int) -> list[int]:
        """Some numbers below `end`, the last ones; none if there are none."""
        block = min(bisect_left(self._lasts, end), len(self._lasts) - 1)
        for numbers in self._numbers[max(0, block - 1) : block + 1][::-1]:
            if some := numbers[: bisect_left(numbers, end)].tolist():
                return some
        return []

    def emptied(self) -> Iterator[object]:
        """Take out and yield all, see `turns.emptied`."""
        self._numbers, self._lasts, self._count = [], [], 0
        for lines in self._lines:
            yield from emptied(lines)
        self._lines = []
