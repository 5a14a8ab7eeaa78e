"""Rows of ids that were published once: one a commit, as many as the window needs.

The one rule: a row goes when all later rows alone hold the window's ids.
"""

from collections import deque
from typing import NamedTuple


class OnceRow(NamedTuple):
    number: int
    ids: int
    """How many it holds."""
    crc: int


class OnceRows:
    """`next` is the number of the next row."""

    def __init__(self, ids_max: int) -> None:
        self.next = 1
        self._ids_max = ids_max
        self._rows: deque[OnceRow] = deque()
        self._count = 0

    def surplus(self, count: int) -> list[OnceRow]:
        """The rows that go when so many more ids are written."""
        surplus = self._count + count - self._ids_max
        gone = []
        for row in self._rows:
            surplus -= row.ids
            if surplus < 0:
                break
            gone.append(row)
        return gone

    def restored(self, row: OnceRow) -> None:
        """A row is there, the latest so far."""
        self._rows.append(row)
        self._count += row.ids
        self.next = row.number + 1

    def written(self, row: OnceRow) -> None:
        """A row is there, and what it outnumbers is gone."""
        for _ in self.surplus(row.ids):
            self._count -= self._rows.popleft().ids
        self.restored(row)
