"""Workers of a library of tasks: processes on a real server, and what their tasks have noted."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from mqks import blocking
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until

CELERY_TASKS = "tests.kit.celery_tasks"
CELERY = sys.executable, "-m", "celery", "-A", CELERY_TASKS


class WorkerGroup:
    """Starts workers, and kills those that still run at the end.

    Files are made in the directory `path`, which tasks also write to.
    """

    def __init__(self, path: Path, **environment: str) -> None:
        self.path = path
        self.environment = os.environ | environment
        self.log = path / "worker.log"
        self.log.touch()
        self._all: list[subprocess.Popen[bytes]] = []
        self.tasks: Any = None
        """Their module as this process sees it."""

    @contextmanager
    def seen(self, monkeypatch: pytest.MonkeyPatch, module: str) -> Iterator[Self]:
        """With their module of tasks, and what it sends by."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delitem(sys.modules, module, raising=False)
        self.tasks = importlib.import_module(module)
        with self:
            yield self
            self.close()

    def close(self) -> None:
        """What sends."""
        raise NotImplementedError

    def run(self, *command: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            started = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        self._all.append(started)
        return started

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        """A worker."""
        raise NotImplementedError

    def ready(self, word: bytes, *command: str) -> subprocess.Popen[bytes]:
        """A worker that has logged this word."""
        before = self.log.read_bytes().count(word)
        worker = self.run(*command)
        until(lambda: self.log.read_bytes().count(word) > before or worker.poll() is not None)
        assert self.log.read_bytes().count(word) > before, self.log.read_text()
        return worker

    def kill(self, worker: subprocess.Popen[bytes]) -> None:
        """And its children: they are of its own group."""
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *told: object) -> None:
        for each in self._all:
            if each.poll() is None:
                self.kill(each)

    def notes(self, name: str = "notes") -> Counter[str]:
        """The lines that tasks have written."""
        path = self.path / name
        return Counter(path.read_text().split()) if path.exists() else Counter()

    def noted(self, *lines: str, name: str = "notes") -> None:
        """Wait until they are all there."""

        def missing() -> set[str]:
            return {*lines} - {*self.notes(name)}

        until(lambda: not missing(), lambda: f"no {missing()}; {self._told()}")

    def _told(self) -> str:
        """Where tasks may be that nobody has done, and what workers have logged."""
        url = self.environment.get("MQKS_URL") or self.environment["BROKER"]
        with blocking.connect(url) as client:
            rows = client.stats("queues")
        keys = "name", "ready", "unacked", "scheduled", "consumers"
        held = [{key: row[key] for key in keys} for row in rows if any(map(row.get, keys[1:4]))]
        return f"{held}\n{self.log.read_text()[-2000:]}"

    def work_on(self, server: ServerProcess, count: int, send: Callable[[str], object]) -> None:
        """Send so many tasks, while three workers and the server are killed, until all are done.

        A slow machine may have begun one task in each of the three, so it takes a queue that allows
        more `losses` than that."""
        worker = self.start()
        for number in range(count):
            send(str(number))
            if number in (count // 4, count // 2):
                until(lambda: len(self.notes()) >= number // 4)  # noqa: B023
                self.kill(worker)
                worker = self.start()
            if number in (count // 3, count * 2 // 3):
                server.kill()
                server.start()
        self.kill(worker)
        self.start()
        self.noted(*map(str, range(count)))


class CeleryWorkers(WorkerGroup):
    def __init__(self, path: Path, **environment: str) -> None:
        results = path / "results"
        results.mkdir()
        super().__init__(path, **{"RESULTS": f"file://{results}"} | environment)

    def celery(self, *words: str) -> subprocess.Popen[bytes]:
        """A command of Celery."""
        return self.run(*CELERY, *words)

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        """A worker that is ready."""
        return self.ready(b" ready.", *CELERY, "worker", "-l", "INFO", *(flags or ("-c", "2")))

    def stop(self, worker: subprocess.Popen[bytes], how: int = signal.SIGTERM) -> None:
        worker.send_signal(how)
        worker.wait(WAIT_S)

    def running(self, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[Self]:
        return self.seen(monkeypatch, CELERY_TASKS)

    def close(self) -> None:
        self.tasks.app.close()
