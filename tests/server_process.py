"""The server process of this project's own tests: the one that is shipped, ended by a kill.

The one rule: how a process is started, found and reaped is told in `mqks.testing` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from mqks.testing import BrokerProcess


class ServerProcess(BrokerProcess):
    """Launched when it is made, listening on entry, killed on exit: what it confirmed must last."""

    def __init__(self, db: Path, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(db, *flags, environment=environment)
        self.launch()

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
