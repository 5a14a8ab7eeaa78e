"""The server process of this project's own tests: the one that is shipped, ended by a kill.

The one rule: how a process is started, found and reaped is told in `mqks.testing` alone.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from mqks.testing import BrokerProcess

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

    def hang_up(self) -> None:
        """SIGHUP."""
        os.kill(self.pid, signal.SIGHUP)

    def terminate(self) -> int:
        return self.stop()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        super().__exit__(kind, error, trace)


def refusal(db: Path, *flags: str) -> tuple[int, str]:
    """Exit code and log of a server that must refuse to start."""
    server = ServerProcess(db, *flags)
    code = server.wait()
    return code, server.log
