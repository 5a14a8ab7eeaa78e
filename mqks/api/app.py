"""The routes of the HTTP API.

The one rule: an error has the words of the protocol, as JSON.
"""

import binascii
import json
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from socket import socket
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, unquote_to_bytes

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mqks.api.clients import Clients, Credentials
from mqks.client.async_client import AsyncTail
from mqks.client.errors import (
    AuthenticationFailed,
    ClientError,
    InvalidRequest,
    ReplyTimeout,
    RequestFailed,
)
from mqks.client.messages import Message
from mqks.inspection.text import data_as_text
from mqks.limits import API_BODIES_BYTES_MAX, API_BODY_S, API_STREAMS_MAX
from mqks.protocol.durations import in_seconds

KEEP_ALIVE_S: Final = 15.0
"""A stream without messages shows at this interval that it is alive."""
BATCH: Final = 256
LOGIN: Final = {"WWW-Authenticate": 'Bearer realm="mqks", Basic realm="mqks"'}
STATUS: Final = (("no permission", 403), ("there is no queue", 404), ("no queue is bound", 404))
"""What is in the reason of a refused request; others are limits that were reached, or a journal
that cannot be written."""

Failed = Callable[[Request, Exception], Awaitable[Response]]


def _seconds(text: str) -> float:
    return float(in_seconds(text))


def _text(text: str) -> str:
    return unquote(text, errors="surrogateescape")


def _meta(text: str) -> dict[str, str]:
    pairs = parse_qsl(text, True, True, errors="surrogateescape")
    if len(meta := dict(pairs)) != len(pairs):
        raise ValueError("an attribute is there twice")
    return meta


TERMS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "mqks-delay": ("delay_s", _seconds),
    "mqks-ttl": ("ttl_s", _seconds),
    "mqks-priority": ("priority", int),
    "mqks-key": ("key", _text),
    "mqks-meta": ("meta", _meta),
    "mqks-to": ("to", _text),
}
"""Headers of a message: the option of `publish`, and what reads it."""


