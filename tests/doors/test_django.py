"""Django Tasks on a real broker, by real workers."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from textwrap import indent

import pytest

from mqks import blocking
from tests.kit.postgres import Postgres
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until

pytest.importorskip("django", reason="the extra django is not installed")
SETTINGS = "tests.django_project.settings"
ROOT = Path(__file__).parents[2]
START = "import time, django; django.setup()\nfrom tests.django_project.jobs import *\n"
WORKER = [sys.executable, "-m", "django", "mqks_worker"]


def environment(server: ServerProcess, path: Path) -> dict[str, str]:
    database = os.environ.get("TEST_DB", str(path / "db.sqlite3"))
    more = {"DJANGO_SETTINGS_MODULE": SETTINGS, "MQKS_URL": server.url, "TEST_DB": database}
    return os.environ | more | {"TEST_SIGNALS": str(path / "signals"), "PYTHONPATH": str(ROOT)}


def run(program: str, server: ServerProcess, path: Path) -> str:
    """What a program of the project prints."""
    command = [sys.executable, "-W", "error", "-c", START + program]
    done = subprocess.run(
        command,
        env=environment(server, path),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def worker(server: ServerProcess, path: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    with (path / "worker.log").open("w") as log:
        process = subprocess.Popen(
            [*WORKER, *flags],
            env=environment(server, path),
            stderr=log,
            text=True,
            start_new_session=True,
        )
    try:
        if "--relay-only" not in flags:
            until(lambda: "runs tasks" in (path / "worker.log").read_text())
        yield process
        process.terminate()
        assert process.wait(WAIT_S) == 0, (path / "worker.log").read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    path = tmp_path_factory.mktemp("django")
    with ServerProcess(path / "mqks.db") as server:
        command = [sys.executable, "-m", "django", "migrate", "-v0"]
        subprocess.run(command, env=environment(server, path), check=True, timeout=WAIT_S)
        yield server, path


ROWS = "from mqks.django.models import TaskRow\n"
FINISHED = """
began_s = time.monotonic()
while not result.is_finished:
    assert time.monotonic() < began_s + 100
    time.sleep(0.05)
    result.refresh()
"""


@pytest.mark.slow
def test_results(project: tuple[ServerProcess, Path]) -> None:
    server, path = project
    with worker(server, path, "--processes=2", "--threads=2"):
        out = run(f"result = add.enqueue(1, 2){FINISHED}print(result.return_value)", *project)
        assert out == "3\n"
        out = run(f"result = attempt.enqueue(){FINISHED}print(result.return_value)", *project)
        assert out == "1\n"
        program = f"result = fails_twice.enqueue({str(path / 'tries')!r})"
        out = run(f"{program}{FINISHED}print(result.status, result.attempts)", *project)
        assert out == "SUCCESSFUL 3\n"
        show = "print(result.status, result.errors[0].exception_class.__name__)"
        assert run(f"result = fails.enqueue(){FINISHED}{show}", *project) == "FAILED ValueError\n"
        out = run(f"result = returns_no_json.enqueue(){FINISHED}{show}", *project)
        assert out == "FAILED TypeError\n"
        show = "print(result.status, result.attempts)"
        assert run(f"result = kills.enqueue(){FINISHED}{show}", *project) == "FAILED 3\n"


def test_an_enqueue_is_in_the_queue(project: tuple[ServerProcess, Path]) -> None:
    path = project[1] / "later"
    program = """
from datetime import UTC, datetime, timedelta
later = write.using(run_after=datetime.now(UTC) + timedelta(hours=1), priority=100)
result = later.enqueue(%r, "x")
client = result.task.get_backend().client
(message,) = client.peek("tasks.default", scheduled=True)
print(message.id == result.id, message.priority, round((message.due - time.time()) / 60))
print(later.get_result(result.id).task == later)
"""
    assert run(program % str(path), *project) == "True 100 60\nTrue\n"


def test_a_unique_task_that_waits_is_returned(project: tuple[ServerProcess, Path]) -> None:
    path = project[1] / "once"
    program = """
