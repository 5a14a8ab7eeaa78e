"""A connection to an HTTP port: uvicorn's, read in pieces.

The one rule: of all connections to a port, one piece of one of them is parsed in a turn of the
event loop. A body is parsed only while somebody reads it.
"""

import asyncio
import re
from collections import deque
from typing import Any, ClassVar, Final, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mqks import log
from mqks.clock import Patient
from mqks.limits import (
    HTTP_HEAD_LINES_MAX,
    HTTP_LINGER_BYTES_MAX,
    HTTP_PIECE_BYTES_MAX,
    HTTP_PIECE_LINES_MAX,
    HTTP_UNREAD_BYTES_MAX,
    HTTP_WAITING_BYTES_MAX,
)

REQUEST_S: Final = 5.0
"""About how long a connection may take to send a request: silent ones must not block others."""
_HEAD_END: Final = re.compile(rb"\n\r?\n")


class Port:
    """What the connections to a port share."""

    def __init__(self, connections_max: int) -> None:
        self.connections_max = connections_max
        self.unread: dict[HttpProtocol, int] = {}
        """Long answers that wait for their peers, and their bytes; who waits longest is first."""
        self.waiting_bytes = 0
        """Of requests that have come and are not parsed."""
        self._unparsed: deque[HttpProtocol] = deque()

    def parse_later(self, connection: "HttpProtocol") -> None:
        if not connection.is_due:
            connection.is_due = True
            self._unparsed.append(connection)
            if len(self._unparsed) == 1:
                connection.loop.call_soon(self._parse)

    def _parse(self) -> None:
        connection = self._unparsed.popleft()
        if self._unparsed:
            connection.loop.call_soon(self._parse)
        connection.is_due = False
        connection.parse()


