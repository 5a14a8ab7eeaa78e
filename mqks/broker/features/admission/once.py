"""The ids of messages published with `--once`.

The one rule: the window holds a fixed number of the latest ids. What it keeps of an id is the id,
or `{id}\\t{until}` for one that counts until a time of the monotonic clock. The journal has
`{id}\\t{until}\\t{for}` instead: a time of the wall clock, and how long the id counts, so that a
clock that was set back between two runs makes it no longer. Times are in microseconds.
"""

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import Final

ONCE_BYTES: Final = 90
"""Memory of an id besides its length: an entry of a dict and one of a deque (measured)."""


class OnceWindow:
    """With `ids_max` 0 every id counts as new."""

    __slots__ = ("_clock_us", "_id_bytes", "_ids", "_known", "_wall_us", "ids_max")

    def __init__(
        self, ids_max: int, clock_us: Callable[[], int], wall_us: Callable[[], int]
    ) -> None:
        self.ids_max = ids_max
        self._clock_us = clock_us
        self._wall_us = wall_us
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

    def knows(self, message_id: bytes) -> bool:
        kept = self._known.get(message_id)
        if kept is None or kept == message_id:
            return kept is not None
        return self._clock_us() < int(kept.rpartition(b"\t")[2])

    def add(self, message_id: bytes, for_s: float = inf) -> bytes | None:
        if self.knows(message_id):
            return None
        if for_s == inf:
            self._keep(message_id, message_id)
            return message_id
        for_us = round(for_s * 1e6)
        self._keep(message_id, b"%b\t%d" % (message_id, self._clock_us() + for_us))
        return b"%b\t%d\t%d" % (message_id, self._wall_us() + for_us, for_us)

    def _keep(self, message_id: bytes, kept: bytes) -> None:
        self._known[message_id] = kept
        self._ids.append(kept)
        self._id_bytes += len(kept)
        if len(self._ids) > self.ids_max:
            oldest = self._ids.popleft()
            self._id_bytes -= len(oldest)
            oldest_id = oldest.partition(b"\t")[0]
            # If its time was over, it may have come again: then its later entry counts.
            if self._known.get(oldest_id) == oldest:
                del self._known[oldest_id]

    def restore(self, ids: Iterable[bytes]) -> None:
        """Add the ids of the journal, oldest first."""
        clock_us, wall_us = self._clock_us(), self._wall_us()
        for each in ids:
            message_id, *times = each.split(b"\t")
            if times:
                until_us, *for_us = map(int, times)
                left_us = min(until_us - wall_us, *for_us)
                self._keep(message_id, b"%b\t%d" % (message_id, clock_us + left_us))
            else:
                self._keep(message_id, message_id)
