"""The connections of psycopg, as the product uses them, to simulated servers of PostgreSQL.

The one rule: a connection that breaks says nothing of the statement that was under way.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import psycopg
from psycopg.sql import Composable

from tests.simulation.loop import NOBODY, PROCESS, Process, the_loop
from tests.simulation.postgres import Cluster, Server

if TYPE_CHECKING:
    from tests.simulation.tables import Row

T = TypeVar("T")
LATENCY_S = 0.001
"""A statement, and its answer, are under way for up to so long."""
VANISHED_S = 11.0
"""After this time a connection on which nothing arrives any more counts as lost."""


class Connection(Generic[T]):
    """In place of psycopg.AsyncConnection."""

    cluster: Cluster

    def __init__(self, server: Server, life: int) -> None:
        self.server, self.life = server, life
        self.cluster.pids += 1
        self.pid = self.cluster.pids
        self.pgconn = SimpleNamespace(backend_pid=self.pid)
        about = {"hostaddr": "", "port": 5432, "server_version": 170000}
        told = {"server_version": "17.0"}.get
        self.info = SimpleNamespace(host=server.name, parameter_status=told, **about)
        self.closed = self.broken = False
        self.is_cut = False
        """Nothing passes any more; the client may not know it yet."""
        self.is_active = False
        """The server works on a statement."""
        self._asked: asyncio.Future[list[Row]] | None = None
        self._tell: Callable[[Any], object] = print
        self._context = contextvars.copy_context()
        server.backends.append(self)

    @classmethod
    async def connect(cls, **parameters: Any) -> Any:
        await asyncio.sleep(the_loop().rng.uniform(0, LATENCY_S))
        server = cls.cluster.find(**parameters)
        return cls(server, server.life)

    @property
    def process(self) -> Process:
        return self._context[PROCESS]

    # -- for the client

    async def ask(self, statement: Any, values: Any) -> list[Row]:
        text = statement.decode() if isinstance(statement, bytes) else statement
        text = text.as_string() if isinstance(text, Composable) else text
        if self.closed:
            raise psycopg.OperationalError("the connection is closed")
        asked: asyncio.Future[list[Row]] = the_loop().create_future()
        self._asked = asked
        if self.is_cut:
            self._later(LATENCY_S, self._lose)
        arrives = partial(self.server.receive, self, text, values)
        the_loop().happen(the_loop().rng.uniform(0, LATENCY_S), arrives, NOBODY)
        try:
            return await asked
        except asyncio.CancelledError:
            self.abort()
            raise

    def cursor(self, **how: Any) -> Cursor:
        return Cursor(self.ask)

    async def execute(self, statement: Any, values: Any = None) -> Cursor:
        cursor = self.cursor()
        await cursor.execute(statement, values)
        return cursor

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Of what is written in one, only the row of the owner counts: one commit."""
        await self.ask("begin", None)
        try:
            yield
        finally:
            self.server.unlock(self)
        await self.ask("commit", None)

    def add_notice_handler(self, tell: Callable[[Any], object]) -> None:
        self._tell = tell

    async def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        self.is_cut = True
        self._lose()

    async def __aenter__(self) -> Connection[T]:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    def _lose(self) -> None:
        self.closed = True
        with suppress(ValueError):
            self.server.backends.remove(self)
        if self._asked is not None and not self._asked.done():
            self._asked.set_exception(psycopg.OperationalError("the connection was lost"))

    def _take(self, outcome: Any, warnings: Sequence[str]) -> None:
        if self.closed or self._asked is None or self._asked.done():
            return
        for each in warnings:
            self._tell(SimpleNamespace(message_primary=each))
        if isinstance(outcome, Exception):
            self._asked.set_exception(outcome)
        else:
            self._asked.set_result(outcome)

    # -- for the server, and for faults

    def _later(self, after_s: float, what: Callable[[], object]) -> None:
        the_loop().happen(after_s, what, self._context)

    def answer(self, outcome: Any, warnings: Sequence[str] = ()) -> None:
        self.is_active = False
        if not self.is_cut:
            take = partial(self._take, outcome, warnings)
            self._later(the_loop().rng.uniform(0, LATENCY_S), take)

    def cut(self, noticed_s: float = LATENCY_S) -> None:
        """Break it; who waits for an answer notices it after so long."""
        if not self.is_cut:
            self.is_cut = True
            self._later(noticed_s, self._lose)


class Cursor:
    def __init__(self, ask: Callable[[Any, Any], Any]) -> None:
        self._ask = ask
        self._rows: list[Row] = []

    async def execute(self, statement: Any, values: Any = None, **how: Any) -> None:
        self._rows = await self._ask(statement, values)

    async def fetchall(self) -> list[Row]:
        return self._rows

    async def fetchone(self) -> Row | None:
        return self._rows[0] if self._rows else None


class ThreadConnection:
    """What psycopg.connect returns to a thread: it only reads, in no time."""

    def __init__(self, cluster: Cluster, **parameters: Any) -> None:
        self._server = cluster.find(**parameters)
        self._life = self._server.life
        self._rows: list[Row] = []
        self.closed = False

    @contextmanager
    def cursor(self, **how: Any) -> Any:
        yield self

    def execute(self, statement: bytes, values: Any, **how: Any) -> ThreadConnection:
        if self._server.life != self._life:
            raise psycopg.OperationalError("the connection was lost")
        self._rows = self._server.tables.read(statement.decode(), values)
        return self

    def fetchall(self) -> list[Row]:
        return self._rows

    def close(self) -> None:
        self.closed = True
