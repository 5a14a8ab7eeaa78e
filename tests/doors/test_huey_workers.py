"""Consumers of huey on a real server: what they do when things end, fail and come back."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mqks import blocking
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until
from tests.kit.workers import WorkerGroup

pytest.importorskip("huey", reason="the extra huey is not installed")
MODULE = "tests.kit.huey_tasks"


class HueyWorkers(WorkerGroup):
    """`tasks` is their module here."""

    tasks: Any

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        program = str(Path(sys.executable).with_name("huey_consumer"))
        words = program, f"{MODULE}.huey", *(flags or ("-w", "4"))
        return self.ready(b"consumer started", *words)

    def note(self, what: str) -> None:
        self.tasks.note(str(self.path / "notes"), what)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "db") as server:
        yield server


@pytest.fixture
def workers(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HueyWorkers]:
    monkeypatch.setenv("MQKS_URL", server.url)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with HueyWorkers(tmp_path, MQKS_URL=server.url) as running:
        running.tasks = importlib.import_module(MODULE)
        with closing(running.tasks.huey.storage):
            yield running


@pytest.mark.slow
def test_no_task_is_lost(
    server: ServerProcess, workers: HueyWorkers, capsys: pytest.CaptureFixture[str]
) -> None:
    """While consumers and the server are killed."""
    workers.work_on(server, 2000, workers.note)
    storage = workers.tasks.huey.storage
    until(lambda: storage.client.stats("queue", "shop")["unacked"] == 0)
    assert (storage.queue_size(), storage.schedule_size()) == (0, 0)
    with capsys.disabled():
        print(f"\n2000 tasks, {sum(workers.notes().values()) - 2000} ran again")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["thread", "process", "greenlet"])
def test_a_consumer_ends_what_runs_and_leaves_the_rest(
    workers: HueyWorkers, tmp_path: Path, kind: str
) -> None:
    flags = "-w", "2", "-k", kind
    if kind == "greenlet":
        pytest.importorskip("gevent")
        workers.environment["GREENLETS"] = "yes"
    gate = tmp_path / "gate"
    first = workers.start(*flags)
    results = [workers.tasks.hold(str(tmp_path / "held"), str(gate)) for _ in range(2)]
    until(lambda: workers.notes("held")["begun"] == 2)
    first.send_signal(signal.SIGINT)
    workers.note("later")
    gate.touch()
    assert first.wait(WAIT_S) == 0
    assert workers.notes("held") == {"begun": 2, "done": 2}
    assert [each(blocking=True, timeout=WAIT_S) for each in results] == ["held", "held"]
    workers.start(*flags)
    workers.noted("later")


@pytest.mark.slow
def test_what_was_interrupted_runs_again(workers: HueyWorkers, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    first = workers.start("-w", "1", "-k", "process")
    workers.tasks.hold(str(tmp_path / "held"), str(gate))
    until(lambda: workers.notes("held")["begun"])
    first.send_signal(signal.SIGTERM)
    assert first.wait(WAIT_S) == 0
    gate.touch()
    assert workers.notes("held") == {"begun": 1}
    workers.start()
    workers.noted("done", name="held")


@pytest.mark.slow
def test_the_death_of_a_process_is_one_loss(workers: HueyWorkers, tmp_path: Path) -> None:
    """Also if the server sees one of its connections end after the other."""
    gate, client = tmp_path / "gate", workers.tasks.huey.storage.client
    worker = workers.start("-w", "8")
    workers.tasks.hold(str(tmp_path / "held"), str(gate))
    until(lambda: workers.notes("held")["begun"])
    until(lambda: sum(each["prefetch"] for each in client.stats("consumers")) == 8)
    worker.send_signal(signal.SIGSTOP)
    while rows := [each for each in client.stats("consumers") if each["unacked"]]:
        client.request("close_connection", "--confirm", str(rows[0]["connection"]))
    workers.kill(worker)
    gate.touch()
    workers.start()
    workers.noted("done", name="held")


@pytest.mark.slow
def test_a_task_that_kills_its_workers_is_a_dead_letter(
    server: ServerProcess, workers: HueyWorkers
) -> None:
    workers.tasks.die()
    with blocking.connect(server.url) as client:
        client.subscribe("shop.dead", ["shop.dead"])
        for _ in range(4):
            worker = workers.start("-w", "4")
            until(lambda: worker.poll() is not None)  # noqa: B023
        (dead,) = until(lambda: client.peek("shop.dead"))
        assert dead.dead_letter is not None
        assert (dead.dead_letter.reason, dead.dead_letter.tries) == ("losses", 4)
