"""Libraries of tasks on MQKS, Redis and RabbitMQ, in turns: tasks per second, latency, memory,
restarts.

    python -m benchmarks.tasks [LIBRARY ...] [--count N] [--rounds N]

Needs Debian's `redis-server` and `rabbitmq-server`, and `pip install taskiq-redis taskiq-aio-pika`;
what is not installed is left out, with a line that says so. Prints the table of
docs/performance.md: medians of the rounds.

All make the same promise: Redis syncs each write (`appendfsync always`); RabbitMQ's queue is
durable, its messages are persistent, and each is confirmed, after an fsync (`strace` shows one for
each). Tasks are enqueued one after the other; a worker with two processes runs them, and each
writes its number into a file: each must have run, once.
"""

import argparse
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.flow import free_port
from benchmarks.libraries import NOTED
from benchmarks.process import peer, resident_bytes, spawn, until
from benchmarks.servers import SERVERS

COUNT, ROUNDS, LATENCIES, RESTART_S = 3000, 3, 200, 60
LIBRARIES = "celery", "dramatiq", "huey", "taskiq"
NAMES = {"mqks": "MQKS", "redis-always": "Redis", "rabbitmq": "RabbitMQ"}
SCHEMES = {"mqks": "mqks", "redis-always": "redis", "rabbitmq": "amqp"}
COLUMNS = {
    "enqueued": ("enqueued and confirmed", "{:,.0f}/s"),
    "done": ("done", "{:,.0f}/s"),
    "latency_ms": ("one task, median", "{:.1f} ms"),
    "waiting_kb": ("memory of a waiting task", "{:.1f} KB"),
    "restart_s": ("until a worker works again after its broker was killed", "{:.1f} s"),
}


def measure(
    library: Any, port: int, command: list[str], count: int, tmp: Path, restarts: bool
) -> dict[str, Any]:
    def one() -> float:
        path = tmp / "told"
        path.unlink(missing_ok=True)
        began_s = time.perf_counter()
        library.tell(str(path))
        until(path.exists, 0.0002, RESTART_S)
        return time.perf_counter() - began_s

    def again() -> bool:
        """Whether a task is done. Some programs find out by an error that they are not connected
        any more."""
        with suppress(Exception):
            return one() > 0
        return False

    with ExitStack() as ends:
        brokers = ends.enter_context(ExitStack())
        broker = brokers.enter_context(peer(command, tmp, port))
        first, notes = tmp / "first", tmp / "notes"
        notes.touch()
        library.tell(str(first))
        empty = resident_bytes(broker.pid)
        began_s = time.perf_counter()
        library.fill(str(notes), count)
        enqueued_s = time.perf_counter() - began_s
        waiting_bytes = resident_bytes(broker.pid) - empty
        worker = spawn(library.WORKER, ends.enter_context((tmp / "worker").open("wb")))
        ends.callback(os.killpg, worker.pid, signal.SIGKILL)
        until(first.exists)
        began_s = time.perf_counter()
        until(lambda: notes.stat().st_size >= count * len(NOTED % 0))
        done_s = time.perf_counter() - began_s
        latencies = [one() for _ in range(LATENCIES)]
        ran = sorted(map(int, notes.read_text().split()))
        assert ran == [*range(count)], f"of {count} tasks {len(ran)} have run"
        result: dict[str, Any] = {
            "enqueued": count / enqueued_s,
            "done": count / done_s,
            "latency_ms": statistics.median(latencies) * 1000,
            "waiting_kb": waiting_bytes / count / 1000,
        }
        if restarts:
            brokers.close()
            time.sleep(1)
            brokers.enter_context(peer(command, tmp, port))
            began_s = time.perf_counter()
            with suppress(TimeoutError):
                until(again, 0.05, RESTART_S)
                result["restart_s"] = time.perf_counter() - began_s
    return result


def missing(library: str, server: str) -> str | None:
    """Why this cannot be measured here."""
    if (library, server) == ("huey", "rabbitmq"):
        return "huey has no storage for RabbitMQ"
    found = {("taskiq", "redis-always"): "taskiq_redis", ("taskiq", "rabbitmq"): "taskiq_aio_pika"}
    for module in (library, found.get((library, server), library)):
        try:
            importlib.import_module(module)
        except ImportError:
            return f"{module} is not installed"
    return None if server == "mqks" else SERVERS[server].missing()


def compare(libraries: list[str], servers: list[str], count: int, rounds: int) -> None:
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for library in libraries:
        for server in servers:
            if why := missing(library, server):
                print(f"without {library} on {NAMES[server]}: {why}")
            else:
                found[library, server] = []
    for number in range(rounds):
        for pair, results in found.items():  # Libraries keep connections: each has its process.
            environment = os.environ | {"BROKER": f"{SCHEMES[pair[1]]}://127.0.0.1:{free_port()}"}
            command = [sys.executable, "-m", __spec__.name, pair[0], "--count", str(count)]
            command += ["--rounds", str(number), "--server", pair[1], "--child"]
            told = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            results.append(json.loads(told.stdout.splitlines()[-1]))
            print(*pair, results[-1], file=sys.stderr, flush=True)
    print(f"| | | {' | '.join(label for label, _ in COLUMNS.values())} |")
    print(f"{'| --- ' * (len(COLUMNS) + 2)}|")
    for (library, server), results in found.items():
        cells = []
        for key, (_, form) in COLUMNS.items():
            values = [each[key] for each in results if key in each]
            otherwise = f"not within {RESTART_S} s"
            cells.append(form.format(statistics.median(values)) if values else otherwise)
        print(f"| {library} | {NAMES[server]} | {' | '.join(cells)} |")


def child(library: str, server: str, count: int, number: int) -> None:
    """One round: the one of this number. The first one restarts the broker."""
    port = os.environ["BROKER"].rpartition(":")[2]
    with tempfile.TemporaryDirectory() as directory:
        serve = [sys.executable, "-m", "mqks", "serve", "--db", "db", "--port", port]
        if server != "mqks":
            serve = SERVERS[server].command(Path(directory), int(port))
        module = importlib.import_module(f"benchmarks.libraries.{library}")
        result = measure(module, int(port), serve, count, Path(directory), restarts=not number)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("libraries", nargs="*", metavar="LIBRARY", help=", ".join(LIBRARIES))
    options.add_argument("--server", action="append", choices=NAMES, help="all of them by default")
    options.add_argument("--count", type=int, default=COUNT, help="tasks")
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if wrong := {*given.libraries} - {*LIBRARIES}:
        options.error(f"no such library: {', '.join(sorted(wrong))}")
    if given.child:
        child(given.libraries[0], given.server[0], given.count, given.rounds)
    else:
        compare(
            given.libraries or [*LIBRARIES], given.server or [*NAMES], given.count, given.rounds
        )
