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


def rabbitmq(directory: str, port: str) -> int:
    """Nodes of one cluster, the first of them with this port."""
    base = Path(directory)
    names = [f"bench{number}@localhost" for number in range(NODES)]
    mapper = free_port()
    config = base / "cluster.conf"
    lines = ["cluster_formation.peer_discovery_backend = classic_config"]
    lines += [
        f"cluster_formation.classic_config.nodes.{n} = {name}" for n, name in enumerate(names, 1)
    ]
    config.write_text("\n".join(lines) + "\n")
    # Otherwise each node makes a cookie of its own.
    cookie = base / ".erlang.cookie"
    cookie.write_text("benchmarks")
    cookie.chmod(0o400)
    with ExitStack() as ending:
        _started(ending, ["epmd", "-address", "127.0.0.1", "-port", str(mapper)])
        for number, name in enumerate(names):
            place = base / name
            place.mkdir()
            told = environment(place, name, int(port) if number == 0 else free_port(), mapper)
            told |= {"HOME": directory, "RABBITMQ_CONFIG_FILE": str(config)}
            _started(ending, [f"{_RABBITMQ}/rabbitmq-server"], told)
        wait = [f"{_RABBITMQ}/rabbitmqctl", "--node", names[0], "await_online_nodes", str(NODES)]
        told |= {"RABBITMQ_NODENAME": names[0]}
        while subprocess.run(wait, env={**os.environ, **told}).returncode:
            time.sleep(1)  # The first node has not started yet.
        print(FORMED, flush=True)
        signal.pause()
    return 0


def _started(
    ending: ExitStack, command: list[str], environment: dict[str, str] | None = None
) -> None:
    process = subprocess.Popen(command, env={**os.environ, **(environment or {})})
    ending.callback(process.wait)
    ending.callback(process.terminate)


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
