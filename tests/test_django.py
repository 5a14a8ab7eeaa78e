"""Django Tasks on a real broker, by real workers."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server_process import ServerProcess

pytest.importorskip("django", reason="the extra django is not installed")
SETTINGS = "tests.django_project.settings"
ROOT = Path(__file__).parents[1]
WORKER = [sys.executable, "-m", "django", "mqks_worker"]


def environment(server: ServerProcess, path: Path) -> dict[str, str]:
    more = {"DJANGO_SETTINGS_MODULE": SETTINGS, "MQKS_URL": server.url}
    return os.environ | more | {"TEST_DB": str(path / "db.sqlite3"), "PYTHONPATH": str(ROOT)}


def run(program: str, server: ServerProcess, path: Path) -> str:
    """What a program of the project prints."""
    start = "import time, django; django.setup()\nfrom tests.django_project.jobs import *\n"
    command = [sys.executable, "-W", "error", "-c", start + program]
    done = subprocess.run(
        command, env=environment(server, path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def worker(server: ServerProcess, path: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    with (path / "worker.log").open("a") as log:
        process = subprocess.Popen(
            [*WORKER, *flags], env=environment(server, path), stderr=log, text=True
        )
    try:
        yield process
    finally:
        process.terminate()
        assert process.wait() == 0, (path / "worker.log").read_text()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    path = tmp_path_factory.mktemp("django")
    with ServerProcess(path / "mqks.db") as server:
        command = [sys.executable, "-m", "django", "migrate", "-v0"]
        subprocess.run(command, env=environment(server, path), check=True)
        yield server, path


FINISHED = """
while not result.is_finished:
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
print(list(MqksBackend("default", {"OPTIONS": {}}).check()))
"""
    told = "['mqks.E002', 'mqks.E003', 'mqks.E004', 'mqks.E005']\n[]\n"
    assert run(program, *project) == told


@pytest.mark.slow
def test_kills_lose_nothing(project: tuple[ServerProcess, Path]) -> None:
    server, path = project
    effects, tasks = path / "effects", 400
    enqueues = f"for n in range({tasks}): write.enqueue({str(effects)!r}, str(n))"
    for number in range(4):
        with (path / "killed.log").open("a") as log:
            process = subprocess.Popen(WORKER, env=environment(server, path), stderr=log)
        if number == 0:
            run(enqueues, *project)
        seen = effects.read_text().count("\n") if effects.exists() else 0
        while seen < min(tasks, 60 * (number + 1)):
            time.sleep(0.02)
            seen = effects.read_text().count("\n") if effects.exists() else 0
        process.kill()
        process.wait()
        server.kill()
        server.start()
    with worker(server, path):
        while len(set(effects.read_text().split())) < tasks:
            time.sleep(0.05)
