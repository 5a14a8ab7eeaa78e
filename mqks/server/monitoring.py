"""Metrics, health and the page over HTTP.

The one rule: a request only reads.
"""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import anyio
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from mqks.broker.broker import Broker
from mqks.broker.requests import stats
from mqks.journal.journal import Journal
from mqks.page.app import Page
from mqks.server import http, log
from mqks.server.history import History
from mqks.server.metrics import Metrics, StandbyMetrics, queue_lines, registry_of
from mqks.server.steps import done
from mqks.server.tls import Context
from mqks.settings import Settings

TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""The text format that every version of Prometheus reads."""


def _app(
    settings: Settings,
    broker: Broker,
    journal: Journal,
    why_not_ready: Callable[[], str],
    certificate: Callable[[], Context | None],
    page: Page | None,
) -> Starlette:
    totals: stats.Row = {}
    registry = registry_of(
        Metrics(settings, broker, journal, why_not_ready, certificate, lambda: totals)
    )

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


async def _slices(broker: Broker) -> AsyncIterator[bytes]:
    """The broker gets its turn between slices."""
    for lines in queue_lines(broker):
        if lines:
            yield lines
        await checkpoint()


async def serve(
    sock: socket.socket,
    settings: Settings,
    broker: Broker,
    journal: Journal,
    why_not_ready: Callable[[], str],
    open_inside: Callable[[str, bool], Awaitable[socket.socket]],
    users: Callable[[], Sequence[Mapping[str, object]]],
    history: History,
    certificate: Callable[[], Context | None],
    connections_max: int,
) -> None:
    """Answer on this socket until cancelled; `why_not_ready` returns a reason, or an empty string;
    `open_inside` opens a connection to the broker; `users` returns names and permissions;
    `history` has the rates for charts; `certificate` returns the TLS context in use."""
    page = None
    if settings.page != "off":
        page = Page(
            open_inside,
            may_act=settings.page == "full",
            users=users if settings.users is not None else None,
            limits=settings.public(),
            history=history,
        )
    app = _app(settings, broker, journal, why_not_ready, certificate, page)
    async with anyio.create_task_group() as tasks:
        if page:
            await tasks.start(_keep_page, page)
        try:
            await http.answer(sock, app, connections_max)
        finally:
            tasks.cancel_scope.cancel()


async def serve_standby(sock: socket.socket, why: Callable[[], str], connections_max: int) -> None:
    """Serve health and metrics of a broker that waits for the journal; `why` says what for."""
    await http.answer(sock, _standby_app(why), connections_max)


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
    return Response(generate_latest(registry_of(StandbyMetrics())), media_type=TEXT)


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
