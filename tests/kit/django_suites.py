"""A program that runs tests of others on the backend: `python tests/kit/django_suites.py NAME`.

NAME is `django` or `django-tasks-db`, whose sources `python -m tools.sdists` gets. Their files run
unmodified; the backends that they name are ours, by the names that they import. It prints a line of
JSON: what became of each test. Database and broker are those of the environment.
"""

import contextlib
import importlib
import json
import logging
import os
import sys
import tarfile
import threading
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[0] = str(Path(__file__).parents[2])
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.django_project.settings"
# Some of their tests, which are coroutines, ask a backend as if it needed no database.
os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"

import django  # noqa: E402
from django.core import management  # noqa: E402
from django.test.utils import override_settings, setup_test_environment  # noqa: E402

django.setup()
from django.db import models  # noqa: E402
from django.db.models import Q  # noqa: E402
from django.utils import timezone  # noqa: E402

from mqks.django import MqksBackend, seam, worker  # noqa: E402
from mqks.django.backend import brokers, result_of  # noqa: E402
from mqks.django.management.commands import mqks_worker  # noqa: E402
from mqks.django.models import TaskRow  # noqa: E402
from tests.kit.waiting import until  # noqa: E402
from tools.sdists import DIRECTORY, wanted  # noqa: E402

TASKS = seam.BaseTaskBackend.__module__.removesuffix(".backends.base")
"""`django.tasks`, or `django_tasks`."""


def unpacked(name: str, inside: str, target: Path) -> None:
    """The files of a directory of the sources."""
    (path,) = DIRECTORY.glob(f"{name.replace('-', '[-_]')}-{wanted(name)}.tar.gz")
    target.mkdir(parents=True)
    (target / "__init__.py").touch()
    with tarfile.open(path) as sources:
        for member in sources:
            place = Path(*Path(member.name).parts[1:])
            if place.parent == Path(inside) and (file := sources.extractfile(member)):
                (target / place.name).write_bytes(file.read())


@contextlib.contextmanager
def working(queue_name: str = "default") -> Iterator[None]:
    """A worker runs, and ends when its queue is empty."""
    backend = seam.task_backends["default"]
    queue, stop = backend.queue(queue_name), threading.Event()
    one = worker.Worker(backend, queue_name, 1)
    thread = threading.Thread(target=one.run, args=(stop,))
    thread.start()
    try:
        yield
        # Not the queue's numbers: of acks the broker learns a moment later.
        due = Q(run_after=None) | Q(run_after__lte=timezone.now())
        rows = TaskRow.objects.filter(due, finished_at=None, queue_name=queue_name)
        until(lambda: not rows.exists())
    finally:
        stop.set()
        thread.join()
        backend.client.stats("queue", queue)


class DummyBackend(MqksBackend):
    """Of Django's: one that runs nothing, and shows what was enqueued."""

    @property
    def results(self) -> list[Any]:
        return [*map(result_of, TaskRow.objects.order_by("enqueued_at"))]

    def clear(self) -> None:
        TaskRow.objects.all().delete()


class ImmediateBackend(MqksBackend):
    """Of Django's: one that has run the task when `enqueue` returns."""

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        result = super().enqueue(task, args, kwargs)
        with working():
            pass
        result.refresh()
        return result


class DatabaseBackend(MqksBackend):
    """Of django-tasks-db."""


class Results(models.QuerySet):  # type: ignore[misc]
    def ready(self) -> Any:
        due = Q(run_after=None) | Q(run_after__lte=timezone.now())
        return self.filter(due, status="READY").order_by("-priority", "run_after")

    def successful(self) -> Any:
        return self.filter(status="SUCCESSFUL")

    def failed(self) -> Any:
        return self.filter(status="FAILED")

    def create(self, *, args_kwargs: Any, backend_name: str, task_path: str) -> Any:
        """Enqueue a task, whether or not there is one of this path."""
        row = self.model(
            id=os.urandom(16).hex(),
            task_path=task_path,
            backend=backend_name,
            queue_name="default",
            arguments=[args_kwargs["args"], args_kwargs["kwargs"]],
            enqueued_at=timezone.now(),
        )
        row.save(force_insert=True)
        seam.task_backends[backend_name].publish(row)
        return row


class DBTaskResult(TaskRow):
    objects = Results.as_manager()

    class Meta:
        proxy = True
        app_label = "mqks"

    @property
    def task_result(self) -> Any:
        return result_of(self)

    @property
    def task(self) -> Any:
        return self.task_result.task


class Command(mqks_worker.Command):
    """`db_worker`, which its tests call with `batch`."""

    stealth_options = (
        *("batch", "interval", "startup_delay", "worker_id"),
        *("queue_name", "backend_name"),
    )

    def handle(self, *args: Any, **options: Any) -> None:
        if not options.get("batch"):
            super().handle(*args, **options)
        elif options.get("backend_name", "default") == "default":
            name = options.get("queue_name", "default")
            for each in sorted(seam.task_backends["default"].queues) if name == "*" else [name]:
                with working(each):
                    pass


