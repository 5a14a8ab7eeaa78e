"""Three databases of which one is the primary, brokers that are started again when they end, and
the network between them.

The one rule: a standby is promoted only when it has all that any standby has confirmed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal

from mqks.errors import ClaimLost, ConfigurationError, DatabaseLocked, JournalFailed
from tests.kit import waiting
from tests.kit.postgres import Postgres
from tests.kit.server_process import ServerProcess
from tests.takeover.checker import Accompanied, Alone, Continued, Served, Stopped
from tests.takeover.clients import Place

CHUNK_BYTES = 64 * 1024
SYNCHRONOUS = "ANY 1 (db0, db1, db2)"
SETTINGS: Final = {
    "fsync": "on",
    # Small, and quick to be copied.
    "shared_buffers": "16MB",
    "min_wal_size": "32MB",
    "max_wal_size": "128MB",
    "wal_keep_size": "64MB",
    "wal_log_hints": "on",
    "wal_retrieve_retry_interval": "200ms",
}
BACKEND = "application_name = 'mqks' and pid <> pg_backend_pid()"
RESTART_S = 0.5
LIMIT_S = 90.0
PROGRESS = 20
"""So many messages must be confirmed before the next fault."""
"""Only a fault reaches it."""
Mode = Literal["passes", "swallows", "drops", "refuses"]
NOT_STARTED: Final = tuple(
    error.exit_code for error in (DatabaseLocked, JournalFailed, ClaimLost, ConfigurationError)
)
"""How a broker may end that does not serve: another one has the journal, or no primary answers."""
TOLD: Final = 0, -signal.SIGKILL, *NOT_STARTED
SERVED: Final = (ClaimLost.exit_code,)
"""How one may end that serves and is not told to. JournalReverted is none of it: no fault here
loses a commit."""
_FAULTS = re.compile(r"Traceback|event=(internal_error|journal_damaged|connection_failed)")


async def until(look: Callable[[], object], otherwise: Callable[[], str] = str) -> None:
    """Violation with what is `otherwise` the case when it does not happen."""
    limit_s = time.monotonic() + LIMIT_S
    while not look():
        if time.monotonic() > limit_s:
            raise Violation(otherwise())
        await asyncio.sleep(0.02)


class Violation(Exception):
    """Something has happened that must not, or has not happened that must."""


class Network:
    """Between one broker and the databases."""

    def __init__(self, sockets: list[str]) -> None:
        self.mode: Mode = "passes"
        """swallows: replies are lost. drops: everything is. refuses: nobody is connected."""
        self._sockets = sockets
        self._tasks: set[asyncio.Task[None]] = set()
        self.ports: list[int] = []

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Network]:
        async with AsyncExitStack() as stack:
            for path in self._sockets:

                async def serve(
                    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str = path
                ) -> None:
                    await self._serve(path, reader, writer)

                server = await stack.enter_async_context(
                    await asyncio.start_server(serve, "127.0.0.1", 0)
                )
                self.ports.append(server.sockets[0].getsockname()[1])
            try:
                yield self
            finally:
                self.mode = "refuses"
                self.cut()

    async def _serve(
        self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far = None
        try:
            if self.mode != "refuses":
                near, far = await asyncio.open_unix_connection(path)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pass(reader, far, ("passes", "swallows")))
                    group.create_task(self._pass(near, writer, ("passes",)))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for each in (writer, far):
                if each is not None:
                    each.transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, modes: tuple[Mode, ...]
    ) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            if self.mode in modes:
                writer.write(chunk)
                await writer.drain()
        raise ConnectionResetError  # Ends the other direction, too.

    def cut(self) -> None:
        """Reset all connections."""
        for task in [*self._tasks]:
            task.cancel()

    def heal(self) -> None:
        """Connections that lost something can't be used any more."""
        if self.mode != "passes":
            self.mode = "passes"
            self.cut()


