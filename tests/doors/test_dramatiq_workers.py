"""Workers of dramatiq on a real server: what they do when things end, fail and come back."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mqks.testing import Broker
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until
from tests.kit.workers import WorkerGroup

pytest.importorskip("dramatiq")
MODULE = "tests.kit.dramatiq_tasks"


class Crew(WorkerGroup):
    """`tasks` is their module here."""

    def __init__(self, path: Path, url: str) -> None:
        super().__init__(path, BROKER=url, dramatiq_restart_delay="100")
        self.tasks: Any = None

    def start(self, *flags: str, command: str = "dramatiq") -> subprocess.Popen[bytes]:
        program = str(Path(sys.executable).with_name(command))
        return self.run(program, MODULE, *(flags or ("-p", "2", "-t", "4")))

    def note(self, what: str) -> None:
        self.tasks.note.send(str(self.path / "notes"), what)

    @contextmanager
    def running(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
        monkeypatch.setenv("BROKER", self.environment["BROKER"])
        monkeypatch.delitem(sys.modules, MODULE, raising=False)
        self.tasks = importlib.import_module(MODULE)
        with self, closing(self.tasks.broker):
            yield self


@pytest.fixture
def crew(mqks_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    with Crew(tmp_path, mqks_broker.url).running(monkeypatch) as running:
        yield running


@pytest.mark.slow
def test_a_worker_ends_what_runs_and_returns_what_waits(crew: Crew, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    worker = crew.start("-p", "1", "-t", "1")
    crew.tasks.hold.send(str(crew.path / "notes"), str(gate))
    crew.noted("begun")
    crew.note("later")
    client = crew.tasks.broker.client
    until(lambda: client.stats("queue", "dramatiq.default")["unacked"] == 2)
    worker.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(1)
    gate.touch()
    assert worker.wait(WAIT_S) == 0
    # A thread may have begun the second one before it was told to end.
    left = 1 - crew.notes()["later"]
    assert (crew.notes()["done"], crew.tasks.broker.get_queue_message_counts("default")[0]) == (
        1,
        left,
    )
    crew.start("-p", "1", "-t", "1")
    crew.noted("later")


@pytest.mark.slow
def test_workers_on_gevent(crew: Crew) -> None:
    pytest.importorskip("gevent")
    names = [*map(str, range(50))]
    crew.start("-p", "1", "-t", "20", command="dramatiq-gevent")
    for name in names:
        crew.note(name)
    crew.noted(*names)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2_000])
def test_no_task_is_lost(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While workers and the server are killed."""
    with (
        ServerProcess(tmp_path / "db") as server,
        Crew(tmp_path, server.url).running(monkeypatch) as crew,
    ):
        crew.work_on(server, count, crew.note)
        crew.tasks.broker.join("default", timeout=WAIT_S * 1000)
        assert crew.tasks.broker.get_queue_message_counts("default") == (0, 0, 0)
    assert len(crew.notes()) == count
    with capsys.disabled():
        print(f"\n{count} tasks, {sum(crew.notes().values()) - count} ran again")
