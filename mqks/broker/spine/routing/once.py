"""The ids of messages that were published with `--once`: who remembers them, and when they are
written.

The one rule: of the messages with one id only the first is published.
"""

from math import inf
from typing import Protocol

from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.log.pending import Pending


class KnownIds(Protocol):
    """Ids that were published with `--once`."""

    def knows(self, message_id: bytes) -> bool: ...

    def add(self, message_id: bytes, for_s: float = inf) -> bytes | None:
        """Remember an id; return what the journal has of it, or None if it was known."""


# An id is written with its message or after it, never before: an id that is durable without its
# message would block the message permanently. It is remembered at once, so that of two messages in
# one chunk only the first is published.


class Once:
    """Alone remembers ids, and alone writes them."""

    def __init__(self, known: KnownIds, pending: Pending) -> None:
        self._known = known
        self._pending = pending
        self.gathered: list[bytes] = []
        """Those of the messages that the current chunk gathers."""
        self.unfinished = 0
        """Number of works with ids that are known but not written yet: a second publish of such an
        id must not be confirmed before the first."""

    def knows(self, connection: Connection, message_id: bytes) -> bool:
        return self._known.knows(connection.once_id(message_id))

    def take(
        self, connection: Connection, message_id: bytes, for_s: float = inf
    ) -> list[bytes] | None:
        """Remember an id; return what is to be written of it, or None if it was known."""
        new = self._known.add(connection.once_id(message_id), for_s)
        return None if new is None else [new]

    def gather(self, new: list[bytes]) -> None:
        """These are of messages that the chunk gathers."""
        self.gathered += new

    def take_gathered(self) -> list[bytes]:
        """Those of the chunk, which ends, or whose messages are published."""
        gathered, self.gathered = self.gathered, []
        return gathered

    def write(self, new: list[bytes]) -> None:
        """Write these with the next commit."""
        if new:
            self._pending.entry.once += new
            self._pending.records += len(new)

    def hold(self, new: list[bytes]) -> None:
        """Messages with these ids are published in turns: the ids are written when that ends."""
        self.unfinished += bool(new)

    def release(self, held: list[bytes]) -> None:
        self.unfinished -= bool(held)
        self.write(held)
