"""The ids of messages published with `--once`.

The one rule: the window holds a fixed number of the latest ids. What it keeps of an id, here and in
the journal, is the id, or `{id}\\t{microseconds}` for one that counts until that time.
"""

from collections import deque
from collections.abc import Iterable
from math import inf
from typing import Final

ONCE_BYTES: Final = 90
"""Memory of an id besides its length: an entry of a dict and one of a deque (measured)."""


class OnceWindow:
    """With `ids_max` 0 every id counts as new."""

    __slots__ = ("_id_bytes", "_ids", "_known", "ids_max")

    def __init__(self, ids_max: int) -> None:
        self.ids_max = ids_max
        self._known: dict[bytes, bytes] = {}
        """Ids, and what is kept of each."""
        self._ids: deque[bytes] = deque()
        self._id_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Approximate memory."""
        return self._id_bytes + ONCE_BYTES * len(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def knows(self, message_id: bytes, now_us: int) -> bool:
        kept = self._known.get(message_id)
        return kept is not None and (kept == message_id or now_us < int(kept.rpartition(b"\t")[2]))

    def add(self, message_id: bytes, now_us: int, for_s: float = inf) -> bytes | None:
        """Remember an id; return what is to be kept of it, or None if it was known."""
        if self.knows(message_id, now_us):
            return None
        kept = message_id if for_s == inf else b"%b\t%d" % (message_id, now_us + round(for_s * 1e6))
        self._keep(message_id, kept)
        return kept

    def _keep(self, message_id: bytes, kept: bytes) -> None:
        self._known[message_id] = kept
        self._ids.append(kept)
        self._id_bytes += len(kept)
        if len(self._ids) > self.ids_max:
            oldest = self._ids.popleft()
            self._id_bytes -= len(oldest)
            oldest_id = oldest.partition(b"\t")[0]
            if self._known.get(oldest_id) == oldest:
                del self._known[oldest_id]

    def restore(self, ids: Iterable[bytes]) -> None:
        """Add the ids of the journal, oldest first."""
        for kept in ids:
            self._keep(kept.partition(b"\t")[0], kept)
