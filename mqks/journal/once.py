"""Rows of ids that were published with `--once`: one per commit, as many as the window needs.

The one rule: a row is deleted when the later rows hold all ids of the window.
"""

from collections import deque
from typing import NamedTuple


class OnceRow(NamedTuple):
    number: int
    ids: int
    """Number of ids in it."""
    crc: int


class OnceRows:
    """`next` is the number of the next row."""

    def __init__(self, ids_max: int) -> None:
        self.next = 1
        self._ids_max = ids_max
        self._rows: deque[OnceRow] = deque()
        self._count = 0

    def surplus(self, count: int) -> list[OnceRow]:
        """The rows to delete when this many more ids are written."""
        surplus = self._count + count - self._ids_max
        gone = []
        for row in self._rows:
            surplus -= row.ids
            if surplus < 0:
                break
            gone.append(row)
        return gone

    def restored(self, row: OnceRow) -> None:
        """Add a row that was loaded; rows are added in order."""
        self._rows.append(row)
        self._count += row.ids
        self.next = row.number + 1

    def written(self, row: OnceRow) -> None:
        """A row was written, and the surplus was deleted."""
        for _ in self.surplus(row.ids):
            self._count -= self._rows.popleft().ids
        self.restored(row)