from concurrent.futures import ThreadPoolExecutor
from django.db import connections
client = write_once.get_backend().client
client.set_queue("tasks.default")
client.purge("tasks.default")
first = write_once.enqueue(%r, "x")
def again(_):
    try:
        return write_once.enqueue(%r, "x").id
    finally:
        connections.close_all()
with ThreadPoolExecutor(8) as pool:
    print({*pool.map(again, range(40))} == {first.id})
other = write_once.enqueue(%r, "y")
print([each.id for each in client.peek("tasks.default")] == [first.id, other.id])
print(TaskRow.objects.filter(task_path__endswith="write_once").count())
same = write_once.enqueue(%r, text="x")
print(same.id in (first.id, other.id), other.status, other.args[1])
mine = [of_user.enqueue(7), of_user.enqueue(8), of_user.enqueue(7), of_user.enqueue(7, force=True)]
print([mine[0].id == each.id for each in mine])
# The row of the one that waits may be of a transaction that has not ended.
TaskRow.objects.filter(id=first.id).delete()
print(write_once.enqueue(%r, "x").id == first.id, TaskRow.objects.filter(id=first.id).exists())
"""
    out = run(ROWS + program.replace("%r", repr(str(path))), *project)
    told = "True\nTrue\n2\nFalse READY y\n[True, False, True, False]\nTrue False\n"
    assert out == told


@pytest.mark.slow
def test_a_key_ends_with_its_task(project: tuple[ServerProcess, Path]) -> None:
    server, path = project
    file = path / "ends"
    with worker(server, path):
        for _ in range(2):
            program = f"result = write_once.enqueue({str(file)!r}, 'x')"
            assert run(f"{program}{FINISHED}print(result.return_value)", *project) == "x\n"
    assert file.read_text() == "x\nx\n"


def test_a_unique_task_of_the_outbox_has_the_result_of_the_other(
    project: tuple[ServerProcess, Path],
) -> None:
    program = """
from mqks.django.worker import Worker, expire, now, relay
from datetime import timedelta
import threading
task = write_once.using(backend="outbox")
backend = task.get_backend()
first = task.enqueue(%r, "x")
relay(backend)
second = task.enqueue(%r, "x")
print(first.id != second.id, TaskRow.objects.get(id=second.id).relay_at is not None)
print(relay(backend), relay(backend), backend.get_result(second.id).id == first.id)
print([each.id for each in backend.client.peek("outbox.default")].count(second.id))
stop = threading.Event()
thread = threading.Thread(target=Worker(backend, "default", 1).run, args=(stop,))
thread.start()
result = second
%s
print(result.id == second.id, result.status, result.return_value)
stop.set()
thread.join()
TaskRow.objects.filter(id=second.id).update(enqueued_at=now() - timedelta(days=8))
expire(backend)
print(TaskRow.objects.filter(id=second.id).exists(), TaskRow.objects.filter(id=first.id).exists())
"""
    path = str(project[1] / "outbox")
    out = run(ROWS + program % (path, path, FINISHED), *project)
    assert out == "True True\n1 0 True\n0\nTrue SUCCESSFUL x\nFalse True\n"


def test_wrong_keys_are_told_at_once(project: tuple[ServerProcess, Path]) -> None:
    program = """
import mqks
for given in ("x" * 257, mqks.Unique("x", until="never"), mqks.Unique("x", on="replace")):
    try:
        limits(unique=given)
    except mqks.InvalidRequest as error:
        print(str(error)[:7])
before = TaskRow.objects.count()
try:
    replaces.enqueue(1)
except mqks.InvalidRequest as error:
    print(error)
print(TaskRow.objects.count() == before)
"""
    out = run(ROWS + program, *project)
    told = "unique: a task whose place another one has would never end"
    assert out == f"unique:\nunique:\nunique:\n{told}\nTrue\n"


def test_the_outbox_follows_the_transaction(project: tuple[ServerProcess, Path]) -> None:
    program = """