class Databases:
    """`primary` is one of `servers`; the directory of the first one is made `within` another."""

    def __init__(self, place: Place, within: Path | None = None, count: int = 3) -> None:
        self._history = place.history
        self._within = within
        self._stack = ExitStack()
        self.servers: list[Postgres] = []
        self._count = count
        self.primary: Postgres

    def __enter__(self) -> Databases:
        with ExitStack() as stack:
            for number in range(self._count):
                server = Postgres(
                    primary=self.servers[0] if number else None,
                    name=f"db{number}",
                    within=None if number else self._within,
                    **self.settings(number),
                )
                self.servers.append(stack.enter_context(server))
                if not number:
                    server.change(synchronous_standby_names=SYNCHRONOUS)
            self.primary = self.servers[0]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def settings(self, number: int) -> dict[str, str]:
        return SETTINGS

    @property
    def standbys(self) -> list[Postgres]:
        return [server for server in self.servers if server is not self.primary]

    @property
    def sockets(self) -> list[str]:
        return [server.socket for server in self.servers]

    def backends(self, condition: str = "true") -> list[int]:
        """Of brokers, on the primary."""
        return self._ask(
            self.primary, f"select pid from pg_stat_activity where {BACKEND} and {condition}"
        )

    def waiting(self) -> list[int]:
        """Backends of brokers that wait for a standby."""
        return self.backends("wait_event = 'SyncRep'")

    @staticmethod
    def _ask(server: Postgres, query: str) -> list[Any]:
        with server.connection() as connection:
            return [row[0] for row in connection.execute(query.encode()).fetchall()]

    def last(self) -> int:
        """The last segment, as the primary shows it."""
        return int(self._ask(self.primary, "select last from mqks.owner")[0])

    def first(self) -> int:
        """The first segment."""
        return int(self._ask(self.primary, "select min(id) from mqks.segment")[0])

    def owner_statistics(self) -> tuple[int, int, int]:
        """How often the owner's row was written and a page of its table read, and the bytes of the
        table."""
        query = (
            "select n_tup_upd, heap_blks_read + heap_blks_hit, pg_relation_size(relid)"
            " from pg_stat_user_tables join pg_statio_user_tables using (relid)"
            " where relid = 'mqks.owner'::regclass"
        )
        with self.primary.connection() as connection:
            [(written, pages, size)] = connection.execute(query.encode()).fetchall()
        return written, pages, size

    def signal(self, function: str, pid: int) -> None:
        self._ask(self.primary, f"select {function}({pid})")

    # -- faults

    def lose_standbys(self) -> None:
        for server in self.standbys:
            if server.is_running:
                server.kill()
        self._history.append(Alone())

    def start_standbys(self) -> None:
        for server in self.standbys:
            if not server.is_running:
                self._history.append(Accompanied())
                server.start()

    def fail_over(
        self, *, kill: bool = True, rewind: bool = False, both_s: float | None = None
    ) -> None:
        """Another one becomes the primary, and the old one a standby. With `both_s` the old one
        goes on for so long: no standby confirms its commits any more."""
        old = self.primary
        if both_s is not None:
            for server in self.standbys:
                server.stop()
                server.follow(None)
        elif old.is_running:
            old.kill() if kill else old.stop()
        self.start_standbys()
        # Both are asked: what only one of them has may have been confirmed.
        best = max(self.standbys, key=self._received)
        best.promote()
        self.primary = best
        waiting.until(lambda: not self._ask(best, "select pg_is_in_recovery()")[0])
        for server in self.standbys:
            if server is not old:
                server.stop()
                server.follow(best)
        if both_s is not None:
            time.sleep(both_s)
            old.kill()
        if not (rewind and old.rewind(best)):
            old.copy(best)

    def _received(self, server: Postgres) -> int:
        """How far it is, once it has taken in all that has reached it from a primary that is
        gone."""
        look = (
            "select pg_last_wal_replay_lsn() - '0/0' from pg_stat_activity"
            " where backend_type = 'startup' and not exists (select from pg_stat_wal_receiver)"
            " and wait_event in ('RecoveryRetrieveRetryInterval', 'RecoveryWalStream')"
        )
        return int(
            waiting.until(lambda: self._ask(server, look), "it is not at the end of its WAL")[0]
        )

    def heal(self) -> None:
        """All run, and the standbys stream."""
        waiting.until(self._is_well, "a database does not come back")

    def _is_well(self) -> bool:
        import psycopg

        with suppress(psycopg.OperationalError):
            if not self.primary.is_running:
                self.primary.start()
            self.start_standbys()
            names = "select application_name from pg_stat_replication where state = 'streaming'"
            return len(self._ask(self.primary, names)) == len(self.standbys)
        return False

    def owner(self) -> tuple[int, int] | None:
        """Epoch and the process that holds the claim, if the database answers."""
        import psycopg

        with suppress(psycopg.Error), self.primary.connection() as connection:
            query = "select epoch, holder from mqks.owner"
            for epoch, holder in connection.execute(query.encode()).fetchall():
                if found := re.search(r" pid (\d+) ", holder or ""):
                    return epoch, int(found[1])
        return None


