"""Connections: one that commits, and those that read bodies.

The one rule: a commit is never cancelled. PostgreSQL answers a commit whose wait for the standby
was cancelled with success and a warning. So who stops waiting closes the socket.
"""

import os
import socket
from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import anyio
import psycopg
from anyio.to_thread import run_sync
from psycopg import waiting
from psycopg.abc import PQGen

from mqks.journal.postgres.address import PostgresAddress

T = TypeVar("T")
Row = tuple[Any, ...]


class ServerPlace(NamedTuple):
    """The one of several that the writer's connection has found."""

    generation: int
    """Grows with each connection of the writer."""
    place: dict[str, Any]
    """Parameters of a connection to it, and to no other."""


class PostgresConnection(psycopg.AsyncConnection[Row]):
    """The connection of the writer, one statement at a time, each a transaction."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.warnings: list[str] = []
        """What the server said about the last statement besides its result."""
        self.add_notice_handler(lambda told: self.warnings.append(str(told.message_primary)))
        # Making one takes a fifth of the processor time of a commit.
        self._statement = self.cursor(binary=True)

    @classmethod
    async def to(cls, address: PostgresAddress) -> "PostgresConnection":
        return await cls.connect(**address.parameters, autocommit=True)

    async def wait(self, gen: PQGen[T], interval: float = 1.0, timeout: float | None = None) -> T:
        """psycopg's own one sends a cancel request when its task is cancelled."""
        try:
            return await waiting.wait_async(gen, self.pgconn.socket, interval=interval)
        except CancelledError:
            self.abort()
            raise

    async def rows(self, sql: str, values: Mapping[str, Any] | None = None) -> list[Row]:
        """Execute a statement that has rows; prepared, as each of them is executed often."""
        self.warnings.clear()
        await self._statement.execute(sql.encode(), values, prepare=True)
        return await self._statement.fetchall()

    def abort(self) -> None:
        """End it without a word to the server: what waits for a reply gets an OperationalError."""
        # With a copy of the descriptor, since libpq closes its own.
        with (
            suppress(psycopg.OperationalError, OSError),
            socket.socket(fileno=os.dup(self.pgconn.socket)) as copy,
        ):
            copy.shutdown(socket.SHUT_RDWR)

    @property
    def is_lost(self) -> bool:
        return self.closed or self.broken


class Reading:
    """A connection for bodies, used by one thread at a time, made when it is needed. It is to the
    server on which the writer commits: of two that take themselves for the primary, the other one
    may lack what was committed."""

    def __init__(self, address: PostgresAddress) -> None:
        self._address = address
        self._limiter = anyio.CapacityLimiter(1)
        self._connection: psycopg.Connection[Row] | None = None
        self._server: ServerPlace | None = None

    async def rows(self, sql: str, values: Sequence[Any], server: ServerPlace) -> list[Row]:
        """Raises psycopg.Error."""
        return await run_sync(self._rows, sql, values, server, limiter=self._limiter)

    def _rows(self, sql: str, values: Sequence[Any], server: ServerPlace) -> list[Row]:
        if self._server != server:
            self.close()
            self._server = server
        if self._connection is None or self._connection.closed:
            parameters = {**self._address.parameters, **server.place}
            self._connection = psycopg.connect(**parameters, autocommit=True)
        try:
            with self._connection.cursor(binary=True) as cursor:
                return cursor.execute(sql.encode(), values, prepare=True).fetchall()
        except psycopg.OperationalError:
            self.close()
            raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
