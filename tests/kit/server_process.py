"""The server process of this project's own tests: the one that is shipped, ended by a kill.

What it loads is loaded once (`tests.kit.forks`), unless something about it takes a program of its
own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from mqks.testing import BrokerProcess
from tests.kit.forks import Forked
from tests.kit.waiting import until

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


class ServerProcess(BrokerProcess):
    """Launched when it is made, listening on entry, killed on exit: what it confirmed must last.

    Listening `sockets` are handed over as systemd would, by the names they have there. `module` is
    what runs in the place of `mqks`.
    """

    def __init__(
        self,
        db: Path | str,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        sockets: Mapping[str, Inheritable] | None = None,
        module: str = "mqks",
    ) -> None:
        super().__init__(db, *flags, environment=environment)
        self._command[2] = module
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
        out, its_out = os.pipe()
        with open(os.devnull) as none:
            forked = Forked(command, self._environment, (none.fileno(), its_out, its_out))
        os.close(its_out)
        forked.stdout = open(out, errors="backslashreplace")  # noqa: SIM115
        return cast("subprocess.Popen[str]", forked)

    def hang_up(self) -> None:
        """SIGHUP."""
        os.kill(self.pid, signal.SIGHUP)

    def terminate(self) -> int:
        return self.stop()

    def suspend(self) -> None:
        """SIGSTOP. It stands still when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        threads = Path(f"/proc/{self.pid}/task")
        until(lambda: {_state(each) for each in threads.glob("*/stat")} == {"T"})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It stands still meanwhile: what is sent then is all there when it goes on."""
        try:
            self.suspend()
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.kill()
        super().__exit__(kind, error, trace)


def _state(stat: Path) -> str:
    """Of a thread, from what Linux tells of it: R runs, S sleeps, T is stopped."""
    return stat.read_text().rpartition(")")[2].split()[0]


def refusal(db: Path | str, *flags: str) -> tuple[int, str]:
    """Exit code and log of a server that must refuse to start."""
    server = ServerProcess(db, *flags)
    code = server.wait()
    return code, server.log
