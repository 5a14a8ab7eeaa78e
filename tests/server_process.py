"""The server process of this project's own tests: the one that is shipped, ended by a kill.

What it loads is loaded once: each is forked from a process that has it all, unless something about
it takes a program of its own. The one rule: how a process is found and reaped is told in
`mqks.testing` alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

from mqks.commands import main
from mqks.testing import BrokerProcess
from tests.waiting import until

Inheritable = socket.socket | BinaryIO
# Descriptors get the numbers from 3 on, and LISTEN_PID is known only in the process itself.
_HAND_OVER = """
import fcntl, os, sys
end = sys.argv.index("--")
copies = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 100) for number in sys.argv[1:end]]
for number, copy in enumerate(copies, 3):
    os.dup2(copy, number)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[end + 1], sys.argv[end + 1:])
"""
_FORKS = multiprocessing.get_context("forkserver")
# What is loaded only when a server starts; what is not there is passed over.
_FORKS.set_forkserver_preload(
    [__name__, "typer._adapters", "pydantic.fields", "anyio._backends._asyncio", "uvloop"]
)


class ServerProcess(BrokerProcess):
    """Launched when it is made, listening on entry, killed on exit: what it confirmed must last.

    Listening `sockets` are handed over as systemd would, by the names they have there.
    """

    def __init__(
        self,
        db: Path,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        sockets: Mapping[str, Inheritable] | None = None,
    ) -> None:
        super().__init__(db, *flags, environment=environment)
        if sockets:
            self._inherited = [each.fileno() for each in sockets.values()]
            self._environment |= {
                "LISTEN_FDS": str(len(sockets)),
                "LISTEN_FDNAMES": ":".join(sockets),
            }
            numbers = map(str, self._inherited)
            self._command = [sys.executable, "-c", _HAND_OVER, *numbers, "--", *self._command]
        self.launch()

    def _spawn(self, command: list[str]) -> subprocess.Popen[str]:
        if self._inherited or "LD_PRELOAD" in self._environment:
            return super()._spawn(command)
        forked = _Forked(command[command.index("serve") :], self._environment)
        return cast("subprocess.Popen[str]", forked)

    def hang_up(self) -> None:
        """SIGHUP."""
        os.kill(self.pid, signal.SIGHUP)

    def terminate(self) -> int:
        return self.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It stands still meanwhile: what is sent then is all there when it goes on."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            threads = Path(f"/proc/{self.pid}/task")
            until(lambda: {_state(each) for each in threads.glob("*/stat")} == {"T"})
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        super().__exit__(kind, error, trace)


def _state(stat: Path) -> str:
    """Of a thread, from what Linux tells of it: R runs, S sleeps, T is stopped."""
    return stat.read_text().rpartition(")")[2].split()[0]


class _Forked:
    """`mqks` with these arguments, with as much of a Popen as BrokerProcess asks for."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        lines, log = _FORKS.Pipe(duplex=False)
        self._process = _FORKS.Process(target=_run, args=(log, arguments, environment), daemon=True)
        self._process.start()
        self._asking = threading.Lock()
        log.close()
        with lines:
            self.stdout = open(os.dup(lines.fileno()), errors="backslashreplace")  # noqa: SIM115

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


def _run(log: Connection, arguments: list[str], environment: dict[str, str]) -> None:
    for output in (1, 2):
        os.dup2(log.fileno(), output)
    log.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(main(arguments))


def refusal(db: Path, *flags: str) -> tuple[int, str]:
    """Exit code and log of a server that must refuse to start."""
    server = ServerProcess(db, *flags)
    code = server.wait()
    return code, server.log
