"""Rows of ids that were published once: one a commit, as many as the window needs.

The one rule: a row goes when all later rows alone hold the window's ids.
"""

from collections import deque
from typing import Any


class OnceRows:
    def __init__(self, ids_max: int) -> None:
        self._ids_max = ids_max
        self._rows: deque[tuple[int, int]] = deque()
        """Number of the row, and how many ids it holds."""
        self._count = 0
        self._next = 1

    def restored(self, number: int, count: int) -> None:
        """A row is there, the latest so far."""
        self._rows.append((number, count))
        self._count += count
        self._next = number + 1

    def statements(self, ids: list[bytes]) -> list[tuple[str, list[Any]]]:
        """What a commit with these ids has to say; `written` tells when it is done."""
        surplus = self._count + len(ids) - self._ids_max
        gone = []
        for number, count in self._rows:
            surplus -= count
            if surplus < 0:
                break
            gone.append((number,))
        return [
            ("delete from once where number = ?", gone),
            (
                "insert into once (number, count, ids) values (?, ?, ?)",
                [(self._next, len(ids), b"\n".join(ids))],
            ),
        ]

    def written(self, count: int) -> None:
        self.restored(self._next, count)
        while self._count - self._rows[0][1] >= self._ids_max and len(self._rows) > 1:
            self._count -= self._rows.popleft()[1]
