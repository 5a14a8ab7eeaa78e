"""Checks whether a database file is whole.

The one rule: all findings are reported, and nothing is changed.
"""

from contextlib import closing
from pathlib import Path

from mqks.files import is_file
from mqks.journal.contents import Verdict
from mqks.journal.sqlite.database_file import DatabaseFile, FileState, connect
from mqks.journal.sqlite.lock import server_of
from mqks.journal.sqlite.structure import header_damage, structure_damage


def verify(path: Path) -> Verdict:
    """Check SQLite's structure, each segment, and all rows of queues and bindings.

    Raises like `DatabaseFile.open`.
    """
    is_served = server_of(path) is not None
    header = header_damage(path) if is_file(path) and not is_served else []
    with DatabaseFile.open(path, thorough=True) as file:
        verdict = file.verdict()
        damage = verdict.damage
        if not is_served:
            with closing(connect(path, FileState.of(path))) as db:
                damage = list(dict.fromkeys([*header, *structure_damage(db), *damage]))
    return verdict._replace(damage=damage, is_served=is_served)
