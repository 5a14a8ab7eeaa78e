"""The server of one life: the real process, how it ends, and what its log must not have.

The one rule: a server that ends otherwise than it was told to, or logs a fault, has failed.
"""

from __future__ import annotations

import re
from pathlib import Path

from mqks.journal.sqlite.texts import size_of, texts_path
from tests.chaos.checker import Violation
from tests.chaos.plan import LifePlan
from tests.kit.server_process import ServerProcess

LOOP_HELD_CPU_MS_MAX = 1000
"""Only a fault takes longer, also where time that others had counts as ours."""
_FAULTS = re.compile(
    r"Traceback|event=(internal_error|http_failed|journal_damaged|connection_failed)|^mqks: ", re.M
)
_LOOP_HELD = re.compile(r"event=loop_held .*?\bcpu_ms=(\d+)")


def start(db: Path, plan: LifePlan) -> ServerProcess:
    flags = plan.flags | ({"db_bytes_max": _bytes(db) + plan.room} if plan.full else {})
    words = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if value in ("true", "false"):
            words.append(f"--{flag}" if value == "true" else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return ServerProcess(db, *words, module="tests.chaos.hurried" if plan.hurried else "mqks")


def _bytes(db: Path) -> int:
    return db.stat().st_size + size_of(texts_path(db)) if db.exists() else 0


def end(server: ServerProcess, *, kill: bool) -> None:
    """End it, and look how that went."""
    if not server.is_running:
        raise Violation(f"the server has ended with {server.wait()}")
    code = server.kill() if kill else server.stop()
    if code != (-9 if kill else 0):
        raise Violation(f"the server ended with {code}")
    check_log(server.log)


def check_log(log: str) -> None:
    if fault := _FAULTS.search(log):
        raise Violation(f"the log has a fault: {log[fault.start() : fault.start() + 2000]}")
    for held in _LOOP_HELD.finditer(log):
        if int(held[1]) > LOOP_HELD_CPU_MS_MAX:
            raise Violation(f"the event loop was held: {held[0]}")