from django.db import transaction
from mqks.django.worker import relay
outbox = add.using(backend="outbox")
backend = outbox.get_backend()
with transaction.atomic():
    outbox.enqueue(1, 2)
    transaction.set_rollback(True)
with transaction.atomic():
    kept = outbox.enqueue(3, 4)
    print(relay(backend))
print(relay(backend), [each.id == kept.id for each in backend.client.peek("outbox.default")])
"""
    assert run(program, *project) == "1\n0 [True]\n"


def test_wrong_settings_are_told(project: tuple[ServerProcess, Path]) -> None:
    program = """
from mqks.django import MqksBackend
options = {"url": "http://x", "losses": 0, "results_expire_s": "1d", "outboxes": True}
print(sorted(each.id for each in MqksBackend("default", {"OPTIONS": options}).check()))
options = {"queues": {"mail": {"outbox": True, "retries": 0}, "default": {"backoff": "long"}}}
for each in MqksBackend("default", {"OPTIONS": options}).check():
    print(each.id, each.msg.partition("queue ")[2])
print(list(MqksBackend("default", {"OPTIONS": {}}).check()))
"""
    assert run(program, *project).splitlines() == [
        "['mqks.E002', 'mqks.E003', 'mqks.E004', 'mqks.E005']",
        "mqks.E003 'default': backoff: 'long' is not a number of seconds from 0 to 1e+09",
        "mqks.E002 'mail' has an unknown 'outbox'.",
        "mqks.E004 'mail': 'retries' must be at least 1.",
        "[]",
    ]


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
        command = [sys.executable, "-m", "django", "migrate", "-v0"]
        subprocess.run(command, env=environment(server, path), check=True, timeout=WAIT_S)
        log = ends.enter_context((path / "killed.log").open("a"))

        def started(*command: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(command, env=environment(server, path), stderr=log)
            ends.callback(process.wait)
            ends.callback(process.kill)
            return process

        program = START + ENQUEUES.format(count=count, path=str(effects))
        enqueues = started(sys.executable, "-c", program)
        process = started(*WORKER, "--threads=2")
        for step in range(1, 20):
            until(lambda: enough(count * step // 20) or enqueues.poll())  # noqa: B023
            if step % 3 == 0:
                process.kill()
                process = started(*WORKER, "--threads=2")
            elif step % 3 == 1:
                server.kill()
                server.start()
            else:
                database.kill()
                database.start()
        until(lambda: enqueues.poll() is not None)
        assert enqueues.returncode == 0
        until(lambda: len(set(effects.read_text().split())) == count)
        look = f"{ROWS}print(TaskRow.objects.exclude(status='SUCCESSFUL').values())"
        until(lambda: run(look, server, path) == "<QuerySet []>\n")
    with capsys.disabled():
        print(f"\n{count} tasks, {len(effects.read_text().split()) - count} ran again")


def test_a_deleted_queue_is_made_again(project: tuple[ServerProcess, Path]) -> None:
    program = """
import threading
from mqks.django.seam import task_backends
later = add.using(backend="outbox").get_backend()
client, seen = later.client, []
thread = threading.Thread(target=lambda: seen.append(task_backends["outbox"]))
thread.start()
thread.join()
print(seen[0] is later, seen[0].client is client)
client.delete_queue("tasks.default", if_exists=True)
add.enqueue(1, 2)
client.delete_queue("tasks.default", if_exists=True)
add.enqueue(1, 2)
print(len(client.peek("tasks.default")))
if not (child := __import__("os").fork()):
    add.enqueue(1, 2)
    client.close()
    __import__("os")._exit(0)
print(__import__("os").waitpid(child, 0)[1], len(client.peek("tasks.default")))
client.delete_queue("tasks.default", if_exists=True)
"""
    assert run(program, *project) == "False True\n1\n0 2\n"


def test_what_cannot_be_sent_fails_alone(project: tuple[ServerProcess, Path]) -> None:
    program = """
