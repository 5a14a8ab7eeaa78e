"""`python -m mqks …` without the start of a Python: forked from a process that has loaded it all.

A fork has the arguments, environment, directory and streams that `subprocess` would give it, and is
killed as any process. The one rule: a test of how Python itself starts takes `subprocess`.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TextIO

from tests.kit.waiting import WAIT_S

_FORKS = multiprocessing.get_context("forkserver")
# Each would run the main module, and load this one, unless it is loaded there, too.
_FORKS.set_forkserver_preload(["__main__", __name__, "tests.kit.loaded"])


class Forked:
    """A command `[sys.executable, "-m", module, *arguments]` in a process and session of its own,
    with as much of a Popen as is needed here. `streams` are the descriptors of its standard input,
    output and error."""

    stdout: TextIO

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        streams: tuple[int, int, int],
        directory: str | Path = ".",
    ) -> None:
        python, dash_m, *words = command
        assert (python, dash_m) == (sys.executable, "-m"), f"this is not for a fork: {command}"
        # Connections, as descriptors cross to another process in them.
        handed = [Connection(os.dup(stream)) for stream in streams]
        self._process = _FORKS.Process(
            target=_run,
            args=(handed, words, dict(environment), os.path.abspath(directory)),
            daemon=True,
        )
        self._process.start()
        self._asking = threading.Lock()
        for each in handed:
            each.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        with self._asking:
            return self._process.exitcode

    def wait(self, timeout: float) -> int:
        wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("mqks", timeout)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # It has ended, and the fork server has reaped it.
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    command: Sequence[str],
    stdin: bytes = b"",
    environment: Mapping[str, str] = os.environ,
    directory: str | Path = ".",
) -> tuple[int, bytes, bytes]:
    """The command's exit code, output and errors, once it has ended by itself."""
    pipes = [os.pipe() for _ in range(3)]
    (its_in, to_it), (from_it, its_out), (told, its_err) = pipes
    process = Forked(command, environment, (its_in, its_out, its_err), directory)
    for end in (its_in, its_out, its_err):
        os.close(end)
    with ThreadPoolExecutor() as threads:
        threads.submit(_give, to_it, stdin)
        out, err = threads.map(_take, (from_it, told))
    return process.wait(WAIT_S), out, err


def _give(descriptor: int, data: bytes) -> None:
    with suppress(BrokenPipeError), open(descriptor, "wb") as file:
        file.write(data)


def _take(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read()


def _run(
    streams: list[Connection], words: list[str], environment: dict[str, str], directory: str
) -> None:
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    if os.isatty(2):  # It is the terminal of the session, where a Ctrl-C is a SIGINT.
        fcntl.ioctl(2, termios.TIOCSCTTY, 0)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv[1:] = words[1:]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
