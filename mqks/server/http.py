"""Metrics, health and the page over HTTP, on a separate port; the API and SQS on others.

The one rule: whatever happens here, the broker continues. A request only reads, failures are logged
and answered with 500, and the number of connections is limited: one that waits for its peer makes
room for a new one, so that nobody is kept out by silence.
"""

import asyncio
import html
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, cast
from urllib.parse import urlsplit

import anyio
from anyio.abc import TaskStatus
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config
from uvicorn import Server as Uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mqks.api.app import Api, answer
from mqks.broker.broker import Broker
from mqks.broker.requests import stats
from mqks.journal.journal import Journal
from mqks.limits import HTTP_CONNECTIONS_MAX, HTTP_UNREAD_BYTES_MAX
from mqks.page.app import SECURITY, Page
from mqks.server import log
from mqks.server.history import History
from mqks.server.metrics import queue_lines, registry_of, standby_registry
from mqks.server.steps import done
from mqks.settings import Settings, is_loopback
from mqks.sqs.app import Sqs

TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""The text format that every version of Prometheus reads."""
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
        self.loop.call_later(REQUEST_S, self._end_silent)

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
            self.loop.call_later(REQUEST_S, self._end_silent)

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


def _app(
    settings: Settings,
    broker: Broker,
    journal: Journal,
    why_not_ready: Callable[[], str],
    page: Page | None,
) -> Starlette:
    totals: stats.Row = {}
    registry = registry_of(settings, broker, journal, why_not_ready, lambda: totals)

    async def metrics(request: Request) -> Response:
        nonlocal totals
        totals = await done(stats.totals(broker))
        return Response(generate_latest(registry), media_type=TEXT)

    async def queues(request: Request) -> Response:
        return StreamingResponse(_slices(broker), media_type=TEXT)

    async def readyz(request: Request) -> Response:
        reason = why_not_ready()
        return PlainTextResponse(f"{reason or 'ok'}\n", status_code=503 if reason else 200)

    return Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/metrics/queues", queues),
            Route("/healthz", _healthz),
            Route("/readyz", readyz),
            *(page.routes if page else ()),
        ],
        exception_handlers={Exception: _failed},
    )


async def _failed(request: Request, failure: Exception) -> Response:
    log.error("http_failed", path=request.url.path, exception=failure)
    return PlainTextResponse("internal error\n", status_code=500)


async def _api_failed(request: Request, failure: Exception) -> Response:
    log.error("http_failed", path=request.url.path, exception=failure)
    return answer(500, {"error": "internal error"})


async def _slices(broker: Broker) -> AsyncIterator[bytes]:
    """The broker gets its turn between slices."""
    for lines in queue_lines(broker):
        yield lines
        await anyio.lowlevel.checkpoint()


async def serve(
    sock: socket.socket,
    settings: Settings,
    broker: Broker,
    journal: Journal,
    why_not_ready: Callable[[], str],
    open_inside: Callable[[str, bool], Awaitable[socket.socket]],
    users: Callable[[], Sequence[Mapping[str, object]]],
    history: History,
    connections_max: int,
) -> None:
    """Answer on this socket until cancelled; `why_not_ready` returns a reason, or an empty string;
    `open_inside` opens a connection to the broker; `users` returns names and permissions;
    `history` has the rates for charts."""
    page = None
    if settings.page != "off":
        page = Page(
            open_inside,
            may_act=settings.page == "full",
            users=users if settings.users is not None else None,
            limits=settings.public(),
            history=history,
        )
    app = _app(settings, broker, journal, why_not_ready, page)
    async with anyio.create_task_group() as tasks:
        if page:
            await tasks.start(_keep_page, page)
        try:
            await _answer(sock, app, connections_max)
        finally:
            tasks.cancel_scope.cancel()


async def serve_door(door: Api | Sqs, sock: socket.socket, connections_max: int) -> None:
    """The same for the HTTP API, or that of SQS."""
    async with anyio.create_task_group() as tasks:
        await tasks.start(door.run)
        try:
            await _answer(sock, door.app(_api_failed), connections_max)
        finally:
            tasks.cancel_scope.cancel()


async def serve_standby(sock: socket.socket, why: Callable[[], str], connections_max: int) -> None:
    """The same for a broker that waits for the journal; `why` says what for."""
    await _answer(sock, _standby_app(why), connections_max)


def _standby_app(why: Callable[[], str]) -> Starlette:
    async def waits(request: Request) -> Response:
        return PlainTextResponse(f"{why()}\n", status_code=503)

    routes = [
        Route("/metrics", _standby_metrics),
        Route("/healthz", _healthz),
        Route("/{path:path}", waits),
    ]
    return Starlette(routes=routes)


async def _standby_metrics(request: Request) -> Response:
    return Response(generate_latest(standby_registry()), media_type=TEXT)


async def _healthz(request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _answer(sock: socket.socket, app: Starlette, connections_max: int) -> None:
    host, own = sock.getsockname()[0], _for_its_own_site(app)
    server = _Uvicorn(
        Config(
            # Beyond loopback nobody can know its names.
            _guarded(own) if is_loopback(host) else own,
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


async def _keep_page(page: Page, *, task_status: TaskStatus[None]) -> None:
    while True:
        try:
            await page.run(task_status=task_status)
        except Exception as failure:
            log.error("page_failed", exception=failure)
            task_status = anyio.TASK_STATUS_IGNORED
            await anyio.sleep(1)


def _guarded(app: ASGIApp) -> ASGIApp:
    """Refuses who asks under a name, which may be that of a web site (DNS rebinding): addresses and
    `localhost` are none. Who names no host is no browser."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            name = urlsplit("//" + Headers(scope=scope).get("host", "")).hostname or "localhost"
            is_own = name == "localhost" or bool(ipaddress.ip_address(name))
        except ValueError:
            is_own = False
        await (app if is_own else _MISDIRECTED)(scope, receive, send)

    return guarded


def _for_its_own_site(app: ASGIApp) -> ASGIApp:
    """Refuses what the pages of other sites make a browser ask for, such as an image that costs a
    view. Who follows a link from there is led on. Programs send no such headers."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        await (app if _is_own(Headers(scope=scope)) else _foreign(scope))(scope, receive, send)

    return guarded


def _is_own(headers: Headers) -> bool:
    """Behind a proxy only the browser knows the host name that both have."""
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
