"""Is a database file whole?

The one rule: what is found is told, all of it, and nothing is changed.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from mqks.journal.lock import server_of
from mqks.journal.reader import DatabaseFile, Facts, State, connect
from mqks.journal.tables import Damage

FINDINGS_MAX: Final = 100
"""Of SQLite's own."""


class Verdict(NamedTuple):
    damage: list[Damage]
    facts: Facts
    queues: int
    messages: int
    is_served: bool
    """Then SQLite's structure was not looked at: that read lasts, and the WAL would grow."""


def verify(path: Path) -> Verdict:
    """Check SQLite's structure, each segment, and that queues and bindings make sense.

    Raises as `DatabaseFile.open`.
    """
    is_served = server_of(path) is not None
    with DatabaseFile.open(path, thorough=True) as file:
        file.errors(limit=-1)
        damage = [*([] if is_served else _structure(path)), *file.damage]
        messages = sum(queue.ready + queue.unacked for queue in file.queues)
        damage = list(dict.fromkeys(damage))
        return Verdict(damage, file.facts, len(file.queues), messages, is_served)


def _structure(path: Path) -> list[Damage]:
    with closing(connect(path, State.of(path))) as db:
        try:
            rows = db.execute(f"pragma integrity_check({FINDINGS_MAX})").fetchall()
        except sqlite3.DatabaseError as error:
            rows = [(str(error),)]
    lines = [line for (text,) in rows for line in str(text).splitlines()]
    return [Damage("file", line) for line in lines if line != "ok" and not line.startswith("***")]