class Api:
    """`open_inside` connects to the broker; `with_users` says that everybody must log in."""

    def __init__(
        self,
        open_inside: Callable[[str, bool], Awaitable[socket]],
        *,
        with_users: bool,
        line_bytes_max: int,
    ) -> None:
        self._clients = Clients(lambda name: open_inside(name, False), line_bytes_max)
        self._with_users = with_users
        self._body_bytes_max = line_bytes_max
        self._bodies_bytes = 0
        self._streams = 0
        self._openapi = (files("mqks.api") / "openapi.json").read_bytes()
        self.run = self._clients.run

    def app(self, failed: Failed) -> Starlette:
        """`failed` answers after an exception that nobody expects."""
        return Starlette(
            routes=[
                Route("/publish/{event:path}", self._publish, methods=["POST"]),
                Route("/events/{mask:path}", self._events, methods=["GET"]),
                Route("/openapi.json", self._describe, methods=["GET"]),
            ],
            exception_handlers={
                ClientError: _refused,
                HTTPException: _wrong,
                ClientDisconnect: _gone,
                Exception: failed,
            },
        )

    async def _describe(self, request: Request) -> Response:
        return Response(self._openapi, media_type="application/json")

    async def _publish(self, request: Request) -> Response:
        credentials, event, options = self._credentials(request), _name(request), _options(request)
        with self._room(request):
            body = await self._body(request)
            async with self._clients.of(credentials) as client:
                message_id = await client.publish(event, body, confirm=True, **options)
        return answer(200, {"id": message_id})

    async def _events(self, request: Request) -> Response:
        if request.method == "HEAD":
            raise HTTPException(405, "a stream has no head")
        return _Stream(partial(self._stream, self._credentials(request), _name(request)))

    async def _stream(
        self, credentials: Credentials, mask: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if self._streams >= API_STREAMS_MAX:
            raise HTTPException(503, f"the limit of {API_STREAMS_MAX} streams is reached")
        self._streams += 1
        try:
            async with self._clients.of(credentials) as client, client.tail(mask) as tail:
                headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-store"}
                stream = StreamingResponse(
                    _shown(tail), headers=headers, media_type="text/event-stream"
                )
                await stream(scope, receive, send)
        finally:
            self._streams -= 1

    def _credentials(self, request: Request) -> Credentials:
        kind, _, told = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and told:
            return (told.strip(),)
        if kind.lower() == "basic":
            try:
                user, colon, password = b64decode(told, validate=True).decode().partition(":")
            except (binascii.Error, UnicodeDecodeError):
                user = colon = password = ""
            if user and colon:
                return (user, password)
        if kind or self._with_users:
            raise HTTPException(401, "authorization must be Bearer TOKEN, or Basic", LOGIN)
        return ()

    @contextmanager
    def _room(self, request: Request) -> Iterator[None]:
        """Bodies are in memory from here until they are stored."""
        size = int(request.headers.get("content-length", self._body_bytes_max))
        if size > self._body_bytes_max:
            raise self._too_long()
        if self._bodies_bytes and self._bodies_bytes + size > API_BODIES_BYTES_MAX:
            raise HTTPException(
                503, "too many messages are being published; try again", {"Retry-After": "1"}
            )
        self._bodies_bytes += size
        try:
            yield
        finally:
            self._bodies_bytes -= size

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        try:
            with anyio.fail_after(API_BODY_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self._body_bytes_max:
                        raise self._too_long()
        except TimeoutError:
            raise HTTPException(408, f"the body took more than {API_BODY_S:g} s") from None
        return bytes(body)

    def _too_long(self) -> HTTPException:
        return HTTPException(413, f"line_bytes_max is {self._body_bytes_max}, the body is longer")


class _Stream(Response):
    """Answered by a function that may still refuse."""

    def __init__(self, answer: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


def _name(request: Request) -> str:
    """The path behind its first word: any bytes, of which `path_params` has only UTF-8."""
    raw: bytes = request.scope["raw_path"]
    return unquote_to_bytes(raw.split(b"/", 2)[2]).decode("utf-8", "surrogateescape")


def _options(request: Request) -> dict[str, Any]:
    """The options of `publish` in the headers and the query. Raises HTTPException."""
    options: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name != "mandatory" or value not in ("", "true", "false"):
            raise HTTPException(400, f"{name}={value} is unknown: ?mandatory is all there is")
        options["mandatory"] = value != "false"
    for name, value in request.headers.items():
        if name == "idempotency-key":
            options.update(id=value.strip('"'), once=True)
        elif name in TERMS:
            option, read = TERMS[name]
            try:
                options[option] = read(value)
            except (ValueError, OverflowError) as error:
                raise HTTPException(400, f"{name}: {error}") from None
        elif name.startswith("mqks-"):
            raise HTTPException(400, f"{name} is unknown; there are {', '.join(TERMS)}")
    return options


async def _shown(tail: AsyncTail) -> AsyncIterator[bytes]:
    """Events of a stream: messages, and how many were dropped."""
    dropped = 0
    yield b":\n\n"  # So that the browser knows that the stream is open.
    while True:
        try:
            async for batch in tail.batches(BATCH, KEEP_ALIVE_S):
                yield b"".join(map(_event, batch))
                if tail.dropped > dropped:
                    yield b"event: dropped\ndata: %d\n\n" % (tail.dropped - dropped)
                    dropped = tail.dropped
        except TimeoutError:
            yield b":\n\n"
        except ClientError as failure:
            yield f"event: error\ndata: {json.dumps(_told(failure))}\n\n".encode()
            return


def _event(message: Message) -> bytes:
    told = {"id": message.id, "event": message.event, **data_as_text(message.data)}
    return f"data: {json.dumps(told)}\n\n".encode()


def answer(status: int, told: dict[str, str], headers: dict[str, str] | None = None) -> Response:
    """JSON in a line, for terminals."""
    return Response(json.dumps(told) + "\n", status, headers, "application/json")


def _told(failure: ClientError) -> dict[str, str]:
    """An error as JSON: its reason, and its id, under which the broker keeps it."""
    if isinstance(failure, RequestFailed):
        reason = failure.reason or str(failure)
        return {"error": reason, "error_id": failure.error_id}
    return {"error": str(failure)}


async def _refused(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, ClientError)
    told = _told(failure)
    if isinstance(failure, AuthenticationFailed):
        return answer(401, told, LOGIN)
    if "already in flight" in told["error"]:
        return answer(409, told)
    if isinstance(failure, InvalidRequest) or "name_bytes_max" in told["error"]:
        return answer(400, told)
    if isinstance(failure, ReplyTimeout):
        return answer(504, told)
    return answer(next((status for word, status in STATUS if word in told["error"]), 503), told)


async def _wrong(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, HTTPException)
    headers = dict(failure.headers or {})
    return answer(failure.status_code, {"error": failure.detail}, headers)


async def _gone(request: Request, failure: Exception) -> Response:
    """Nobody reads it."""
    return Response(status_code=400)
