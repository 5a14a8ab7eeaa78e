"""Whether a client is read now, and how much of it at once.

A client is read while it has no reason to rest, see `Resting`:

    reason   comes from                                           ends when
    TURN     Clients: its chunk was large, or its turn is over    others have had theirs
    JOURNAL  Clients: too much of it waits for the journal        the next commit is written
    OUTBOX   ServerClient.send: it does not read its replies      it has read them
    AUTH     Clients: its password is verified in a thread        that is done
    RATE     Clients: its user has sent more than it may          the rate allows it
    ROOM     Unhandled: its line is long, there is hardly room    there is, or it is its turn
    STOP     Clients: the server stops                            never

The one rule: all clients are read into one buffer, and what is in it is copied at once.
"""

from collections.abc import Hashable
from typing import Final

from mqks.clock import Patient
from mqks.limits import (
    PIECE_BYTES_MAX,
    PIECE_LATE_BYTES_MAX,
    TLS_PIECE_BYTES_MAX,
    TLS_PIECE_LATE_BYTES_MAX,
)


class Hold:
    """Why reading from a client is paused."""

    TURN: Final = 1
    JOURNAL: Final = 2
    OUTBOX: Final = 4
    STOP: Final = 8
    AUTH: Final = 16
    ROOM: Final = 32
    RATE: Final = 64


class ReadBuffer:
    __slots__ = (
        *("_is_late", "_piece", "_piece_bytes"),
        *("long_lines", "outboxes_full", "tls_piece_bytes", "whole"),
    )

    def __init__(self) -> None:
        self.whole = self._piece = memoryview(bytearray(PIECE_BYTES_MAX))
        self._piece_bytes = PIECE_BYTES_MAX
        self.tls_piece_bytes = TLS_PIECE_BYTES_MAX
        self._is_late = False
        self.long_lines: dict[Hashable, Patient] = {}
        """Clients whose long lines are read though there is hardly room, and when that is checked.
        """
        self.outboxes_full = False
        """Clients with unsent replies are not read: there is hardly room for more."""

    def buffer(self, client: Hashable) -> memoryview:
        """The part of `whole` for what is read next."""
        return self.whole if client in self.long_lines else self._piece

    def limit(self, piece_bytes: int) -> None:
        """Read at most so much at once, as there is room for lines."""
        self._piece_bytes = piece_bytes
        self._cut()

    def late(self, is_late: bool) -> None:
        """Whether the turn of the event loop is over: what can be read in it is less then."""
        if is_late != self._is_late:
            self._is_late = is_late
            self._cut()

    def _cut(self) -> None:
        size, self.tls_piece_bytes = self._piece_bytes, TLS_PIECE_BYTES_MAX
        if self._is_late:
            size = min(size, PIECE_LATE_BYTES_MAX)
            self.tls_piece_bytes = TLS_PIECE_LATE_BYTES_MAX
        self._piece = self.whole[:size]
