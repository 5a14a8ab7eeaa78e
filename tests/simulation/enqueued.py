"""Players of Django Tasks: programs that enqueue in threads, and `manage.py mqks_worker`.

The one rule: nobody waits for a lock of the database, which would be a real one: what is locked
raises, as a database that is away.
"""

import io
import sqlite3
import threading
import time
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from datetime import datetime, timedelta, tzinfo
from functools import partial
from typing import Any, Self

from django.core.management import call_command
from django.db import DatabaseError, connection, connections, transaction
from django.db.backends.signals import connection_created
from django.db.models.signals import post_save

from mqks.client import blocking_connection
from mqks.django import backend, worker
from mqks.django.management.commands import mqks_worker
from mqks.django.models import TaskRow
from mqks.errors import MqksError
from tests.simulation.blocking import together
from tests.simulation.loop import GRAVES, PROCESS, Process, Violation, put
from tests.simulation.threads import Event, Lock, Thread, instead_of

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

ALIASES = {1: "default", 3: "outbox"}
"""What workers run."""
THREADS = 2
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


class OwnLock:
    """Each process has one."""

    def _own(self) -> Lock:
        found: Lock = vars(PROCESS.get()).setdefault("beginning", Lock())
        return found

    def __enter__(self) -> None:
        self._own().acquire()

    def __exit__(self, *failure: object) -> None:
        self._own().release()


class Tried(Thread):
    """It may end of itself, and with it the command."""

    def __init__(self, target: Callable[..., object], args: Iterable[Any] = ()) -> None:
        def tried() -> None:
            try:
                target(*args)
            except LOST as error:
                world.note("a thread ends:", type(error).__name__, error)

        super().__init__(tried)


class Pool:
    """An executor, as far as it is used."""

    def __init__(self, size: int) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        pass

    def map(self, call: Callable[[Any], Any], given: list[Any]) -> Iterator[Any]:
        told: list[Any] = [None] * len(given)

        def run(number: int) -> None:
            try:
                told[number] = True, call(given[number])
            except LOST as error:
                told[number] = False, error

        together(*(partial(run, number) for number in range(len(given))))
        for is_done, result in told:
            if not is_done:
                raise result
            yield result


def install(playing: Any) -> None:
    global world
    world = playing
    own, brokers = instead_of(threading, Thread=Tried, Event=Event), Brokers()
    put(
        {
            blocking_connection: {"_beginning": OwnLock()},
            backend: {"datetime": Datetime, "brokers": brokers},
            worker: {
                "datetime": Datetime,
                "threading": own,
                "ThreadPoolExecutor": Pool,
                "RELAY_S": 5.0,
            },
            mqks_worker: {"threading": own, "brokers": brokers},
        }
    )
    post_save.connect(saved, TaskRow)
    connection_created.connect(opened)


def migrate() -> None:
    with connection.schema_editor() as editor:
        editor.create_model(TaskRow)


def saved(instance: TaskRow, **_: Any) -> None:
    if instance.status == "SUCCESSFUL":
        world.successful.add(instance.id)
    if instance.finished_at is not None:
        world.handled.add(instance.id)


def opened(connection: Any, **_: Any) -> None:
    vars(PROCESS.get()).setdefault("databases", []).append(connection.connection)


@task(takes_context=True)
def job(context: Any, name: str, fails: bool) -> str:
    id_ = context.task_result.id
    world.note("runs", name, id_, context.attempt)
    if id_ in world.successful or id_ in world.undone:
        why = "has ended" if id_ in world.successful else "was rolled back"
        world.loop.fail(Violation(f"{name} runs, and {why}"))
    time.sleep(world.rng.expovariate(1 / 0.5))
    if fails:
        raise ValueError(name)
    return name


def publish(world: Any, number: int, count: int, mean_s: float = 20.0) -> None:
    PROCESS.get().leaves = True
    together(*(partial(enqueue, f"{number}-{own}", count, mean_s) for own in range(THREADS)))


def enqueue(prefix: str, count: int, mean_s: float) -> None:
    for each in range(count):
        while not is_enqueued(f"{prefix}-{each}", is_together=world.rng.random() < 0.5):
            time.sleep(world.rng.expovariate(1 / 2))
        time.sleep(world.rng.expovariate(1 / mean_s))
    connections.close_all()


def is_enqueued(name: str, *, is_together: bool) -> bool:
    """`is_together`: with others, in a transaction, which may be rolled back."""
    rng = world.rng
    fails, alias = rng.random() < 0.2, rng.choice([*ALIASES.values()])
    later = Datetime.now().astimezone() + timedelta(seconds=rng.expovariate(1 / 60))
    asked = job.using(backend=alias, run_after=rng.choice((None, later)))
    try:
        with transaction.atomic() if is_together else nullcontext():
            id_ = asked.enqueue(name, fails).id
            if is_together:
                time.sleep(rng.expovariate(1 / 0.2))
                if rng.random() < 0.3:
                    raise Undone
    except Undone:
        world.note("rolled back", name, id_)
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
        with suppress(sqlite3.ProgrammingError):  # It is closed.
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
    for id_, status in world.wanted.items():
        if rows[id_].status != status:
            raise Violation(f"task {id_} is {rows[id_].status}, and not {status}")
    if there := world.undone & rows.keys():
        raise Violation(f"{there} were rolled back, and are there")
    if waiting := [id_ for id_, row in rows.items() if row.relay_at is not None]:
        raise Violation(f"{waiting} wait in the outbox")
    connections.close_all()
