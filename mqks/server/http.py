"""Answering HTTP on a socket: what page and metrics, the API and SQS have in common.

The one rule: whatever happens here, the broker continues. Failures are logged and answered with
500, and the number of connections is limited: one that waits for its peer makes room for a new one,
so that nobody is kept out by silence.
"""

import asyncio
import html
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, cast
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config
from uvicorn import Server as Uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mqks.limits import HTTP_CONNECTIONS_MAX, HTTP_UNREAD_BYTES_MAX
from mqks.page.headers import SECURITY
from mqks.server import log
from mqks.server.clock import Patient
from mqks.settings import is_loopback

REQUEST_S = 5.0
"""About how long a connection may take to send a request: silent ones must not block others."""
_MISDIRECTED = PlainTextResponse("This host name is not the broker's.\n", 421)
STOP_S = 1
"""How long a stopping server waits for requests to finish."""


class _Protocol(H11Protocol):
    connections_max = HTTP_CONNECTIONS_MAX
    unread: "ClassVar[dict[_Protocol, int]]"
    """Long answers that wait for their peers, and their bytes, those first that wait longest."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.made_s = self.loop.time()
        self._is_new = True
        self._left = 0
        """Bytes of an answer that its peer had yet to take."""
        if len(self.connections) > self.connections_max:
            waiting = [each for each in cast(set[_Protocol], self.connections) if each.waits]
            min(waiting, key=lambda each: each.made_s, default=self).transport.abort()
        Patient(REQUEST_S, self._end_silent)

    @property
    def waits(self) -> bool:
        """Its peer has yet to send a request, or does not read the response."""
        cycle = self.cycle
        silent = not cycle or cycle.response_complete or cycle.more_body or self.flow.write_paused
        return silent and not self.transport.is_closing()

    def _end_silent(self) -> None:
        # Between requests uvicorn has a timer, which the first byte of the next request ends.
        if not self.cycle or (self.cycle.response_complete and not self.timeout_keep_alive_task):
            self.transport.abort()
        elif not self.transport.is_closing():
            before, self._left = self._left, self.transport.get_write_buffer_size()
            if self._left and self._left == before:
                self.transport.abort()
            Patient(REQUEST_S, self._end_silent)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread[self] = self.transport.get_write_buffer_size()
        while len(self.unread) > 1 and sum(self.unread.values()) > HTTP_UNREAD_BYTES_MAX:
            longest = next(iter(self.unread))
            del self.unread[longest]
            longest.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread.pop(self, None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.unread.pop(self, None)

    def data_received(self, data: bytes) -> None:
        if self._is_new and b"\n" in data:
            # Who speaks something else, like a client of the broker, learns it from the first line.
            first, end, rest = data.partition(b"\n")
            data = first + end + (rest if b" HTTP/" in first else b"\n")
        self._is_new = False
        try:
            super().data_received(data)
        except Exception as failure:
            # The event loop would report it to the server, which would end.
            log.error("http_failed", path="", exception=failure)
            self.transport.abort()


class _Uvicorn(Uvicorn):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The server handles signals."""
        yield


async def answer(sock: socket.socket, app: ASGIApp, connections_max: int) -> None:
    """Answer on this socket until cancelled."""
    server = _Uvicorn(
        Config(
            # Beyond loopback nobody can know its names.
            _guarded(app, has_names=is_loopback(sock.getsockname()[0])),
            http=type("Protocol", (_Protocol,), {"connections_max": connections_max, "unread": {}}),
            # Event loops accept all at once that wait there, before one can be closed.
            backlog=connections_max // 4,
            ws="none",
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=STOP_S,
            # Its messages are noise, or reach `failed` as well.
            log_config=None,
            log_level="critical",
            access_log=False,
        )
    )
    try:
        await server.serve([sock])
    finally:
        with anyio.CancelScope(shield=True):
            await server.shutdown([sock])


def _guarded(app: ASGIApp, *, has_names: bool) -> ASGIApp:
    """Refuses what the pages of other sites make a browser ask for, such as an image that costs a
    view, and who asks under a name that it has not."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        answering = app if _is_own_site(headers) else _foreign(scope)
        if has_names and not _is_own_name(headers.get("host", "")):
            answering = _MISDIRECTED
        await answering(scope, receive, send)

    return guarded


def _is_own_name(host: str) -> bool:
    """Any other may be that of a web site (DNS rebinding). Who names no host is no browser."""
    try:
        name = urlsplit("//" + host).hostname or "localhost"
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _is_own_site(headers: Headers) -> bool:
    """Behind a proxy only the browser knows the host name that both have. Programs send no such
    headers."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site in ("same-origin", "none")
    return origin is None or origin.partition("://")[2] == headers.get("host")


def _foreign(scope: Scope) -> Response:
    text = "<!doctype html><title>MQKS</title><p>This request came from another site."
    if scope["method"] == "GET":
        # Two slashes would be the start of a host name.
        asked = f"/{scope['raw_path'].decode('latin-1').lstrip('/')}"
        query = scope["query_string"].decode("latin-1")
        text += f' <a href="{html.escape(f"{asked}?{query}" if query else asked)}">Open it here</a>'
    return HTMLResponse(text, 403, SECURITY)
