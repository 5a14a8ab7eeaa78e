"""Players of Django Tasks: programs that enqueue in threads, and `manage.py mqks_worker`.

The one rule: nobody waits for a lock of the database, which would be a real one: what is locked
raises, as a database that is away.
"""

import io
import sqlite3
import threading
import time
from collections import UserDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import django
from django.conf import settings
from django.core.management import call_command
from django.db import DatabaseError, connection, connections, transaction
from django.db.backends.signals import connection_created
from django.db.models.signals import post_save

from mqks.errors import MqksError
from tests.simulation.blocking import together
from tests.simulation.loop import GRAVES, PROCESS, Process, Violation, put, run_into
from tests.simulation.threads import Event, Thread, instead_of

settings.DATABASES["default"]["OPTIONS"]["timeout"] = 0
for _each in settings.TASKS.values():
    _each["OPTIONS"] |= {"losses": 1000, "retries": 2}
django.setup()

from mqks.django import backend, worker  # noqa: E402
from mqks.django.management.commands import mqks_worker  # noqa: E402
from mqks.django.models import TaskRow  # noqa: E402

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

ALIASES = {1: "default", 3: "outbox"}
"""What workers run."""
THREADS = 2
RELAY_S = 5.0
"""To look at a database more often takes longer."""
LOST = MqksError, OSError, DatabaseError

world: Any
_workers: dict[int, Process] = {}


class Undone(Exception):
    """A transaction is rolled back."""


class Datetime(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls.fromtimestamp(time.time(), tz)


class Brokers(UserDict[str, Any]):
    """Of the present process."""

    data = property(lambda _: vars(PROCESS.get()).setdefault("brokers", {}), lambda *_: None)


def tried(target: Callable[..., object], args: tuple[Any, ...]) -> Thread:
    """It may end of itself, and with it the command."""

    def run() -> None:
        try:
            target(*args)
        except LOST as error:
            world.note("a thread ends:", type(error).__name__, error)

    return Thread(run)


def mapped(call: Callable[[Any], Any], rows: list[Any]) -> Iterator[Any]:
    told: list[Any] = [Future() for _ in rows]
    pairs = zip(told, rows, strict=True)
    together(*(partial(run_into, future, partial(call, row)) for future, row in pairs))
    return (each.result() for each in told)


def install(playing: Any) -> None:
    global world
    world = playing
    common = {"threading": instead_of(threading, Thread=tried, Event=Event), "brokers": Brokers()}
    common |= {"datetime": Datetime, "RELAY_S": RELAY_S}
    pool = SimpleNamespace(map=mapped)
    put({backend: common, mqks_worker: common, worker: common})
    put({worker: {"ThreadPoolExecutor": lambda _: nullcontext(pool)}})
    connection_created.connect(opened)
    post_save.connect(saved, TaskRow)
    with connection.schema_editor() as editor:
        editor.create_model(TaskRow)


def opened(connection: Any, **_: Any) -> None:
    vars(PROCESS.get()).setdefault("databases", []).append(connection.connection)


def saved(instance: TaskRow, **_: Any) -> None:
    if instance.status == "SUCCESSFUL":
        world.successful.add(instance.id)
    if instance.finished_at is not None:
        world.handled.add(instance.id)


@task(takes_context=True)
def job(context: Any, name: str, fails: bool) -> None:
    id_ = context.task_result.id
    world.note("runs", name, id_, context.attempt)
    if id_ in world.successful | world.undone:
        world.loop.fail(Violation(f"{name} runs, and has ended, or was rolled back"))
    time.sleep(world.rng.expovariate(1 / 0.5))
    if fails:
        raise ValueError(name)


def publish(world: Any, number: int, count: int, mean_s: float) -> None:
    def some(own: int) -> None:
        for each in range(count):
            while not is_enqueued(f"{number}-{own}-{each}", is_together=world.rng.random() < 0.5):
                time.sleep(world.rng.expovariate(1 / 2))
            time.sleep(world.rng.expovariate(1 / mean_s))
        connections.close_all()

    PROCESS.get().leaves = True
    together(*(partial(some, own) for own in range(THREADS)))


def is_enqueued(name: str, *, is_together: bool) -> bool:
    """`is_together`: with others, in a transaction, which may be rolled back."""
    rng = world.rng
    fails, alias = rng.random() < 0.2, rng.choice([*ALIASES.values()])
    later = Datetime.now(UTC) + timedelta(seconds=rng.expovariate(1 / 60))
    asked = job.using(backend=alias, run_after=rng.choice((None, later)))
    try:
        with transaction.atomic() if is_together else nullcontext():
            id_ = asked.enqueue(name, fails).id
            time.sleep(is_together * rng.expovariate(1 / 0.2))
            if is_together and rng.random() < 0.3:
                raise Undone
    except Undone:
        if alias == "outbox":
            world.undone.add(id_)
            return True
    except LOST as error:
        world.note("not enqueued:", name, type(error).__name__, error)
        return False
    world.wanted[id_] = "FAILED" if fails else "SUCCESSFUL"
    world.note("enqueued", name, id_)
    return True


def work(world: Any, number: int) -> None:
    process = PROCESS.get()
    process.leaves = True
    GRAVES.append(process)
    for each in vars(_workers.get(number, process)).get("databases", ()):
        with suppress(sqlite3.ProgrammingError):  # It is closed; or its process was killed.
            each.rollback()
            each.close()
    _workers[number] = process
    while True:
        how = {"backend": ALIASES[number], "threads": THREADS, "stderr": io.StringIO()}
        call_command("mqks_worker", **how)
        world.note("worker", number, "begins anew")
        time.sleep(1)


def judge() -> None:
    """All have ended."""
    rows = {row.id: row for row in TaskRow.objects.all()}
    found = {id_: rows[id_].status for id_ in world.wanted}
    if wrong := found.items() ^ world.wanted.items():
        raise Violation(f"tasks have not ended as their functions: {wrong}")
    if there := world.undone & rows.keys() | {id_ for id_, row in rows.items() if row.relay_at}:
        raise Violation(f"{there} were rolled back, or wait in the outbox")
    connections.close_all()