class Life(ServerProcess):
    """A broker from its start to its end. `without` names the safeguard that it lacks."""

    def __init__(
        self,
        number: int,
        index: int,
        url: str,
        without: str,
        environment: Mapping[str, str] | None,
    ) -> None:
        self.number = number
        self.index = index
        """Of the broker."""
        self._program = ["tests.takeover.without", without] if without else ["mqks"]
        self.is_stopped = False
        self.is_told = False
        """It was killed, or told to end."""
        super().__init__(url, "--drain-timeout-s", "2", environment=environment)

    def _spawn(self, command: list[str]) -> subprocess.Popen[str]:
        return super()._spawn([*command[:2], *self._program, *command[3:]])

    @property
    def listens(self) -> tuple[str, int] | None:
        return self._address if self._listens and self.is_running else None

    def kill_now(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Without waiting for its end."""
        self.is_told = True
        self._started.send_signal(how)


class Brokers:
    """Each is started again when it ends, as a service manager does it."""

    def __init__(
        self,
        place: Place,
        databases: Databases,
        networks: list[Network],
        *,
        without: str = "",
        environments: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        self.place = place
        self.databases = databases
        self.networks = networks
        self._lives: list[Life] = []
        self.now: dict[int, Life] = {}
        """Of each broker, by its index: the last one."""
        self.epochs: dict[int, int] = {}
        """Of lives that serve or have served."""
        self.ends: dict[int, int] = {}
        """The exit code of each life that has ended."""
        self._without = without
        self._environments = environments or {}
        self._numbers = itertools.count(1)
        self._seen: dict[int, int] = {}
        """Epochs by process."""

    def _url(self, index: int) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.networks[index].ports)
        return f"postgresql://{hosts}/postgres?user=postgres&sslmode=disable&connect_timeout=2"

    def start(self, index: int) -> Life:
        life = Life(
            next(self._numbers),
            index,
            self._url(index),
            self._without,
            self._environments.get(index),
        )
        self._lives.append(life)
        self.now[index] = life
        return life

    async def keep(self, index: int) -> None:
        """Run it for ever."""
        while True:
            life = await asyncio.to_thread(self.start, index)
            while life.is_running:
                await asyncio.sleep(0.05)
            await asyncio.to_thread(self._check, life)
            await asyncio.sleep(RESTART_S)

    def _check(self, life: Life) -> None:
        code = life.wait()
        self.place.brokers.pop(life.number, None)
        self.ends[life.number] = code
        served = SERVED if life.number in self.epochs else NOT_STARTED
        if code not in (TOLD if life.is_told else served) or _FAULTS.search(life.log):
            raise Violation(f"broker {life.number} has ended with {code}:\n{life.log[-4000:]}")

    async def watch(self) -> None:
        """Note who serves, with which epoch."""
        while True:
            unknown = any(life.number not in self.epochs for life in [*self.now.values()])
            if unknown and (found := await asyncio.to_thread(self.databases.owner)):
                epoch, pid = found
                self._seen[pid] = epoch
            self._look()
            await asyncio.sleep(0.05)

    def _look(self) -> None:
        for life in [*self.now.values()]:
            address = life.listens
            epoch = self._seen.get(life.pid)
            if address and epoch and life.number not in self.epochs:
                self.epochs[life.number] = epoch
                self.place.history.append(Served(life.number, epoch))
                self.place.brokers[life.number] = address

    @property
    def active(self) -> Life | None:
        """Who serves with the highest epoch."""
        running = [life for life in [*self.now.values()] if life.number in self.epochs]
        running = [life for life in running if life.is_running and not life.is_stopped]
        return max(running, key=lambda life: self.epochs[life.number], default=None)

    def told(self) -> str:
        """The ends of their logs."""
        return "\n".join(
            f"broker {each.number}:\n{each.log[-900:]}" for each in [*self.now.values()]
        )

    async def until_served(self, above: int = 0) -> Life:
        """By an epoch above this one."""

        def serves() -> bool:
            return (life := self.active) is not None and self.epochs[life.number] > above

        while not ((life := self.active) and serves()):
            await until(serves, lambda: f"no broker serves: {self.told()}")
        return life

    async def until_confirmed(self, place: Place) -> None:
        """So many messages more, of clients there."""
        end = place.confirms + PROGRESS
        await until(lambda: place.confirms >= end, lambda: f"nothing is confirmed; {self.told()}")

    async def until_lost(self, life: Life) -> None:
        """It must have lost its claim."""
        await until(
            lambda: life.number in self.ends,
            lambda: f"broker {life.number} goes on after a take-over:\n{life.log}",
        )
        if (code := self.ends[life.number]) != ClaimLost.exit_code:
            raise Violation(f"broker {life.number} has ended with {code}:\n{life.log}")

    def stop(self, life: Life) -> None:
        """SIGSTOP."""
        life.is_stopped = True
        life.suspend()
        self.place.history.append(Stopped(life.number))

    def go_on(self, life: Life) -> None:
        self.place.history.append(Continued(life.number))
        os.kill(life.pid, signal.SIGCONT)

    def end(self) -> None:
        for life in self._lives:
            life.kill()
