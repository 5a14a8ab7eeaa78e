"""A program of a test, run as a person runs it: a process that finds the broker in MQKS_URL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from tests.kit.waiting import WAIT_S, until

ROOT = Path(__file__).parents[2]


def installed(name: str) -> str:
    """A command beside this Python."""
    return str(Path(sys.executable).with_name(name))


class Program:
    """Runs until exit, when it and what it has started are killed. What it has printed so far are
    its `lines`, and its `errors`."""

    def __init__(
        self, command: Sequence[Any], url: str, directory: Path, **environment: str
    ) -> None:
        self._command = command
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env=os.environ | {"MQKS_URL": url} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        streams = (self.process.stdout, self.lines), (self.process.stderr, self.errors)
        self._threads = [threading.Thread(target=_read, args=each, daemon=True) for each in streams]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    @property
    def told(self) -> str:
        return "\n".join([*self.lines, *self.errors])

    def until(self, text: str, times: int = 1) -> None:
        """Wait until it has printed this."""
        until(lambda: self.told.count(text) == times or self.process.poll() is not None)
        assert self.told.count(text) == times, self.told

    def end(self, how: signal.Signals | None = None) -> int:
        """The exit code, after a signal or without; everything it has printed is in `lines`."""
        if how is not None:
            self.process.send_signal(how)
        code = self.process.wait(WAIT_S)
        for thread in self._threads:
            thread.join(WAIT_S)
        return code

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.end()
        if isinstance(error, BaseException):
            error.add_note(f"{self._command} has printed:\n{self.told}")


def _read(stream: IO[str], into: list[str]) -> None:
    with stream:
        into.extend(map(str.rstrip, stream))


def printed(command: Sequence[Any], url: str, directory: Path, **environment: str) -> list[str]:
    """By a program that ends by itself, with 0 and without errors."""
    with Program(command, url, directory, **environment) as program:
        assert (program.end(), program.errors) == (0, [])
    return program.lines
