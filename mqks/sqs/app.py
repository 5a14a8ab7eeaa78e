"""The HTTP of SQS: who has sent a request, and its answer in the protocol that it came in.

The one rule: a request acts as the user who has signed it.
"""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from socket import socket
from typing import Any, Final, Protocol
from uuid import uuid4

import anyio
from anyio.abc import TaskStatus
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from mqks import users
from mqks.api.bodies import Bodies
from mqks.api.clients import Credentials, UserClients
from mqks.client.errors import ClientError
from mqks.limits import SQS_CONNECTIONS_MAX, SQS_LINE_BYTES_MAX, SQS_REQUEST_BYTES_MAX
from mqks.sqs.actions import ACTIONS, Actions
from mqks.sqs.errors import SqsError
from mqks.sqs.known import KnownQueues
from mqks.sqs.signatures import verified
from mqks.sqs.wire import SqsCall, answered, failed

LARGE_BYTES: Final = 64 * 1024
"""A longer body is read in a thread."""
_NO_USER: Final = users.Known("", users.Permissions(consume=["**"]))


class OpenInside(Protocol):
    """Connects to the broker; a `trusted` connection may do everything, or what the named user
    may."""

    async def __call__(
        self, name: str, trusted: bool, user: str = "", line_bytes_max: int = 0
    ) -> socket: ...


class Sqs:
    """`known_users` are those who may sign requests; `with_users` says that everybody must."""

    def __init__(
        self,
        open_inside: OpenInside,
        known_users: Callable[[], users.Users],
        *,
        with_users: bool,
        line_bytes_max: int,
    ) -> None:
        self._known_users = known_users
        self._with_users = with_users
        line_bytes_max = max(line_bytes_max, SQS_LINE_BYTES_MAX)

        async def open_as(name: str, credentials: Credentials) -> socket:
            return await open_inside(name, True, "".join(credentials), line_bytes_max)

        most = SQS_CONNECTIONS_MAX
        self._clients = UserClients(open_as, line_bytes_max, "sqs", logs_in=False, waits_max=most)
        self._bodies = Bodies(SQS_REQUEST_BYTES_MAX, "The request is longer than 4 MiB.")
        self._one_large = anyio.CapacityLimiter(1)
        """Reading a form of 4 MiB may take 150 MB for a moment."""
        self._known = KnownQueues(partial(self._clients.of, ()))

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        async with anyio.create_task_group() as self._known.tasks.group:
            await self._clients.run(task_status=task_status)

    def app(self, unexpected: Callable[[Request, Exception], Awaitable[Response]]) -> Starlette:
        """`unexpected` answers after an exception that nobody expects."""
        return Starlette(
            routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])],
            exception_handlers={ClientDisconnect: _gone, Exception: unexpected},
        )

    async def _answer(self, request: Request) -> Response:
        request_id, is_json = str(uuid4()), "x-amz-target" in request.headers
        headers = {"x-amzn-requestid": request_id}
        try:
            call, told = await self._told(request)
        except (SqsError, ClientError, HTTPException) as failure:
            if isinstance(failure, HTTPException):
                headers |= failure.headers or {}
            # An error that this frame kept would keep the frame, and so the body of the request.
            return _refused(SqsError.of(failure), is_json, headers)
        content, kind = answered(call, told, request_id)
        return Response(content, 200, headers, kind)

    async def _told(self, request: Request) -> tuple[SqsCall, dict[str, Any] | None]:
        async with self._bodies.read(request) as body:
            read = partial(self._read, request, body)
            is_large = len(body) > LARGE_BYTES
            if is_large:
                user, call = await anyio.to_thread.run_sync(read, limiter=self._one_large)
            else:
                user, call = read()
            action = ACTIONS.get(call.action)
            if action is None or not _is_possible(request, call):
                raise call.unknown()
            credentials = (user.name,) if user.name else ()
            actions = Actions(
                call.action,
                call.given,
                f"{request.url.scheme}://{request.headers.get('host', 'localhost')}",
                _region(request),
                self._known,
                partial(self._clients.of, credentials),
                user.permissions,
                user.name,
                request.is_disconnected,
            )
            if call.action != "ReceiveMessage":
                return call, await action(actions)
        return call, await action(actions)  # It may wait, and has no body any more.

    def _read(self, request: Request, body: bytes) -> tuple[users.Known, SqsCall]:
        """Who sent a request, and what it asks for. Raises SqsError."""
        query = request.scope["query_string"].decode("latin-1")
        path = request.scope["raw_path"].decode("latin-1")
        user = _NO_USER
        if self._with_users:
            place, now = (request.method, path, query), datetime.now(UTC)
            find = self._known_users().by_access_key
            user = verified(place, request.headers.items(), body, find, now)
        return user, SqsCall.of(request.headers.get("x-amz-target", ""), query, body, path)


def _is_possible(request: Request, call: SqsCall) -> bool:
    """Whether AWS offers the action at this URL, with this method: a link may not do anything."""
    if call.is_json:
        return True
    if call.action in ("CreateQueue", "ListQueues") and "/" in request.url.path.strip("/"):
        return False
    is_signed = "authorization" in request.headers or "X-Amz-Signature" in request.query_params
    return request.method != "GET" or is_signed


def _refused(error: SqsError, is_json: bool, headers: dict[str, str]) -> Response:
    headers["x-amzn-query-error"] = f"{error.query_code};{error.fault}"
    content, kind = failed(error, is_json, headers["x-amzn-requestid"])
    return Response(content, error.status, headers, kind)


def _region(request: Request) -> str:
    """That of the signature. It is in the names of resources, and has no other meaning."""
    parts = request.headers.get("authorization", "").split("/")
    region = parts[2] if len(parts) > 3 else ""
    return region if region.replace("-", "").isalnum() else "us-east-1"


async def _gone(request: Request, failure: Exception) -> Response:
    """Nobody reads it."""
    return Response(status_code=400)
