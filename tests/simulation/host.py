"""A machine of the simulated world: one server after the other on its database.

The one rule: a killed process leaves what it has written; its locks and its memory are gone.
"""

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.simulation.loop import NOBODY, Process, Violation, end_run, the_loop
from tests.simulation.network import Network

if TYPE_CHECKING:
    from mqks.broker.broker import Broker
    from mqks.settings import Settings

FILES: Final = "/proc/self/fd"
"""Of this process."""


class Started:
    """The task status of a server."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def started(self, value: object = None) -> None:
        self.event.set()


def spawn_server(
    process: Process, settings: "Settings", stop: asyncio.Event, **how: Any
) -> asyncio.Task[None]:
    """One that ends when it is told to."""
    from mqks.server.running import serve

    async def until(reload: object) -> None:
        await stop.wait()

    return process.spawn(serve(settings, until, **how))


class Host:
    def __init__(
        self, network: Network, directory: Path, port: int, note: Callable[..., None]
    ) -> None:
        self._network, self._directory, self._note = network, directory, note
        self.port = port
        self.lives = 0
        self.process: Process
        """Of the latest server."""
        self._connections: list[sqlite3.Connection] = []
        """Of the latest server."""
        connect = sqlite3.connect

        def connected(*arguments: Any, **named: Any) -> sqlite3.Connection:
            self._connections.append(connect(*arguments, **named))
            return self._connections[-1]

        from mqks.server import running

        self.broker: Broker
        """Of the latest server."""
        made = vars(running)["Broker"]

        def remembered(*arguments: Any, **named: Any) -> "Broker":
            self.broker = made(*arguments, **named)
            return self.broker

        vars(sqlite3)["connect"], vars(running)["Broker"] = connected, remembered
        self._stop: asyncio.Event
        self._server: asyncio.Task[None]

    @property
    def db(self) -> Path:
        """Of the latest server."""
        return self._directory / f"life-{self.lives}" / "mqks.db"

    async def serve(self, **settings: Any) -> None:
        """Start a server on what the one before it left; it listens when this returns."""
        from mqks.settings import Settings

        old = self.db.parent
        self.lives += 1
        new = self.db.parent
        if old.exists():
            shutil.copytree(old, new, ignore=shutil.ignore_patterns("*-shm", "*.lock"))
            self._close_files(old)
            shutil.rmtree(old)
        else:
            new.mkdir(parents=True)
        how = Settings(db=self.db, port=self.port, page="off", loop_held_s=0, **settings)
        self._connections.clear()
        process, started, stop = Process(f"server {self.lives}"), Started(), asyncio.Event()
        self._server = spawn_server(process, how, stop, task_status=started)
        self._server.add_done_callback(partial(self._ended, process), context=NOBODY)
        while not started.event.is_set():
            await asyncio.sleep(0.01)
        self._note(process.name, "listens")
        self.process, self._stop = process, stop

    def _close_files(self, directory: Path) -> None:
        """Those that a killed server has left open: its memory is not collected. SQLite knows its
        files by their inodes, so it closes them itself."""
        for connection in self._connections:
            connection.close()
        for name in os.listdir(FILES):
            with suppress(OSError):
                if os.readlink(f"{FILES}/{name}").startswith(f"{directory}/"):
                    os.close(int(name))

    def _ended(self, process: Process, task: asyncio.Task[None]) -> None:
        self._network.kill(process)
        end_run(task)

    async def leave_nothing(self, idle_s: float, turns_max: int, **more: int) -> None:
        """All have left: nothing is held for them, and the server rests. `more` is 0, too."""
        broker, loop = self.broker, the_loop()
        held = {
            "connections": len(broker.connections),
            "consumers": len(broker.consumers),
            "unacked bytes": broker.flow.unacked.used,
            "bytes in outboxes": broker.shared.outboxes.used,
            "receives": broker.flow.receivers,
            "bytes of messages": broker.shared.memory.used,
            "schedules": len(broker.schedules._alarms),
            "records to be written": broker.pending.records,
            **more,
        }
        if any(held.values()):
            raise Violation(f"all have left, and there are {held}")
        turns = loop.steps
        await asyncio.sleep(idle_s)
        if loop.steps - turns > turns_max:
            raise Violation(f"{loop.steps - turns} turns in {idle_s:.0f} s without clients")

    @property
    def stops(self) -> bool:
        """Whether the latest server was told to."""
        return self._stop.is_set()

    def kill(self) -> None:
        self._note("kill", self.process.name)
        self._network.kill(self.process)

    async def end(self, *, kill: bool) -> None:
        if kill:
            self.kill()
        else:
            await self.stop()

    async def stop(self) -> None:
        """SIGTERM; returns when it has ended. Raises what ended it."""
        self._note("stop", self.process.name)
        self._stop.set()
        await asyncio.wait([self._server])
        self._server.result()
