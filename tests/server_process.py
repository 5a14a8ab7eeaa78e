"""A real server process for tests: started, found, killed and always reaped.

The one rule: nothing here waits without a limit, and every failure shows the server's log.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

START_SECONDS = 20.0
STOP_SECONDS = 20.0
LOG_LINES_SHOWN = 40
"""The end of the log that a failure shows."""

_LISTENING = re.compile(r"\bevent=listening address=(\S+):(\d+)")
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


class ServerProcess:
    """`python -m mqks serve` on one database, on a free port of the loopback interface.

    `flags` are put behind the command line, `environment` is added to the child's environment, and
    listening `sockets` are handed over as systemd would, by the names they have there.
    As a context manager it is listening on entry and gone on exit, whatever happened between.
    """

    def __init__(
        self,
        db: Path,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        sockets: Mapping[str, Inheritable] | None = None,
    ) -> None:
        command = [sys.executable, "-m", "mqks", "serve", "--db", str(db), "--port", "0", *flags]
        # Settings come from the environment too, and those of whoever runs the tests must not.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("MQKS_")}
        passed = [each.fileno() for each in (sockets or {}).values()]
        if sockets:
            inherited |= {"LISTEN_FDS": str(len(passed)), "LISTEN_FDNAMES": ":".join(sockets)}
            command = [sys.executable, "-c", _HAND_OVER, *map(str, passed), "--", *command]
        self._address: tuple[str, int] | None = None
        self._log: list[str] = []
        self._found_or_ended = threading.Event()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=inherited | dict(environment or {}),
            pass_fds=passed,
        )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stderr:
            for raw in stderr:
                line = raw.decode(errors="backslashreplace").rstrip("\n")
                self._log.append(line)
                if self._address is None and (found := _LISTENING.search(line)):
                    self._address = found[1], int(found[2])
                    self._found_or_ended.set()
        self._found_or_ended.set()

    @property
    def log(self) -> str:
        """What the server wrote to stderr so far."""
        return "\n".join(self._log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def resident_bytes(self) -> int:
        """Memory that the process has in RAM, as Linux tells it."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    @property
    def address(self) -> tuple[str, int]:
        """Host and port it listens on; waits until it does."""
        self._found_or_ended.wait(START_SECONDS)
        if self._address is None:
            self.kill()
            raise AssertionError(f"the server does not listen; its log:\n{self.log}")
        return self._address

    def kill(self) -> None:
        """SIGKILL, and reap it. Nothing happens to one that has ended already."""
        self._process.kill()
        self.wait()

    def hang_up(self) -> None:
        """SIGHUP."""
        self._process.send_signal(signal.SIGHUP)

    def terminate(self) -> int:
        """SIGTERM; gives the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """The exit code, once it has ended; one that does not end in time is killed, and fails."""
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
            raise AssertionError(f"the server does not end; its log:\n{self.log}") from None
        self._reader.join(STOP_SECONDS)
        return code

    def __enter__(self) -> Self:
        _ = self.address
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        if error is not None:
            end = "\n".join(self._log[-LOG_LINES_SHOWN:])
            error.add_note(f"end of the server's log:\n{end}")


def refusal(db: Path, *flags: str) -> tuple[int, str]:
    """Exit code and log of a server that must refuse to start."""
    server = ServerProcess(db, *flags)
    code = server.wait()
    return code, server.log
