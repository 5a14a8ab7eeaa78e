"""What clients have sent and the broker has not handled: lines that wait for their turn, and
incomplete lines.

The one rule: who sends little is always read. The less room there is, the smaller are the pieces in
which clients are read. Near the limit a few long lines are read at a time; who does not go on with
one is disconnected.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from mqks import log
from mqks.broker.broker import Broker
from mqks.clock import Patient
from mqks.errors import LimitExceeded
from mqks.limits import (
    LONG_LINES_READ,
    PIECE_BYTES_MAX,
    PIECE_BYTES_MIN,
    STUCK_S,
)
from mqks.server.client import Hold, ReadBuffer, ServerClient

ROOM_PIECES: Final = 256
"""A piece is at most this part of the room."""
GOES_ON_BYTES: Final = 64 * 1024
"""Who has sent so much of a line in `STUCK_S` goes on with it."""


class Unhandled:
    """`drop` disconnects a client with a reason."""

    def __init__(
        self,
        broker: Broker,
        reading: ReadBuffer,
        drop: Callable[[ServerClient, LimitExceeded], None],
    ) -> None:
        self._broker = broker
        self._flow = broker.flow
        self._drop = drop
        self._loop = asyncio.get_running_loop()
        self._bytes_max = broker.settings.unhandled_bytes_max
        self._reading = reading
        self._long = reading.long_lines
        self._waiting: dict[ServerClient, None] = {}
        """Clients whose long lines wait for that, in the order they came."""
        self._full = False
        """It is logged."""

    @property
    def is_short(self) -> bool:
        """Whether there is hardly room: for lines that wait for their turn, not for long ones."""
        return self._flow.unhandled_bytes > self._bytes_max * 3 // 4

    @property
    def excess_bytes(self) -> int:
        """How much has to go, so that there is room for a while."""
        return self._flow.unhandled_bytes - self._bytes_max // 2

    def count(self, client: ServerClient) -> None:
        """Count what is left of a client's lines."""
        connection, flow = client.connection, self._flow
        left = connection.left_bytes
        flow.unhandled_bytes += left - client.unhandled_bytes
        client.unhandled_bytes = left
        room = self._bytes_max - flow.unhandled_bytes
        size = min(PIECE_BYTES_MAX, max(PIECE_BYTES_MIN, room // ROOM_PIECES))
        if size != flow.piece_bytes:
            flow.piece_bytes = size
            self._reading.limit(size)
        tail_bytes, before = connection.splitter.tail_bytes, client.tail_bytes
        client.tail_bytes = tail_bytes
        if tail_bytes < before and client in self._long:
            self._forget(client)  # Its line is complete; those who wait come before the next one.
        if tail_bytes < PIECE_BYTES_MIN or client.ended or connection.closed:
            self._forget(client)
        elif client not in self._long and self.is_short:
            client.rest(Hold.ROOM)
            self._waiting[client] = None
        self._admit()
        self._tell()

    def leave(self, client: ServerClient) -> None:
        """It has disconnected, and its lines are handled."""
        self._flow.unhandled_bytes -= client.unhandled_bytes
        client.unhandled_bytes = 0
        self._admit()
        self._tell()

    def _forget(self, client: ServerClient) -> None:
        if client in self._waiting:
            del self._waiting[client]
            self._loop.call_soon(client.resume, Hold.ROOM)
        if timer := self._long.pop(client, None):
            timer.cancel()

    def _admit(self) -> None:
        while self._waiting and (len(self._long) < LONG_LINES_READ or not self.is_short):
            client = next(iter(self._waiting))
            del self._waiting[client]
            if self.is_short:
                self._check_later(client)
            self._loop.call_soon(client.resume, Hold.ROOM)

    def _check_later(self, client: ServerClient) -> None:
        size = client.connection.splitter.tail_bytes
        self._long[client] = Patient(STUCK_S, partial(self._check, client, size))

    def _check(self, client: ServerClient, began_bytes: int) -> None:
        """Whether it has gone on, if it could."""
        if client.ended:
            self._forget(client)
            self._admit()
            return
        size = client.connection.splitter.tail_bytes
        waits = client.rests & ~Hold.OUTBOX
        if waits or size >= began_bytes + GOES_ON_BYTES or not self.is_short:
            self._check_later(client)
            return
        self._broker.limits_reached["unhandled_bytes_max"] += 1
        reason = (
            f"a line of {size} bytes does not go on for {STUCK_S:g} s, and the server is near "
            "unhandled_bytes_max"
        )
        self._drop(client, LimitExceeded("unhandled_bytes_max", reason))

    def _tell(self) -> None:
        size = self._flow.unhandled_bytes
        # Two bounds, so that it is not logged for each line that comes and goes.
        if not self._full and self.is_short:
            self._full = True
            log.warning("unhandled_full", unhandled_bytes=size)
        elif self._full and size <= self._bytes_max // 2:
            self._full = False
            log.event("unhandled_has_room", unhandled_bytes=size)
