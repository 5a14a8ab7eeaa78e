"""Django Tasks on MQKS and on django-tasks-db, in one run: tasks per second, and latency.

    python -m benchmarks.django [COUNT]

Needs `pip install django-tasks-db`. Each has a project of its own, on SQLite (in WAL mode) and on
PostgreSQL, which sync each commit, as MQKS does. One worker, one thread; a task does nothing. Each
result is read: all must have run, once.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mqks.testing import BrokerProcess

LATENCIES = 50
SETTINGS = """
import os
SECRET_KEY = "of a benchmark"
USE_TZ = True
INSTALLED_APPS = [os.environ["APP"]]
TASKS = {"default": {"BACKEND": os.environ["BACKEND"]}}
if "OUTBOX" in os.environ:
    TASKS["default"]["OPTIONS"] = {"outbox": True}
SQLITE = {
    "ENGINE": "django.db.backends.sqlite3",
    "NAME": "db.sqlite3",
    "OPTIONS": {
        "timeout": 60,
        "transaction_mode": "IMMEDIATE",
        "init_command": "pragma journal_mode=wal; pragma synchronous=full",
    },
}
POSTGRES = {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres"}
DATABASES = {"default": POSTGRES | {"CONN_MAX_AGE": None} if "PGHOST" in os.environ else SQLITE}
LOGGING_CONFIG = None
"""
TASK = """
try:
    from django.tasks import task
except ImportError:
    from django_tasks import task
@task
def nothing(n):
    return n
"""
BACKENDS = {
    "mqks": ("mqks.django", "mqks.django.MqksBackend", ["mqks_worker"]),
    "mqks outbox": ("mqks.django", "mqks.django.MqksBackend", ["mqks_worker"]),
    "django-tasks-db": (
        "django_tasks_db",
        "django_tasks_db.DatabaseBackend",
        ["db_worker", "--verbosity=0", "--no-startup-delay", "--no-reload"],
    ),
}


def measure(name: str, database: str, count: int) -> None:
    """In a process of its own, in the project."""
    import django

    django.setup()
    import jobs  # type: ignore[import-not-found]
    from django.core.management import call_command

    call_command("migrate", verbosity=0)

    def enqueued(count: int) -> list[Any]:
        return [jobs.nothing.enqueue(number) for number in range(count)]

    def finished(result: Any, pause_s: float) -> float:
        while not result.is_finished:
            time.sleep(pause_s)
            result.refresh()
        return time.perf_counter()

    enqueued(1)
    began_s = time.perf_counter()
    results = enqueued(count)
    enqueued_s = time.perf_counter() - began_s
    command = [sys.executable, "-m", "django", *BACKENDS[name][2]]
    worker = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        first, last = results[0], results[-1]
        began_s = finished(first, 0.001)
        done_s = finished(last, 0.02) - began_s
        latencies = list[float]()
        for _ in range(LATENCIES):
            began_s = time.perf_counter()
            latencies.append(finished(enqueued(1)[0], 0.001) - began_s)
        for number, result in enumerate(results):
            result.refresh()
            assert (result.return_value, result.attempts) == (number, 1)
    finally:
        worker.terminate()
        worker.wait()
    print(
        f"{name:15} {database:10} enqueued {count / enqueued_s:6,.0f}/s  "
        f"finished {count / done_s:6,.0f}/s  "
        f"latency {statistics.median(latencies) * 1000:7.1f} ms",
        flush=True,
    )


@contextmanager
def postgres() -> Iterator[dict[str, str]]:
    from tests.kit.postgres import Postgres

    with Postgres(fsync="on") as server:
        yield server.environment


def main(count: int) -> None:
    for database in ("SQLite", "PostgreSQL"):
        for name, (app, backend, _) in BACKENDS.items():
            with ExitStack() as ends:
                path = Path(ends.enter_context(tempfile.TemporaryDirectory()))
                (path / "project.py").write_text(SETTINGS)
                (path / "jobs.py").write_text(TASK)
                broker = ends.enter_context(BrokerProcess(path / "mqks.db"))
                environment = os.environ | {"APP": app, "BACKEND": backend, "MQKS_URL": broker.url}
                environment |= {"DJANGO_SETTINGS_MODULE": "project"}
                environment |= {"OUTBOX": "yes"} if "outbox" in name else {}
                environment["PYTHONPATH"] = f"{path}:{Path(__file__).parents[1]}"
                if database == "PostgreSQL":
                    environment |= ends.enter_context(postgres())
                command = [sys.executable, __file__, str(count), name, database]
                subprocess.run(command, env=environment, cwd=path, check=True)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        # Not the directory of this file, which has the name of what it measures.
        del sys.path[0]
        measure(sys.argv[2], sys.argv[3], int(sys.argv[1]))
    else:
        options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        options.add_argument("count", nargs="?", type=int, default=2000, help="tasks")
        main(options.parse_args().count)
