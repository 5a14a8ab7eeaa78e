"""The routes of the HTTP API.

The one rule: an error has the words of the protocol, as JSON.
"""

import json
import re
from base64 import b64decode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from socket import socket
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, unquote_to_bytes

import anyio
from anyio.lowlevel import checkpoint
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mqks import limits
from mqks.api.bodies import Bodies
from mqks.api.clients import TIMEOUT_S, Credentials, UserClients
from mqks.client import requests
from mqks.client.async_client import AsyncTail
from mqks.client.errors import (
    AuthenticationFailed,
    ClientError,
    InvalidRequest,
    ReplyTimeout,
    RequestFailed,
)
from mqks.client.messages import Message, PeekedMessage
from mqks.inspection.text import data_as_text
from mqks.limits import API_STREAMS_MAX, API_WAITS_MAX
from mqks.protocol.durations import in_seconds

_PLAIN: Final = re.compile(r"[0-9a-z.+-]{1,40}")
_INTEGER: Final = re.compile(r"-?[0-9]{1,19}")
KEEP_ALIVE_S: Final = 15.0
"""A stream without messages shows at this interval that it is alive."""
BATCH: Final = 64
STREAMS_S: Final = 0.1
"""A stream shows what has come, and then looks again after this time."""
LOGIN: Final = {"WWW-Authenticate": 'Bearer realm="mqks", Basic realm="mqks"'}
STATUS: Final = (
    ("no permission", 403),
    ("there is no queue", 404),
    ("there is no batch", 404),
    ("no queue is bound", 404),
    ("lease: ", 400),
    ("--keep-result is for one queue", 400),
)
"""What is in the reason of a refused request; others are limits that were reached, or a journal
that cannot be written."""

Failed = Callable[[Request, Exception], Awaitable[Response]]
Terms = Mapping[str, tuple[str, Callable[[str], Any]]]
"""What may be said in a request: the option of the client, and what reads it."""


def _seconds(text: str) -> float:
    if not _PLAIN.fullmatch(text):  # Python also reads 1_000, and digits of other scripts.
        raise ValueError(f"{text!r} is not a duration")
    return float(in_seconds(text))


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def _name_of(text: str) -> str:
    return unquote(text, errors="surrogateescape")


def _flag_text(text: str) -> bytes:
    """The text behind a flag of the protocol, which has the same form there."""
    if not text:
        raise ValueError("it is empty")
    return requests.encoded(text)


