"""Who looks at the page: a cookie for each browser, and a connection to the broker for each user.

The one rule: a session knows the broker's answer to `auth` only. Passwords are checked by the
broker, as for every client, and never stored.
"""

import hmac
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

import anyio
from anyio.abc import TaskGroup, TaskStatus

from mqks.client.async_client import AsyncClient
from mqks.client.errors import AuthenticationFailed, ClientError, InvalidRequest, RequestFailed
from mqks.client.options import Options
from mqks.client.urls import Address

COOKIE: Final = "mqks_session"
SESSIONS_MAX: Final = 100
"""One that was not used again makes room, otherwise the one that was idle for longest; none that
has an open page does."""
IDLE_S: Final = 12 * 3600.0
CHECK_S: Final = 10.0
"""An open page learns within this time that its user may not look any more."""
OPTIONS: Final = Options(timeout_s=15.0, connect_timeout_s=5.0, connect_again=False)

Opener = Callable[[str, bool], Awaitable[socket.socket]]
"""Opens a connection to the broker, given what it is called and whether it is trusted."""


@dataclass(eq=False)
class PageSession:
    client: AsyncClient
    has_login: bool
    """Somebody has logged in; false without users."""
    user: str
    """Empty for a token as well."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """The value of its cookie."""
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    used_s: float = field(default_factory=monotonic)
    used_again: bool = False
    """Its browser has sent the cookie back."""
    watching: int = 0
    """Open pages that are renewed."""
    notice: str = ""
    """What an action has done, to be shown once."""
    wrong: str = ""
    """What was wrong with what was typed, to be shown once."""
    typed: dict[str, str] = field(default_factory=dict)
    """The fields of a form that was not done, for when it is shown again."""
    end: anyio.Event = field(default_factory=anyio.Event)
    checked_s: float = field(default_factory=monotonic)
    """When its permission to look was checked."""

    def allows(self, csrf: str) -> bool:
        return hmac.compare_digest(self.csrf.encode(), csrf.encode())


class Sessions:
    """`open_stream` connects to the broker; `with_users` says that everybody must log in."""

    def __init__(self, open_stream: Opener, *, with_users: bool) -> None:
        self._open_stream = open_stream
        self.with_users = with_users
        self._sessions: dict[str, PageSession] = {}
        self._tasks: TaskGroup | None = None

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        async with anyio.create_task_group() as self._tasks:
            task_status.started()
            while True:
                await anyio.sleep(60)
                self._end_idle()

    def client(self, credentials: tuple[str, ...] = (), *, trusted: bool = False) -> AsyncClient:
        """A client that is not connected yet."""
        user = credentials[0] if len(credentials) == 2 else ""

        async def opener() -> socket.socket:
            return await self._open_stream(f"page:{user}" if user else "page", trusted)

        return AsyncClient(Address("page", 0, credentials=credentials, opener=opener), OPTIONS)

    def get(self, token: str | None) -> PageSession | None:
        session = self._sessions.get(token or "")
        if session is None or session.client.is_closed:
            return None
        session.used_s, session.used_again = monotonic(), True
        return session

    async def begin(self, credentials: tuple[str, ...] = ()) -> PageSession:
        """Begin a session. Raises ClientError: RequestFailed for
        a user who may not look, InvalidRequest when all sessions have open pages."""
        assert self._tasks is not None
        began: PageSession | ClientError = await self._tasks.start(self._live, credentials)
        if isinstance(began, ClientError):
            raise began
        if len(self._sessions) >= SESSIONS_MAX and not self._make_room():
            began.end.set()
            raise InvalidRequest("too many pages are open")
        self._sessions[began.token] = began
        return began

    def _make_room(self) -> bool:
        idle = [
            (session.used_again, session.used_s, token)
            for token, session in self._sessions.items()
            if not session.watching
        ]
        if idle:
            self.end(min(idle)[-1])
        return bool(idle)

    async def watched(
        self, session: PageSession, events: AsyncGenerator[bytes]
    ) -> AsyncGenerator[bytes]:
        """Yield these events until its user may no longer look; meanwhile it counts as a session
        with an open page."""
        session.watching += 1
        try:
            async with aclosing(events):
                async for event in events:
                    if not await self._may_look(session):
                        return
                    yield event
        finally:
            session.watching -= 1

    async def _may_look(self, session: PageSession) -> bool:
        now_s = monotonic()
        session.used_s = now_s
        if self.with_users and now_s - session.checked_s > CHECK_S:
            session.checked_s = now_s
            try:
                await session.client.stats("journal")
            except ClientError:
                return False
        return not (session.end.is_set() or session.client.is_closed)

    def end(self, token: str) -> None:
        if session := self._sessions.pop(token, None):
            session.end.set()

    async def _live(
        self, credentials: tuple[str, ...], *, task_status: TaskStatus[PageSession | ClientError]
    ) -> None:
        try:
            async with self.client(credentials, trusted=not self.with_users) as client:
                await client.stats()
                user = credentials[0] if len(credentials) == 2 else ""
                session = PageSession(client, self.with_users, user)
                task_status.started(session)
                await session.end.wait()
        except ClientError as failure:
            task_status.started(failure)

    def _end_idle(self) -> None:
        limit_s = monotonic() - IDLE_S
        for token, session in [*self._sessions.items()]:
            if session.used_s < limit_s or session.client.is_closed:
                self.end(token)


def refusal(failure: ClientError) -> str:
    """Why a login failed, for the person who tried."""
    if isinstance(failure, AuthenticationFailed):
        return "The broker does not accept this name and password."
    if isinstance(failure, InvalidRequest):
        return f"{failure}."
    if isinstance(failure, RequestFailed):
        return "This user may not look at the broker."
    return f"The broker does not answer: {failure}."
