"""Workers of Celery, and their tasks as this process sees them."""

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

from tests.kit.waiting import WAIT_S
from tests.kit.workers import WorkerGroup

MODULE = "tests.kit.celery_tasks"
COMMAND = sys.executable, "-m", "celery", "-A", MODULE


class Workers(WorkerGroup):
    """`tasks` is their module here."""

    def __init__(self, path: Path, **environment: str) -> None:
        results = path / "results"
        results.mkdir()
        super().__init__(path, **{"RESULTS": f"file://{results}"} | environment)
        self.tasks: Any = None

    def celery(self, *words: str) -> subprocess.Popen[bytes]:
        """A command of Celery."""
        return self.run(*COMMAND, *words)

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        """A worker that is ready."""
        return self.ready(b" ready.", *COMMAND, "worker", "-l", "INFO", *(flags or ("-c", "2")))

    def stop(self, worker: subprocess.Popen[bytes], how: int = signal.SIGTERM) -> None:
        worker.send_signal(how)
        worker.wait(WAIT_S)

    @contextmanager
    def running(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delitem(sys.modules, MODULE, raising=False)
        self.tasks = importlib.import_module(MODULE)
        with self, closing(self.tasks.app):
            yield self
