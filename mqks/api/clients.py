"""The connections to the broker of those who use the HTTP API: one for each user.

The one rule: credentials are checked by the broker, as for every client, and again after a minute.
"""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

import anyio
from anyio.abc import TaskGroup, TaskStatus

from mqks.client.async_client import AsyncClient
from mqks.client.errors import ConnectionLost
from mqks.client.options import Options
from mqks.client.urls import Address
from mqks.limits import API_STREAM_BYTES_MAX, API_WAITS_MAX

CLIENTS_MAX: Final = 256
"""For one more, one that nobody uses is closed."""
LOGIN_S: Final = 60.0
"""After this time a request logs in again: the token may have changed."""
TIMEOUT_S: Final = 15.0
CONNECT_S: Final = 10.0
"""A login may wait for a pause after wrong passwords."""
STOPPING: Final = "the server is stopping"

Credentials = tuple[str, ...]
"""Nothing, a token, or user and password."""


@dataclass(eq=False)
class _User:
    client: AsyncClient
    is_open: anyio.Event = field(default_factory=anyio.Event)
    """Or it was refused."""
    failure: Exception | None = None
    requests: int = 0
    """Under way."""
    used_s: float = field(default_factory=monotonic)
    end: anyio.Event = field(default_factory=anyio.Event)
    unused: anyio.Event = field(default_factory=anyio.Event)


class UserClients:
    """`open_stream` connects to the broker, given what the connection is called, and the
    credentials; where it logs in itself, the client does not."""

    def __init__(
        self,
        open_stream: Callable[[str, Credentials], Awaitable[socket.socket]],
        line_bytes_max: int,
        kind: str = "api",
        *,
        logs_in: bool = True,
        waits_max: int = API_WAITS_MAX,
    ) -> None:
        self._open_stream = open_stream
        self._kind = kind
        self._logs_in = logs_in
        self._options = Options(
            timeout_s=TIMEOUT_S,
            connect_timeout_s=CONNECT_S,
            connect_again=False,
            line_bytes_max=line_bytes_max,
            buffer_bytes_max=API_STREAM_BYTES_MAX,
            in_flight_max=10_000 + waits_max,
        )
        self._users: dict[Credentials, _User] = {}
        self._tasks: TaskGroup | None = None
        self._is_over = False

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        async with anyio.create_task_group() as self._tasks:
            task_status.started()
            try:
                await anyio.sleep_forever()
            finally:
                self._is_over = True

    @asynccontextmanager
    async def of(self, credentials: Credentials) -> AsyncIterator[AsyncClient]:
        """A connected client. Raises ClientError."""
        user = self._users.get(credentials)
        if user is None or (user.is_open.is_set() and user.client.is_closed):
            user = self._begin(credentials)
        user.requests += 1
        try:
            await user.is_open.wait()
            if user.failure is not None:
                raise user.failure
            yield user.client
        finally:
            user.requests -= 1
            user.used_s = monotonic()
            if not user.requests and self._users.get(credentials) is not user:
                user.unused.set()

    def _begin(self, credentials: Credentials) -> _User:
        if self._tasks is None or self._is_over:
            raise ConnectionLost(STOPPING)
        if old := self._users.pop(credentials, None):
            old.end.set()
        if len(self._users) >= CLIENTS_MAX:
            idle = [(each.used_s, key) for key, each in self._users.items() if not each.requests]
            if not idle:
                raise ConnectionLost(f"{CLIENTS_MAX} users have requests under way")
            self._users.pop(min(idle)[1]).end.set()
        has_name = len(credentials) == (2 if self._logs_in else 1)
        name = f"{self._kind}:{credentials[0]}" if has_name else self._kind
        address = Address(
            self._kind,
            0,
            credentials=credentials if self._logs_in else (),
            opener=lambda: self._open_stream(name, credentials),
        )
        user = self._users[credentials] = _User(AsyncClient(address, self._options))
        self._tasks.start_soon(self._live, credentials, user)
        return user

    async def _live(self, credentials: Credentials, user: _User) -> None:
        try:
            async with user.client:
                user.is_open.set()
                with anyio.move_on_after(LOGIN_S):
                    await user.end.wait()
                self._forget(credentials, user)
                if user.requests:
                    await user.unused.wait()
        except Exception as failure:  # Told to those who wait; the others go on.
            user.failure = failure
        finally:
            self._forget(credentials, user)
            user.failure = user.failure or ConnectionLost(STOPPING)
            user.is_open.set()

    def _forget(self, credentials: Credentials, user: _User) -> None:
        if self._users.get(credentials) is user:
            del self._users[credentials]
