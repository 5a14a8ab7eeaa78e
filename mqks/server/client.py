"""One connected client: bytes in, bytes out, and when to pause reading.

The one rule: data are handled in the turn of the event loop in which they arrive. So this is a
protocol and not a task: a reply leaves in the turn in which it was made, and a request with its
reply costs one turn, not three. All clients are read into one buffer, and what is in it is copied
at once.

A client is read while it has no reason to rest, see `Resting`:

    reason   comes from                                           ends when
    TURN     Chunks: its chunk was large, or its turn is over     others have had theirs
    JOURNAL  Chunks: too much of it waits for the journal         the next commit is written
    OUTBOX   ServerClient.send: it does not read its replies      it has read them
    AUTH     Clients: its password is verified in a thread        that is done
    RATE     Chunks: its user has sent more than it may           the rate allows it
    ROOM     Unhandled: its line is long, there is hardly room    there is, or it is its turn
    STOP     Clients: the server stops                            never
"""

import asyncio
from collections.abc import Hashable
from typing import Final, Protocol, cast

from mqks.broker.spine.base.resting import Resting
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.outbox import Slow
from mqks.clock import Patient
from mqks.limits import (
    LINGER_BYTES_MAX,
    PIECE_BYTES_MAX,
    PIECE_LATE_BYTES_MAX,
    TLS_PIECE_BYTES_MAX,
    TLS_PIECE_LATE_BYTES_MAX,
)
from mqks.server.gate import Peer

LINGER_S = 2.0
"""How long a connection that broke the rules is still read and its data ignored."""
NOT_SEEN = -1
TLS_HELLO = b"\x16\x03"
"""How a client begins that takes the port for one with TLS."""


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


class ClientOwner(Protocol):
    """Who is told what comes from clients."""

    stopping: bool
    reading: ReadBuffer

    def add(self, client: "ServerClient") -> None: ...
    def begin_reading(self) -> None: ...
    def receive(
        self, client: "ServerClient", data: bytes, read_bytes: int, *, is_cut: bool
    ) -> None: ...
    def wait_for_turn(self, client: "ServerClient") -> None: ...
    def handle_chunks(self) -> None: ...
    def refuse_tls(self, client: "ServerClient") -> None: ...
    def caught_up(self, client: "ServerClient", why: int = 0) -> None: ...
    def end_of_stream(self, client: "ServerClient") -> None: ...
    def remove(self, client: "ServerClient") -> None: ...


class ServerClient(Resting, asyncio.BufferedProtocol):
    """`peer` was admitted by the gate; with more than `unread_bytes_max` of unread replies it is
    not read. While the client rests, it is not read. The server decides how much is read at once.
    """

    connection: Connection
    transport: asyncio.Transport

    def __init__(self, owner: ClientOwner, unread_bytes_max: int, peer: Peer) -> None:
        super().__init__()
        self._owner = owner
        self._unread_bytes_max = unread_bytes_max
        self.peer = peer
        self.made = False
        """It has, or had, a transport."""
        self.stranger = False
        """It has not authenticated yet."""
        self.auth_timer: Patient | None = None
        self._lingering_bytes = 0
        self._is_new = True
        """Nothing has come from it."""
        self._at_end = False
        """It has closed its sending side."""
        self.ended = False
        """It sends no more, and is closed when its confirms are sent."""
        self.lingers = False
        """It broke the rules, and gets an error before it is closed."""
        self._lingering = False
        self.piece_bytes = 0
        """How much is read at once, as its user has a rate; 0: as much as from all."""
        self.unhandled_bytes = 0
        """Memory of what has come in and is not handled."""
        self.tail_bytes = 0
        """Of its incomplete line, when that was last counted."""
        self.unsent_bytes = 0
        """Bytes sent since everything had been read: all of them may still be in memory."""
        self.taken_bytes = NOT_SEEN
        self.moved_s = 0.0
        """When it was last seen reading."""

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.made = True
        if self._owner.stopping:  # Accepted while the listeners closed.
            self.ended = True
            self.transport.abort()
            return
        self._owner.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer = self._owner.reading.buffer(self)
        return buffer[: self.piece_bytes] if self.piece_bytes else buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._owner.reading.whole[:nbytes])
        self._received(data, nbytes, is_cut=nbytes == len(self.get_buffer(nbytes)))

    def _received(self, data: bytes, read_bytes: int, *, is_cut: bool) -> None:
        if not self.ended:
            if self._is_new:
                self._is_new = False
                if data.startswith(TLS_HELLO):
                    self._owner.refuse_tls(self)
                    return
            self._owner.receive(self, data, read_bytes, is_cut=is_cut)
            return
        self._ignore(data)

    def _ignore(self, data: bytes) -> None:
        self._lingering_bytes += len(data)
        if self._lingering_bytes > LINGER_BYTES_MAX:
            self.transport.abort()

    def eof_received(self) -> bool:
        self._at_end = True
        # What came before the end; of that, what a turn leaves comes before the end, too.
        self._owner.handle_chunks()
        if not (self.ended or self.connection.waits or self.connection.works):
            self._owner.end_of_stream(self)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if hasattr(self, "connection"):  # Otherwise the server stopped when it was accepted.
            self._owner.remove(self)

    def pause_writing(self) -> None:
        self.connection.rest(Slow.PEER)

    def resume_writing(self) -> None:
        self.unsent_bytes, self.taken_bytes = 0, NOT_SEEN
        self.resume(Hold.OUTBOX)
        self._owner.caught_up(self, Slow.PEER)

    # -- called by the server

    def close(self) -> None:
        """Close when the client has read what was sent.

        A client that broke the rules may still be sending: closing with unread bytes in the
        socket would reset the connection before it has read why.
        """
        if not self.lingers:
            self.hang_up()
        elif not self._lingering:
            self._lingering = True
            asyncio.get_running_loop().call_later(LINGER_S, self.transport.abort)
            self._say_end()
            self.transport.write_eof()

    def hang_up(self) -> None:
        """Close when what was written is sent."""
        self._say_end()
        self.transport.close()

    def _say_end(self) -> None:
        """Tell the client that nothing more comes, if there is a way."""

    def send(self, data: bytes) -> None:
        """Write bytes to the socket; `paused` shows whether they were accepted at once."""
        self.unsent_bytes += len(data)
        self.transport.write(data)
        if self.paused and (
            self._owner.reading.outboxes_full or self.waiting_bytes > self._unread_bytes_max
        ):
            self.rest(Hold.OUTBOX)

    @property
    def paused(self) -> bool:
        """Whether it reads its replies more slowly than they are produced."""
        return bool(self.connection.rests & Slow.PEER)

    @property
    def waiting_bytes(self) -> int:
        """Unread bytes of a slow client; 0 for others."""
        return self.transport.get_write_buffer_size() if self.paused else 0

    def set_high_water(self, high_bytes: int) -> None:
        """Above it the client is slow until it has read everything."""
        self.transport.set_write_buffer_limits(high=high_bytes, low=0)

    def _stop(self) -> None:
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def _go_on(self) -> None:
        """The rest of its earlier lines is handled before more is read."""
        if not self.transport.is_closing():
            if self.connection.overrun and not self.ended:
                self._owner.wait_for_turn(self)
            else:
                self.transport.resume_reading()
            if self._at_end:
                self.eof_received()
