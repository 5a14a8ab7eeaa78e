"""Celery on MQKS, Redis and RabbitMQ, in one run: tasks per second, latency, memory, restarts.

    python -m benchmarks.celery [COUNT]

Needs Debian's `redis-server` and `rabbitmq-server`, and `pip install redis`. Redis syncs each write
(`appendfsync always`), as MQKS does; RabbitMQ confirms each publish. The worker is prefork with two
processes, the task does nothing, and is acked when it is done.
"""

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from celery import Celery

from benchmarks.flow import free_port
from benchmarks.servers.rabbitmq import Rabbitmq

WAITING = 100_000
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


def _until(look: Callable[[], bool], step_s: float = 0.001) -> None:
    ends_s = time.monotonic() + 120
    while not look():
        if time.monotonic() > ends_s:
            raise TimeoutError("nothing happens for two minutes")
        time.sleep(step_s)


def _resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def measure(name: str, port: int, command: list[str], count: int, tmp: Path) -> None:
    def server() -> subprocess.Popen[bytes]:
        started = subprocess.Popen(
            command, cwd=tmp, stdout=subprocess.DEVNULL, start_new_session=True
        )
        _until(lambda: _accepts(port))
        return started

    def worker_started(log: BinaryIO) -> subprocess.Popen[bytes]:
        args = [sys.executable, "-m", "celery", "-A", "benchmarks.celery", "worker", "-c", "2"]
        return subprocess.Popen(args, stdout=log, stderr=log, start_new_session=True)

    def one() -> float:
        path = tmp / "told"
        path.unlink(missing_ok=True)
        began_s = time.perf_counter()
        tell.delay(str(path))
        _until(path.exists, 0.0002)
        return time.perf_counter() - began_s

    with ExitStack() as ends, (tmp / "worker.log").open("wb") as log:
        broker = server()
        ends.callback(lambda: os.killpg(broker.pid, signal.SIGKILL))  # The one of then.
        empty = _resident_bytes(broker.pid)
        first, last = tmp / "first", tmp / "last"
        tell.delay(str(first))
        began_s = time.perf_counter()
        for _ in range(count):
            nothing.delay()
        published_s = time.perf_counter() - began_s
        per_task = (_resident_bytes(broker.pid) - empty) / count
        tell.delay(str(last))
        worker = worker_started(log)
        ends.callback(os.killpg, worker.pid, signal.SIGKILL)
        _until(first.exists)
        began_s = time.perf_counter()
        _until(last.exists)
        done_s = time.perf_counter() - began_s
        latencies = [one() for _ in range(200)]
        os.killpg(broker.pid, signal.SIGKILL)
        broker.wait()
        time.sleep(1)
        broker = server()
        began_s = time.perf_counter()
        back = "not within two minutes"
        with suppress(TimeoutError):
            one()
            back = f"{time.perf_counter() - began_s:.1f} s"
    print(
        f"{name:8} published {count / published_s:7,.0f}/s  done {count / done_s:7,.0f}/s  "
        f"latency {statistics.median(latencies) * 1000:5.1f} ms  "
        f"{per_task:5.0f} bytes a waiting task  works again after a restart: {back}",
        flush=True,
    )


def main(count: int, name: str = "") -> None:
    if not name:  # An app keeps connections to its broker: each has a process of its own.
        for each, scheme in (("mqks", "mqks"), ("redis", "redis"), ("rabbitmq", "amqp")):
            environment = os.environ | {"BROKER": f"{scheme}://127.0.0.1:{free_port()}"}
            command = [sys.executable, "-m", "benchmarks.celery", str(count), each]
            subprocess.run(command, env=environment, check=True)
        return
    port = os.environ["BROKER"].rpartition(":")[2]
    with tempfile.TemporaryDirectory() as directory:
        serve = [sys.executable, "-m", "mqks", "serve", "--db", "db", "--port", port]
        if name == "redis":
            serve = ["redis-server", "--port", port, "--save", "", "--appendonly", "yes"]
            serve += ["--appendfsync", "always"]
        elif name == "rabbitmq":
            serve = Rabbitmq().command(Path(directory), int(port))
        measure(name, int(port), serve, count, Path(directory))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else WAITING, *sys.argv[2:])