from mqks.django.models import TaskRow
from mqks.django.worker import relay
outbox = write.using(backend="outbox")
outbox.enqueue("", "x" * 2_000_000)
for number in range(20):
    outbox.enqueue("", str(number))
print(relay(outbox.get_backend()), relay(outbox.get_backend()))
(row,) = TaskRow.objects.filter(backend="outbox", status="FAILED")
print(row.relay_at, row.errors[0][0], row.finished_at is not None)
outbox.get_backend().client.delete_queue("outbox.default", if_exists=True)
"""
    told = "20 0\nNone mqks.client.errors.InvalidRequest True\n"
    assert run(program, *project) == told


def test_what_the_broker_refuses_is_set_aside(project: tuple[ServerProcess, Path]) -> None:
    """With the reason; it delays no other, and is tried again."""
    program = f"""
from django.utils.timezone import now
from mqks.django.worker import relay
{ROWS}
outbox = write.using(backend="outbox")
backend = outbox.get_backend()
backend.client.set_queue("outbox.full", messages_max=1)
backend.queues.add("full")
full = [outbox.using(queue_name="full").enqueue("", str(number)) for number in range(40)]
outbox.enqueue("", "other")
print(relay(backend), relay(backend))
refused = TaskRow.objects.filter(id__in=[each.id for each in full]).exclude(refusal="")
print(refused.count(), "full" in refused[0].refusal, refused[0].status)
backend.client.set_queue("outbox.full", messages_max=None)
refused.update(relay_at=now())
print(relay(backend), refused.count())
for queue in "outbox.full", "outbox.default":
    backend.client.delete_queue(queue)
"""
    assert run(program, *project) == "2 0\n39 True READY\n39 0\n"


@pytest.mark.slow
def test_what_others_publish_is_dead(project: tuple[ServerProcess, Path]) -> None:
    """With the reason, and not taken again and again."""
    server, path = project
    odd = ("no json", "[]", '{"x": 1}', '{"run_after": 5, "arguments": [[], 1]}', "[" * 100_000)
    run("add.enqueue(1, 2)", *project)
    with worker(server, path), blocking.connect(server.url) as client:
        for data in odd:
            client.publish("tasks.default", data, confirm=True, mandatory=True)

        def reasons() -> list[str]:
            dead = [each for each in client.peek("dead") if each.data.decode() in odd]
            return [str(each.dead_letter and each.dead_letter.why) for each in dead]

        until(lambda: len(reasons()) == len(odd))
        assert all(reason.startswith("this is no task") for reason in reasons())
        client.purge("dead")


def test_a_restart_of_the_broker_is_no_loss(project: tuple[ServerProcess, Path]) -> None:
    server, path = project
    file = path / "long"
    task_id = run(f"print(waits.enqueue({str(file)!r}).id)", *project).strip()
    look = f"result = waits.get_result({task_id!r})\n"
    with worker(server, path, "--threads=5"):
        for attempt in range(1, 5):
            until(lambda: run(f"{look}print(result.attempts)", *project) == f"{attempt}\n")  # noqa: B023
            server.stop()
            server.start()
        file.unlink()
        assert run(f"{look}{FINISHED}print(result.status)", *project) == "SUCCESSFUL\n"


@pytest.mark.slow
def test_a_dead_letter_that_is_redriven_runs_again(project: tuple[ServerProcess, Path]) -> None:
    server, path = project
    program = f"result = fails.using(queue_name='own').enqueue(){FINISHED}print(result.id)"
    with worker(server, path, "--queue=own"):
        task_id = run(program, *project).strip()
        program = f"""
client = add.get_backend().client
letter, = client.peek("own.dead")
print(letter.id, letter.dead_letter.why)
print(client.redrive("own.dead"))
result = fails.get_result({task_id!r})
while result.attempts < 2:
    result.refresh()
{FINISHED}print(result.status, result.attempts, len(result.errors))
"""
        told = f"{task_id} ValueError: never\n1\nFAILED 2 1\n"
        assert run(program, *project) == told


def test_results_expire(project: tuple[ServerProcess, Path]) -> None:
    program = """