def module(name: str, **contents: Any) -> None:
    """One that can be imported."""
    made = sys.modules[name] = types.ModuleType(name)
    made.__path__ = []
    vars(made).update(contents)


def stand_in_for_django() -> None:
    if TASKS != "django.tasks":
        from django_tasks import exceptions, signals

        signals.logger = logging.getLogger("django.tasks")
        exceptions.InvalidTask = exceptions.InvalidTaskError
        exceptions.InvalidTaskBackend = exceptions.InvalidTaskBackendError
        for name in ("", ".base", ".exceptions", ".signals", ".backends", ".backends.base"):
            sys.modules[f"django.tasks{name}"] = importlib.import_module(f"{TASKS}{name}")
    for backend in (DummyBackend, ImmediateBackend):
        name = backend.__name__.removesuffix("Backend").lower()
        module(f"django.tasks.backends.{name}", **{backend.__name__: backend})


def stand_in_for_django_tasks_db() -> None:
    nothing = mock.MagicMock()
    module("django_tasks_db", DatabaseBackend=DatabaseBackend, compat=nothing)
    module("django_tasks_db.admin", DBTaskResultAdmin=nothing)
    module("django_tasks_db.models", DBTaskResult=DBTaskResult, get_date_max=nothing)
    nothing.exclusive_transaction = lambda: lambda function: function
    for name in ("utils", "management", "management.commands"):
        sys.modules[f"django_tasks_db.{name}"] = nothing
    sys.modules["django_tasks_db.management.commands.prune_db_task_results"] = nothing
    module("django_tasks_db.management.commands.db_worker", Command=Command)
    known = management.get_commands
    management.get_commands = lambda: known() | {"db_worker": Command()}
    tasks = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}
    module("no_urls", urlpatterns=[])
    override_settings(TASKS=tasks, ROOT_URLCONF="no_urls").enable()


def tests_of(name: str, directory: Path) -> unittest.TestSuite:
    loader = unittest.TestLoader()
    if name == "django":
        stand_in_for_django()
        unpacked(name, "tests/tasks", directory / "tasks")
        modules = [f"tasks.test_{each}" for each in ("tasks", "dummy_backend", "immediate_backend")]
    else:
        stand_in_for_django_tasks_db()
        unpacked(name, "tests", directory / "tests")
        unpacked("django", "tests/tasks", directory / "django")
        tasks = (directory / "django/tasks.py").read_text()
        tasks = tasks.replace("django.tasks", TASKS).replace("This Task failed", "This task failed")
        (directory / "tests/tasks.py").write_text(tasks)  # Its sources have none.
        for each in [each for each in sys.modules if each.partition(".")[0] == "tests"]:
            del sys.modules[each]  # Theirs has the same name.
        modules = ["tests.tests"]
    sys.path.insert(0, str(directory))
    return unittest.TestSuite(loader.loadTestsFromName(each) for each in modules)


def flat(suite: Any) -> Iterator[Any]:
    for each in suite:
        yield from flat(each) if isinstance(each, unittest.TestSuite) else [each]


class Told(unittest.TestResult):
    """What became of each test."""

    def __init__(self) -> None:
        super().__init__()
        self.all = dict[str, str]()

    def startTest(self, test: Any) -> None:
        TaskRow.objects.all().delete()
        client = MqksBackend("default", {}).client
        for queue in ("default", "queue-1", "queue_1", "unknown_queue", "dead"):
            client.delete_queue(f"tasks.{queue}", if_exists=True)
        for _, bound in brokers.values():
            bound.clear()
        self.all[test.id()] = "passed"
        super().startTest(test)

    def addSkip(self, test: Any, reason: str) -> None:
        self.all[test.id()] = f"skipped: {reason}"

    def addFailure(self, test: Any, error: Any) -> None:
        self.all[test.id()] = self._exc_info_to_string(error, test)  # type: ignore[attr-defined]

    addError = addFailure  # type: ignore[assignment]

    def addSubTest(self, test: Any, subtest: Any, error: Any) -> None:
        if error is not None:
            self.addFailure(test, error)


def parts(test: Any) -> set[str]:
    """What its class and itself are called."""
    kind, name = test.id().split(".")[-2:]
    return {kind, name, f"{kind}.{name}"}


def main(name: str, directory: Path, *without: str) -> None:
    """Names of tests and of classes that do not apply are `without`."""
    setup_test_environment()
    management.call_command("migrate", verbosity=0)
    told = Told()
    chosen = [
        each for each in flat(tests_of(name, directory)) if not parts(each).intersection(without)
    ]
    for each in {type(each) for each in chosen}:
        each.databases = {"default"}
        if "Worker" in each.__name__:  # Its queries are those of threads.
            each.assertNumQueries = lambda *_: contextlib.nullcontext()
    logging.getLogger(TASKS).addHandler(logging.NullHandler())
    unittest.TestSuite(chosen).run(told)
    print(json.dumps(told.all))
    while brokers:
        brokers.popitem()[1][0].close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
