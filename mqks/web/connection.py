"""A connection to an HTTP port: h11 on asyncio, read in pieces, and its requests as ASGI has them.

The one rule: of all connections to a port, one piece of one of them is parsed in a turn of the
event loop. A body is parsed only while somebody reads it.

Written here since servers of ASGI parse all that comes, when it comes, and their classes for that
are not meant to be changed.
"""

import asyncio
import re
from collections import deque
from email.utils import formatdate
from http.client import responses
from typing import Any, Final
from urllib.parse import unquote

import anyio
import h11
from starlette.types import ASGIApp, Message

from mqks import log
from mqks.clock import Patient
from mqks.limits import (
    HTTP_BODY_BYTES_MAX,
    HTTP_HEAD_LINES_MAX,
    HTTP_LINGER_BYTES_MAX,
    HTTP_PIECE_BYTES_MAX,
    HTTP_PIECE_LINES_MAX,
    HTTP_UNREAD_BYTES_MAX,
    HTTP_WAITING_BYTES_MAX,
)

REQUEST_S: Final = 5.0
"""About how long a connection may take to send a request: silent ones must not block others."""
LOOK_S: Final = 0.05
"""How often a port that closes looks whether all is answered."""
LOOPBACK: Final = "127.0.0.1", "::1"
FORWARDED_TLS: Final = b"x-forwarded-proto", b"https"
"""The header of a proxy on this machine that adds TLS."""
_HEAD_END: Final = re.compile(rb"\n\r?\n")


class Port:
    """What the connections to a port share."""

    def __init__(self, app: ASGIApp, connections_max: int) -> None:
        self.app = app
        self.connections_max = connections_max
        self.connections: set[HttpProtocol] = set()
        self.answering: set[asyncio.Task[None]] = set()
        self.is_closing = False
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

    async def close(self, seconds: float) -> None:
        """Answer what is asked already, for so many seconds at most."""
        self.is_closing = True
        for connection in [*self.connections]:
            if connection.is_silent:
                connection.close()
        with anyio.move_on_after(seconds):
            while self.connections or self.answering:
                await anyio.sleep(LOOK_S)
        for task in self.answering:
            task.cancel()
        for connection in [*self.connections]:
            connection.transport.abort()


class HttpExchange:
    """A request and its answer."""

    def __init__(self, connection: "HttpProtocol", request: h11.Request) -> None:
        self._connection = connection
        path, _, query = request.target.partition(b"?")
        get_info = connection.transport.get_extra_info
        peer = get_info("peername") or ("",)  # It may be gone.
        is_by_tls = peer[0] in LOOPBACK and FORWARDED_TLS in request.headers
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode(),
            "server": get_info("sockname"),
            "client": peer,
            "scheme": "https" if is_by_tls else "http",
            "method": request.method.decode(),
            "root_path": "",
            "path": unquote(path.decode()),
            "raw_path": path,
            "query_string": query,
            "headers": [*request.headers],
        }
        self._must_continue = connection.conn.they_are_waiting_for_100_continue
        self.body = bytearray()
        self.more_body = True
        self.came = asyncio.Event()
        """Something of the body has come, or nothing more will."""
        self._is_begun = False
        self.is_over = False
        """It is answered, or nobody waits for that any more."""

    async def run(self) -> None:
        try:
            await self._connection.port.app(self._scope, self._receive, self._send)
        except Exception as failure:
            if not self._is_begun:  # Else the application has answered that it failed.
                log.error("http_failed", path=self._scope["path"], exception=failure)
        if not self.is_over:
            if self._is_begun:
                self._connection.close()
            else:
                self._connection.refuse(500, "Internal Server Error")

    def end(self) -> None:
        self.is_over = True
        self.came.set()

    async def _receive(self) -> Message:
        connection = self._connection
        if self._must_continue and not connection.is_closing:
            self._must_continue = False
            connection.send(
                h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            )
        if not self.is_over:
            connection.resume_parsing()
            await self.came.wait()
            self.came.clear()
        if self.is_over:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def _send(self, message: Message) -> None:
        connection = self._connection
        await connection.is_writable.wait()
        if self.is_over:
            return
        if not self._is_begun:
            self._is_begun, self._must_continue = True, False
            connection.answer(message["status"], message.get("headers", ()))
            return
        is_head = self._scope["method"] == "HEAD"
        connection.send(h11.Data(data=b"" if is_head else message.get("body", b"")))
        if not message.get("more_body", False):
            connection.end_answer()
            self.end()