from datetime import timedelta
from django.utils.timezone import now
from mqks.django.models import TaskRow
from mqks.django.worker import expire
result = add.enqueue(1, 2)
backend = result.task.get_backend()
done = TaskRow.objects.filter(id=result.id)
for days in 6, 8:
    done.update(finished_at=now() - timedelta(days=days))
    print(expire(backend), done.exists())
print(expire(backend))
"""
    assert run(program, *project) == "0 True\n1 False\n0\n"


def test_the_admin_shows_tasks(project: tuple[ServerProcess, Path]) -> None:
    program = """
from django.contrib.auth.models import User
from django.test import Client
from mqks.django.models import TaskRow
User.objects.filter(username="ann").delete()
client = Client()
client.force_login(User.objects.create_superuser("ann"))
result = fails.enqueue()
TaskRow.objects.filter(id=result.id).update(status="FAILED", errors=[["E", "a trace"]])
page = client.get("/admin/mqks/taskrow/?q=" + result.id)
print(page.status_code, result.id in page.text, "Failed" in page.text)
page = client.get(f"/admin/mqks/taskrow/{result.id}/change/")
print(page.status_code, "a trace" in page.text)
print(client.get("/admin/mqks/taskrow/add/").status_code)
"""
    program = program.replace("page.text", "page.content.decode()")
    assert run(program, *project) == "200 True True\n200 True\n403\n"


def test_an_app_that_is_not_installed_is_told(project: tuple[ServerProcess, Path]) -> None:
    program = """
from django.test import override_settings
from mqks.django import MqksBackend
with override_settings(INSTALLED_APPS=[]):
    print([each.id for each in MqksBackend("default", {"OPTIONS": {}}).check()])
"""
    assert run(program, *project) == "['mqks.E001']\n"


@pytest.mark.slow
def test_a_worker_relays_and_signals_and_ends_its_task(
    project: tuple[ServerProcess, Path],
) -> None:
    server, path = project
    program = """
from mqks.django.seam import task_enqueued
def told(task_result, **_):
    print("enqueued", task_result.status)
task_enqueued.connect(told)
outbox = waits.using(backend="outbox")
print(outbox.enqueue(%r).id)
"""
    file, signals = path / "waits", path / "signals"
    signals.unlink(missing_ok=True)  # Of other tests.
    with worker(server, path, "--relay-only"):
        told, task_id = run(program % str(file), *project).split("\n")[:2]
        assert told == "enqueued READY"
        look = f"{ROWS}print(TaskRow.objects.filter(relay_at__isnull=False))"
        until(lambda: run(look, *project) == "<QuerySet []>\n")
    assert not file.exists()
    with worker(server, path, "--backend=outbox") as process:
        until(file.exists)
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        file.unlink()
        assert process.wait(WAIT_S) == 0
    look = f"print(add.get_backend().get_result({task_id!r}).return_value)"
    assert run(look, *project) == "done\n"
    with worker(server, path):  # Of another backend: it relays all the same.
        run(program % str(file), *project)
        look = f"{ROWS}print(TaskRow.objects.filter(relay_at__isnull=False))"
        until(lambda: run(look, *project) == "<QuerySet []>\n")
    run('add.get_backend().client.delete_queue("outbox.default")', *project)
    assert signals.read_text() == "started RUNNING\nfinished SUCCESSFUL\n"


def test_reload_is_for_one_process(project: tuple[ServerProcess, Path]) -> None:
    command = [*WORKER, "--reload", "--processes=2"]
    done = subprocess.run(
        command, env=environment(*project), capture_output=True, timeout=WAIT_S, check=False
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


IN_PLACE = """
import threading
from mqks.django.worker import Worker
stop = threading.Event()
thread = threading.Thread(target=Worker(add.get_backend(), "default", 4).run, args=(stop,))
thread.start()
try:
{program}
finally:
    stop.set()
    thread.join()
