"""Workers of dramatiq on a real server: what they do when things end, fail and come back."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mqks.testing import Broker
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until

pytest.importorskip("dramatiq")
MODULE = "tests.kit.dramatiq_tasks"


class Crew:
    """Starts workers, and kills those that still run at the end. `tasks` is their module here."""

    def __init__(self, path: Path, url: str) -> None:
        self.notes_path, self.log = path / "notes", path / "worker.log"
        self.log.touch()
        self._environment = os.environ | {"BROKER": url, "dramatiq_restart_delay": "100"}
        self._all: list[subprocess.Popen[bytes]] = []
        self.tasks: Any = None

    def start(self, *flags: str, command: str = "dramatiq") -> subprocess.Popen[bytes]:
        program = str(Path(sys.executable).with_name(command))
        with self.log.open("ab") as log:
            worker = subprocess.Popen(
                [program, MODULE, *(flags or ("-p", "2", "-t", "4"))],
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._all.append(worker)
        return worker

    def kill(self, worker: subprocess.Popen[bytes]) -> None:
        """And its children: they are of its own group."""
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()

    def note(self, what: str) -> None:
        self.tasks.note.send(str(self.notes_path), what)

    @property
    def notes(self) -> Counter[str]:
        path = self.notes_path
        return Counter(path.read_text().split()) if path.exists() else Counter()

    def noted(self, *lines: str) -> None:
        until(lambda: {*lines} <= {*self.notes}, self.log.read_text()[-2000:])

    @contextmanager
    def running(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
        monkeypatch.setenv("BROKER", self._environment["BROKER"])
        monkeypatch.delitem(sys.modules, MODULE, raising=False)
        self.tasks = importlib.import_module(MODULE)
        try:
            yield self
        finally:
            self.tasks.broker.close()
            for each in self._all:
                if each.poll() is None:
                    self.kill(each)


@pytest.fixture
def crew(mqks_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    with Crew(tmp_path, mqks_broker.url).running(monkeypatch) as running:
        yield running


@pytest.mark.slow
def test_a_worker_ends_what_runs_and_returns_what_waits(crew: Crew, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    worker = crew.start("-p", "1", "-t", "1")
    crew.tasks.hold.send(str(crew.notes_path), str(gate))
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
    left = 1 - crew.notes["later"]
    assert (crew.notes["done"], crew.tasks.broker.get_queue_message_counts("default")[0]) == (
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
        worker = crew.start()
        for number in range(count):
            crew.note(str(number))
            if number in (count // 4, count // 2):
                until(lambda: len(crew.notes) >= number // 4)  # noqa: B023
                crew.kill(worker)
                worker = crew.start()
            if number in (count // 3, count * 2 // 3):
                server.kill()
                server.start()
        crew.kill(worker)
        crew.start()
        crew.noted(*map(str, range(count)))
        crew.tasks.broker.join("default", timeout=WAIT_S * 1000)
        assert crew.tasks.broker.get_queue_message_counts("default") == (0, 0, 0)
    assert len(crew.notes) == count
    with capsys.disabled():
        print(f"\n{count} tasks, {sum(crew.notes.values()) - count} ran again")