class HttpProtocol(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, port: Port) -> None:
        self.port = port
        self.loop = asyncio.get_running_loop()
        self.conn = h11.Connection(h11.SERVER)
        self.is_writable = asyncio.Event()
        self.is_writable.set()
        self._exchange: HttpExchange | None = None
        """The last one."""
        self.is_due = False
        self._is_held = False
        """The request so far waits for its reader, or for the answer to the one before."""
        self._is_new = True
        self._is_closing = False
        """What comes is read to no effect."""
        self._unparsed = bytearray()
        self.waiting_bytes = 0
        """Of these, and of an incomplete head."""
        self._ignored = 0
        """Bytes that came when nothing was read any more."""
        self._left = 0
        """Bytes of an answer that its peer had yet to take."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.made_s = self.loop.time()
        self._silent_s = self.made_s
        """Since when its peer has sent nothing, or not all of a request."""
        connections = self.port.connections
        connections.add(self)
        if len(connections) > self.port.connections_max:
            waiting = [each for each in connections if each.waits]
            min(waiting, key=lambda each: each.made_s, default=self).transport.abort()
        Patient(REQUEST_S, self._end_silent)

    @property
    def is_silent(self) -> bool:
        """Its peer has yet to send a request."""
        return self._exchange is None or self._exchange.is_over

    @property
    def waits(self) -> bool:
        """Its peer has yet to send a request, or does not read the response."""
        exchange = self._exchange
        is_asked = exchange is not None and not exchange.is_over and not exchange.more_body
        return not (is_asked and self.is_writable.is_set()) and not self.is_closing

    @property
    def has_unread(self) -> bool:
        """Something has come, or is to come, that nobody will read."""
        unread = self._ignored or self._unparsed or self.conn.trailing_data[0]
        return bool(unread) or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def _end_silent(self) -> None:
        if self not in self.port.connections:
            return
        before, self._left = self._left, self.transport.get_write_buffer_size()
        is_late = self.loop.time() - self._silent_s >= REQUEST_S and not self.is_due
        if self._left == before if self._left else self.is_silent and is_late:
            self.transport.abort()
        else:
            Patient(REQUEST_S, self._end_silent)

    def pause_writing(self) -> None:
        self.is_writable.clear()
        unread = self.port.unread
        unread[self] = self.transport.get_write_buffer_size()
        while len(unread) > 1 and sum(unread.values()) > HTTP_UNREAD_BYTES_MAX:
            longest = next(iter(unread))
            del unread[longest]
            longest.transport.abort()

    def resume_writing(self) -> None:
        self.is_writable.set()
        self.port.unread.pop(self, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.port.connections.discard(self)
        if self._exchange is not None:
            self._exchange.end()
        self.resume_writing()
        self._unparsed.clear()
        self._count(0)

    def _count(self, unparsed_bytes: int) -> None:
        """Count what waits; for too much, whose is most is closed."""
        port = self.port
        port.waiting_bytes += unparsed_bytes - self.waiting_bytes
        self.waiting_bytes = unparsed_bytes
        if port.waiting_bytes > HTTP_WAITING_BYTES_MAX:
            max(port.connections, key=lambda each: each.waiting_bytes).transport.abort()

    # -- requests

    def data_received(self, data: bytes) -> None:
        if self.is_closing:
            self._ignored += len(data)
            if self._ignored > HTTP_LINGER_BYTES_MAX:
                self.transport.abort()
            return
        if not self.waiting_bytes and self._exchange is not None:
            self._silent_s = self.loop.time()
        if self._is_new and b"\n" in data:
            # Who speaks something else, like a client of the broker, learns it from the first line.
            first, end, rest = data.partition(b"\n")
            data = first + end + (rest if b" HTTP/" in first else b"\n")
        self._is_new = False
        self._unparsed += data
        if len(self._unparsed) > HTTP_PIECE_BYTES_MAX:
            self.transport.pause_reading()
        self._count(self.waiting_bytes + len(data))
        self.go_on()

    def go_on(self) -> None:
        """Parse what has come, unless it has to wait."""
        if self._unparsed and not self._is_held:
            self.port.parse_later(self)

    def parse(self) -> None:
        """Parse a piece of what has come."""
        if self._is_held or self.is_closing:
            return
        try:
            self._parse_piece()
        except Exception as failure:
            # The event loop would report it to the server, which would end. h11 says so of a
            # request that is wrong when its answer has begun.
            if not isinstance(failure, h11.LocalProtocolError):
                log.error("http_failed", path="", exception=failure)
            self.transport.abort()
            return
        self._count(len(self._unparsed) + len(self.conn.trailing_data[0]))
        if len(self._unparsed) <= HTTP_PIECE_BYTES_MAX and not self.transport.is_closing():
            self.transport.resume_reading()
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
        try:
            self._take_events()
        except h11.RemoteProtocolError:
            self.refuse(400, "Invalid HTTP request received.")
        if self.is_closing or conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            return
        # h11 takes all lines of a head, or of what follows the last chunk, in one step.
        if conn.trailing_data[0].count(b"\n") > HTTP_HEAD_LINES_MAX:
            self.refuse(400, "The request has too many header lines.")
        elif is_head and conn.their_state is h11.SEND_BODY:
            self._is_held = True

    def _take_events(self) -> None:
        while True:
            event = self.conn.next_event()
            if event is h11.PAUSED:
                self._is_held = True
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return
            if isinstance(event, h11.Request):
                self._exchange = HttpExchange(self, event)
                task = self.loop.create_task(self._exchange.run())
                self.port.answering.add(task)
                task.add_done_callback(self.port.answering.discard)
                continue
            assert self._exchange is not None
            if isinstance(event, h11.Data):
                self._exchange.body += event.data
                if len(self._exchange.body) > HTTP_BODY_BYTES_MAX:
                    self._is_held = True
            else:
                self._exchange.more_body = False
            self._exchange.came.set()
            if self.conn.their_state is h11.MUST_CLOSE:
                return

    def resume_parsing(self) -> None:
        self._is_held = False
        self.go_on()

    def ignore(self) -> None:
        """Read on to no effect."""
        self._ignored += len(self._unparsed)
        self._unparsed.clear()
        self.transport.resume_reading()

    # -- answers

    def send(self, event: h11.Event) -> None:
        self.transport.write(self.conn.send(event) or b"")

    def answer(self, status: int, headers: Any) -> None:
        date = (b"date", formatdate(usegmt=True).encode())
        reason = responses.get(status, "")
        self.send(h11.Response(status_code=status, headers=[date, *headers], reason=reason))

    def refuse(self, status: int, text: str) -> None:
        """Raises LocalProtocolError if another answer has begun."""
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        self.answer(status, headers)
        self.send(h11.Data(data=text.encode()))
        self.send(h11.EndOfMessage())
        self.close()

    def end_answer(self) -> None:
        self.send(h11.EndOfMessage())
        self._silent_s = self.loop.time()
        if self.conn.our_state is h11.MUST_CLOSE or self.port.is_closing:
            self.close()
        elif self.conn.their_state is h11.DONE:
            self.conn.start_next_cycle()
            self._is_held = False
            self.port.parse_later(self)  # There may be the next request already.

    @property
    def is_closing(self) -> bool:
        return self._is_closing or self.transport.is_closing()

    def close(self) -> None:
        """Who still sends can read the answer, since what comes is read to no effect: a socket that
        is closed with unread bytes is reset."""
        if self.is_closing or not self.has_unread:
            self.transport.close()
            return
        self._is_closing = True
        self.transport.write_eof()
        self.ignore()
        if self._exchange is not None:
            self._exchange.end()  # A body was wrong.


def _piece(data: bytearray, *, is_head: bool) -> int:
    """How much of these data is parsed at once: a head ends it, and each line takes its time."""
    some = data[:HTTP_PIECE_BYTES_MAX]
    if is_head and (end := _HEAD_END.search(some)):
        del some[end.end() :]
    *lines, rest = some.split(b"\n", HTTP_PIECE_LINES_MAX)
    return len(some) - (len(rest) if len(lines) == HTTP_PIECE_LINES_MAX else 0)