"""


def in_place(program: str, server: ServerProcess, path: Path) -> str:
    """What a program of the project prints that has a worker in itself."""
    return run(IN_PLACE.format(program=indent(program, "    ")), server, path)


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
        command = [sys.executable, "-m", "django", "migrate", "-v0"]
        subprocess.run(command, env=environment(server, path), check=True, timeout=WAIT_S)
        program = f"""
results = {{kind: odd.enqueue({str(runs)!r}, kind) for kind in ODD}}
import json
import math
for kind, result in results.items():
{indent(FINISHED, "    ")}
    told = [each.traceback for each in result.errors]
    print(json.dumps([kind, result.status, result.attempts, *told]))
def left():
    queue = add.get_backend().client.stats("queue", "tasks.default")
    return queue["ready"] + queue["scheduled"] + queue["unacked"]
while left():
    time.sleep(0.01)
"""
        lines = in_place(program, server, path).splitlines()
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


def test_a_message_that_no_row_can_have_is_dead(project: tuple[ServerProcess, Path]) -> None:
    """And one whose task cannot be imported has failed. Each is taken once."""
    path = project[1]
    (path / "broken.py").write_text("raise ValueError('this module')\n")
    task = {"task_path": "broken.task", "arguments": [[], {}], "priority": 0, "run_after": None}
    at = "2026-11-28T00:00:00+00:00"
    odd: list[dict[str, object]] = [
        {"arguments": [[math.nan], {}]},
        {"enqueued_at": "no time " * 100},
        {},
    ]
    texts = [json.dumps({**task, "enqueued_at": at, **each}) for each in odd]
    program = f"""
import sys
sys.path.insert(0, {str(path)!r})
client = add.get_backend().client
add.enqueue(1, 2)  # Makes the queue.
for number, data in enumerate({texts!r}):
    client.publish("tasks.default", data, id=f"odd{{number}}", confirm=True, mandatory=True)
def odd():  # Tasks of other tests may still fail.
    return [each for each in client.peek("dead") if each.id.startswith("odd")]
while len(dead := odd()) < 3:
    time.sleep(0.01)
for each in sorted(dead, key=lambda each: each.id):
    print(each.id, each.dead_letter.tries, each.dead_letter.why.partition("(")[0])
from mqks.django.models import TaskRow
for row in TaskRow.objects.filter(id__startswith="odd"):
    print(row.id, row.status, len(row.errors))
client.purge("dead")
"""
    assert in_place(program, *project).splitlines() == [
        "odd0 1 this is no task: IntegrityError",
        "odd1 1 this is no task: ValueError",
        "odd2 1 ValueError: this module",
        "odd2 FAILED 1",
    ]


def test_a_receiver_of_signals_that_raises_changes_nothing(
    project: tuple[ServerProcess, Path],
) -> None:
    program = f"""
from mqks.django.seam import task_finished, task_started
def told(**_):
    raise ValueError("a receiver")
task_started.connect(told)
task_finished.connect(told)
client = add.get_backend().client
client.purge("dead")  # Of other tests.
for result in add.enqueue(1, 2), fails.enqueue():
{indent(FINISHED, "    ")}
    print(result.status, result.attempts)
while not (dead := client.peek("dead")):
    time.sleep(0.01)
print(len(dead), dead[0].dead_letter.tries, client.purge("dead"))
"""
    assert in_place(program, *project) == "SUCCESSFUL 1\nFAILED 1\n1 1 1\n"


def test_a_database_that_is_away_is_waited_for(project: tuple[ServerProcess, Path]) -> None:
    """A task whose end it did not store runs again, and has not failed; so does one whose row is
    gone."""
    file = project[1] / "waits"
    program = f"""
from pathlib import Path
from django.db import connection
from mqks.django.models import TaskRow
file = Path({str(file)!r})
client = add.get_backend().client

