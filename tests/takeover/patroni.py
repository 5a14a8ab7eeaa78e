"""Three databases that Patroni manages, with etcd, in strict synchronous mode.

Each cluster has its own addresses of the loopback network, so that all ports are the usual ones.
The one rule: which one is the primary, and who may become it, is Patroni's affair alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from urllib.request import urlopen

from tests.postgres import Postgres, kill_with_children
from tests.takeover.checker import Accompanied
from tests.takeover.cluster import SETTINGS, Databases
from tests.takeover.faults import Faults
from tests.waiting import WAIT_S, until

PATRONI = "patroni[etcd3]>=4.1,<5"
SCOPE = "mqks"
DYNAMIC = {
    # The shortest that it accepts: after `ttl` without a word another node becomes the primary.
    "ttl": 20,
    "loop_wait": 1,
    "retry_timeout": 3,
    "synchronous_mode": True,
    "synchronous_mode_strict": True,
}


class PatroniMissing(Exception):
    """Patroni or etcd can't run here."""


def address(number: int) -> str:
    """No other process has it: a pid has 22 bits at most, and 24 are free."""
    return str(ip_address("127.0.0.0") + 4 * os.getpid() + number)


def installed(directory: Path) -> Path:
    """Packages of Patroni in this directory. Two of what it needs are no wheels, and none of it is
    needed by anything else."""
    if not shutil.which("etcd"):
        raise PatroniMissing("etcd is not installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "--target", directory, PATRONI], capture_output=True, text=True)
    if done.returncode:
        raise PatroniMissing(f"Patroni can't be installed: {done.stderr[-1000:]}")
    return directory


def not_root() -> list[str]:
    """A command in which this user is not root by name, which PostgreSQL would refuse."""
    if os.geteuid():
        return []
    command = ["unshare", "--user", "--map-user=1000"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PatroniMissing(f"root can't make a user namespace: {error}") from None
    return command


class Node(Postgres):
    """PostgreSQL under Patroni. To kill it is to kill both."""

    def __init__(self, number: int, packages: Path, **settings: str) -> None:
        super().__init__(name=f"db{number}")
        self._address = address(number)
        self._packages = packages
        self._config = self._directory / "patroni.json"
        self._prefix = not_root()
        self._parameters = settings

    def __enter__(self) -> Node:
        every = ["local all all trust", "host all all 127.0.0.0/8 trust"]
        user = {"username": "postgres"}
        # JSON is YAML, too.
        config = {
            "scope": SCOPE,
            "name": self._name,
            "restapi": {"listen": f"{self._address}:8008"},
            "etcd3": {"host": f"{address(0)}:2379"},
            "bootstrap": {
                "dcs": {**DYNAMIC, "postgresql": {"use_pg_rewind": True}},
                "initdb": [{"encoding": "UTF8"}, {"auth": "trust"}, "no-locale", "no-sync"],
            },
            "postgresql": {
                "listen": f"{self._address}:5432",
                "data_dir": str(self._data),
                "bin_dir": str(self._installation / "bin"),
                "pgpass": str(self._directory / "pgpass"),
                "authentication": {"superuser": user, "replication": user, "rewind": user},
                "parameters": {
                    **self._parameters,
                    "unix_socket_directories": str(self._directory),
                },
                "pg_hba": [*every, "host replication all 127.0.0.0/8 trust"],
            },
        }
        self._config.write_text(json.dumps(config))
        self.start()
        return self

    def _python(self, name: str) -> tuple[list[str], dict[str, str]]:
        """A program of Patroni, and its environment."""
        environment = {**os.environ, "PYTHONPATH": str(self._packages)}
        return [sys.executable, str(self._packages / "bin" / name)], environment

    def start(self) -> None:
        """Start Patroni, which does what is to be done."""
        program, environment = self._python("patroni")
        with open(self._directory / "log", "ab") as log:
            self._server = subprocess.Popen(
                [*self._prefix, *program, str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def switch_over(self, candidate: Node) -> bool:
        """What an operator does, if Patroni does it: this one is the primary."""
        program, environment = self._python("patronictl")
        nodes = ["--leader", self._name, "--candidate", candidate._name]
        done = subprocess.run(
            [*program, "-c", str(self._config), "switchover", SCOPE, *nodes, "--force"],
            env=environment,
            capture_output=True,
            text=True,
        )
        return "Successfully switched over" in done.stdout

    @property
    def is_synchronous(self) -> bool:
        """Whether Patroni would make it the primary."""
        with suppress(OSError):
            urlopen(f"http://{self._address}:8008/synchronous", timeout=5).close()
            return True
        return False

    def kill(self) -> None:
        assert self._server is not None
        self._server.kill()
        self._server.wait(WAIT_S)
        killed: list[int] = []
        for pid in self._postgres():
            with suppress(ProcessLookupError, FileNotFoundError):
                killed += pid, *kill_with_children(pid)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in killed))

    stop = kill

    def _postgres(self) -> list[int]:
        """Those that were started with its directory."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if str(self._data).encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found


class Patroni(Databases):
    """`primary` is who was it when it was looked for last."""

    def __enter__(self) -> Patroni:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mqks-etcd-")))
            packages = installed(directory / "packages")
            stack.enter_context(_etcd(directory))
            for number in range(1, self._count + 1):
                self.servers.append(stack.enter_context(Node(number, packages, **SETTINGS)))
            self.heal()
            self._stack = stack.pop_all()
        return self

    def owner(self) -> tuple[int, int] | None:
        self._find()
        return super().owner()

    def _find(self) -> bool:
        import psycopg

        for server in self.servers:
            with suppress(psycopg.OperationalError):
                if not self._ask(server, "select pg_is_in_recovery()")[0]:
                    self.primary = server
                    return True
        return False

    def standby_names(self) -> str:
        return str(self._ask(self.primary, "show synchronous_standby_names")[0])

    def switch_over(self) -> None:
        """To a synchronous standby."""
        old, new = self.primary, until(self._candidate)
        assert isinstance(old, Node)
        until(lambda: old.switch_over(new) or self._is_another(old), "Patroni does not switch over")

    def _candidate(self) -> Node | None:
        nodes = [each for each in self.servers if isinstance(each, Node) and each.is_synchronous]
        return next(iter(nodes), None)

    def until_another(self, old: Postgres) -> None:
        until(lambda: self._is_another(old), "no other one becomes the primary")

    def _is_another(self, old: Postgres) -> bool:
        return self._find() and self.primary is not old

    def _is_well(self) -> bool:
        import psycopg

        for server in self.servers:
            if not server.is_running:
                self._history.append(Accompanied())
                server.start()
        with suppress(psycopg.OperationalError):
            if self._find() and self._candidate():
                states = self._ask(self.primary, "select state from pg_stat_replication")
                return states == ["streaming"] * (self._count - 1)
        return False


@contextmanager
def _etcd(directory: Path) -> Iterator[None]:
    """One alone, as nothing here is about it."""
    clients, peers = f"http://{address(0)}:2379", f"http://{address(0)}:2380"
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(
            [
                *("etcd", "--name", "etcd", "--data-dir", str(directory / "data")),
                *("--listen-client-urls", clients, "--advertise-client-urls", clients),
                *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
                *("--initial-cluster", f"etcd={peers}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        process.kill()
        process.wait(WAIT_S)


class FailOvers(Faults):
    """Those of Patroni, and what happens to brokers meanwhile."""

    _databases: Patroni

    def names(self) -> list[str]:
        mine = [name for name in vars(FailOvers) if name[0] != "_" and name != "names"]
        return sorted([*mine, "kill_broker", "suspend_broker", "cut_network_through_a_take_over"])

    async def switch_over(self, rng: random.Random) -> None:
        old = self._databases.primary
        await asyncio.to_thread(self._databases.switch_over)
        await asyncio.to_thread(self._databases.until_another, old)

    async def lose_the_primary(self, rng: random.Random) -> None:
        """It comes back when messages are confirmed by the next one."""
        old = self._databases.primary
        await asyncio.to_thread(old.kill)
        await asyncio.to_thread(self._databases.until_another, old)
        await self._progress()

    async def lose_all_standbys(self, rng: random.Random) -> None:
        """Patroni lets any standby confirm then, and there is none. Brokers say what they wait for:
        the one that serves, and one that starts."""
        life = await self._brokers.until_served()
        await asyncio.to_thread(self._databases.lose_standbys)
        await asyncio.to_thread(until, lambda: self._databases.standby_names() == "*")
        await asyncio.to_thread(until, lambda: "waits with the commit for a standby" in life.log)
        life.kill_now()
        await asyncio.to_thread(
            until, lambda: "any standby confirms" in self._brokers.now[life.index].log
        )
