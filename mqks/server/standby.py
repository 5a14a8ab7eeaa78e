"""A broker that waits for a journal which another one owns, and then loads it.

The one rule: until the journal is loaded it opens no port for clients, and tells everybody else who
asks that it waits, and for whom.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
from anyio.abc import TaskGroup

from mqks import log
from mqks.journal.journal import Journal
from mqks.server.notify import Notify
from mqks.settings import Settings
from mqks.web import http_port

TELL_S: Final = 0.25
"""Interval at which it is seen what the store waits for: a shorter wait is none."""


class Stop:
    """An `until` that is waited for from the first moment. A reload that comes before there is a
    server is done when there is one."""

    def __init__(self, until: Callable[[Callable[[], None]], Awaitable[object]]) -> None:
        self._reload: Callable[[], None] | None = None
        self._is_wanted = False
        self.told = asyncio.ensure_future(until(self._reloaded))

    async def __call__(self, reload: Callable[[], None]) -> None:
        self._reload = reload
        if self._is_wanted:
            reload()
        await self.told

    def _reloaded(self) -> None:
        if self._reload is not None:
            self._reload()
        else:
            self._is_wanted = True


class Standby:
    def __init__(
        self, settings: Settings, journal: Journal, notify: Notify, http_connections_max: int
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._store = journal.store
        self._notify = notify
        self._http_connections_max = http_connections_max
        self._told = ""
        """What it waits for, as it was logged."""
        self.http_address = ""
        """Where its HTTP port is."""

    def why(self) -> str:
        """Why publishes are not confirmed."""
        waits = self._store.waits
        return f"standby: {waits}" if waits else "reading the journal"

    async def load(self, load: Callable[[], Awaitable[None]], stop: Stop) -> bool:
        """Claim and load the journal; False if it was told to stop before."""
        with anyio.CancelScope() as scope:

            def end(_: object) -> None:
                scope.cancel()

            stop.told.add_done_callback(end)
            async with anyio.create_task_group() as tasks:
                if self._settings.standby:
                    tasks.start_soon(self._tell, tasks)
                await load()
                tasks.cancel_scope.cancel()
            if self._told:  # It was loaded before the next look.
                log.event("claimed")
            stop.told.remove_done_callback(end)
            return True
        self._notify.tell("STOPPING=1")
        log.event("stopped")
        return False

    async def _tell(self, tasks: TaskGroup) -> None:
        is_standby = False
        while True:
            await anyio.sleep(TELL_S)
            waits = self._store.waits
            if waits == self._told:
                continue
            self._told = waits
            if waits and not is_standby:
                is_standby = True
                await self._become_standby(tasks)
            if waits:
                log.event("standby", reason=waits)
            else:
                log.event("claimed")
            self._notify.tell(f"STATUS={self.why()}")

    async def _become_standby(self, tasks: TaskGroup) -> None:
        """It has started as far as service managers are concerned."""
        if self._settings.has_http:
            place = self._settings.http_host, self._settings.http_port
            self.http_address = await tasks.start(http_port.serve, *place, self._answer_http)
        tasks.start_soon(self._notify.feed_watchdog, self._progress)
        self._notify.tell("READY=1")

    def _progress(self) -> int | None:
        return None if self._store.waits else self._journal.next_segment

    async def _answer_http(self, sock: socket.socket) -> None:
        monitoring = await http_port.load("mqks.server.monitoring")
        await monitoring.serve_standby(sock, self.why, self._http_connections_max)
