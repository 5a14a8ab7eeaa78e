"""Answering HTTP on a socket: what page and metrics, the API and SQS have in common.

The one rule: whatever happens here, the broker continues. Failures are logged and answered with
500, and the number of connections is limited: one that waits for its peer makes room for a new one,
so that nobody is kept out by silence.
"""

import asyncio
import html
import ipaddress
import re
import socket
from functools import partial

import anyio
from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mqks.limits import HTTP_QUERY_FIELDS_MAX
from mqks.loops import send_at_once
from mqks.page.headers import SECURITY
from mqks.settings import is_loopback
from mqks.web.connection import HttpProtocol, Port

_HOST = re.compile(r"(?:([\w.~-]*)|\[([\da-fA-F:.]+)\])(?::\d{0,5})?", re.ASCII)
_NO_HOST = PlainTextResponse("The header Host is a name, and perhaps a port.\n", 400)
_TOO_MANY_FIELDS = PlainTextResponse("The query has too many fields.\n", 400)
_MISDIRECTED = PlainTextResponse("This host name is not the broker's.\n", 421)
STOP_S = 1
"""How long a stopping server waits for requests to finish."""


async def answer(sock: socket.socket, app: ASGIApp, connections_max: int) -> None:
    """Answer on this socket until cancelled."""
    # Beyond loopback nobody can know its names.
    guarded = _guarded(app, has_names=is_loopback(sock.getsockname()[0]))
    port = Port(guarded, connections_max)
    # Event loops accept all at once that wait there, before one can be closed.
    backlog = connections_max // 4
    connect = partial(HttpProtocol, port)
    send_at_once(sock)
    server = await asyncio.get_running_loop().create_server(connect, sock=sock, backlog=backlog)
    try:
        await anyio.sleep_forever()
    finally:
        server.close()
        sock.close()
        with anyio.CancelScope(shield=True):
            await port.close(STOP_S)


def _guarded(app: ASGIApp, *, has_names: bool) -> ASGIApp:
    """Refuses what the pages of other sites make a browser ask for, such as an image that costs a
    view, and who asks under a name that it has not. Of a connection nothing is executed behind a
    body that was not read to its end, or whose length was told in two ways (RFC 9112, 6.1)."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        host = _HOST.fullmatch(headers.get("host", ""))
        answering = app if _is_own_site(headers) else _foreign(scope)
        if host is None:
            answering = _NO_HOST
        elif has_names and not _is_own_name(host[1] or host[2] or "localhost"):
            answering = _MISDIRECTED
        elif scope["query_string"].count(b"&") >= HTTP_QUERY_FIELDS_MAX:
            answering = _TOO_MANY_FIELDS
        has_chunks, length = "transfer-encoding" in headers, headers.get("content-length")
        is_last = has_chunks and length is not None
        is_unread = has_chunks or int(length or 0) > 0

        async def received() -> Message:
            nonlocal is_unread
            message = await receive()
            is_unread = is_unread and message.get("more_body", True)
            return message

        async def sent(message: Message) -> None:
            if (is_last or is_unread) and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await answering(scope, received, sent)

    return guarded


def _is_own_name(name: str) -> bool:
    """Any other may be that of a web site (DNS rebinding). Who names no host is no browser."""
    try:
        return name.lower() == "localhost" or bool(ipaddress.ip_address(name))
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
