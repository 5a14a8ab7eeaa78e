"""Celery on MQKS, Redis and RabbitMQ, in turns: tasks per second, latency, memory, restarts.

    python -m benchmarks.celery [COUNT [ROUNDS]]

Needs Debian's `redis-server` and `rabbitmq-server`, and `pip install redis`. Prints the table of
docs/celery.md: medians of the rounds. 3,000 tasks in 3 rounds take 6 minutes on two quiet cores.

All make the same promise: Redis syncs each write (`appendfsync always`); RabbitMQ's queue is
durable, its messages are persistent, as Celery publishes by default, and each is confirmed, after
an fsync (`strace` shows one for each). The worker is prefork with two processes; the task does
nothing, and is acked when it is done. Each task must have run, once.
"""

import argparse
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

from celery import Celery

from benchmarks.flow import free_port
from benchmarks.process import peer, resident_bytes, spawn, until
from benchmarks.servers import SERVERS

COUNT, ROUNDS, RESTART_S = 3000, 3, 60
NAMES = {"mqks": "MQKS", "redis": "Redis, `appendfsync always`", "rabbitmq": "RabbitMQ, confirmed"}
ROWS = {
    "published": ("published and confirmed", "{:,.0f}/s"),
    "done": ("done", "{:,.0f}/s"),
    "latency_ms": ("one task, median", "{:.1f} ms"),
    "waiting_kb": ("memory of a waiting task", "{:.1f} KB"),
    "restart_s": ("a worker works again after the broker was killed and started", "{:.1f} s"),
}
app: Any = Celery("bench", broker=os.environ.get("BROKER", "mqks://127.0.0.1"))
app.conf.update(
    task_acks_late=True, task_ignore_result=True, broker_connection_retry_on_startup=True
)
if app.conf.broker_url.startswith("amqp"):
    app.conf.broker_transport_options = {"confirm_publish": True}


@app.task(name="nothing")  # type: ignore[untyped-decorator]
def nothing() -> None:
    pass


@app.task(name="tell")  # type: ignore[untyped-decorator]
def tell(path: str) -> None:
    Path(path).touch()


def _check(count: int) -> None:
    """Each task has run, once, and RabbitMQ was asked for confirms."""
    with app.producer_or_acquire() as producer:
        assert getattr(producer.channel.connection, "confirm_publish", True)
    (told,) = app.control.inspect(timeout=30, limit=1).stats().values()
    assert told["total"]["nothing"] == count, f"of {count} tasks these have run: {told['total']}"


def measure(port: int, command: list[str], count: int, tmp: Path, restarts: bool) -> dict[str, Any]:
    def one(limit_s: float = 240) -> float:
        path = tmp / "told"
        path.unlink(missing_ok=True)
        began_s = time.perf_counter()
        tell.delay(str(path))
        until(path.exists, 0.0002, limit_s)
        return time.perf_counter() - began_s

    with ExitStack() as ends:
        brokers = ends.enter_context(ExitStack())
        broker = brokers.enter_context(peer(command, tmp, port))
        first, last = tmp / "first", tmp / "last"
        tell.delay(str(first))
        empty = resident_bytes(broker.pid)
        began_s = time.perf_counter()
        for _ in range(count):
            nothing.delay()
        published_s = time.perf_counter() - began_s
        waiting_bytes = resident_bytes(broker.pid) - empty
        tell.delay(str(last))
        args = [sys.executable, "-m", "celery", "-A", "benchmarks.celery", "worker", "-c", "2"]
        worker = spawn(args, ends.enter_context((tmp / "worker").open("wb")))
        ends.callback(os.killpg, worker.pid, signal.SIGKILL)
        until(first.exists)
        began_s = time.perf_counter()
        until(last.exists)
        done_s = time.perf_counter() - began_s
        latencies = [one() for _ in range(200)]
        _check(count)
        result: dict[str, Any] = {
            "published": count / published_s,
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
                one(RESTART_S)
                result["restart_s"] = time.perf_counter() - began_s
    return result


def compare(count: int, rounds: int) -> None:
    schemes = {"mqks": "mqks", "redis": "redis", "rabbitmq": "amqp"}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    for number in range(rounds):
        for name in NAMES:  # An app keeps connections to its broker: each has its own process.
            environment = os.environ | {"BROKER": f"{schemes[name]}://127.0.0.1:{free_port()}"}
            command = [sys.executable, "-m", "benchmarks.celery", str(count), str(number), name]
            told = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            found[name].append(json.loads(told.stdout))
            print(name, found[name][-1], file=sys.stderr, flush=True)
    print(f"| | {' | '.join(NAMES.values())} |\n{'| --- ' * (len(NAMES) + 1)}|")
    for key, (label, form) in ROWS.items():
        columns = [[each[key] for each in found[name] if key in each] for name in NAMES]
        otherwise = f"not within {RESTART_S} s"
        cells = [form.format(statistics.median(each)) if each else otherwise for each in columns]
        print(f"| {label} | {' | '.join(cells)} |")


def main(count: int, rounds: int, name: str) -> None:
    """With a name: the child for one round of it, the one of this number."""
    if not name:
        compare(count, rounds)
        return
    port = os.environ["BROKER"].rpartition(":")[2]
    with tempfile.TemporaryDirectory() as directory:
        serve = [sys.executable, "-m", "mqks", "serve", "--db", "db", "--port", port]
        if name != "mqks":
            server = SERVERS["redis-always" if name == "redis" else name]
            serve = server.command(Path(directory), int(port))
        # Of all rounds the first one restarts the broker.
        print(json.dumps(measure(int(port), serve, count, Path(directory), restarts=not rounds)))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("count", nargs="?", type=int, default=COUNT, help="tasks")
    options.add_argument("rounds", nargs="?", type=int, default=ROUNDS)
    options.add_argument("name", nargs="?", default="", help=argparse.SUPPRESS)
    given = options.parse_args()
    main(given.count, given.rounds, given.name)
