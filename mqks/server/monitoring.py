"""Metrics, health and the page over HTTP.

The one rule: a request only reads.
"""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from mqks import log
from mqks.broker.broker import Broker
from mqks.broker.requests import stats
from mqks.journal.journal import Journal
from mqks.page.app import Page
from mqks.server import metrics
from mqks.server.history import History
from mqks.server.reads import done
from mqks.server.tls import Context
from mqks.web import serving

TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""The text format that every version of Prometheus reads."""


async def serve(
    sock: socket.socket,
    broker: Broker,
    journal: Journal,
    history: History,
    why_not_ready: Callable[[], str],
    open_inside: Callable[[str, bool], Awaitable[socket.socket]],
    certificate: Callable[[], Context | None],
    connections_max: int,
) -> None:
    """Answer on this socket until cancelled; `why_not_ready` returns a reason, or an empty string;
    `open_inside` opens a connection to the broker; `history` has the rates for charts;
    `certificate` returns the TLS context in use."""

    async def told(request: Request) -> Response:
        totals = await done(stats.totals(broker))
        found = metrics.of_broker(broker, journal, totals, why_not_ready(), certificate())
        return Response(metrics.lines(found), media_type=TEXT)

    async def queues(request: Request) -> Response:
        return StreamingResponse(_slices(broker), media_type=TEXT)

    async def readyz(request: Request) -> Response:
        reason = why_not_ready()
        return PlainTextResponse(f"{reason or 'ok'}\n", status_code=503 if reason else 200)

    routes = [
        Route("/metrics", told),
        Route("/metrics/queues", queues),
        Route("/healthz", _healthz),
        Route("/readyz", readyz),
    ]
    settings = broker.settings
    async with anyio.create_task_group() as tasks:
        if settings.page != "off":
            page = Page(
                open_inside,
                may_act=settings.page == "full",
                users=None if settings.users is None else broker.users_shown,
                limits=settings.public(),
                history=history,
                broker=settings.broker_name or "",
            )
            routes += page.routes
            await tasks.start(_keep_page, page)
        app = Starlette(routes=routes, exception_handlers={Exception: _failed})
        try:
            await serving.answer(sock, app, connections_max)
        finally:
            tasks.cancel_scope.cancel()


async def _failed(request: Request, failure: Exception) -> Response:
    log.error("http_failed", path=request.url.path, exception=failure)
    return PlainTextResponse("internal error\n", status_code=500)


async def _slices(broker: Broker) -> AsyncIterator[bytes]:
    """The broker gets its turn between slices."""
    for lines in metrics.queue_lines(broker):
        if lines:
            yield lines
        await checkpoint()


async def serve_standby(sock: socket.socket, why: Callable[[], str], connections_max: int) -> None:
    """Serve health and metrics of a broker that waits for the journal; `why` says what for."""

    async def told(request: Request) -> Response:
        return Response(metrics.lines([metrics.role(is_active=False)]), media_type=TEXT)

    async def waits(request: Request) -> Response:
        return PlainTextResponse(f"{why()}\n", status_code=503)

    routes = [
        Route("/metrics", told),
        Route("/healthz", _healthz),
        Route("/{path:path}", waits),
    ]
    await serving.answer(sock, Starlette(routes=routes), connections_max)


async def _healthz(request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _keep_page(page: Page, *, task_status: TaskStatus[None]) -> None:
    while True:
        try:
            await page.run(task_status=task_status)
        except Exception as failure:
            log.error("page_failed", exception=failure)
            task_status = anyio.TASK_STATUS_IGNORED
            await anyio.sleep(1)
