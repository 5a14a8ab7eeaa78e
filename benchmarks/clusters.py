"""Servers of several processes, as one program: `python -m benchmarks.clusters NAME ARGUMENT…`.

The one rule: it ends what it has started, also when it is itself ended by SIGTERM.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Self

from benchmarks.flow import free_port
from benchmarks.servers.rabbitmq import FORMED, environment
from tests.postgres import Postgres

NODES = 3
_RABBITMQ = "/usr/lib/rabbitmq/bin"


def mqks_on_postgres(*serve: str) -> int:
    """A broker on a PostgreSQL server with one synchronous standby. Returns the broker's status."""
    with (
        Postgres(fsync="on", synchronous_standby_names="standby") as primary,
        Postgres(primary=primary, fsync="on") as standby,
    ):
        assert standby
        return _watched([sys.executable, "-m", "mqks", "serve", "--db", primary.url(), *serve])


class RabbitmqNodes:
    """Nodes of one cluster, while it is entered; the first of them listens on `ports[0]`."""

    def __init__(self, directory: Path, port: int | None = None) -> None:
        self.ports = [port or free_port(), *(free_port() for _ in range(NODES - 1))]
        self._names = [f"bench{number}@localhost" for number in range(NODES)]
        self._directory = directory
        self._mapper = free_port()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ending = ExitStack()

    def __enter__(self) -> Self:
        lines = ["cluster_formation.peer_discovery_backend = classic_config"]
        lines += [
            f"cluster_formation.classic_config.nodes.{n} = {name}"
            for n, name in enumerate(self._names, 1)
        ]
        self._config.write_text("\n".join(lines) + "\n")
        # Otherwise each node makes a cookie of its own.
        cookie = self._directory / ".erlang.cookie"
        cookie.write_text("benchmarks")
        cookie.chmod(0o400)
        with ExitStack() as ending:
            mapper = ["epmd", "-address", "127.0.0.1", "-port", str(self._mapper)]
            process = subprocess.Popen(mapper)
            ending.callback(process.wait)
            ending.callback(process.terminate)
            for number, name in enumerate(self._names):
                (self._directory / name).mkdir()
                ending.callback(self.end, number, signal.SIGTERM)
                self.start(number)
            self.wait()
            self._ending = ending.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    @property
    def _config(self) -> Path:
        return self._directory / "cluster.conf"

    def _environment(self, number: int) -> dict[str, str]:
        name = self._names[number]
        told = environment(self._directory / name, name, self.ports[number], self._mapper)
        return told | {"HOME": str(self._directory), "RABBITMQ_CONFIG_FILE": str(self._config)}

    def _log(self, number: int) -> Path:
        return self._directory / f"log.{number}"

    def start(self, number: int) -> None:
        told = {**os.environ, **self._environment(number)}
        with self._log(number).open("ab") as log:
            self._processes[number] = subprocess.Popen(
                [f"{_RABBITMQ}/rabbitmq-server"], env=told, stdout=log, stderr=log
            )

    def end(self, number: int, how: signal.Signals) -> None:
        """Send a signal, and wait until it is gone."""
        if process := self._processes.get(number):
            process.send_signal(how)
            process.wait()

    def wait(self) -> None:
        """Until all are members of the cluster."""
        for number in range(NODES):
            while self._ctl(number, "await_online_nodes", str(NODES)).returncode:
                if self._processes[number].poll() is not None:
                    raise RuntimeError(f"a node has ended:\n{self._log(number).read_text()}")
                time.sleep(1)  # It has not started yet.

    def leader(self, queue: str, asked: int) -> int:
        """The number of the node that leads a quorum queue, as this one says."""
        told = self._ctl(asked, "--quiet", "list_queues", "name", "leader").stdout
        leaders = dict(line.split() for line in told.splitlines()[1:])
        return self._names.index(leaders[queue])

    def _ctl(self, number: int, *words: str) -> subprocess.CompletedProcess[str]:
        told = {**os.environ, **self._environment(number)}
        command = [f"{_RABBITMQ}/rabbitmqctl", "--node", self._names[number], *words]
        return subprocess.run(command, env=told, capture_output=True, text=True)


def rabbitmq(directory: str, port: str) -> int:
    with RabbitmqNodes(Path(directory), int(port)):
        print(FORMED, flush=True)
        signal.pause()
    return 0


def _watched(command: list[str]) -> int:
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        finally:
            process.terminate()


CLUSTERS: dict[str, Callable[..., int]] = {"mqks": mqks_on_postgres, "rabbitmq": rabbitmq}


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    name, *arguments = sys.argv[1:]
    sys.exit(CLUSTERS[name](*arguments))
