"""The ids of messages published with `--once`.

The one rule: the window holds a fixed number of the latest ids.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

ONCE_BYTES: Final = 90
"""Memory of an id besides its length: an entry of a set and one of a deque (measured)."""


class OnceWindow:
    """With `ids_max` 0 every id counts as new."""

    __slots__ = ("_id_bytes", "_ids", "_known", "ids_max")

    def __init__(self, ids_max: int) -> None:
        self.ids_max = ids_max
        self._known: set[bytes] = set()
        self._ids: deque[bytes] = deque()
        self._id_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Approximate memory."""
        return self._id_bytes + ONCE_BYTES * len(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, message_id: bytes) -> bool:
        return message_id in self._known

    def add(self, message_id: bytes) -> bool:
        """Remember an id; return whether it was not known."""
        if message_id in self._known:
            return False
        self._known.add(message_id)
        self._ids.append(message_id)
        self._id_bytes += len(message_id)
        if len(self._ids) > self.ids_max:
            oldest = self._ids.popleft()
            self._known.discard(oldest)
            self._id_bytes -= len(oldest)
        return True

    def restore(self, ids: Iterable[bytes]) -> None:
        """Add the ids of the journal, oldest first."""
        for message_id in ids:
            self.add(message_id)
