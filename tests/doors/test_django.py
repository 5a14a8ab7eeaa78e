"""Django Tasks on a real broker, by real workers.

The one rule: the project is set up once in the process of the tests, so what a test leaves in
queues and rows is there for the next one.
"""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import mqks
from mqks import blocking
from tests.kit.postgres import Postgres
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until

django = pytest.importorskip("django", reason="the extra django is not installed")
from django.db import connection, connections, transaction  # noqa: E402
from django.test import Client, override_settings  # noqa: E402

SETTINGS = "tests.django_project.settings"
ROOT = Path(__file__).parents[2]
DJANGO = [sys.executable, "-m", "django"]


def environment(server: ServerProcess, path: Path) -> dict[str, str]:
    database = os.environ.get("TEST_DB", str(path / "db.sqlite3"))
    more = {"DJANGO_SETTINGS_MODULE": SETTINGS, "MQKS_URL": server.url, "TEST_DB": database}
    return os.environ | more | {"TEST_SIGNALS": str(path / "signals"), "PYTHONPATH": str(ROOT)}


def migrate(server: ServerProcess, path: Path) -> None:
    command = [*DJANGO, "migrate", "-v0"]
    subprocess.run(command, env=environment(server, path), check=True, timeout=WAIT_S)


START = "import time, django; django.setup()\nfrom tests.django_project.jobs import *\n"


