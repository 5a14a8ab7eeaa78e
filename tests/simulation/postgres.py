"""PostgreSQL in memory: a primary and its synchronous standby.

What is simulated is what psycopg shows: the product's own connections, claim and store run on it.
The one rule: a commit that was answered with success and without a warning is on both servers, and
a connection that breaks says nothing of the statement that was under way. Whatever is lost
otherwise, and when, the faults say.

Each commit updates the owner's row, so one is made after the other: it is written to the log of the
primary, sent to the standby, and can be seen and is answered when that has it. A primary that dies
in between has it in its log, and shows it when it is started again; a standby that is promoted
meanwhile has never heard of it.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import psycopg
from psycopg.sql import Composable

from tests.simulation.loop import NOBODY, PROCESS, Process, the_loop

if TYPE_CHECKING:
    from tests.simulation.tables import Row, Tables

T = TypeVar("T")
LATENCY_S = 0.001
"""A statement, and its answer, are under way for up to so long."""
VANISHED_S = 11.0
"""After this time a connection on which nothing arrives any more counts as lost."""
WRITE_S = 0.002
"""A commit needs up to so long to be on the disk of the primary, and again on the standby's."""
LOCK_S = 0.05
"""Interval of looks at a lock."""
NAMES = "a", "b"
Phase = Literal["arrives", "is written", "is replicated"]
PHASES: tuple[Phase, ...] = "arrives", "is written", "is replicated"
"""Of a commit: when it has come, is on the primary, and on both."""


@dataclass(slots=True, eq=False)
class Commit:
    """`backend` gets the answer."""

    backend: Connection[Any]
    statement: str
    values: Any
    seen_s: float = -inf
    """Since when a primary shows it."""