def _unquoted(text: str) -> str:
    """A header may be a string in quotes (RFC 8941)."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _flag(text: str) -> bool:
    if text not in ("", "true", "false"):
        raise ValueError("it is true or false")
    return text != "false"


HEADERS: Final[Terms] = {
    "mqks-delay": ("delay_s", _seconds),
    "mqks-ttl": ("ttl_s", _seconds),
    "mqks-priority": ("priority", _integer),
    "mqks-key": ("key", _flag_text),
    "mqks-unique": ("unique", _flag_text),
    "mqks-meta": ("meta", _flag_text),
    "mqks-to": ("to", _name_of),
    "mqks-batch": ("batch", _name_of),
    "mqks-keep-result": ("keep_result_s", _seconds),
    "idempotency-key": ("id", _unquoted),
}
"""Headers of a message: the option of `publish`, and what reads it."""
RECEIVE: Final[Terms] = {
    "max": ("limit", _integer),
    "lease": ("lease_s", _seconds),
    "wait": ("wait_s", _seconds),
}
RESULT: Final[Terms] = {"wait": ("wait_s", _seconds)}
CANCEL: Final[Terms] = {"reason": ("reason", str)}
PAUSE: Final[Terms] = {
    "for": ("for_s", _seconds),
    "deliveries": ("deliveries", _flag),
    "publishes": ("publishes", lambda text: text if text == "wait" else _flag(text)),
}
LEASE: Final[dict[str, Terms]] = {
    "ack": {},
    "reject": {
        "delay": ("delay_s", _seconds),
        "dead": ("dead", _flag),
        "reason": ("reason", str),
    },
    "extend": {"lease": ("for_s", _seconds)},
}


class Api:
    """`open_inside` connects to the broker; `with_users` says that everybody must log in."""

    def __init__(
        self,
        open_inside: Callable[[str, bool], Awaitable[socket]],
        *,
        with_users: bool,
        line_bytes_max: int,
    ) -> None:
        self._clients = UserClients(lambda name, _: open_inside(name, False), line_bytes_max)
        self._with_users = with_users
        too_long = f"line_bytes_max is {line_bytes_max}, the body is longer"
        self._bodies = Bodies(line_bytes_max, too_long)
        self._streams = 0
        self._one_shows = anyio.Lock()
        self._waits = 0
        self._openapi = (files("mqks.api") / "openapi.json.in").read_text() % vars(limits)
        self.run = self._clients.run

    def app(self, failed: Failed) -> Starlette:
        """`failed` answers after an exception that nobody expects."""
        return Starlette(
            routes=[
                Route("/publish/{event:path}", self._publish, methods=["POST"]),
                Route("/queues/{queue:path}/receive", self._receive, methods=["POST"]),
                Route("/queues/{queue:path}/cancel/{id:path}", self._cancel, methods=["POST"]),
                Route("/results/{id:path}", self._result, methods=["GET"]),
                Route("/queues/{queue:path}/pause", self._pause, methods=["POST"]),
                Route("/queues/{queue:path}/resume", self._resume, methods=["POST"]),
                Route("/leases/{lease}/{what}", self._settle, methods=["POST"]),
                Route("/batches/{batch:path}/close", self._close_batch, methods=["POST"]),
                Route("/batches/{batch:path}", self._batch, methods=["GET", "PUT"]),
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
        async with self._bodies.read(request) as body, self._clients.of(credentials) as client:
            message_id = await client.publish(event, body, confirm=True, **options)
        others = {"duplicate_of": message_id.duplicate_of, "replaced": message_id.replaced}
        told = {name: other for name, other in others.items() if other is not None}
        return answer(200, {"id": message_id, **told})

    async def _receive(self, request: Request) -> Response:
        credentials, options = self._credentials(request), _parameters(request, RECEIVE)
        queue, wait_s = _name(request, behind=1), options.get("wait_s", 0)
        with self._waiting(wait_s):
            async with self._clients.of(credentials) as client:
                found = await client.receive(queue, timeout_s=wait_s + TIMEOUT_S, **options)
                if await request.is_disconnected():
                    for each in found:
                        words = queue, each.lease or "", "--undelivered"
                        await client.request("lease", "--confirm", *words)
        return answer(200, {"messages": [_received(queue, each) for each in found]})

    async def _cancel(self, request: Request) -> Response:
        credentials, options = self._credentials(request), _parameters(request, CANCEL)
        queue, message_id = _name(request, behind=2), _last(request)
        async with self._clients.of(credentials) as client:
            told = await client.cancel_job(queue, message_id, **options)
        return answer(200, {"answer": told})

    async def _result(self, request: Request) -> Response:
        credentials, options = self._credentials(request), _parameters(request, RESULT)
        wait_s, message_id = options.get("wait_s", 0.0), _name(request)
        with self._waiting(wait_s):
            async with self._clients.of(credentials) as client:
                found = await client.job(message_id).state(wait_s, timeout_s=wait_s + TIMEOUT_S)
        words = found._replace(data=None)._asdict().items()
        told = {name: value for name, value in words if value not in (None, "")}
        data = {} if found.data is None else data_as_text(found.data)
        return answer(200, {"id": message_id, **told, **data})

    @contextmanager
    def _waiting(self, wait_s: float) -> Iterator[None]:
        if wait_s and self._waits >= API_WAITS_MAX:
            raise HTTPException(503, f"the limit of {API_WAITS_MAX} waiting requests is reached")
        self._waits += wait_s > 0
        try:
            yield
        finally:
            self._waits -= wait_s > 0

    async def _pause(self, request: Request) -> Response:
        credentials, options = self._credentials(request), _parameters(request, PAUSE)
        if options.get("deliveries") and options.get("publishes"):
            raise HTTPException(400, "deliveries excludes publishes; without either it is both")
        async with self._clients.of(credentials) as client:
            await client.pause(_name(request, behind=1), **options)
        return answer(200, {"done": "pause"})

    async def _resume(self, request: Request) -> Response:
        credentials, _ = self._credentials(request), _parameters(request, {})
        async with self._clients.of(credentials) as client:
            await client.resume(_name(request, behind=1))
        return answer(200, {"done": "resume"})

    async def _settle(self, request: Request) -> Response:
        credentials, what = self._credentials(request), request.path_params["what"]
        if what not in LEASE:
            raise HTTPException(404, f"a lease has {', '.join(LEASE)}")
        options = _parameters(request, LEASE[what])
        if what == "extend" and not options:
            raise HTTPException(400, "extend needs ?lease=SECONDS")
        try:
            told = urlsafe_b64decode(request.path_params["lease"].encode() + b"==")
            queue, lease = told.decode("utf-8", "surrogateescape").split(" ")
        except ValueError:
            raise HTTPException(400, "this is not a lease") from None
        async with self._clients.of(credentials) as client:
            ask = {"ack": client.ack_lease, "reject": client.reject_lease}
            was_there = await ask.get(what, client.extend_lease)(queue, lease, **options)
        if not was_there:
            raise HTTPException(410, "the lease has ended")
        return answer(200, {"done": what})

    async def _batch(self, request: Request) -> Response:
        """Opens a batch, or tells what one counts."""
        credentials, name = self._credentials(request), _name(request)
        if request.scope["raw_path"].endswith(b"/close"):  # In a name it is %2Fclose.
            raise HTTPException(405, "a batch is closed by POST", {"Allow": "POST"})
        if request.method != "PUT":
            async with self._clients.of(credentials) as client:
                counts = await client.batch_counts(name)
            if counts is None:
                raise HTTPException(404, f"there is no batch {name!r}")
            return answer(200, counts)
        options = _parameters(request, {"for": ("for_s", _seconds)})
        async with self._bodies.read(request) as body, self._clients.of(credentials) as client:
            await client.open_batch(name, **options, **_follows(body))
        return answer(200, {"name": name})

    async def _close_batch(self, request: Request) -> Response:
        credentials, name = self._credentials(request), _name(request, behind=1)
        options = _parameters(request, {"discard": ("discard", _flag)})
        async with self._clients.of(credentials) as client:
            if not await client.close_batch(name, **options):
                raise HTTPException(404, f"there is no batch {name!r}")
        return answer(200, {"name": name})

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
                    self._shown(tail), headers=headers, media_type="text/event-stream"
                )
                await stream(scope, receive, send)
        finally:
            self._streams -= 1

    async def _shown(self, tail: AsyncTail) -> AsyncIterator[bytes]:
        """Events of a stream: messages, and how many were dropped."""
        dropped = 0
        yield b":\n\n"  # So that the browser knows that the stream is open.
        while True:
            try:
                async for batch in tail.batches(BATCH, KEEP_ALIVE_S):
                    async with self._one_shows:  # Others have the event loop between two streams.
                        await checkpoint()
                        events = b"".join(map(_event, batch))
                    yield events
                    if tail.dropped > dropped:
                        yield b"event: dropped\ndata: %d\n\n" % (tail.dropped - dropped)
                        dropped = tail.dropped
                    if len(batch) < BATCH:
                        await anyio.sleep(STREAMS_S)
            except TimeoutError:
                yield b":\n\n"
            except ClientError as failure:
                yield f"event: error\ndata: {json.dumps(_told(failure))}\n\n".encode()
                return

    def _credentials(self, request: Request) -> Credentials:
        raw = request.headers.get("authorization", "").encode("latin-1")
        kind, _, told = requests.decoded(raw).partition(" ")
        if kind.lower() == "bearer" and told:
            return (told.strip(),)
        if kind.lower() == "basic":
            try:
                login = requests.decoded(b64decode(told, validate=True))
                user, colon, password = login.partition(":")
            except ValueError:
                user = colon = password = ""
            if user and colon:
                return (user, password)
        if kind or self._with_users:
            raise HTTPException(401, "authorization must be Bearer TOKEN, or Basic", LOGIN)
        return ()


class _Stream(Response):
    """Answered by a function that may still refuse."""

    def __init__(self, answer: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


def _name(request: Request, behind: int = 0) -> str:
    """The path behind its first word, and before so many others: any bytes, of which `path_params`
    has only UTF-8."""
    _, slash, raw = request.scope["raw_path"][1:].partition(b"/")
    if not slash:
        raise HTTPException(404, "a slash of the path is encoded")
    name = raw.rsplit(b"/", behind)[0]
    return requests.decoded(unquote_to_bytes(name))


def _follows(body: bytes) -> dict[str, Any]:
    """What follows a batch, as the body says. Raises HTTPException."""
    try:
        told = json.loads(body or b"{}")
        each = {
            key: (told[key]["event"], told[key]["data"])
            for key in ("then", "on_dead")
            if key in told
        }
        if (
            isinstance(told, dict)
            and len(each) == len(told)
            and all(isinstance(event, str) for event, _ in each.values())
        ):
            return each
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise HTTPException(400, 'the body is not as {"then": {"event": "e", "data": "x"}}')


def _last(request: Request) -> str:
    """The last word of the path."""
    return requests.decoded(unquote_to_bytes(request.scope["raw_path"].rpartition(b"/")[2]))


def _options(request: Request) -> dict[str, Any]:
    """The options of `publish` in the headers and the query. Raises HTTPException."""
    options = _parameters(request, {"mandatory": ("mandatory", _flag)})
    named = ((raw.decode("latin-1"), requests.decoded(value)) for raw, value in request.headers.raw)
    told = [pair for pair in named if pair[0].startswith("mqks-") or pair[0] in HEADERS]
    options |= _read(HEADERS, told)
    if "unique" in options and options.keys() & {"batch", "keep_result_s"}:
        raise HTTPException(400, "Mqks-Unique excludes Mqks-Batch and Mqks-Keep-Result")
    return options | {"once": "id" in options}


def _parameters(request: Request, terms: Terms) -> dict[str, Any]:
    """The options in the query. Raises HTTPException."""
    return _read(terms, parse_qsl(request.url.query, True, errors="surrogateescape"))


def _read(terms: Terms, pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in pairs:
        if name not in terms:
            raise HTTPException(400, f"{name} is unknown; there are {', '.join(terms) or 'none'}")
        option, read = terms[name]
        if option in options:
            raise HTTPException(400, f"{name} is there twice")
        try:
            options[option] = read(value)
        except (ValueError, OverflowError) as error:
            raise HTTPException(400, f"{name}: {error}") from None
    return options


def _received(queue: str, message: PeekedMessage) -> dict[str, Any]:
    token = f"{queue} {message.lease}".encode("utf-8", "surrogateescape")
    dead_letter = message.dead_letter and message.dead_letter._asdict()
    more = {
        "key": message.key,
        "unique": message.unique,
        "meta": message.meta,
        "dead_letter": dead_letter,
    }
    return {
        "lease": urlsafe_b64encode(token).rstrip(b"=").decode(),
        "id": message.id,
        "event": message.event,
        **data_as_text(message.data),
        "retry": message.retry,
        "priority": message.priority,
        **{name: value for name, value in more.items() if value},
    }


def _event(message: Message) -> bytes:
    told = {"id": message.id, "event": message.event, **data_as_text(message.data)}
    return f"data: {json.dumps(told)}\n\n".encode()


def answer(status: int, told: Mapping[str, Any], headers: dict[str, str] | None = None) -> Response:
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