def run(program: str, server: ServerProcess, path: Path) -> str:
    """What a program of the project prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", START + program],
        env=environment(server, path),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def finished(result: Any) -> Any:
    """The same result."""
    until(lambda: result.refresh() or result.is_finished)
    return result


@dataclass
class Project:
    server: ServerProcess
    path: Path
    jobs: Any
    rows: Any
    """Those of all tasks."""
    working: Any
    """The module of the worker."""

    @property
    def client(self) -> blocking.BlockingClient:
        found: blocking.BlockingClient = self.jobs.add.get_backend().client
        return found

    @contextmanager
    def worker(self, *flags: str) -> Iterator[subprocess.Popen[str]]:
        """A process."""
        log = self.path / "worker.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [*DJANGO, "mqks_worker", *flags],
                env=environment(self.server, self.path),
                stderr=file,
                text=True,
                start_new_session=True,
            )
        try:
            if "--relay-only" not in flags:
                until(lambda: "runs tasks" in log.read_text())
            yield process
            process.terminate()
            assert process.wait(WAIT_S) == 0, log.read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @contextmanager
    def worker_here(self, task: Any = None) -> Iterator[None]:
        """Threads of this process that run tasks of the backend of this one."""
        backend, stop = (task or self.jobs.add).get_backend(), threading.Event()
        work = self.working.Worker(backend, "default", 4).run
        thread = threading.Thread(target=work, args=(stop,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    path = tmp_path_factory.mktemp("django")
    with ServerProcess(path / "mqks.db") as server, pytest.MonkeyPatch.context() as patch:
        migrate(server, path)
        for name, value in environment(server, path).items():
            patch.setenv(name, value)
        django.setup()
        names = "tests.django_project.jobs", "mqks.django.models", "mqks.django.worker"
        jobs, models, worker = map(importlib.import_module, names)
        made = Project(server, path, jobs, models.TaskRow.objects, worker)
        yield made
        made.client.close()
        connections.close_all()


@pytest.mark.slow
def test_results(project: Project) -> None:
    jobs = project.jobs
    with project.worker("--processes=2", "--threads=2"):
        for task, arguments, attempts, told in (
            (jobs.add, (1, 2), 1, 3),
            (jobs.attempt, (), 1, 1),
            (jobs.fails_twice, (str(project.path / "tries"),), 3, 3),
            (jobs.fails, (), 1, "ValueError"),
            (jobs.returns_no_json, (), 1, "TypeError"),
            (jobs.kills, (), 3, "RuntimeError"),
        ):
            result = finished(task.enqueue(*arguments))
            assert (result.status, result.attempts) == (
                "FAILED" if isinstance(told, str) else "SUCCESSFUL",
                attempts,
            )
            if isinstance(told, str):
                assert result.errors[0].exception_class.__name__ == told
            else:
                assert result.return_value == told


def test_an_enqueue_is_in_the_queue(project: Project) -> None:
    in_an_hour = datetime.now(UTC) + timedelta(hours=1)
    later = project.jobs.write.using(run_after=in_an_hour, priority=100)
    result = later.enqueue(str(project.path / "later"), "x")
    (message,) = project.client.peek("tasks.default", scheduled=True)
    assert (message.id, message.priority) == (result.id, 100)
    assert message.due == pytest.approx(in_an_hour.timestamp(), abs=1)
    assert later.get_result(result.id).task == later


def test_a_unique_task_that_waits_is_returned(project: Project) -> None:
    path, rows, client = str(project.path / "once"), project.rows, project.client
    write_once, of_user = project.jobs.write_once, project.jobs.of_user
    client.set_queue("tasks.default")
    client.purge("tasks.default")
    first = write_once.enqueue(path, "x")

    def again(_: int) -> str:
        try:
            return str(write_once.enqueue(path, "x").id)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(8) as pool:
        assert {*pool.map(again, range(40))} == {first.id}
    other = write_once.enqueue(path, "y")
    assert [each.id for each in client.peek("tasks.default")] == [first.id, other.id]
    assert rows.filter(task_path__endswith="write_once").count() == 2
    assert write_once.enqueue(path, text="x").id not in (first.id, other.id)
    assert (other.status, other.args[1]) == ("READY", "y")
    mine = [of_user.enqueue(user) for user in (7, 8, 7)] + [of_user.enqueue(7, force=True)]
    assert [mine[0].id == each.id for each in mine] == [True, False, True, False]
    # The row of the one that waits may be of a transaction that has not ended.
    rows.filter(id=first.id).delete()
    assert write_once.enqueue(path, "x").id == first.id
    assert not rows.filter(id=first.id).exists()


@pytest.mark.slow
def test_a_key_ends_with_its_task(project: Project) -> None:
    file = project.path / "ends"
    with project.worker():
        for _ in range(2):
            assert finished(project.jobs.write_once.enqueue(str(file), "x")).return_value == "x"
    assert file.read_text() == "x\nx\n"


def test_a_unique_task_of_the_outbox_has_the_result_of_the_other(project: Project) -> None:
    path, rows, worker = str(project.path / "outbox"), project.rows, project.working
    task = project.jobs.write_once.using(backend="outbox")
    backend = task.get_backend()
    first = task.enqueue(path, "x")
    worker.relay(backend)
    second = task.enqueue(path, "x")
    assert first.id != second.id
    assert rows.get(id=second.id).relay_at is not None
    assert [worker.relay(backend), worker.relay(backend)] == [1, 0]
    assert backend.get_result(second.id).id == first.id
    assert second.id not in [each.id for each in backend.client.peek("outbox.default")]
    with project.worker_here(task):
        finished(second)
    assert (second.status, second.return_value) == ("SUCCESSFUL", "x")
    rows.filter(id=second.id).update(enqueued_at=worker.now() - timedelta(days=8))
    worker.expire(backend)
    assert [rows.filter(id=each.id).exists() for each in (second, first)] == [False, True]


def test_wrong_keys_and_limits_are_told_at_once(project: Project) -> None:
    limits, jobs = importlib.import_module("mqks.django").limits, project.jobs
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"unique": "x" * 257}, "unique:"),
        ({"unique": mqks.Unique("x", until="never")}, "unique:"),  # type: ignore[arg-type]
        ({"unique": mqks.Unique("x", on="replace")}, "unique:"),
        ({"retries": -1}, "retries: '-1' is not a whole number from 0 to 1000000000"),
        ({"backoff": "long"}, "backoff: 'long' is not a number of seconds from 0 to 1e[+]09"),
    ]
    for given, told in wrong:
        with pytest.raises(mqks.InvalidRequest, match=f"^{told}"):
            limits(**given)
    before = project.rows.count()
    with pytest.raises(mqks.InvalidRequest, match="a task whose place another one has would never"):
        jobs.replaces.enqueue(1)
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        jobs.add.enqueue(1, float("nan"))
    assert project.rows.count() == before


def test_the_outbox_follows_the_transaction(project: Project) -> None:
    outbox, relay = project.jobs.add.using(backend="outbox"), project.working.relay
    backend = outbox.get_backend()
    with transaction.atomic():
        outbox.enqueue(1, 2)
        transaction.set_rollback(True)
    with transaction.atomic():
        kept = outbox.enqueue(3, 4)
        assert relay(backend) == 1
    assert relay(backend) == 0
    assert [each.id for each in backend.client.peek("outbox.default")] == [kept.id]


def test_wrong_settings_are_told(project: Project) -> None:
    kind = type(project.jobs.add.get_backend())

    def told(**options: Any) -> list[tuple[str, str]]:
        found = kind("default", {"OPTIONS": options}).check()
        return [(each.id, each.msg.partition("queue ")[2]) for each in found]

    wrong = told(url="http://x", losses=0, results_expire_s="1d", outboxes=True)
    assert sorted(id_ for id_, _ in wrong) == [f"mqks.E00{each}" for each in (2, 3, 4, 5)]
    queues = {"mail": {"outbox": True, "retries": 0}, "default": {"backoff": "long"}}
    assert told(queues=queues) == [
        (
            "mqks.E003",
            "'default': backoff: 'long' is not a number of seconds from 0 to 1e+09",
        ),
        ("mqks.E002", "'mail' has an unknown 'outbox'."),
        ("mqks.E004", "'mail': 'retries' must be at least 1."),
    ]
    assert told() == []
    with override_settings(INSTALLED_APPS=[]):
        assert told() == [("mqks.E001", "")]


ENQUEUES = """
from django.db import close_old_connections
n = 0
while n < {count}:
    close_old_connections()
    try:
        write.enqueue({path!r}, str(n))
        n += 1
    except Exception:  # It may have been enqueued all the same.
        time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1_000])
