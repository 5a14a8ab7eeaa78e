"""The server of one life: where it runs, how it ends, and what its log must not have.

The one rule: a server that ends otherwise than it was told to, or logs a fault, has failed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from mqks.journal.sqlite.texts import size_of, texts_path
from tests.chaos.checker import Violation
from tests.chaos.plan import LifePlan
from tests.chaos.wire import WAIT_S
from tests.kit.server_process import ServerProcess

LOOP_HELD_CPU_MS_MAX = 1000
"""Only a fault takes longer, also where time that others had counts as ours."""
_FAULTS = re.compile(
    r"Traceback|event=(internal_error|http_failed|journal_damaged|connection_failed)|^mqks: ", re.M
)
_LOOP_HELD = re.compile(r"event=loop_held .*?\bcpu_ms=(\d+)")


class Server(Protocol):
    """Listens when it is made."""

    address: tuple[str, int]
    wait_s: float
    """Only a fault lets a client wait for longer."""

    @property
    def log(self) -> str: ...

    @property
    def has_ended(self) -> str:
        """How, while nobody has told it to; empty while it runs."""

    async def end(self, *, kill: bool) -> None:
        """End it, if it still runs. Raises Violation where that goes otherwise than it should."""


class Servers(Protocol):
    """Servers of one database, one after the other."""

    async def start(self, plan: LifePlan, flags: Mapping[str, str | int | float]) -> Server: ...


class ProcessServer:
    wait_s = WAIT_S

    def __init__(self, process: ServerProcess) -> None:
        self._process = process
        self.address = process.address

    @property
    def log(self) -> str:
        return self._process.log

    @property
    def has_ended(self) -> str:
        return "" if self._process.is_running else str(self._process.wait())

    async def end(self, *, kill: bool) -> None:
        if code := self.has_ended:
            raise Violation(f"the server has ended with {code}")
        ended = await asyncio.to_thread(self._process.kill if kill else self._process.stop)
        if ended != (-9 if kill else 0):
            raise Violation(f"the server ended with {ended}")
        check_log(self.log)


class Processes:
    """Real ones. Leaving it ends the last."""

    def __init__(self, db: Path) -> None:
        self._db = db
        self._last: ServerProcess | None = None

    async def start(self, plan: LifePlan, flags: Mapping[str, str | int | float]) -> Server:
        words = []
        for name, value in flags.items():
            flag = name.replace("_", "-")
            if value in ("true", "false"):
                words.append(f"--{flag}" if value == "true" else f"--no-{flag}")
            else:
                words += [f"--{flag}", str(value)]
        if plan.full:
            words += ["--db-bytes-max", str(size_of_database(self._db) + plan.room)]
        module = "tests.chaos.hurried" if plan.hurried else "mqks"
        self.close()
        self._last = process = ServerProcess(self._db, *words, module=module)
        return ProcessServer(process.__enter__())

    def close(self) -> None:
        if self._last is not None:
            self._last.__exit__(None, None, None)
            self._last = None


def size_of_database(db: Path) -> int:
    return db.stat().st_size + size_of(texts_path(db)) if db.exists() else 0


def check_log(log: str) -> None:
    if fault := _FAULTS.search(log):
        raise Violation(f"the log has a fault: {log[fault.start() : fault.start() + 2000]}")
    for held in _LOOP_HELD.finditer(log):
        if int(held[1]) > LOOP_HELD_CPU_MS_MAX:
            raise Violation(f"the event loop was held: {held[0]}")
