"""Reading files again while the server runs: users, certificates, and queue defaults.

The one rule: all are read, off the event loop, before anything changes; if one of them is invalid,
nothing changes. One reload after the other: who asks meanwhile gets the next one.
"""

import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import anyio

from mqks import log
from mqks.audit import Actor, Operator
from mqks.broker.spine.clients.connection import Connection
from mqks.errors import BadRequest, ConfigurationError
from mqks.limits import RELOADS_WAITING_MAX
from mqks.protocol import replies
from mqks.server import tls
from mqks.server.notify import Notify
from mqks.settings import QueueTable
from mqks.users import Users

NAMES_TOLD: Final = 100
"""Users that an answer names."""


class Reread(NamedTuple):
    """What the files say now."""

    users: Users
    context: tls.Context | None
    tables: tuple[QueueTable, ...]
    restart: list[str]
    """Settings that have changed since the start of the server, and need another one."""


class Reloads:
    """`read` reads the files, and raises ConfigurationError. `use` applies them, on behalf of an
    actor, and returns what changed."""

    def __init__(
        self,
        notify: Notify,
        read: Callable[[], Reread],
        use: Callable[[Reread, Actor], dict[str, Any]],
        flush: Callable[[], None],
    ) -> None:
        self._notify, self._read, self._use, self._flush = notify, read, use, flush
        self._wanted = anyio.Event()
        self._waiting: list[tuple[Connection, bytes]] = []

    def want(self) -> None:
        """On a signal."""
        self._wanted.set()

    def want_for(self, connection: Connection, request_id: bytes) -> None:
        """Tell this connection what changed. Raises BadRequest."""
        if len(self._waiting) >= RELOADS_WAITING_MAX:
            raise BadRequest(f"reload: {RELOADS_WAITING_MAX} of them wait already")
        connection.unconfirmed += 1  # It has an answer to come, also if it sends no more.
        self._waiting.append((connection, request_id))
        self._wanted.set()

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted, waiting = anyio.Event(), self._waiting
            self._waiting, refusal = [], None
            try:
                with self._notify.reloading():
                    found = await anyio.to_thread.run_sync(self._read)
                    told = self._use(found, waiting[0][0] if waiting else Operator())
            except ConfigurationError as failure:
                log.error("reload_failed", reason=failure)
                told, refusal = {}, BadRequest(f"reload: {failure}")
            for connection, request_id in waiting:
                connection.unconfirmed -= 1
                if connection.closed:
                    continue
                if refusal is not None:
                    connection.fail(request_id, b"reload", refusal)
                else:
                    connection.write(replies.ok(request_id, json.dumps(told).encode()))
            self._flush()
