"""Is a database file whole?

The one rule: what is found is told, all of it, and nothing is changed.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from mqks.journal.lock import server_of
from mqks.journal.reader import Damage, DatabaseFile, Facts, State, connect
from mqks.journal.survey import shown

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
        damage = [*([] if is_served else _structure(path)), *file.damage]
        for queue in file.queues:
            if not _is_name(queue.name) or not 1 <= queue.cursor <= queue.next_seq:
                what = f"cursor {queue.cursor}, next_seq {queue.next_seq}"
                damage.append(Damage(f"queue {shown(queue.name)}", what))
        damage += [
            Damage("table binding", f"no binding: {shown(name)!r} to {shown(event)!r}")
            for name, event in file.bindings
            if not (_is_name(name) and _is_name(event))
        ]
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


def _is_name(name: bytes) -> bool:
    return name != b"" and not any(byte in b" \n" for byte in name)
