"""Workers of Celery, and their tasks as this process sees them."""

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

from tests.kit.waiting import WAIT_S, until

MODULE = "tests.kit.celery_tasks"


class Workers:
    """Starts workers, and kills those that still run at the end.

    `tasks` is their module here. Files are made in the directory `path`, which `note` also writes
    to.
    """

    def __init__(self, path: Path, **environment: str) -> None:
        self.path = path
        results = path / "results"
        results.mkdir()
        self.environment = os.environ | {"RESULTS": f"file://{results}"} | environment
        self.log = path / "worker.log"
        self.log.touch()
        self.tasks: Any = None
        self._all: list[subprocess.Popen[bytes]] = []

    def celery(self, *words: str) -> subprocess.Popen[bytes]:
        """A command of Celery."""
        with self.log.open("ab") as log:
            started = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", MODULE, *words],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._all.append(started)
        return started

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        """A worker that is ready."""
        before = self._ready
        worker = self.celery("worker", "-l", "INFO", *(flags or ("-c", "2")))
        until(lambda: self._ready > before or worker.poll() is not None)
        assert worker.poll() is None, self.log.read_text()
        return worker

    @property
    def _ready(self) -> int:
        return self.log.read_bytes().count(b" ready.")

    def kill(self, worker: subprocess.Popen[bytes]) -> None:
        """And its children: they are of its own group."""
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()

    def stop(self, worker: subprocess.Popen[bytes], how: int = signal.SIGTERM) -> None:
        worker.send_signal(how)
        worker.wait(WAIT_S)

    def notes(self, name: str = "notes") -> Counter[str]:
        """The lines that tasks have written."""
        path = self.path / name
        return Counter(path.read_text().split()) if path.exists() else Counter()

    def noted(self, *lines: str, name: str = "notes") -> None:
        """Wait until they are all there."""
        until(lambda: {*lines} <= {*self.notes(name)}, self.log.read_text()[-2000:])

    @contextmanager
    def running(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delitem(sys.modules, MODULE, raising=False)
        self.tasks = importlib.import_module(MODULE)
        try:
            yield self
        finally:
            self.tasks.app.close()
            for each in self._all:
                if each.poll() is None:
                    self.kill(each)