class Server:
    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.is_up = True
        self.is_primary = False
        self.tables: Tables = cluster.tables()
        """What can be seen."""
        self.log: list[Commit] = []
        """What is on the disk: the last one perhaps is not to be seen."""
        self.seen = 0
        """How many of the log can be seen."""
        self.backends: list[Connection[Any]] = []
        self._cluster = cluster
        self.life = 0
        self._waiting = deque[Commit]()
        """For the lock of the owner's row."""
        self._is_committing = False
        self._lock: Connection[Any] | None = None
        """Who has the advisory lock."""

    @property
    def other(self) -> Server:
        return next(each for each in self._cluster.servers if each is not self)

    @property
    def standby(self) -> Server | None:
        """That of this primary, if it has one."""
        return None if self.other.is_primary or not self.other.is_up else self.other

    # -- statements

    def receive(self, backend: Connection[Any], statement: str, values: Any) -> None:
        if not backend.is_cut:
            try:
                self._execute(backend, statement, values)
            except Exception as error:  # One that the model does not know.
                backend.answer(error)

    def _execute(self, backend: Connection[Any], statement: str, values: Any) -> None:
        backend.is_active = True
        if statement.startswith(LOCK):
            self._take_lock(backend, statement, values)
        elif statement == self.tables.RUNS:
            runs = any(each.pid == values["pid"] and each.is_active for each in self.backends)
            backend.answer([(1,)] if runs else [])
        elif statement == self.tables.LOOK:
            backend.answer([self.settings(backend)])
        elif statement.startswith(NOTHING):
            backend.answer([])
        elif statement.lstrip().startswith("select"):
            backend.answer(self.tables.read(statement, values))
        else:
            self._waiting.append(Commit(backend, statement, values))
            if not self._passes("arrives", backend):
                self._commit()

    def _take_lock(self, backend: Connection[Any], statement: str, values: Any) -> None:
        if self._lock is None or self._lock.is_cut or self._lock.process.dead:
            self._lock = backend
            backend.answer([])
        else:
            the_loop().happen(LOCK_S, partial(self.receive, backend, statement, values), NOBODY)

    def unlock(self, backend: Connection[Any]) -> None:
        if self._lock is backend:
            self._lock = None

    def settings(self, backend: Connection[Any]) -> Row:
        on = "on", "on", "on"
        return not self.is_primary, backend.pid, *on, "0", "0", "notice", "ANY 1 (a, b)"

    # -- commits

    def _passes(self, phase: Phase, backend: Connection[Any]) -> bool:
        """Whether a fault that waited for a commit has ended this life of the server."""
        life, trap = self.life, self._cluster.trap
        if trap is not None and trap[0] == phase:
            self._cluster.trap = None
            trap[1](self, backend)
        return life != self.life

    def _after(self, most_s: float, what: Callable[[], object]) -> None:
        life = self.life

        def go_on() -> None:
            if self.life == life:
                what()

        after_s = the_loop().rng.uniform(0, most_s) + self._cluster.slow_s()
        the_loop().happen(after_s, go_on, NOBODY)

    def _commit(self) -> None:
        if self._is_committing or not self._waiting:
            return
        commit = self._waiting.popleft()
        try:
            if self._cluster.is_full and self.tables.adds(commit.statement):
                raise psycopg.errors.DiskFull("no space left on device")
            self._is_committing = self.tables.is_met(commit.statement, commit.values)
        except psycopg.Error as error:
            commit.backend.answer(error)
        else:
            if self._is_committing:
                self._after(WRITE_S, partial(self._write, commit))
            else:
                commit.backend.answer([])
        self._commit()

    def _write(self, commit: Commit) -> None:
        self.log.append(commit)
        if not self._passes("is written", commit.backend):
            self._after(WRITE_S, self.replicate)

    def replicate(self) -> None:
        """Send the standby what it has not got; without one, commits wait."""
        if (standby := self.standby) is None:
            return
        standby.log += self.log[len(standby.log) :]
        standby.show()
        if self.waits and not self._passes("is replicated", self.log[-1].backend):
            self.end_wait()

    @property
    def waits(self) -> bool:
        return self._is_committing and self.seen < len(self.log)

    def end_wait(self, *warnings: str) -> None:
        """Answer the commit that waits; with a warning if an operator has ended the wait."""
        self._is_committing = False
        self.log[-1].backend.answer(self.show(), warnings)
        self._commit()

    def show(self) -> list[Row]:
        """All of the log can be seen. Returns what the last one has returned."""
        rows: list[Row] = []
        for commit in self.log[self.seen :]:
            if self.is_primary:
                commit.seen_s = the_loop().time()
                if self.tables.deposes(commit.statement):
                    silent_s = commit.seen_s - self.log[self.seen - 1].seen_s
                    self._cluster.shortest_s = min(self._cluster.shortest_s, silent_s)
            self.seen += 1
            settings = self.settings(commit.backend)
            rows = self.tables.write(commit.statement, commit.values, settings)
        return rows

    # -- lives

    def die(self) -> None:
        self.is_up, self._is_committing, self._lock = False, False, None
        self.life += 1
        self._waiting.clear()
        for each in [*self.backends]:
            each.cut()

    def start(self) -> None:
        """Again, as what it was, with all that is in its log."""
        if not self.is_up:
            self.is_up = True
            self.show()
        for each in self._cluster.servers:
            if each.is_primary:
                each._after(WRITE_S, each.replicate)

    def follow(self) -> None:
        """Start as the standby of the other one, which may lack what this one had."""
        self.is_primary = False
        self.log, self.seen = self.other.log[: self.other.seen], self.other.seen
        self.tables = copy.deepcopy(self.other.tables)
        self.start()


class Cluster:
    """Both servers, and the faults that they have at present."""

    def __init__(self, tables: type[Tables]) -> None:
        self.tables = tables
        self.trap: tuple[Phase, Callable[[Server, Connection[Any]], object]] | None = None
        """What happens to the next commit that is there."""
        self.slow_mean_s = 0.0
        self.is_full = False
        """There is no room for segments."""
        self.shortest_s = inf
        """The shortest time without a commit after which an owner has lost its claim."""
        self.cut_off: Process | None = None
        """Who can connect to none of them."""
        self.servers = [Server(self, name) for name in NAMES]
        self.servers[0].is_primary = True
        self.pids = 0

    def slow_s(self) -> float:
        return the_loop().rng.expovariate(1 / self.slow_mean_s) if self.slow_mean_s else 0.0

    @property
    def primary(self) -> Server:
        [primary] = (each for each in self.servers if each.is_primary)
        return primary

    def find(self, host: str, **how: Any) -> Server:
        """Raises OperationalError. What psycopg does with the names of several hosts."""
        for server in self.servers if PROCESS.get() is not self.cut_off else ():
            is_wanted = server.is_primary or "target_session_attrs" not in how
            if is_wanted and server.is_up and server.name in host.split(","):
                return server
        raise psycopg.OperationalError(f"connection to {host} failed")


LOCK = "select pg_advisory_xact_lock("
NOTHING = "create ", "--", "alter ", "begin", "commit"
"""What has no effect here: all tables are there."""


# -- what psycopg shows


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