class HttpProtocol(H11Protocol):
    port: ClassVar[Port]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Transport(transport, self))
        self.made_s = self.loop.time()
        self.is_due = False
        self.is_held = False
        """The request so far waits for its reader, or for the answer to the one before."""
        self._transport = transport
        self._is_new = True
        self._unparsed = bytearray()
        self.waiting_bytes = 0
        """Of these, and of an incomplete head."""
        self._ignored = 0
        """Bytes that came when nothing was read any more."""
        self._left = 0
        """Bytes of an answer that its peer had yet to take."""
        if len(self.connections) > self.port.connections_max:
            waiting = [each for each in cast(set[HttpProtocol], self.connections) if each.waits]
            min(waiting, key=lambda each: each.made_s, default=self).transport.abort()
        Patient(REQUEST_S, self._end_silent)

    @property
    def waits(self) -> bool:
        """Its peer has yet to send a request, or does not read the response."""
        cycle = self.cycle
        silent = not cycle or cycle.response_complete or cycle.more_body or self.flow.write_paused
        return silent and not self.transport.is_closing()

    @property
    def has_unread(self) -> bool:
        """Something has come, or is to come, that nobody will read."""
        unread = self._ignored or self._unparsed or self.conn.trailing_data[0]
        return bool(unread) or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def _end_silent(self) -> None:
        if self not in self.connections:
            return
        before, self._left = self._left, self._transport.get_write_buffer_size()
        cycle = self.cycle
        # Between requests uvicorn has a timer, which the first byte of the next request ends.
        is_idle = not cycle or (cycle.response_complete and not self.timeout_keep_alive_task)
        if self._left == before if self._left else is_idle and not self.is_due:
            self._transport.abort()
        else:
            Patient(REQUEST_S, self._end_silent)

    def pause_writing(self) -> None:
        super().pause_writing()
        unread = self.port.unread
        unread[self] = self._transport.get_write_buffer_size()
        while len(unread) > 1 and sum(unread.values()) > HTTP_UNREAD_BYTES_MAX:
            longest = next(iter(unread))
            del unread[longest]
            longest.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.port.unread.pop(self, None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.port.unread.pop(self, None)
        self._unparsed.clear()
        self._count(0)

    def _count(self, unparsed_bytes: int) -> None:
        """Count what waits; for too much, whose is most is closed."""
        port = self.port
        port.waiting_bytes += unparsed_bytes - self.waiting_bytes
        self.waiting_bytes = unparsed_bytes
        if port.waiting_bytes > HTTP_WAITING_BYTES_MAX:
            connections = cast(set[HttpProtocol], self.connections)
            max(connections, key=lambda each: each.waiting_bytes).transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self._ignored += len(data)
            if self._ignored > HTTP_LINGER_BYTES_MAX:
                self._transport.abort()
            return
        self._unset_keepalive_if_required()
        if self._is_new and b"\n" in data:
            # Who speaks something else, like a client of the broker, learns it from the first line.
            first, end, rest = data.partition(b"\n")
            data = first + end + (rest if b" HTTP/" in first else b"\n")
        self._is_new = False
        self._unparsed += data
        if len(self._unparsed) > HTTP_PIECE_BYTES_MAX:
            self._transport.pause_reading()
        self._count(self.waiting_bytes + len(data))
        self.go_on()

    def go_on(self) -> None:
        """Parse what has come, unless it has to wait."""
        if self._unparsed and not self.is_held:
            self.port.parse_later(self)

    def handle_events(self) -> None:
        # Uvicorn calls this after an answer, for the next request if there is one already.
        self.port.parse_later(self)

    def parse(self) -> None:
        """Parse a piece of what has come."""
        if self.is_held or self.transport.is_closing():
            return
        try:
            self._parse_piece()
        except Exception as failure:
            # The event loop would report it to the server, which would end. h11 says so of a
            # request that is wrong when its answer has begun.
            if not isinstance(failure, h11.LocalProtocolError):
                log.error("http_failed", path="", exception=failure)
            self._transport.abort()
            return
        self._count(len(self._unparsed) + len(self.conn.trailing_data[0]))
        if len(self._unparsed) <= HTTP_PIECE_BYTES_MAX and not self._transport.is_closing():
            self._transport.resume_reading()
        self.go_on()

    def _parse_piece(self) -> None:
        conn = self.conn
        if conn.their_state in (h11.MUST_CLOSE, h11.CLOSED, h11.ERROR):
            self.ignore()
            return
        is_head = conn.their_state is h11.IDLE
        if self._unparsed:  # No bytes would be the end to h11.
            size = _piece(self._unparsed, is_head=is_head)
            conn.receive_data(bytes(self._unparsed[:size]))
            del self._unparsed[:size]
        super().handle_events()
        if self.transport.is_closing() or conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            return
        # h11 takes all lines of a head, or of what follows the last chunk, in one step.
        if conn.trailing_data[0].count(b"\n") > HTTP_HEAD_LINES_MAX:
            self.send_400_response("The request has too many header lines.")
        elif is_head and conn.their_state is h11.SEND_BODY:
            self.flow.pause_reading()

    def ignore(self) -> None:
        """Read on to no effect."""
        self._ignored += len(self._unparsed)
        self._unparsed.clear()
        self._transport.resume_reading()


def _piece(data: bytearray, *, is_head: bool) -> int:
    """How much of these data is parsed at once: a head ends it, and each line takes its time."""
    some = data[:HTTP_PIECE_BYTES_MAX]
    if is_head and (end := _HEAD_END.search(some)):
        del some[end.end() :]
    *lines, rest = some.split(b"\n", HTTP_PIECE_LINES_MAX)
    return len(some) - (len(rest) if len(lines) == HTTP_PIECE_LINES_MAX else 0)


class _Transport(asyncio.Transport):
    """What uvicorn sees of a socket: it decides when requests are parsed, not what is read; and who
    still sends when it closes can read the answer, since what comes is read to no effect. A socket
    that is closed with unread bytes is reset."""

    def __init__(self, below: asyncio.Transport, protocol: HttpProtocol) -> None:
        self._below = below
        self._protocol = protocol
        self._is_closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._below.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._below.write(data)

    def pause_reading(self) -> None:
        self._protocol.is_held = True

    def resume_reading(self) -> None:
        self._protocol.is_held = False
        self._protocol.go_on()

    def is_closing(self) -> bool:
        return self._is_closing or self._below.is_closing()

    def close(self) -> None:
        if self.is_closing() or not self._protocol.has_unread:
            self._below.close()
            return
        self._is_closing = True
        self._below.write_eof()
        self._protocol.ignore()
        cycle = self._protocol.cycle
        if cycle and not cycle.response_complete:  # A body was wrong.
            cycle.disconnected = True
            cycle.message_event.set()

    def abort(self) -> None:
        self._below.abort()