def begun():
    while not file.exists():
        time.sleep(0.01)

def rename(old, new):
    with connection.cursor() as cursor:
        cursor.execute(f"alter table {{old}} rename to {{new}}")

result = waits.enqueue(str(file))
begun()
rename("mqks_taskrow", "away")
file.unlink()
while not client.stats("queue", "tasks.default")["scheduled"]:
    time.sleep(0.01)
rename("away", "mqks_taskrow")
begun()
TaskRow.objects.filter(id=result.id).delete()
file.unlink()
while not TaskRow.objects.filter(id=result.id):
    time.sleep(0.01)
{FINISHED}
print(result.status, result.return_value, len(result.errors))
"""
    assert in_place(program, *project) == "SUCCESSFUL done 0\n"


def test_wrong_limits_are_told_at_once(project: tuple[ServerProcess, Path]) -> None:
    program = """
from mqks.django import limits
for wrong in {"retries": -1}, {"backoff": "long"}:
    try:
        limits(**wrong)
    except ValueError as error:
        print(error)
try:
    add.enqueue(1, float("nan"))
except ValueError as error:
    print(str(error).partition(":")[0])  # Newer Pythons name the value.
"""
    assert run(program, *project).splitlines() == [
        "retries: '-1' is not a whole number from 0 to 1000000000",
        "backoff: 'long' is not a number of seconds from 0 to 1e+09",
        "Out of range float values are not JSON compliant",
    ]


def test_dead_tasks_have_failed_beside_dead_letters_of_others(
    project: tuple[ServerProcess, Path],
) -> None:
    program = r"""
from mqks.django.worker import bury
backend = add.get_backend()
client = backend.client
client.subscribe("dead", ["dead"])
for odd in "\udcff", "a\0b":
    client.publish("dead", "x", id=odd, confirm=True)
result = add.using(queue_name="own").enqueue(1, 2)
client.set_queue("tasks.own", dead_letter_queue="dead")
with client.consume("tasks.own") as consumer:
    next(consumer).reject(dead=True, reason="for a test")
while not [each for each in client.peek("dead") if each.id == result.id]:
    time.sleep(0.01)
bury(backend, {})
result.refresh()
print(result.status, result.errors[0].traceback.partition(": ")[2])
client.delete_queue("tasks.own")
client.purge("dead")
"""
    told = "FAILED the broker has given it up: dead after 1 deliveries: for a test\n\n"
    assert run(program, *project) == told


@pytest.mark.slow
def test_an_interrupted_enqueue_is_whole_or_absent(project: tuple[ServerProcess, Path]) -> None:
    """Whatever an exception of a signal handler breaks off."""
    program = """
import json, signal
class Interrupted(BaseException):
    pass
def interrupt(*_):
    raise Interrupted
signal.signal(signal.SIGALRM, interrupt)
client = add.get_backend().client
client.subscribe("tasks.own", ["tasks.own"])
task, text, kept = add.using(queue_name="own"), "x" * 300_000, set()
task.enqueue(text, text)
began_s = time.monotonic()
kept.add(task.enqueue(text, text).id)
took_s = time.monotonic() - began_s
for step in range(1, 61):
    try:
        signal.setitimer(signal.ITIMER_REAL, step / 40 * took_s)
        result = task.enqueue(text, text)
        signal.setitimer(signal.ITIMER_REAL, 0)
        kept.add(result.id)
    except Interrupted:
        pass
signal.setitimer(signal.ITIMER_REAL, 0)
found, after = [], 0
while part := client.peek("tasks.own", after=after, limit=10):
    found += [(each.id, json.loads(each.text)["arguments"] == [[text, text], {}]) for each in part]
    after = part[-1].seq
ids = {each for each, _ in found}
print(len(ids) == len(found), all(whole for _, whole in found), kept <= ids, len(ids) <= 62)
client.purge("tasks.own")
"""
    assert run(program, *project) == "True True True True\n"
