"""Checks whether a database file is whole.

The one rule: all findings are reported, and nothing is changed.
"""

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from mqks.journal.sqlite.database_file import DatabaseFile, Facts, State, connect
from mqks.journal.sqlite.lock import server_of
from mqks.journal.sqlite.structure import header_damage, structure_damage
from mqks.journal.store import Damage


class Verdict(NamedTuple):
    damage: list[Damage]
    facts: Facts
    queues: int
    messages: int
    is_served: bool
    """A server uses the file. Then SQLite's structure is not checked: the read takes long, and the
    WAL would grow meanwhile."""
    torn: str
    """State of the WAL's end, if a power cut may have torn it."""


def verify(path: Path) -> Verdict:
    """Check SQLite's structure, each segment, and all rows of queues and bindings.

    Raises like `DatabaseFile.open`.
    """
    is_served = server_of(path) is not None
    header = header_damage(path) if path.is_file() and not is_served else []
    with DatabaseFile.open(path, thorough=True) as file:
        file.errors(limit=-1)
        damage = file.damage
        if not is_served:
            with closing(connect(path, State.of(path))) as db:
                damage = [*header, *structure_damage(db), *damage]
        messages = sum(queue.ready + queue.unacked for queue in file.queues)
        damage = list(dict.fromkeys(damage))
        return Verdict(damage, file.facts, len(file.queues), messages, is_served, file.torn)