def test_no_task_is_lost(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While workers, the broker and the database, which is a PostgreSQL, are killed."""
    path, effects = tmp_path, tmp_path / "effects"
    effects.touch()

    def enough(number: int) -> bool:
        return effects.read_text().count("\n") >= number

    with ServerProcess(path / "mqks.db") as server, Postgres() as database, ExitStack() as ends:
        for name, value in (database.environment | {"TEST_DB": "postgres"}).items():
            monkeypatch.setenv(name, value)
        migrate(server, path)
        log = ends.enter_context((path / "killed.log").open("a"))

        def started(*command: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(command, env=environment(server, path), stderr=log)
            ends.callback(process.wait)
            ends.callback(process.kill)
            return process

        worker = [*DJANGO, "mqks_worker", "--threads=2"]
        program = START + ENQUEUES.format(count=count, path=str(effects))
        enqueues = started(sys.executable, "-c", program)
        process = started(*worker)
        for step in range(1, 20):
            until(lambda: enough(count * step // 20) or enqueues.poll())  # noqa: B023
            if step % 3 == 0:
                process.kill()
                process = started(*worker)
            elif step % 3 == 1:
                server.kill()
                server.start()
            else:
                database.kill()
                database.start()
        until(lambda: enqueues.poll() is not None)
        assert enqueues.returncode == 0
        until(lambda: len(set(effects.read_text().split())) == count)
        look = "from mqks.django.models import TaskRow\n"
        look += "print(TaskRow.objects.exclude(status='SUCCESSFUL').values())"
        until(lambda: run(look, server, path) == "<QuerySet []>\n")
    with capsys.disabled():
        print(f"\n{count} tasks, {len(effects.read_text().split()) - count} ran again")


def test_a_deleted_queue_is_made_again(project: Project) -> None:
    add, client = project.jobs.add, project.client
    for _ in range(2):
        client.delete_queue("tasks.default", if_exists=True)
        add.enqueue(1, 2)
    assert len(client.peek("tasks.default")) == 1


def test_each_process_has_a_client_of_its_own(project: Project) -> None:
    """Each thread has a backend, and all those of a process share one."""
    program = """
import os, threading
from mqks.django.seam import task_backends
later = add.using(backend="outbox").get_backend()
client, seen = later.client, []
thread = threading.Thread(target=lambda: seen.append(task_backends["outbox"]))
thread.start()
thread.join()
print(seen[0] is later, seen[0].client is client)
client.delete_queue("tasks.own", if_exists=True)
add.using(queue_name="own").enqueue(1, 2)
if not (child := os.fork()):
    add.using(queue_name="own").enqueue(1, 2)
    client.close()
    os._exit(0)
print(os.waitpid(child, 0)[1], len(client.peek("tasks.own")))
client.delete_queue("tasks.own")
"""
    assert run(program, project.server, project.path) == "False True\n0 2\n"


def test_what_cannot_be_sent_fails_alone(project: Project) -> None:
    outbox, relay = project.jobs.write.using(backend="outbox"), project.working.relay
    backend = outbox.get_backend()
    outbox.enqueue("", "x" * 2_000_000)
    for number in range(20):
        outbox.enqueue("", str(number))
    assert [relay(backend), relay(backend)] == [20, 0]
    (row,) = project.rows.filter(backend="outbox", status="FAILED")
    assert (row.relay_at, row.finished_at is not None) == (None, True)
    assert row.errors[0][0] == "mqks.client.errors.InvalidRequest"
    backend.client.delete_queue("outbox.default", if_exists=True)


def test_what_the_broker_refuses_is_set_aside(project: Project) -> None:
    """With the reason; it delays no other, and is tried again."""
    outbox, relay = project.jobs.write.using(backend="outbox"), project.working.relay
    backend = outbox.get_backend()
    backend.client.set_queue("outbox.full", messages_max=1)
    backend.queues.add("full")
    full = [outbox.using(queue_name="full").enqueue("", str(number)) for number in range(40)]
    outbox.enqueue("", "other")
    assert [relay(backend), relay(backend)] == [2, 0]
    refused = project.rows.filter(id__in=[each.id for each in full]).exclude(refusal="")
    assert (refused.count(), refused[0].status) == (39, "READY")
    assert "full" in refused[0].refusal
    backend.client.set_queue("outbox.full", messages_max=None)
    refused.update(relay_at=project.working.now())
    assert (relay(backend), refused.count()) == (39, 0)
    for queue in "outbox.full", "outbox.default":
        backend.client.delete_queue(queue)


def test_a_restart_of_the_broker_is_no_loss(project: Project) -> None:
    file = project.path / "long"
    result = project.jobs.waits.enqueue(str(file))
    with project.worker_here():
        for attempt in range(1, 5):
            until(lambda: result.refresh() or result.attempts == attempt)  # noqa: B023
            project.server.stop()
            project.server.start()
        file.unlink()
        assert finished(result).status == "SUCCESSFUL"


@pytest.mark.slow
def test_a_dead_letter_that_is_redriven_runs_again(project: Project) -> None:
    with project.worker("--queue=own"):
        result = finished(project.jobs.fails.using(queue_name="own").enqueue())
        (letter,) = until(lambda: project.client.peek("own.dead"))
        assert letter.dead_letter is not None
        assert (letter.id, letter.dead_letter.why) == (result.id, "ValueError: never")
        assert project.client.redrive("own.dead") == 1
        until(lambda: result.refresh() or result.attempts == 2)
        finished(result)
    assert (result.status, result.attempts, len(result.errors)) == ("FAILED", 2, 1)


def test_results_expire(project: Project) -> None:
    result, expire = project.jobs.add.enqueue(1, 2), project.working.expire
    done, backend = project.rows.filter(id=result.id), result.task.get_backend()
    for days, gone in ((6, 0), (8, 1)):
        done.update(finished_at=project.working.now() - timedelta(days=days))
        assert (expire(backend), done.exists()) == (gone, not gone)
    assert expire(backend) == 0


def test_the_admin_shows_tasks(project: Project) -> None:
    users = importlib.import_module("django.contrib.auth.models").User.objects
    client = Client()
    client.force_login(users.create_superuser("ann"))
    result = project.jobs.fails.enqueue()
    project.rows.filter(id=result.id).update(status="FAILED", errors=[["E", "a trace"]])
    for path, status, told in (
        (f"?q={result.id}", 200, (result.id, "Failed")),
        (f"{result.id}/change/", 200, ("a trace",)),
        ("add/", 403, ()),
    ):
        page = client.get(f"/admin/mqks/taskrow/{path}")
        assert page.status_code == status
        assert all(each in page.content.decode() for each in told)


@pytest.mark.slow
def test_a_worker_relays_and_signals_and_ends_its_task(project: Project) -> None:
    file, signals, told = project.path / "waits", project.path / "signals", list[str]()
    outbox = project.jobs.waits.using(backend="outbox")
    waiting = project.rows.filter(relay_at__isnull=False)
    signals.unlink(missing_ok=True)  # Of other tests.

    def enqueued(task_result: Any, **_: Any) -> None:
        told.append(task_result.status)

    with project.worker("--relay-only"), signalled(project, task_enqueued=enqueued):
        result = outbox.enqueue(str(file))
        assert told == ["READY"]
        until(lambda: not waiting.exists())
    assert not file.exists()
    with project.worker("--backend=outbox") as process:
        until(file.exists)
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        file.unlink()
        assert process.wait(WAIT_S) == 0
    assert finished(result).return_value == "done"
    with project.worker():  # Of another backend: it relays all the same.
        outbox.enqueue(str(file))
        until(lambda: not waiting.exists())
    project.client.delete_queue("outbox.default")
    assert signals.read_text() == "started RUNNING\nfinished SUCCESSFUL\n"


@contextmanager
def signalled(project: Project, **receivers: Any) -> Iterator[None]:
    """Meanwhile these receive the signals of these names."""
    seam = importlib.import_module("mqks.django.seam")
    for name, receiver in receivers.items():
        getattr(seam, name).connect(receiver)
    try:
        yield
    finally:
        for name, receiver in receivers.items():
            getattr(seam, name).disconnect(receiver)


def test_reload_is_for_one_process(project: Project) -> None:
    command = [*DJANGO, "mqks_worker", "--reload", "--processes=2"]
    done = subprocess.run(
        command,
        env=environment(project.server, project.path),
        capture_output=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, b"CommandError: --reload is for one process\n")


@contextmanager
def database(kind: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The one of the environment: SQLite, or a PostgreSQL in this encoding."""
    if kind == "sqlite":
        yield
        return
    with Postgres() as server:
        with server.connection() as connection:
            create = f"create database tasks encoding '{kind}' template template0"
            connection.execute(create.encode())
        for name, value in (server.environment | {"PGDATABASE": "tasks"}).items():
            patch.setenv(name, value)
        patch.setenv("TEST_DB", "postgres")
        yield


ODD_TASKS = """
import json, threading
from mqks.django.worker import Worker
backend, stop = odd.get_backend(), threading.Event()
results = {{kind: odd.enqueue({path!r}, kind) for kind in ODD}}
work = Worker(backend, "default", 4).run
thread = threading.Thread(target=work, args=(stop,), daemon=True)
thread.start()
for kind, result in results.items():
    while not result.is_finished:
        time.sleep(0.05)
        result.refresh()
    told = [each.traceback for each in result.errors]
    print(json.dumps([kind, result.status, result.attempts, *told]))
while any(backend.client.stats("queue", "tasks.default")[each] for each in ("ready", "unacked")):
    time.sleep(0.01)
stop.set()
thread.join()
"""
REASONS = {
    "nan": "Out of range float values are not JSON compliant",
    "cyclic": "maximum recursion depth exceeded",
    "large": "20000002 bytes of JSON are more than 16777216",
    "NUL": "u0000",
    "surrogate": "surrogate",
    "error with NUL": "ValueError: a\\x00b\n",
    "error with surrogate": "ValueError: a\\ud800b\n",
    "error that is not Latin": "ValueError: \u2192\n",
    "error of 100 MB": "\n[...]\nxxx",
    "error that raises": "Mute",
    "error that raises at any look": "Hostile, and its traceback raises RuntimeError",
    "error of an odd class": "a\\x00\\ud800.Odd\n",
    "exit": "SystemExit\n",
}
"""What the last error of a task of ODD says."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "UTF8", "LATIN1"])
def test_what_the_database_cannot_store_fails(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its retries, with what can be stored of the reason."""
    path, runs = tmp_path, tmp_path / "runs"
    with database(kind, monkeypatch), ServerProcess(path / "mqks.db") as server:
        migrate(server, path)
        lines = run(ODD_TASKS.format(path=str(runs)), server, path).splitlines()
    told = {each[0]: each[1:] for each in map(json.loads, lines)}
    if kind == "sqlite":  # It stores any text.
        for stored in "NUL", "surrogate":
            assert told.pop(stored) == ["SUCCESSFUL", 1]
    for each, (status, attempts, *errors) in told.items():
        reason = REASONS[each].replace("\u2192", "\\u2192" if kind == "LATIN1" else "\u2192")
        assert (status, attempts, len(errors)) == ("FAILED", 2, 2)
        assert reason in errors[-1]
        assert len(errors[-1]) < 20_000
        assert runs.read_text().splitlines().count(each) == 2


def test_what_others_publish_is_dead(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what no row can have. A task that cannot be imported has failed. Each is taken once."""
    (project.path / "broken.py").write_text("raise ValueError('this module')\n")
    monkeypatch.syspath_prepend(project.path)
    at = "2026-11-28T00:00:00+00:00"
    task = {"task_path": "broken.task", "arguments": [[], {}], "priority": 0, "run_after": None}
    task["enqueued_at"] = at
    odd = [
        (json.dumps(task), "ValueError: this module"),
        (json.dumps({**task, "arguments": [[math.nan], {}]}), "this is no task: IntegrityError"),
        (json.dumps({**task, "enqueued_at": "no time " * 100}), "this is no task: ValueError"),
        ("no json", "this is no task: JSONDecodeError"),
        ("[]", "this is no task: TypeError"),
        ('{"x": 1}', "this is no task: KeyError"),
        ('{"run_after": 5, "arguments": [[], 1]}', "this is no task: TypeError"),
        ("[" * 100_000, "this is no task: ValueError"),
    ]
    client = project.client

    def dead() -> list[tuple[str, int, str]]:
        """Tasks of other tests may still fail."""
        found = [each for each in client.peek("dead") if each.id.startswith("odd")]
        about = ((each.id, each.dead_letter) for each in found)
        return sorted((id_, at.tries, (at.why or "").partition("(")[0]) for id_, at in about if at)

    with project.worker_here():
        project.jobs.add.enqueue(1, 2)  # Makes the queue.
        for number, (data, _) in enumerate(odd):
            client.publish("tasks.default", data, id=f"odd{number}", confirm=True, mandatory=True)
        until(lambda: len(dead()) == len(odd))
    assert dead() == [(f"odd{number}", 1, why) for number, (_, why) in enumerate(odd)]
    (row,) = project.rows.filter(id__startswith="odd")
    assert (row.id, row.status, len(row.errors)) == ("odd0", "FAILED", 1)
    client.purge("dead")


def test_a_receiver_of_signals_that_raises_changes_nothing(project: Project) -> None:
    def told(**_: Any) -> None:
        raise ValueError("a receiver")

    project.client.purge("dead")  # Of other tests.
    with signalled(project, task_started=told, task_finished=told), project.worker_here():
        for task, arguments, status in (
            (project.jobs.add, (1, 2), "SUCCESSFUL"),
            (project.jobs.fails, (), "FAILED"),
        ):
            result = finished(task.enqueue(*arguments))
            assert (result.status, result.attempts) == (status, 1)
        (dead,) = until(lambda: project.client.peek("dead"))
    assert dead.dead_letter is not None
    assert (dead.dead_letter.tries, project.client.purge("dead")) == (1, 1)


def test_a_database_that_is_away_is_waited_for(project: Project) -> None:
    """A task whose end it did not store runs again, and has not failed; so does one whose row is
    gone."""
    file = project.path / "waits"

    def rename(old: str, new: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"alter table {old} rename to {new}")

    with project.worker_here():
        result = project.jobs.waits.enqueue(str(file))
        until(file.exists)
        rename("mqks_taskrow", "away")
        file.unlink()
        until(lambda: project.client.stats("queue", "tasks.default")["scheduled"])
        rename("away", "mqks_taskrow")
        until(file.exists)
        project.rows.filter(id=result.id).delete()
        file.unlink()
        until(lambda: project.rows.filter(id=result.id))
        finished(result)
    assert (result.status, result.return_value, result.errors) == ("SUCCESSFUL", "done", [])


def test_dead_tasks_have_failed_beside_dead_letters_of_others(project: Project) -> None:
    client, task = project.client, project.jobs.add.using(queue_name="own")
    client.subscribe("dead", ["dead"])
    for odd in "\udcff", "a\0b":
        client.publish("dead", "x", id=odd, confirm=True)
    result = task.enqueue(1, 2)
    client.set_queue("tasks.own", dead_letter_queue="dead")
    with client.consume("tasks.own") as consumer:
        next(consumer).reject(dead=True, reason="for a test")
    until(lambda: [each for each in client.peek("dead") if each.id == result.id])
    project.working.bury(task.get_backend(), {})
    result.refresh()
    why = "the broker has given it up: dead after 1 deliveries: for a test\n"
    assert result.status == "FAILED"
    assert result.errors[0].traceback.partition(": ")[2] == why
    client.delete_queue("tasks.own")
    client.purge("dead")
